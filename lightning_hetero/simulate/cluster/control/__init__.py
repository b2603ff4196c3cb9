"""Control of a simulation: what timers and the noise scale tell, and the package's own decisions on it."""

__all__: list[str] = []
