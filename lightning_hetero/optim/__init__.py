"""What acts on optimizers, or reads them: the learning rate of a total that moves, Adam's view of a gradient."""

from lightning_hetero.optim.lr_gain import LearningRateGain
from lightning_hetero.optim.preconditioner import AdamPreconditioner, is_adam

__all__ = ["AdamPreconditioner", "LearningRateGain", "is_adam"]
