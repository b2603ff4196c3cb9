"""Gradient noise scale, from unequal batches and over accumulation windows."""

__all__: list[str] = []
