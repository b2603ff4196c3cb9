"""Tools around optimizers: learning rates under a moving total batch, Adam's preconditioning, sparse steps."""

from lightning_hetero.optim.adam_preconditioner import AdamPreconditioner, common_preconditioner, is_adam
from lightning_hetero.optim.lr_multiplier import LearningRateGain, LearningRateMultiplier
from lightning_hetero.optim.sparse.optimizers import SparseAdamW, SparseSGD

__all__ = [
    "AdamPreconditioner",
    "LearningRateGain",
    "LearningRateMultiplier",
    "SparseAdamW",
    "SparseSGD",
    "common_preconditioner",
    "is_adam",
]
