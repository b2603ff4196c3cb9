"""Compressors of gradients, one file each."""

__all__: list[str] = []
