"""Loaders that are not plain: batches of the user's own sampler, several loaders, datasets of batches, own shards."""

__all__: list[str] = []
