"""Data that comes as a stream: cut into batches of the plan's sizes, which ranks agree on ahead of time."""

__all__: list[str] = []
