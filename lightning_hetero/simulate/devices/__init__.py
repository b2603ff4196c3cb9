"""Devices of exactly known speed: their profiles, and their emulation on a CPU that waits."""

__all__: list[str] = []
