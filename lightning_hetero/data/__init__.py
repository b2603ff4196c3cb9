"""Which samples each rank sees: index streams, the uneven batch sampler, evaluation shards."""

from lightning_hetero.data.evaluation import EvaluationBatchSampler
from lightning_hetero.data.live import LiveStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.stream import IndexStream, PermutationStream, SamplerStream

__all__ = [
    "EvaluationBatchSampler",
    "IndexStream",
    "LiveStream",
    "PermutationStream",
    "SamplerStream",
    "UnevenBatchSampler",
]
