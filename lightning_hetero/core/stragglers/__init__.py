"""Detection of stragglers: which worker, or the link, makes all others wait, in which phase, and for how long."""

__all__: list[str] = []
