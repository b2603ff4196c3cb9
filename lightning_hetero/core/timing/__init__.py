"""How long a worker takes, how long a step takes, and how certain both are."""

__all__: list[str] = []
