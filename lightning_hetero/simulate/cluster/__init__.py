"""Discrete-event simulator of a cluster: the real planners and schedules over a virtual clock, without a process."""

__all__: list[str] = []
