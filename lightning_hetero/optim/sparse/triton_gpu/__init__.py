"""Sparse optimizer steps on GPU, in Triton."""

__all__: list[str] = []
