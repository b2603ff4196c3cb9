"""Clusters of ranks in real processes: the same sums, one message per cluster, residuals with the leaders only."""

import os
import threading
from datetime import timedelta

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives import cluster_discovery, topology
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.comm.gradients.test_ddp_hook import TINY
from tests.helpers import fit, run_ranks
from tests.strategies.test_compression import Wide, points, same_everywhere, saving
from tests.strategies.test_delayed_blocks import Delays

CLUSTERS = [[0, 2, 3], [1]]
SPLIT = [3, 1, 2, 2]
SPARSE = BlockTopK(density=0.2, warmup_steps=2)


def _fit(rank, hierarchy, compression, kwargs):
    crossed = []
    async_all_reduce = sums.async_all_reduce
    sums.async_all_reduce = lambda buffer, group=None: (
        crossed.append(dist.get_world_size(group)), async_all_reduce(buffer, group)
    )[1]  # fmt: skip
    settings = {"local_batch_sizes": SPLIT, "bucket_cap_mb": TINY, **kwargs.pop("strategy", {})}
    strategy = HeteroDDPStrategy(hierarchy=hierarchy, compression=compression, **settings)
    result = fit(rank, strategy, 4, 2, **{"model": Wide(), "dataset": points(), "max_epochs": 2, **kwargs})
    held = strategy.engine.compression
    residual = None if held is None else held.averager.encoder.residual.numpy().copy()
    return {**result, "crossed": crossed, "residual": residual}


def run(hierarchy, compression=None, **kwargs):
    return run_ranks(_fit, 4, hierarchy, compression, kwargs)


def test_dense_sums_are_those_of_all_ranks_and_leaders_alone_cross():
    expected, ours = run(None)[0], run(CLUSTERS)
    result = same_everywhere(ours)
    np.testing.assert_allclose(result["grads"], expected["grads"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(result["weights"], expected["weights"], rtol=1e-4, atol=1e-7)
    assert set(expected["crossed"]) == {4}
    assert [set(r["crossed"]) for r in ours] == [{2}, {2}, set(), set()]


def test_density_1_is_the_dense_gradient_and_few_blocks_are_few():
    expected = run(None)[0]
    whole = same_everywhere(run(CLUSTERS, BlockTopK(density=1.0, value_dtype="float32")))
    np.testing.assert_allclose(whole["grads"], expected["grads"], rtol=1e-4, atol=1e-6)
    ranks = run(CLUSTERS, SPARSE)
    few = same_everywhere(ranks)
    assert 0.02 < (few["grads"][2:] != 0).mean() < 0.4
    assert [bool(r["residual"].any()) for r in ranks] == [True, True, False, False]


def test_a_resume_goes_on_identically_and_another_hierarchy_loses_no_residual(tmp_path):
    whole = same_everywhere(run(CLUSTERS, SPARSE, **saving(tmp_path)))
    path = str(next(tmp_path.glob("*step=10.ckpt")))
    rest = same_everywhere(run(CLUSTERS, SPARSE, ckpt_path=path))
    np.testing.assert_array_equal(rest["grads"], whole["grads"][10:])
    saved = torch.load(path, weights_only=True)["lightning_hetero_residuals"]["ranks"]
    total = sum(torch.cat(list(rank["residuals"].values())).numpy() for rank in saved)
    for hierarchy in ([[0, 1], [2, 3]], None):
        ranks = run(hierarchy, SPARSE, ckpt_path=path, max_steps=10)
        held = sum(rank["residual"] for rank in ranks)
        kept = held[held != 0]
        np.testing.assert_allclose(kept.sum(), total.sum(), rtol=1e-4, atol=1e-6)
        assert kept.size == (total != 0).sum()


def _late(rank, hierarchy, compression, kwargs):
    names = [name for name, _ in Wide().named_parameters()]
    delays = Delays({2: names if compression is None else True})
    return _fit(rank, hierarchy, compression, {"callbacks": [delays], "strategy": {"staleness": 1}, **kwargs})


@pytest.mark.parametrize("compression", [None, BlockTopK(density=1.0, value_dtype="float32")])
def test_delayed_sums_go_by_way_of_leaders_too(compression):
    """Gradients arrive a step later, as they do on the straight way; the last ones are applied at the end."""
    expected = same_everywhere(run_ranks(_late, 4, None, compression, {}))
    ranks = run_ranks(_late, 4, CLUSTERS, compression, {})
    ours = same_everywhere(ranks)
    for name in ("grads", "weights"):
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4, atol=1e-6)
    assert np.abs(ours["grads"][2]).max() == 0.0  # the sum of this step is on its way
    assert [set(r["crossed"]) for r in ranks] == [{2}, {2}, set(), set()]


@pytest.mark.parametrize(("rank", "compression"), [(3, None), (1, SPARSE)], ids=["a member", "a leader"])
def test_a_worker_that_fails_ends_the_others(rank, compression):
    errors = run_ranks(_failing, 4, rank, compression, expect_errors=True)
    assert [number for number, *_ in errors] == [0, 1, 2, 3]


class Fails(L.Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4 and trainer.global_rank == self.rank:
            raise ValueError("this worker fails")


def _failing(rank, failing, compression):
    return _fit(rank, CLUSTERS, compression, {"callbacks": [Fails(failing)]})


# where clusters come from


def _meet(rank, names):
    dist.init_process_group("gloo")
    control = ControlPlane(rank, 4, timeout=timedelta(seconds=60))
    cluster_discovery.socket.gethostname = lambda: names[rank]
    found = [Topology.form("nodes", control, None).clusters]
    os.environ[cluster_discovery.VARIABLE] = names[rank]
    found.append(Topology.form("env", control, None).clusters)
    seconds = cluster_discovery.link_seconds(control)
    assert (seconds[~np.eye(4, dtype=bool)] > 0).all()
    np.testing.assert_array_equal(seconds, seconds.T)
    cluster_discovery.socket.gethostname, os.environ[cluster_discovery.VARIABLE] = lambda: "one", "one"
    cluster_discovery._ping = lambda probe, low, high, control: 0.1 if names[low] != names[high] else 0.01
    found.append(Topology.form("auto", control, None).clusters)
    flat = Topology.form("auto", control, None).with_own_groups()
    buffer = torch.full((5,), float(rank))
    flat.all_reduce(buffer).wait()
    rows = torch.zeros(flat.size, 3, dtype=torch.uint8)
    if flat.is_leader:
        rows[flat.cluster] = 1 + flat.cluster
    flat.all_gather(rows).wait()
    if rank == 3:
        del os.environ[cluster_discovery.VARIABLE]
    try:
        Topology.form("env", control, None)
    except ValueError as error:
        return found, buffer.tolist(), rows[:, 0].tolist(), str(error)
    return None


def test_clusters_from_hosts_the_environment_and_times():
    for found, sums_, rows, error in run_ranks(_meet, 4, ["a", "b", "a", "a"]):
        assert found == [((0, 2, 3), (1,))] * 3
        assert sums_ == [6.0] * 5
        assert rows == [1, 2]
        assert "not set on rank 3" in error


def test_wrong_arguments_are_refused_at_construction():
    with pytest.raises(ValueError, match="hierarchy='sites' is unknown"):
        HeteroDDPStrategy(hierarchy="sites")
    with pytest.raises(ValueError, match="hierarchy= and ddp_comm_hook="):
        HeteroDDPStrategy(hierarchy="nodes", ddp_comm_hook=lambda state, bucket: None)
    with pytest.raises(ValueError, match="compression=LowRank"):
        HeteroDDPStrategy(hierarchy="nodes", compression="powersgd")


def test_clusters_that_do_not_fit_the_job_are_refused_on_every_rank():
    errors = run_ranks(_fit, 4, [[0, 1, 2]], None, {}, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(rank, "ValueError") for rank in range(4)]


def _alone(rank):
    few = {"accelerator": "cpu", "devices": 1, "num_nodes": 4}
    trainer = L.Trainer(strategy=HeteroDDPStrategy(hierarchy=[[0, 1, 2]]), max_epochs=1, logger=False, **few)
    fabric = Fabric(strategy=FabricStrategy(hierarchy=[[0, 1, 2]]), **few)
    loader = torch.utils.data.DataLoader(points(), 4)
    with pytest.raises(ValueError, match="Name each rank once"):
        trainer.fit(Wide(), loader)
    with pytest.raises(ValueError, match="Name each rank once"):
        fabric.launch()
    return dist.is_initialized()


def test_they_are_refused_before_anybody_waits_for_the_others():
    """The other three ranks do not exist."""
    assert run_ranks(_alone, 1, timeout=40.0) == [False]


def _one_order(rank, backend):
    """Threads from which collectives set out, and what four ranks in two clusters sum up and gather."""
    dist.init_process_group("gloo")
    way = Topology(rank, ((0, 1), (2, 3)))
    if backend is not None:
        topology.backend_of = lambda device, group: backend
    threads = set()
    for place, name in ((dist, "reduce"), (dist, "broadcast"), (sums, "async_all_reduce"), (sums, "async_all_gather")):
        setattr(place, name, _noting(getattr(place, name), threads))
    buffers, found = [torch.full((3,), float(rank + i)) for i in range(5)], []
    for future in [way.all_reduce(buffer) for buffer in buffers]:
        future.wait()
    found += [buffer[0].item() for buffer in buffers]
    rows = torch.zeros(2, 3, dtype=torch.uint8)
    rows[way.cluster] = 1 + way.cluster
    way.all_gather(rows).wait()
    return threads == {threading.get_ident()}, found, rows[:, 0].tolist()


def _noting(call, threads):
    def noted(*args, **kwargs):
        threads.add(threading.get_ident())
        return call(*args, **kwargs)

    return noted


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_with_nccl_every_collective_sets_out_from_the_thread_of_the_buckets(backend):
    """Two groups of NCCL may be used in one order only, the same on all ranks; a thread beside would break that."""
    expected = [6.0 + 4 * i for i in range(5)]
    assert run_ranks(_one_order, 4, backend) == [(backend == "nccl", expected, [1, 2])] * 4
