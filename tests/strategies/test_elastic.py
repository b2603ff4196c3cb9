"""Elastic averaging end to end: real processes, real optimizers, batches claimed through the job's store."""

import contextlib
import inspect
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero import HeteroElasticStrategy
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticEngine
from lightning_hetero.elastic.batch_queue import ElasticWorkerError, job_store
from lightning_hetero.simulate import Throttle
from tests.helpers import Points, Regressor, covered, fit, run_ranks
from tests.strategies.elastic_helpers import elastic

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def _ddp(rank, world_size, batch_size, samples):
    return fit(rank, "ddp", world_size, batch_size, dataset=Points(samples))


@pytest.mark.parametrize(("world_size", "samples"), [(2, 64), (3, 66)])
def test_one_batch_each_and_the_plain_mean_are_synchronous_sgd(world_size, samples):
    """Averaging replicas after one update each is averaging their gradients, local momentum included."""
    ddp = run_ranks(_ddp, world_size, world_size, 4, samples)
    ours = elastic(world_size, 4, {"mega_batch_batches": world_size}, dataset=Points(samples))
    for a, b in zip(ddp, ours, strict=True):
        np.testing.assert_allclose(b["weights"], a["weights"], **EXACT)
        assert a["steps"] == b["steps"]
    assert covered(ours, 0) == covered(ours, 1) == list(range(samples))


def test_a_slow_worker_takes_fewer_batches_then_smaller_ones():
    """Three times slower: a third of the batches first; once sizes are scaled, as many updates as the other, within 1.

    Batches are claimed in the order of a virtual clock, through the real store, by real processes.
    """
    results = elastic(
        2, 32, {"merge": "adaptive", "mega_batch_batches": 24}, costs=(1.0, 3.0), dataset=Points(32 * 24), max_epochs=12
    )
    merges = results[0]["merges"]
    assert merges[0].updates == (18, 6)
    assert merges[0].batch_sizes == (32, 32)
    for merge in merges[-3:]:
        assert abs(merge.updates[0] - merge.updates[1]) <= 1
    assert abs(results[0]["sizes"][1] / results[0]["sizes"][0] - 1 / 3) < 0.1
    for epoch in range(12):
        assert covered(results, epoch) == list(range(32 * 24))
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


@pytest.mark.parametrize("merge", sorted(MERGES))
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_and_one_model_whatever_the_speeds(merge, drop_last):
    """Ragged mega-batches, three ranks of three speeds, every merge rule."""
    results = elastic(
        3,
        4,
        {"merge": merge, "mega_batch_size": 31},
        costs=(1.0, 2.5, 0.7),
        dataset=Points(107),
        loader_kwargs={"drop_last": drop_last},
    )
    for epoch in range(2):
        seen = covered(results, epoch)
        assert len(seen) == len(set(seen)) == (107 // 12 * 12 if drop_last else 107)
    assert len({tuple(r["weights"]) for r in results}) == 1
    assert np.isfinite(results[0]["weights"]).all()
    updates = np.sum([m.updates for m in results[0]["merges"]], axis=0)
    assert updates.tolist() == [len(r["seen"]) for r in results]
    assert len(set(updates)) > 1


class Busy(Regressor):
    """Works in short pieces, which take no processor, since that is shared: a process that is stopped does none."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0 and self.trainer.global_rank == 1:
            self.throttle = Throttle(1 / 3).start()
        for _ in range(8):
            time.sleep(0.001)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        if self.trainer.global_rank == 1:
            self.throttle.stop()


@pytest.mark.alone
def test_a_throttled_process_takes_fewer_batches():
    """The same with a process that is really slowed down; the margins are wide because the machine is shared."""
    results = elastic(2, 2, {"mega_batch_batches": 120}, model=Busy, dataset=Points(240), max_epochs=1)
    fast, slow = results[0]["merges"][0].updates
    assert fast + slow == 120
    assert 0.1 < slow / fast < 0.75
    assert covered(results, 0) == list(range(240))


class Waits(Regressor):
    """Rank 1 stops in its second batch until rank 0 has taken all others and arrived at the merge."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1 and self.trainer.current_epoch == 0:
            while 0 in self.trainer.strategy.engine.dispatcher.missing():
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_the_share_of_a_worker_that_stops_claiming_is_done_by_the_rest():
    results = elastic(2, 4, {"mega_batch_size": 64}, model=Waits)
    first = results[0]["merges"][0]
    assert first.updates == (14, 2)
    assert covered(results, 0) == covered(results, 1) == list(range(64))


class Ends(Regressor):
    """Rank 1 ends in its second batch, in one of three ways; rank 0 notes what it hears of that."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 0:
            job_store().wait(["rank1 has its second batch"])
        elif batch_idx == 1:
            job_store().set("rank1 has its second batch", "")
            if self.how == "killed":
                os._exit(9)
            if self.how == "raises":
                raise ArithmeticError("broken worker")
            while not job_store().check(["rank0 heard"]):  # stuck
                time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def _ends(rank, how):
    model = Ends(how)
    timeout = timedelta(seconds=3 if how == "stuck" else 60)
    strategy = HeteroElasticStrategy(merge="mean", mega_batch_size=64, timeout=timeout)
    try:
        fit(rank, strategy, 2, 4, model=model)
    except ElasticWorkerError as error:
        if rank == 0:
            job_store().set("rank0 heard", "")
            time.sleep(0.3)  # rank 0 holds the store, which rank 1 looks at
        raise ElasticWorkerError(f"trained on {len(covered([vars(model)], 0))}: {error}") from error


def _ends_with_the_store(rank):
    model = Regressor()
    strategy = HeteroElasticStrategy(merge="mean", mega_batch_size=64)
    fit(rank, strategy, 2, 4, model=model, callbacks=[KillsRankZero()])


class KillsRankZero(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 1:
            os._exit(9)


def test_the_end_of_the_process_that_holds_the_store_is_told():
    errors = {rank: (kind, message) for rank, kind, message in run_ranks(_ends_with_the_store, 2, expect_errors=True)}
    assert errors[1][0] == "ElasticWorkerError"
    assert (
        "nothing is heard: 0" in errors[1][1] or "store, which hands out the batches, does not answer" in errors[1][1]
    )


@pytest.mark.alone
@pytest.mark.parametrize("how", ["killed", "raises", "stuck"])
def test_a_worker_that_ends_is_named_and_the_rest_is_done_first(how):
    """The others finish the mega-batch without it, then end with an error that names it; nobody waits for ever."""
    errors = {rank: (kind, message) for rank, kind, message in run_ranks(_ends, 2, how, timeout=60, expect_errors=True)}
    kind, message = errors[0]
    assert kind == "ElasticWorkerError"
    assert "ranks of which nothing is heard: 1." in message
    assert message.startswith(f"trained on {64 - 2 * 4}: ")  # all but the two batches of rank 1
    assert 1 in errors


class LongBatch(Regressor):
    """Rank 2 is killed in a batch while rank 0 is in a long one; rank 1 has done all the others."""

    def training_step(self, batch, batch_idx):
        store, rank = job_store(), self.trainer.global_rank
        if batch_idx == 1 and rank != 1:
            store.set(f"rank{rank} has its second batch", "")
        if batch_idx == 1 and rank == 1:
            store.wait(["rank0 has its second batch", "rank2 has its second batch"])
        if batch_idx == 1 and rank == 2:
            while 1 in self.trainer.strategy.engine.dispatcher.missing():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 1 and rank == 0:
            while not dead(int(store.get("pid2"))):
                time.sleep(0.01)
            time.sleep(0.5)  # rank 1 has noticed by now, though the test is right without
        return super().training_step(batch, batch_idx)


def dead(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _long_batch(rank):
    model = LongBatch()
    model.on_train_start = lambda: job_store().set(f"pid{rank}", str(os.getpid()))
    fit(rank, HeteroElasticStrategy(merge="mean", mega_batch_size=64), 3, 4, model=model)


def test_only_the_worker_that_was_killed_is_named_though_another_is_still_busy():
    errors = {rank: message for rank, _, message in run_ranks(_long_batch, 3, timeout=60, expect_errors=True)}
    assert "ranks of which nothing is heard: 2." in errors[0]
    assert "ranks of which nothing is heard: 2." in errors[1]


class Stops(L.Callback):
    """Rank 0, which holds the store, stands still for ever."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 0:
            job_store().set("pid0", str(os.getpid()))
        if trainer.global_rank == 0 and batch_idx == 1:
            job_store().wait(["rank 1 knows"], timedelta(seconds=60))
            os.kill(os.getpid(), signal.SIGSTOP)
        if trainer.global_rank == 1 and batch_idx == 0:
            job_store().wait(["pid0"], timedelta(seconds=60))
            self.pid = int(job_store().get("pid0"))
            job_store().set("rank 1 knows", "")
        if trainer.global_rank == 1:
            while not stopped(self.pid):
                time.sleep(0.01)


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _stands_still(rank):
    callback = Stops()
    strategy = HeteroElasticStrategy(merge="mean", mega_batch_size=64, timeout=timedelta(seconds=3))
    try:
        fit(rank, strategy, 2, 4, model=Regressor(), callbacks=[callback])
    finally:
        if rank == 1:
            os.kill(callback.pid, signal.SIGKILL)


@pytest.mark.alone
def test_nobody_waits_without_bound_for_a_store_that_stands_still():
    errors = {rank: (kind, message) for rank, kind, message in run_ranks(_stands_still, 2, expect_errors=True)}
    assert errors[1][0] == "ElasticWorkerError"
    assert "the job's store, which hands out the batches, does not answer" in errors[1][1]
    assert "no answer within 3 s" in errors[1][1]


# settings


def _merged(rank, cases):
    """Of each case the merge of six updates of rank 0 and two of rank 1, the sizes that follow, and three weights."""
    dist.init_process_group("gloo")
    store, found = job_store(), []
    for number, keywords in enumerate(cases):
        strategy = HeteroElasticStrategy(mega_batch_size=64, **keywords)
        engine, model = ElasticEngine(strategy.config, rank=rank, world_size=2), nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 0.01)
        engine.attach(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        weights, sampler = [model.weight.item()], engine.shard(PermutationStream(128, shuffle=False, seed=0), 8)
        for done, _ in enumerate(sampler, 1):
            engine.begin_batch()
            if not engine.merges:
                with torch.no_grad():
                    model.weight.add_(0.01)
                if rank == 1 and done == 1:
                    store.wait([f"{number}: one batch is left"])
                if rank == 0 and done == 6:
                    store.set(f"{number}: one batch is left", "")
                    store.wait([f"{number}: none is"])
            if engine.end_batch() is not None:
                weights.append(model.weight.item())
            elif rank == 1 and done == 1:
                store.set(f"{number}: none is", "")
        first, second = engine.merges
        found.append((first.updates, second.batch_sizes, first.weights, first.perturbed, weights))
    dist.barrier()
    return found


CASES = (
    *({}, {"beta": 1.0}, {"beta": 3.0}, {"beta": 3.0, "damped": False}, {"beta": 3.0, "min_batch_size": 5}),
    *({"perturbation": 0.5}, {"perturbation_threshold": 1e-6}, {"renormalize": False}, {"momentum": 0.5}),
    *({"merge": "elastic"}, {"merge": "mean"}),
)


def test_every_setting_changes_the_merge_or_the_next_batches():
    named = {name for case in CASES for name in case}
    keywords = set(inspect.signature(HeteroElasticStrategy).parameters)
    assert named == keywords - {"mega_batch_size", "mega_batch_batches", "kwargs"}
    different = set()
    for case, found, other in zip(CASES, *run_ranks(_merged, 2, CASES), strict=True):
        assert found == other
        updates, sizes, weights, perturbed, (before, first, second) = found
        rule = MERGES[case.get("merge", "adaptive")]
        settings = AdaptiveSettings(8, **{name: value for name, value in case.items() if name != "merge"})
        merged = rule.weights((8, 8), (6, 2), (0.07, 0.03), settings)
        assert updates == (6, 2)
        assert sizes == (scale_batch_sizes((8, 8), (6, 2), settings) if rule.scales else (8, 8))
        assert (weights, perturbed) == (merged.weights, merged.perturbed)
        assert first == pytest.approx(weights[0] * 0.07 + weights[1] * 0.03)
        moved = first + (settings.momentum * (first - before) if rule.momentum else 0.0)
        if settings.renormalize:  # replicas stood still until the second merge
            assert second == pytest.approx(moved)
        different.add((sizes, weights, round(second, 9)))
    assert len(different) == len(CASES)
