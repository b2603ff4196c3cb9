"""Record of a run for all front ends: its header when training begins, and its summary when training ends."""

__all__: list[str] = []
