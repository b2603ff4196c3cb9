"""Who gets how many samples of a batch."""

__all__: list[str] = []
