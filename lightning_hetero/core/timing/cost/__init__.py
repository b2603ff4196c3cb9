"""Time of a share of samples of different cost: features of the share, and weights that are learned for them."""

__all__: list[str] = []
