"""Clusters of ranks: residuals are the leaders' alone, all end together, and clusters that cannot be are refused.

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
from tests.modes.test_compression import Wide, alike, points, train
from tests.ranks import run_ranks

SPARSE = BlockTopK(density=0.2, warmup_steps=2)


class Fails(L.Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4 and trainer.global_rank == self.rank:
            raise ValueError("this worker fails")


def _train(rank, compression, clusters, failing=None):
    return train(rank, compression, (3, 1, 2, 2), strategy={"hierarchy": clusters}, callbacks=[Fails(failing)])


CLUSTERS = [[0, 2, 3], [1]]


def test_few_blocks_cross_and_leaders_alone_owe():
    ranks = run_ranks(_train, 4, SPARSE, CLUSTERS, timeout=240)
    assert 0.02 < (alike(ranks)["grads"][2:] != 0).mean() < 0.4
    assert [bool(np.any(result["left"])) for result in ranks] == [True, True, False, False]


@pytest.mark.parametrize(("rank", "compression"), [(3, None), (1, SPARSE)], ids=["a member", "a leader"])
def test_a_worker_that_fails_ends_the_others(rank, compression):
    errors = run_ranks(_train, 4, compression, CLUSTERS, rank, expect_errors=True)
    assert [number for number, *_ in errors] == [0, 1, 2, 3]


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


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"hierarchy": "sites"}, "hierarchy='sites'"),
        ({"hierarchy": "nodes", "ddp_comm_hook": print}, "ddp_comm_hook="),
        ({"hierarchy": "nodes", "compression": "powersgd"}, "compression="),
    ],
)
def test_wrong_arguments_are_refused_at_construction(given, match):
    with pytest.raises(ValueError, match=match):
        HeteroDDPStrategy(**given)
