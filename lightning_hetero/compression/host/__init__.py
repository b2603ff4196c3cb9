"""Block top-k on the host, in torch."""

__all__: list[str] = []
