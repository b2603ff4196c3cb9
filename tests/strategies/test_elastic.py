"""Elastic averaging end to end: real processes, real optimizers, batches claimed through the job's store."""

import numpy as np
import pytest
import torch

from lightning_hetero import HeteroElasticStrategy
from tests.helpers import Points, Regressor, covered, fit, run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def elastic(rank, world_size, batch_size, arguments=None, **kwargs):
    strategy = HeteroElasticStrategy(**(arguments or {}))
    result = fit(rank, strategy, world_size, batch_size, **kwargs)
    return {**result, "merges": strategy.merges}


def _run(rank, *args, kwargs):
    return elastic(rank, *args, **kwargs)


def _ddp(rank, world_size, batch_size, samples):
    return fit(rank, "ddp", world_size, batch_size, dataset=Points(samples))


def _elastic(rank, world_size, batch_size, samples, arguments):
    return elastic(rank, world_size, batch_size, arguments, dataset=Points(samples))


@pytest.mark.parametrize(("world_size", "samples"), [(2, 64), (3, 66)])
def test_one_batch_each_and_the_plain_mean_are_synchronous_sgd(world_size, samples):
    """Averaging replicas after one update each is averaging their gradients, local momentum included."""
    ddp = run_ranks(_ddp, world_size, world_size, 4, samples)
    arguments = {"merge": "mean", "mega_batch_batches": world_size}
    ours = run_ranks(_elastic, world_size, world_size, 4, samples, arguments)
    for a, b in zip(ddp, ours, strict=True):
        np.testing.assert_allclose(b["weights"], a["weights"], **EXACT)
        assert a["steps"] == b["steps"]
    assert covered(ours, 0) == covered(ours, 1) == list(range(samples))
