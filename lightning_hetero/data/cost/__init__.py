"""Costs of the samples of a dataset, and the division of global batches by them."""

__all__: list[str] = []
