"""DataLoaders whose steps are made of units: own batch samplers, several loaders, datasets of batches."""

__all__: list[str] = []
