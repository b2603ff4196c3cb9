"""Samples of each rank: index streams, samplers, evaluation shards; and sparse multi-label data."""

from lightning_hetero.data.broadcast_stream import BroadcastStream
from lightning_hetero.data.evaluation import EvaluationBatchSampler
from lightning_hetero.data.index_stream import IndexStream, PermutationStream, SamplerStream
from lightning_hetero.data.mega_batch import ClaimedBatchSampler, MegaBatch
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.datasets.libsvm import SparseBatch, SparseMultiLabelDataset, load_libsvm, sparse_loader
from lightning_hetero.datasets.synthetic import AMAZON_670K, DELICIOUS_200K, SparseShape, synthetic_multilabel

__all__ = [
    "AMAZON_670K",
    "BroadcastStream",
    "ClaimedBatchSampler",
    "DELICIOUS_200K",
    "EvaluationBatchSampler",
    "IndexStream",
    "MegaBatch",
    "PermutationStream",
    "SampleStream",
    "SamplerStream",
    "SparseBatch",
    "SparseMultiLabelDataset",
    "SparseShape",
    "UnevenBatchSampler",
    "load_libsvm",
    "sparse_loader",
    "synthetic_multilabel",
]
