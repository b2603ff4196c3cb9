"""Optimizers that update only the blocks that a compressed gradient touches."""

__all__: list[str] = []
