"""The parts of the strategies for Lightning's Trainer."""

__all__: list[str] = []
