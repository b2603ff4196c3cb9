"""Block top-k on the host, in Numba."""

__all__: list[str] = []
