"""The plan really changes the next batches, on workers whose time is counted, and with every averager."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.core.compression.settings import COMPRESSORS
from lightning_hetero.engine import parts
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, collected, covered, fit, trainer_of
from tests.loops import Planned
from tests.ranks import run_ranks

# a split that follows speeds; time is counted, so that plans are the same in every run


class Paced(Regressor):
    """Rank 0 is three times as fast as rank 1 for 90 steps, then the other way round; all scatter by 1 %."""

    def __init__(self, rank):
        super().__init__(features=8, dtype=torch.float32, lr=1e-3)
        self.rank, self.noise, self.counted = rank, random.Random(rank), CountedTime(rank, 1e8)

    def forward(self, x):
        fast = (self.rank == 0) == (self.trainer.global_step < 90)
        took = self.noise.gauss(1.0, 0.01) * (4e-4 if fast else 12e-4) * len(x)
        self.counted.sleep(took / 3 + 0.002)
        y = self.net(x)
        y.register_hook(lambda _: self.counted.sleep(took * 2 / 3))
        return y


def _swap(rank, policy):
    how = {"model": Paced(rank), "dataset": Points(64 * 200, 8, torch.float32), "max_epochs": 1}
    return fit(rank, {"policy": policy, "replan": 8}, 2, 32, **how)


@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_split_follows_the_faster_process_and_back(policy):
    """Once a split fits, nothing moves it to and fro: two or three changes to each split, and then none."""
    results = run_ranks(_swap, 2, policy)
    history = results[0]["history"]
    assert history == results[1]["history"]
    assert covered(results, 0) == list(range(64 * 200))
    sizes = np.array([[len(indices) for _, _, indices in r["seen"]] for r in results])
    assert (sizes.sum(axis=0) == 64).all()
    assert tuple(sizes[:, 0]) == (32, 32)
    assert 45 <= sizes[0, 66:88].min() <= sizes[0, 66:88].max() <= 51, history
    assert 13 <= sizes[0, 150:].min() <= sizes[0, 150:].max() <= 19, history
    changed = [step for _, step, _ in history[1:]]
    assert [step for step in changed if 32 <= step < 90 or step >= 130] == [], history
    assert len(changed) <= 6, history
    for _, step, split in history:
        assert step >= 200 or tuple(sizes[:, step]) == split


class Waiting(CountedTime):
    """Time in which a rank that blocks in a collective waits for the last one; sums in the background take none."""

    def __init__(self, rank, clusters):
        gather, total, self._all_reduce = async_ops.async_all_gather, async_ops.async_all_reduce, dist.all_reduce
        super().__init__(rank, 1e9)
        async_ops.async_all_reduce, dist.all_reduce = total, self.all_reduce
        if clusters:  # only leaders gather
            async_ops.async_all_gather = gather

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        work = self._all_reduce(tensor, op, group, async_op)
        if group is None and not async_op:
            moment = torch.tensor([self.now], dtype=torch.float64)
            self._all_reduce(moment, dist.ReduceOp.MAX)
            self.now = float(moment)
        return work


class Deep(Regressor):
    """Five layers, each a bucket of its own, that take equally long."""

    def __init__(self, counted, by_sample):
        super().__init__(features=64, dtype=torch.float32, lr=1e-3)
        self.counted, self.by_sample = counted, by_sample
        self.net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)], torch.nn.Linear(64, 1))

    def forward(self, x):
        took = self.by_sample * len(x) / 15
        for layer in self.net:
            self.counted.spend(took)
            x = layer(x)
            x.register_hook(lambda _: self.counted.spend(2 * took))
        return x


def blocking(state, bucket):
    """A hook of the user's that waits for each bucket."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


STALE = {"staleness": 1}
AVERAGERS = {
    "none": {},
    **{name: {"compression": name} for name in COMPRESSORS},
    "powersgd": {"compression": "powersgd(rank=2, start=2)"},
    "block_topk, threshold": {"compression": "block_topk(selector='histogram')"},
    "block_topk, dense": {"compression": "block_topk(dense_every=2)"},
    "stale": STALE,
    "stale block_topk": {"compression": "block_topk", **STALE},
    "stale block_topk, dense": {"compression": "block_topk(dense_every=2)", **STALE},
    "a user's hook": {"ddp_comm_hook": blocking},
}
IN_CLUSTERS = {
    name: {**AVERAGERS[name], "hierarchy": [[0, 1], [2]]}
    for name in ("none", "block_topk", "stale", "stale block_topk")
}


def _learned(rank, averagers, speeds, clusters):
    counted, splits = Waiting(rank, clusters), {}
    for name, settings in averagers.items():
        strategy = HeteroDDPStrategy(replan=8, bucket_cap_mb=1e-4, **settings)
        model, n = Deep(counted, speeds[rank]), 24 * len(speeds)
        fit(rank, strategy, len(speeds), 24, model=model, dataset=Points(n * 20, 64, torch.float32), max_epochs=1)
        assert strategy.observations().bucket_ends.shape[2] >= 4
        splits[name] = strategy.plan_history[-1].plan.local_batch_sizes
    return splits


@pytest.mark.parametrize(
    ("averagers", "speeds", "clusters"),
    [(AVERAGERS, (2e-3, 4e-3), False), (IN_CLUSTERS, (2e-3, 4e-3, 4e-3), True)],
    ids=["flat", "clusters"],
)
def test_every_averager_learns_the_split_of_its_workers(averagers, speeds, clusters):
    """One worker is twice as fast; what it waits for inside the hook of a bucket is no computing of its own."""
    splits = run_ranks(_learned, len(speeds), averagers, speeds, clusters)[0]
    optimum = 24 * len(speeds) / speeds[0] / sum(1 / speed for speed in speeds)
    assert {name: sizes for name, sizes in splits.items() if abs(sizes[0] - optimum) > 2} == {}


# plans by hand


WORKERS = {"num_workers": 2, "persistent_workers": True}
BY_HAND = {  # plans behind steps of an epoch, settings of the loader, and steps of each epoch
    "another split": ({(0, 2): (10, 2)}, WORKERS, (10, 10)),
    "smaller": ({(0, 3): (4, 2)}, {}, (4 + 12, 20)),
    "greater": ({(0, 3): (22, 2)}, {"num_workers": 1}, (6 + 2, 5)),
    "behind epochs": ({(0, 9): (22, 2), (1, 4): (4, 2)}, {}, (10, 5, 20)),
}


class Validated(Planned):
    def __init__(self, plans):
        super().__init__(plans, {}, "mean")
        self.validations = 0

    def val_dataloader(self):
        return DataLoader(Points(4), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validations += not self.trainer.sanity_checking


def _by_hand(rank):
    found = {}
    for name, (plans, loader, epochs) in BY_HAND.items():
        model, how = Validated(plans), {"loader_kwargs": loader, "max_epochs": len(epochs), "val_check_interval": 0.5}
        found[name] = fit(rank, {"policy": "even"}, 2, 6, model=model, dataset=Points(120), **how), model.validations
    return found


def test_adopted_plans_hold_beyond_the_prefetched_batches_and_epochs_follow_their_total():
    """No epoch is cut, validations are not skipped, and each sample is used once."""
    ranks = run_ranks(_by_hand, 2)
    for name, (plans, loader, epochs) in BY_HAND.items():
        results, validations = zip(*(found[name] for found in ranks), strict=True)
        assert [result["steps"] for result in results] == [sum(epochs)] * 2, name
        assert name in ("smaller", "greater") or validations == (2 * len(epochs),) * 2, name
        for epoch in range(len(epochs)):
            assert covered(results, epoch) == list(range(120))
        if name != "behind epochs":
            (((_, step), plan),) = plans.items()
            first = step + 1 + 2 * loader.get("num_workers", 0)
            assert results[0]["history"] == [(0, 0, (6, 6)), (0, first, plan)]
            sizes = [tuple(len(own) for *_, own in step) for step in zip(*(r["seen"] for r in results), strict=True)]
            assert sizes == [(6, 6)] * first + [plan] * (len(sizes) - first)


# a worker on a part of a core


def _quota(rank):
    """A tenth of a core, of which it saw no end yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "cpu_quota", lambda: 0.1 if rank else None)
        return fit(rank, {"replan": 8}, 2, 16, dataset=Points(32 * 12), max_epochs=1)["history"]


def test_a_quota_of_the_cpu_counts_before_it_is_used_up():
    first, second = run_ranks(_quota, 2)[0][-1][2]
    assert second < first / 3


# evaluation


class Evaluated(Regressor):
    def validation_step(self, batch, batch_idx):
        self.seen.append(("val", batch_idx, batch[2].tolist()))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.seen.append(("test", batch_idx, batch[2].tolist()))

    def predict_step(self, batch, batch_idx):
        return batch[2]


def _evaluate(rank):
    found = {}
    for balance in (True, False):
        trainer = trainer_of(HeteroDDPStrategy(local_batch_sizes=[6, 2], balance_evaluation=balance), 2, max_epochs=1)
        model, loader = Evaluated(), DataLoader(Points(33), 4)
        trainer.fit(model, DataLoader(Points(24), 4), loader)
        model.seen.clear()
        loss = trainer.validate(model, loader, verbose=False)[0]["val_loss"]
        trainer.test(model, loader, verbose=False)
        parts = [[i for s, _, own in model.seen if s == stage for i in own] for stage in ("val", "test")]
        parts.append(torch.cat(trainer.predict(model, loader)).tolist())
        expected = float(model.loss((Points(33).x, Points(33).y, None)).detach())
        lines, single = collected(), Evaluated()
        for _ in range(2):
            trainer.validate(single, DataLoader(Points(1), 4), verbose=False)
        said = ["1 samples" in line for line in lines if "balance_evaluation" in line]
        found[balance] = parts, (loss, expected), (single.seen, said)
    return found


def test_balanced_evaluation_repeats_no_sample_and_splits_by_speed_where_it_can():
    """By default, and where it cannot, it is as under ddp, which is said once."""
    one, other = run_ranks(_evaluate, 2)
    for first, second in zip(one[True][0], other[True][0], strict=True):
        assert sorted(first + second) == list(range(33))
        assert len(first) > 2 * len(second)
    assert one[True][1][0] == pytest.approx(one[True][1][1], rel=1e-5)
    assert [len(part) for found in (one, other) for part in found[False][0][:2]] == [17] * 4
    assert one[True][2] == (one[False][2][0], [True])
    assert other[True][2] == (other[False][2][0], [])
