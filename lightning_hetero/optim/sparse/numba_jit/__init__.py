"""Sparse optimizer steps on the host, in Numba."""

__all__: list[str] = []
