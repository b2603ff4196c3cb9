"""How ranks agree: control plane, sync rounds, workers, what a run tells its user."""

__all__: list[str] = []
