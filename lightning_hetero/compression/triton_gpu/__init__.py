"""Block top-k on GPU, in Triton."""

__all__: list[str] = []
