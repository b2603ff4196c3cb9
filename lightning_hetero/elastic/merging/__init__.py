"""Merging of the replicas of an elastic run."""

__all__: list[str] = []
