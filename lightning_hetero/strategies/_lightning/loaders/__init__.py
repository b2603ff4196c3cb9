"""Train loaders of a Trainer that are not plain: as the user gives them, split, or left to their ranks."""

__all__: list[str] = []
