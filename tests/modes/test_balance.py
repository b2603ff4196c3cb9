"""The plan really changes the next batches, on workers whose time is counted, and with every policy and averager."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan, DynamicBatchPIDCallback, HeteroDDPStrategy
from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.core.compression.settings import COMPRESSORS
from lightning_hetero.core.policies import NAMED
from lightning_hetero.core.policies.base import Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.engine import parts, training_data
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, collected, covered, fit, trainer_of
from tests.ranks import run_ranks

# a split that follows speeds; time is counted, so that plans are the same in every run


class Paced(Regressor):
    """Takes ``(q, s, k, m)`` seconds, ``q b + s`` outside of the backward pass and ``k b + m`` in it, which change."""

    def __init__(self, rank, pace, scatter=0.0):
        super().__init__(features=8, dtype=torch.float32, lr=1e-3)
        self.pace, self.scatter, self.noise = pace, scatter, random.Random(rank)
        self.counted = CountedTime(rank, 1e8)

    def forward(self, x):
        factor = self.noise.gauss(1.0, self.scatter) if self.scatter else 1.0
        q, s, k, m = (factor * seconds for seconds in self.pace(self.trainer.global_step))
        self.counted.sleep(q * len(x) + s)
        y = self.net(x)
        y.register_hook(lambda _: self.counted.sleep(k * len(x) + m))
        return y


def _swap(rank, policy):
    """Three times as fast as the other one for 90 steps, then the other way round."""

    def pace(step):
        by_sample = 4e-4 if (rank == 0) == (step < 90) else 12e-4
        return by_sample / 3, 0.002, 2 * by_sample / 3, 0.0

    how = {"model": Paced(rank, pace, 0.01), "dataset": Points(64 * 200, 8, torch.float32), "max_epochs": 1}
    return fit(rank, {"policy": policy, "replan": 8}, 2, 32, **how)


@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_split_follows_the_faster_process_and_back(policy):
    """Once a split fits, nothing moves it to and fro: two or three changes to each split, and then none."""
    results = run_ranks(_swap, 2, policy, timeout=240)
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


TOTAL, STEPS, CALM = 120, 150, 80
DEVICES = np.array([[0.30, 3.0, 0.50, 3.0], [0.40, 2.0, 0.60, 4.0], [0.60, 3.0, 1.00, 4.0]]) / 1e3


def _swings(rank):
    """Rank 1 is slower, as it was, faster, as it was, and calm in the end; all scatter by 2 %."""

    def pace(step):
        return DEVICES[rank] * ((1.25, 1.0, 0.8, 1.0)[step // 20] if rank == 1 and step < CALM else 1.0)

    how = {"model": Paced(rank, pace, 0.02), "dataset": Points(TOTAL * STEPS, 8, torch.float32), "max_epochs": 1}
    return fit(rank, {"policy": "perf_model"}, 3, TOTAL // 3, **how)["history"]


def seconds(sizes):
    """What a step takes by the devices' own times, when all are calm."""
    q, s, k, m = DEVICES.T
    return float(((q + k) * np.array(sizes) + s + m).max())


def test_after_a_swing_of_speeds_the_split_is_near_the_optimum():
    least = min(seconds((i, j, TOTAL - i - j)) for i in range(1, TOTAL) for j in range(1, TOTAL - i))
    history, *others = run_ranks(_swings, 3, timeout=240)
    assert others == [history, history]
    assert seconds((TOTAL // 3,) * 3) > 1.4 * least
    assert max(step for _, step, _ in history) < STEPS
    assert seconds(history[-1][2]) <= 1.03 * least, history


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
    splits = run_ranks(_learned, len(speeds), averagers, speeds, clusters, timeout=240)[0]
    optimum = 24 * len(speeds) / speeds[0] / sum(1 / speed for speed in speeds)
    assert {name: sizes for name, sizes in splits.items() if abs(sizes[0] - optimum) > 2} == {}


class Heavy(Regressor):
    """Enough arithmetic for each sample that a step is made of computing; several times over if asked to."""

    def __init__(self, times):
        super().__init__(features=64, dtype=torch.float32, lr=1e-3)
        self.times = times
        weight = torch.randn(700, 700, generator=torch.Generator().manual_seed(2))
        self.register_buffer("weight", weight / 700, persistent=False)

    def forward(self, x):
        h = torch.nn.functional.pad(x, (0, 700 - x.shape[1])).repeat_interleave(16, 0)
        for _ in range(2 * self.times):
            h = h @ self.weight
        return self.net(x) + 0 * h.sum()


def _heavy(rank):
    data = Points(32 * 40, 64, torch.float32)
    return fit(rank, {"replan": 8}, 2, 16, model=Heavy(1 + 3 * rank), dataset=data, max_epochs=1)


@pytest.mark.slow("measures time")
def test_what_is_measured_of_processes_that_compute_finds_the_slower_one():
    """Rank 1 computes four times as much for each sample; a machine that is busy with something else slows both."""
    results = run_ranks(_heavy, 2, timeout=240)
    assert covered(results, 0) == list(range(32 * 40))
    sizes = np.array([[len(indices) for *_, indices in r["seen"]] for r in results])
    assert tuple(sizes[:, 0]) == (16, 16)
    assert sizes[0, 24:].mean() > 18, results[0]["history"]


# plans by hand


class Adopts(Callback):
    """Plans behind steps; with ``epochs``, behind epochs."""

    def __init__(self, plans, epochs=False):
        self.plans, self.epochs = plans, epochs

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.epochs and trainer.global_step in self.plans:
            self.adopt(trainer, self.plans[trainer.global_step])

    def on_train_epoch_end(self, trainer, pl_module):
        if self.epochs:
            self.adopt(trainer, self.plans[trainer.current_epoch])

    def adopt(self, trainer, sizes):
        trainer.strategy.adopt(BatchPlan(sum(sizes), sizes), "by hand")


class Validated(Regressor):
    def __init__(self):
        super().__init__()
        self.validations = 0

    def val_dataloader(self):
        return DataLoader(Points(4), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validations += not self.trainer.sanity_checking


WORKERS = {"num_workers": 2, "persistent_workers": True}
BY_HAND = {  # plans, settings of the loader, and steps of the two or three epochs
    "another split": ({3: (10, 2)}, {}, (10, 10)),
    "another split, loader workers": ({3: (10, 2)}, WORKERS, (10, 10)),
    "smaller inside": ({4: (4, 2)}, {}, (4 + 12, 20)),
    "greater inside": ({4: (22, 2)}, {}, (4 + 3, 5)),
    "greater inside, loader workers": ({4: (22, 2)}, {"num_workers": 1}, (6 + 2, 5)),
    "by epochs": ({0: (22, 2), 1: (4, 2), 2: (10, 2)}, {}, (10, 5, 20)),
}


def _by_hand(rank):
    found = {}
    for name, (plans, loader, epochs) in BY_HAND.items():
        model = Validated()
        how = {"callbacks": [Adopts(plans, "epochs" in name)], "loader_kwargs": loader, "max_epochs": len(epochs)}
        done = fit(rank, {"policy": "even"}, 2, 6, model=model, dataset=Points(120), val_check_interval=0.5, **how)
        found[name] = {**done, "validations": model.validations}
    return found


def test_adopted_plans_hold_beyond_the_prefetched_batches_and_epochs_follow_their_total():
    """No epoch is cut, validations are not skipped, and each sample is used once."""
    ranks = run_ranks(_by_hand, 2, timeout=120)
    for name, (plans, loader, epochs) in BY_HAND.items():
        results = [found[name] for found in ranks]
        assert [result["steps"] for result in results] == [sum(epochs)] * 2, name
        if "inside" not in name:
            assert [result["validations"] for result in results] == [2 * len(epochs)] * 2, name
        for epoch in range(len(epochs)):
            assert covered(results, epoch) == list(range(120))
        if name != "by epochs":
            ((step, plan),) = plans.items()
            first = step + 2 * loader.get("num_workers", 0)
            assert results[0]["history"] == [(0, 0, (6, 6)), (0, first, plan)]
            sizes = [tuple(len(own) for *_, own in step) for step in zip(*(r["seen"] for r in results), strict=True)]
            assert sizes == [(6, 6)] * first + [plan] * (len(sizes) - first)


# policies


def _policies(rank):
    """Each policy; capacities of three to one; a worker that lives on a tenth of a core, of which it saw no end yet."""
    found = {policy: fit(rank, {"policy": policy, "replan": 2}, 2, 6, dataset=Points(60)) for policy in NAMED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_data, "capacity", lambda device: (3.0, 1.0)[rank])
        for name, (settings, callback, _) in STARTS.items():
            callbacks = [DynamicBatchPIDCallback(**callback)] if callback else []
            how = {"dataset": Points(24), "max_epochs": 1, "callbacks": callbacks}
            found[name] = fit(rank, HeteroDDPStrategy(**settings), 2, 6, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "cpu_quota", lambda: 0.1 if rank else None)
        found["quota"] = fit(rank, {"replan": 8}, 2, 16, dataset=Points(32 * 12), max_epochs=1)
    return found


GIVEN = {"policy": "pid", "local_batch_sizes": [10, 2]}
STARTS = {
    "static, by capacity": ({"policy": "static"}, {}, (9, 3)),
    "open loop": ({"policy": "pid"}, {}, (9, 3)),
    "equal": ({}, {"start": "equal"}, (6, 6)),
    "given": (GIVEN, {}, (10, 2)),
    "given, with a callback": (GIVEN, {"dead_band": 0.2}, (10, 2)),
}


def test_every_policy_trains_each_sample_once_and_starts_as_it_says():
    ranks = run_ranks(_policies, 2, timeout=240)
    for name in ranks[0]:
        results = [found[name] for found in ranks]
        samples = 60 if name in NAMED else 24 if name in STARTS else 32 * 12
        assert covered(results, 0) == list(range(samples)), name
        if name in STARTS:
            sizes = STARTS[name][2]
            assert results[0]["history"][0] == (0, 0, sizes)
            assert tuple(len(r["seen"][0][-1]) for r in results) == sizes
    assert [len(own) for *_, own in ranks[0]["static, by capacity"]["seen"]] == [9, 9]
    first, second = ranks[0]["quota"]["history"][-1][2]
    assert second < first / 3


class Swaps(StaticPlanner):
    """Swaps the split whenever it is asked, if it is told of the hysteresis that was set; or cannot decide."""

    def __init__(self, hysteresis):
        self.hysteresis = hysteresis

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        if self.hysteresis is None:
            raise ZeroDivisionError("cannot decide")
        first = 8 if current.local_batch_sizes[0] != 8 else 4
        plan = BatchPlan(12, (first, 12 - first))
        return self, Proposal(plan, "swap") if context.hysteresis == self.hysteresis else None


def _replans(rank):
    found = []
    for replan in ("epoch", 5):
        how = {"dataset": Points(12 * 12), "callbacks": [PolicyCallback(Swaps(0.07))], "max_epochs": 3}
        found.append(fit(rank, {"replan": replan, "hysteresis": 0.07}, 2, 6, **how)["history"])
    return found


def test_replan_says_when_plans_change_and_hysteresis_reaches_the_planner():
    by_epoch, by_steps = run_ranks(_replans, 2, timeout=240)[0]
    assert [(epoch, step) for epoch, step, _ in by_epoch] == [(0, 0), (1, 0), (2, 0)]
    assert [12 * epoch + step for epoch, step, _ in by_steps if step][:2] == [5, 10]
    assert len(by_steps) > 4


class Alone(Callback):
    """Gives a rank a plan of its own."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            from lightning_hetero.core import PlanEntry

            trainer.strategy.engine.data.plans.append(PlanEntry(0, 9, BatchPlan(12, (1, 11))))


def _wrong(rank, callback):
    how = {"dataset": Points(240), "callbacks": [callback], "max_epochs": 1}
    return fit(rank, {"replan": 4}, 2, 6, **how)


@pytest.mark.parametrize(
    ("callback", "kind"), [(Alone(), "PlanMismatchError"), (PolicyCallback(Swaps(None)), "ZeroDivisionError")]
)
def test_another_plan_or_an_error_in_a_policy_is_raised_on_every_rank(callback, kind):
    errors = run_ranks(_wrong, 2, callback, expect_errors=True, timeout=60)
    assert [(rank, name) for rank, name, _ in errors] == [(0, kind), (1, kind)]


# evaluation


class Evaluated(Regressor):
    def validation_step(self, batch, batch_idx):
        self.seen.append(("val", batch_idx, batch[2].tolist()))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.seen.append(("test", batch_idx, batch[2].tolist()))

    def predict_step(self, batch, batch_idx):
        return batch[2]


class Reversed(torch.utils.data.BatchSampler):
    """Batches in an order of their own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Points(1)[0]] * 8)


ODD = {
    "SubsetRandomSampler": lambda: {"sampler": torch.utils.data.SubsetRandomSampler(range(12)), "batch_size": 4},
    "Reversed": lambda: {"batch_sampler": Reversed(torch.utils.data.SequentialSampler(Points(33)), 4, False)},
    "IterableDataset": lambda: {"dataset": Streamed(), "batch_size": 4},
    "1 samples": lambda: {"dataset": Points(1), "batch_size": 4},
}


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
        predicted = torch.cat(trainer.predict(model, loader)).tolist()
        with torch.no_grad():
            expected = float(model.loss((Points(33).x, Points(33).y, None)))
        odd = {}
        for name, make in ODD.items():
            lines, model = collected(), Evaluated()
            trainer = trainer_of(HeteroDDPStrategy(balance_evaluation=balance), 2)
            torch.manual_seed(0)  # orders of samples are drawn from it
            loader = DataLoader(**{"dataset": Points(33), **make()})
            for _ in range(2):
                trainer.validate(model, loader, verbose=False)
            odd[name] = model.seen, [name in line for line in lines if "balance_evaluation" in line]
        found[balance] = [*parts, predicted], (loss, expected), odd
    return found


def test_balanced_evaluation_repeats_no_sample_and_splits_by_speed_where_it_can():
    """By default, and where it cannot, it is as under ddp, which is said once."""
    one, other = run_ranks(_evaluate, 2, timeout=240)
    for first, second in zip(one[True][0], other[True][0], strict=True):
        assert sorted(first + second) == list(range(33))
        assert len(first) > 2 * len(second)
    assert one[True][1][0] == pytest.approx(one[True][1][1], rel=1e-5)
    assert [len(part) for found in (one, other) for part in found[False][0][:2]] == [17] * 4
    for name in ODD:
        assert one[True][2][name] == (one[False][2][name][0], [True])
        assert other[True][2][name] == (other[False][2][name][0], [])
