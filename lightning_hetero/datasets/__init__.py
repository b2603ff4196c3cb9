"""Data sets of extreme classification: sparse samples with many labels each."""

from lightning_hetero.datasets.libsvm import SparseBatch, SparseMultiLabelDataset, load_libsvm, sparse_loader
from lightning_hetero.datasets.synthetic import AMAZON_670K, DELICIOUS_200K, SparseShape, synthetic_multilabel

__all__ = [
    "AMAZON_670K",
    "DELICIOUS_200K",
    "SparseBatch",
    "SparseMultiLabelDataset",
    "SparseShape",
    "load_libsvm",
    "sparse_loader",
    "synthetic_multilabel",
]
