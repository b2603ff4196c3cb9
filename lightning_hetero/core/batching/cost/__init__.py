"""Division of a global batch by the cost of its samples."""

__all__: list[str] = []
