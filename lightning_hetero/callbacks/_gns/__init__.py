"""Sources of gradient norms for GNSCallback, by what runs the training."""

__all__: list[str] = []
