"""Times of steps, gradient buckets and messages, with no synchronization."""

__all__: list[str] = []
