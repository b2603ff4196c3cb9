"""What compression sends and what it costs in convergence."""

__all__: list[str] = []
