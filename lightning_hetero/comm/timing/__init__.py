"""Times of steps, gradient buckets and messages, with no synchronisation."""

__all__: list[str] = []
