"""Loaders under the engine: evaluation within the workers' bounds, and what cannot be training."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero.frontend.loaders import balanced_evaluation_loader, evaluates
from tests.helpers import Points


def test_a_balanced_evaluation_stays_within_the_most_samples_of_a_worker():
    data = Points(16)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    workers = SimpleNamespace(max_local=(5, 8))
    engine = SimpleNamespace(rank=0, world_size=2, current_shares=lambda: (3.0, 1.0), workers=workers)
    assert [len(batch) for batch in balanced_evaluation_loader(loader, engine).batch_sampler] == [5, 5]
    engine.workers = None
    assert [len(batch) for batch in balanced_evaluation_loader(loader, engine).batch_sampler] == [6, 6]


def test_a_loop_without_gradients_or_with_models_in_eval_cannot_be_training():
    training, frozen = nn.Linear(1, 1), nn.Linear(1, 1).eval()
    assert [evaluates(models) for models in ([], [training], [training, frozen], [frozen])] == [False] * 3 + [True]
    with torch.no_grad():
        assert evaluates([training])
