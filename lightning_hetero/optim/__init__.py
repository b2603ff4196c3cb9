"""Optimizers that touch only the blocks that a compressed gradient has."""

from lightning_hetero.optim.sparse import SparseAdamW, SparseSGD

__all__ = ["SparseAdamW", "SparseSGD"]
