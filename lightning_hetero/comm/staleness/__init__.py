"""Gradients that are applied one step late."""

__all__: list[str] = []
