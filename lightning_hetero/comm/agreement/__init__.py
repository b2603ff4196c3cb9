"""Agreement of ranks: control plane, sync rounds, workers, and notices to the user."""

__all__: list[str] = []
