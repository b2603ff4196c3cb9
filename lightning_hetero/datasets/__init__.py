"""Data sets of extreme classification: sparse samples with many labels each."""

from lightning_hetero.datasets.libsvm import SparseBatch, SparseMultiLabelDataset, load_libsvm, sparse_loader
from lightning_hetero.datasets.multilabel_loss import PrecisionAtOne, multilabel_cross_entropy
from lightning_hetero.datasets.synthetic import AMAZON_670K, DELICIOUS_200K, SparseShape, synthetic_multilabel

__all__ = [
    "AMAZON_670K",
    "DELICIOUS_200K",
    "PrecisionAtOne",
    "SparseBatch",
    "SparseMultiLabelDataset",
    "SparseShape",
    "load_libsvm",
    "multilabel_cross_entropy",
    "sparse_loader",
    "synthetic_multilabel",
]
