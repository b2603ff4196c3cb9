"""Clusters of ranks: residuals are the leaders' alone, and clusters that cannot be are refused.

Sums over clusters are exact, sparse and delayed: tests/one_process, test_compression.py, test_staleness.py.
"""

import lightning as L
import numpy as np
import pytest
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.modes.runs import alike
from tests.modes.test_compression import Wide, points, train
from tests.ranks import run_ranks

SPARSE = BlockTopK(density=0.2, warmup_steps=2)


def _train(rank, clusters):
    return train(rank, SPARSE, (3, 1, 2, 2), strategy={"hierarchy": clusters})


def test_few_blocks_cross_and_leaders_alone_owe():
    ranks = run_ranks(_train, 4, [[0, 2, 3], [1]])
    assert 0.02 < (alike(ranks, "grads")["grads"][2:] != 0).mean() < 0.4
    assert [bool(np.any(result["left"])) for result in ranks] == [True, True, False, False]


def _alone(rank):
    """The other three ranks do not exist."""
    few, clusters = {"accelerator": "cpu", "devices": 1, "num_nodes": 4}, [[0, 1, 2]]
    trainer = L.Trainer(strategy=HeteroDDPStrategy(hierarchy=clusters), max_epochs=1, logger=False, **few)
    with pytest.raises(ValueError, match="each rank once"):
        trainer.fit(Wide(), DataLoader(points(), 4))
    with pytest.raises(ValueError, match="each rank once"):
        Fabric(strategy=FabricStrategy(hierarchy=clusters), **few).launch()
    return dist.is_initialized()


def test_clusters_that_do_not_fit_the_job_are_refused_before_anybody_waits_for_the_others():
    assert run_ranks(_alone, 1, timeout=40.0) == [False]
