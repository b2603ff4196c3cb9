"""DDP's communication hook, its averagers, and the weighting and checks of losses and gradients."""

__all__: list[str] = []
