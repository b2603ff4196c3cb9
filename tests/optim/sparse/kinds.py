"""Settings of sparse optimizers that every implementation of their steps is tested with."""

from lightning_hetero.optim import SparseAdamW, SparseSGD

KINDS = {
    "sgd": (SparseSGD, {"lr": 0.1}),
    "decay": (SparseSGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (SparseSGD, {"lr": 0.05, "momentum": 0.9}),
    "momentum decay": (SparseSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SparseSGD, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (SparseAdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
