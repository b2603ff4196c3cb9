"""Record of a run, made at sync rounds: its schema, and the figures that reports and summaries take from it."""

__all__: list[str] = []
