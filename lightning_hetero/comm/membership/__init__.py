"""Membership: which workers train together while workers are lost and come, and whose state they go on from."""

__all__: list[str] = []
