"""Simulated devices and link: what steps truly take, and the exact optimum."""

__all__: list[str] = []
