"""Failures of ranks: who failed first, who is silent, and how the other ranks end."""

__all__: list[str] = []
