"""Policies: one file each, from observations to the next plan."""

__all__: list[str] = []
