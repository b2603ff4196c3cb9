"""Optimizers that update only the blocks which a compressed gradient touches."""

__all__: list[str] = []
