"""The parts of a session: its data, its batches and its steps."""

__all__: list[str] = []
