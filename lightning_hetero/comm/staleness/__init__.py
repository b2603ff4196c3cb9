"""Stale gradients: applied one step after their own."""

__all__: list[str] = []
