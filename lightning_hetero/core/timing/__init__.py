"""Times of workers and of steps, learned from observations, with their uncertainty."""

__all__: list[str] = []
