"""Measurements of the link before and while compressed gradients cross it."""

__all__: list[str] = []
