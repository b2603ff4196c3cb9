"""Settings of compression, and its cost in convergence."""

__all__: list[str] = []
