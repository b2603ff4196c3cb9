"""Batch sizes: integer splits, the optimal split, proportional control, and the total by goodput."""

__all__: list[str] = []
