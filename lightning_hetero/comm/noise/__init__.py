"""Sums from which the gradient noise scale is estimated."""

__all__: list[str] = []
