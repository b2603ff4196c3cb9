"""The plan really changes the next batches: end to end with unequal processes, and with every policy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from lightning.pytorch.trainer.states import RunningStage

from lightning_hetero import BatchPlan, DynamicBatchPIDCallback, HeteroDDPStrategy
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.core.compression.settings import COMPRESSORS
from lightning_hetero.core.policies import NAMED
from lightning_hetero.engine import parts, training_data
from lightning_hetero.strategies._lightning.epoch_length import recount_batches
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, collected, covered, fit, run_ranks


class Speeds(Regressor):
    """Takes seconds by the sample that change at given steps, by counted time."""

    def __init__(self, counted, phases):
        super().__init__(features=64, dtype=torch.float32, lr=1e-3)
        self.counted, self.phases, self.by_sample = counted, phases, phases[0]

    def forward(self, x):
        self.by_sample = self.phases.get(self.trainer.global_step, self.by_sample)
        self.counted.spend(0.002 + self.by_sample * len(x) / 3)
        y = self.net(x)
        y.register_hook(lambda _: self.counted.spend(2 * self.by_sample * len(x) / 3))
        return y


def _unequal(rank, policy, phases, steps):
    model = Speeds(CountedTime(rank, 1e8), {step: speeds[rank] for step, speeds in phases.items()})
    strategy, dataset = {"policy": policy, "replan": 8}, Points(64 * steps, 64, torch.float32)
    return fit(rank, strategy, 2, 32, model=model, dataset=dataset, max_epochs=1)


@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_split_follows_the_faster_process_and_back(policy):
    """Rank 0 is three times as fast for 90 steps, then rank 1 is; once a split fits, nothing moves it to and fro.

    Time is counted, so that plans are the same in every run: two or three changes to each split, and then none.
    """
    results = run_ranks(_unequal, 2, policy, {0: (4e-4, 12e-4), 90: (12e-4, 4e-4)}, 200)
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
    for epoch, step, split in history:
        assert epoch == 0
        if step < 200:
            assert tuple(sizes[:, step]) == split


class Waiting(CountedTime):
    """Time in which a rank that blocks in a collective waits for the last one; sums in the background take none."""

    def __init__(self, rank, clusters):
        gather, total, self._all_reduce = sums.async_all_gather, sums.async_all_reduce, dist.all_reduce
        super().__init__(rank, 1e9)
        sums.async_all_reduce, dist.all_reduce = total, self.all_reduce
        if clusters:  # only leaders gather
            sums.async_all_gather = gather

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        work = self._all_reduce(tensor, op, group, async_op)
        if group is None and not async_op:
            moment = torch.tensor([self.now], dtype=torch.float64)
            self._all_reduce(moment, dist.ReduceOp.MAX)
            self.now = float(moment)
        return work


class Deep(Speeds):
    """Five layers, each a bucket of its own, that take equally long."""

    def __init__(self, counted, by_sample):
        super().__init__(counted, {0: by_sample})
        self.net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)], torch.nn.Linear(64, 1))

    def forward(self, x):
        seconds = self.by_sample * len(x) / 15
        for layer in self.net:
            self.counted.spend(seconds)
            x = layer(x)
            x.register_hook(lambda _: self.counted.spend(2 * seconds))
        return x


def blocking(state, bucket):
    """A hook of the user's that waits for each bucket."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


AVERAGERS = {
    "none": {},
    **{name: {"compression": name} for name in COMPRESSORS},
    "powersgd": {"compression": "powersgd(rank=2, start=2)"},
    "block_topk, threshold": {"compression": "block_topk(selector='histogram')"},
    "block_topk, dense": {"compression": "block_topk(dense_every=2)"},
    "stale": {"staleness": 1},
    "stale block_topk": {"compression": "block_topk", "staleness": 1},
    "stale block_topk, dense": {"compression": "block_topk(dense_every=2)", "staleness": 1},
    "a user's hook": {"ddp_comm_hook": blocking},
}
CLUSTERS = [[0, 1], [2]]
IN_CLUSTERS = {
    name: {**AVERAGERS[name], "hierarchy": CLUSTERS} for name in ("none", "block_topk", "stale", "stale block_topk")
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
    model = Heavy(1 + 3 * rank)
    return fit(rank, {"replan": 8}, 2, 16, model=model, dataset=Points(32 * 40, 64, torch.float32), max_epochs=1)


@pytest.mark.alone
def test_what_is_measured_of_processes_that_compute_finds_the_slower_one():
    """Rank 1 computes four times as much for each sample; a machine that is busy with something else slows both."""
    results = run_ranks(_heavy, 2)
    assert covered(results, 0) == list(range(32 * 40))
    sizes = np.array([[len(indices) for *_, indices in r["seen"]] for r in results])
    assert tuple(sizes[:, 0]) == (16, 16)
    assert sizes[0, 24:].mean() > 18, results[0]["history"]


def _table(rank, policy):
    return fit(rank, {"policy": policy, "replan": 2}, 2, 6, dataset=Points(60), max_epochs=2)


@pytest.mark.parametrize("policy", NAMED)
def test_every_policy_trains_each_sample_once(policy):
    results = run_ranks(_table, 2, policy)
    for epoch in range(2):
        assert covered(results, epoch) == list(range(60))


class Adopts(Callback):
    """Changes the plan by hand in the middle of the first epoch; the total changes with the second epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.strategy.adopt(BatchPlan(12, (10, 2)), "by hand")


def _adopt(rank, workers):
    kwargs = {"num_workers": workers, "persistent_workers": workers > 0}
    return fit(
        rank, {"policy": "even"}, 2, 6, dataset=Points(120), callbacks=[Adopts()], loader_kwargs=kwargs, max_epochs=2
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_adopted_plan_holds_beyond_the_prefetched_batches(workers):
    results = run_ranks(_adopt, 2, workers)
    start = 3 + 2 * workers
    assert results[0]["history"] == [(0, 0, (6, 6)), (0, start, (10, 2))]
    sizes = [tuple(len(r["seen"][step][2]) for r in results) for step in range(20)]
    assert sizes == [(6, 6)] * start + [(10, 2)] * (20 - start)
    assert covered(results, 0) == covered(results, 1) == list(range(120))


class ChangesTotal(Callback):
    def __init__(self, totals):
        self.totals = totals

    def on_train_epoch_end(self, trainer, pl_module):
        total = self.totals[trainer.current_epoch]
        trainer.strategy.adopt(BatchPlan(total, (total - 2, 2)), "another total")


class Validated(Regressor):
    validations = 0

    def val_dataloader(self):
        return torch.utils.data.DataLoader(Points(4), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        type(self).validations += not self.trainer.sanity_checking


def _totals(rank):
    out = fit(
        rank,
        {"policy": "even"},
        2,
        6,
        model=Validated(),
        dataset=Points(96),
        callbacks=[ChangesTotal([24, 6, 12])],
        max_epochs=3,
        val_check_interval=0.5,
    )
    return {**out, "validations": Validated.validations}


def test_epochs_follow_a_total_that_grows_and_shrinks():
    """96 samples in batches of 12, then 24, then 6: 8 + 4 + 16 steps, none cut, two validations in each epoch."""
    for results in [run_ranks(_totals, 2)]:
        assert [r["steps"] for r in results] == [28, 28]
        assert [r["validations"] for r in results] == [6, 6]
        for epoch in range(3):
            assert covered(results, epoch) == list(range(96))


class ChangesTotalInside(Callback):
    def __init__(self, total):
        self.total = total

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.strategy.adopt(BatchPlan(self.total, (self.total - 2, 2)), "another total")


def _inside(rank, total, workers):
    return fit(
        rank,
        {"policy": "even"},
        2,
        6,
        dataset=Points(120),
        callbacks=[ChangesTotalInside(total)],
        max_epochs=2,
        loader_kwargs={"num_workers": workers},
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("total", [6, 24])
def test_epoch_follows_a_total_that_changes_inside_it(total, workers):
    """10 steps of 12 samples; from step 4 (and what was prefetched) on, the total is another one."""
    results = run_ranks(_inside, 2, total, workers)
    start = 4 + 2 * workers
    first = start + (120 - 12 * start) // total
    assert [r["steps"] for r in results] == [first + 120 // total] * 2
    for epoch in range(2):
        assert covered(results, epoch) == list(range(120))


def _mismatch(rank):
    class Alone(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            engine = trainer.strategy.engine
            if rank == 1 and trainer.global_step == 2:
                from lightning_hetero.core import PlanEntry

                engine.data.plans.append(PlanEntry(0, 9, BatchPlan(12, (1, 11))))

    return fit(rank, {"replan": 4}, 2, 6, dataset=Points(240), callbacks=[Alone()], max_epochs=1)


def test_rank_with_another_plan_is_found_before_the_next_collective():
    errors = run_ranks(_mismatch, 2, expect_errors=True, timeout=60)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]
    assert all("rank 0:" in message and "adopt()" in message for *_, message in errors)


def _broken_planner(rank):
    from lightning_hetero.callbacks import PolicyCallback
    from lightning_hetero.core.policies.static import StaticPlanner

    class Broken(StaticPlanner):
        def decide(self, observations, current, context):
            raise ZeroDivisionError("cannot decide")

    return fit(rank, {"replan": 2}, 2, 6, dataset=Points(120), callbacks=[PolicyCallback(Broken())], max_epochs=1)


def test_error_in_a_policy_is_raised_on_every_rank():
    errors = run_ranks(_broken_planner, 2, expect_errors=True, timeout=60)
    assert [(rank, kind, message) for rank, kind, message in errors] == [
        (0, "ZeroDivisionError", "cannot decide"),
        (1, "ZeroDivisionError", "cannot decide"),
    ]


def _evaluate(rank, balance):
    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import trainer_of

    class Evaluated(Regressor):
        def validation_step(self, batch, batch_idx):
            self.seen.append(("val", batch_idx, batch[2].tolist()))
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def test_step(self, batch, batch_idx):
            self.seen.append(("test", batch_idx, batch[2].tolist()))

        def predict_step(self, batch, batch_idx):
            return batch[2]

    strategy = HeteroDDPStrategy(local_batch_sizes=[6, 2], balance_evaluation=balance)
    trainer = trainer_of(strategy, 2, max_epochs=1)
    model, loader = Evaluated(), torch.utils.data.DataLoader(Points(33), 4)
    trainer.fit(model, torch.utils.data.DataLoader(Points(24), 4), loader)
    model.seen.clear()
    validation = trainer.validate(model, loader, verbose=False)
    trainer.test(model, loader, verbose=False)
    predictions = torch.cat(trainer.predict(model, loader)).tolist()
    return model.seen, predictions, validation[0]["val_loss"], model.flat()


def test_balanced_evaluation_repeats_no_sample_and_splits_by_speed():
    results = run_ranks(_evaluate, 2, True)
    for stage in ("val", "test"):
        parts = [[i for s, _, indices in seen if s == stage for i in indices] for seen, *_ in results]
        assert sorted(parts[0] + parts[1]) == list(range(33))
        assert len(parts[0]) > 2 * len(parts[1])
    assert sorted(results[0][1] + results[1][1]) == list(range(33))
    model = Regressor()
    torch.nn.utils.vector_to_parameters(torch.as_tensor(results[0][3]), model.parameters())
    data = Points(33)
    with torch.no_grad():
        expected = float(model.loss((data.x, data.y, None)))
    assert results[0][2] == pytest.approx(expected, rel=1e-5)


def test_evaluation_loaders_are_lightnings_own_by_default():
    results = run_ranks(_evaluate, 2, False)
    parts = [[i for s, _, indices in seen if s == "val" for i in indices] for seen, *_ in results]
    assert len(parts[0]) == len(parts[1]) == 17


class Reversed(torch.utils.data.BatchSampler):
    """Batches in an order of their own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


ODD = {
    "SubsetRandomSampler": lambda data: {"sampler": torch.utils.data.SubsetRandomSampler(range(12)), "batch_size": 4},
    "Reversed": lambda data: {"batch_sampler": Reversed(torch.utils.data.SequentialSampler(data), 4, False)},
    "IterableDataset": lambda data: {"batch_size": 4},
    "1 samples": lambda data: {"batch_size": 4},
}


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Points(1)[0]] * 8)


def _odd_evaluation(rank, name, balance):
    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import trainer_of

    class Evaluated(Regressor):
        def validation_step(self, batch, batch_idx):
            self.seen.append(batch[2].tolist())

    lines = collected()
    model, data = Evaluated(), Points(1 if name == "1 samples" else 33)
    trainer = trainer_of(HeteroDDPStrategy(balance_evaluation=balance), 2)
    loader = torch.utils.data.DataLoader(Streamed() if name == "IterableDataset" else data, **ODD[name](data))
    for _ in range(2):
        trainer.validate(model, loader, verbose=False)
    return model.seen, [line for line in lines if "balance_evaluation" in line]


@pytest.mark.parametrize("name", ODD)
def test_an_evaluation_that_cannot_be_balanced_is_as_under_ddp_and_said_once(name):
    torch.manual_seed(0)  # orders of samples are drawn from it
    (seen, said), (others, elsewhere) = run_ranks(_odd_evaluation, 2, name, True)
    assert (len(said), elsewhere) == (1, [])
    assert name in said[0]
    torch.manual_seed(0)
    assert [seen, others] == [result[0] for result in run_ranks(_odd_evaluation, 2, name, False)]


def _settings(rank, replan, hysteresis, steps):
    """A planner that swaps the split whenever it is asked, if it is told of the hysteresis that was set."""
    from lightning_hetero.callbacks import PolicyCallback
    from lightning_hetero.core.policies.base import Proposal
    from lightning_hetero.core.policies.static import StaticPlanner

    class Swaps(StaticPlanner):
        def initial(self, context):
            return None

        def decide(self, observations, current, context):
            first = 8 if current.local_batch_sizes[0] != 8 else 4
            plan = BatchPlan(12, (first, 12 - first))
            return self, Proposal(plan, "swap") if context.hysteresis == hysteresis else None

    strategy = {"replan": replan, "hysteresis": hysteresis}
    return fit(rank, strategy, 2, 6, dataset=Points(12 * steps), callbacks=[PolicyCallback(Swaps())], max_epochs=3)[
        "history"
    ]


def test_replan_says_when_plans_change_and_hysteresis_reaches_the_planner():
    by_epoch = run_ranks(_settings, 2, "epoch", 0.07, 12)[0]
    assert [(epoch, step) for epoch, step, _ in by_epoch] == [(0, 0), (1, 0), (2, 0)]
    by_steps = run_ranks(_settings, 2, 5, 0.07, 12)[0]
    inside = [12 * epoch + step for epoch, step, _ in by_steps if step]
    assert inside[:2] == [5, 10]
    assert len(by_steps) > 4


def _static(rank):
    """Two workers of which the first says that it has three times the capacity."""
    training_data.capacity = lambda device: (3.0, 1.0)[rank]
    return fit(rank, {"policy": "static"}, 2, 6, dataset=Points(48), max_epochs=1)


def test_static_policy_splits_by_capacity():
    results = run_ranks(_static, 2)
    assert results[0]["history"] == [(0, 0, (9, 3))]
    assert [[len(indices) for *_, indices in r["seen"]] for r in results] == [[9] * 4, [3] * 4]


def _pid_start(rank, settings, callback):
    training_data.capacity = lambda device: (3.0, 1.0)[rank]
    strategy, callbacks = HeteroDDPStrategy(**settings), [DynamicBatchPIDCallback(**callback)] if callback else []
    result = fit(rank, strategy, 2, 6, dataset=Points(24), max_epochs=1, callbacks=callbacks)
    return {**result, "reasons": [entry.reason for entry in strategy.plan_history]}


@pytest.mark.parametrize(
    ("settings", "callback", "sizes", "reason"),
    [
        ({"policy": "pid"}, {}, (9, 3), "in proportion to cores or peak FLOPs"),
        ({}, {"start": "equal"}, (6, 6), "equal sizes"),
        ({"policy": "pid", "local_batch_sizes": [10, 2]}, {}, (10, 2), "given start"),
        ({"policy": "pid", "local_batch_sizes": [10, 2]}, {"dead_band": 0.2}, (10, 2), "given start"),
    ],
    ids=["open loop", "equal", "given", "given, with a callback"],
)
def test_proportional_control_starts_open_loop_equal_or_as_given(settings, callback, sizes, reason):
    results = run_ranks(_pid_start, 2, settings, callback)
    assert results[0]["history"][0] == (0, 0, sizes)
    assert results[0]["reasons"][0] == reason
    assert [len(r["seen"][0][-1]) for r in results] == list(sizes), "the first batch of each rank"
    assert covered(results, 0) == list(range(24))


def _quota(rank):
    parts.cpu_quota = lambda: 0.1 if rank else None
    return fit(rank, {"replan": 8}, 2, 16, dataset=Points(32 * 12), max_epochs=1)


def test_a_worker_that_lives_on_its_quota_gets_what_that_sustains():
    """Both are as fast, but rank 1 may use a tenth of a core, of which it has not yet seen the end."""
    results = run_ranks(_quota, 2)
    first, second = results[0]["history"][-1][2]
    assert second < first / 3
    assert covered(results, 0) == list(range(32 * 12))


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 30), (0.5, 15), (12, 12), (40, 30)])
def test_batches_are_counted_anew_within_the_limit_of_the_trainer(limit, batches):
    iterator = SimpleNamespace(limits=[7])
    combined = SimpleNamespace(flattened=[range(30)], limits=[7], _iterator=iterator)
    loop = SimpleNamespace(_combined_loader=combined, max_batches=7, _data_fetcher=SimpleNamespace(length=7))
    state = SimpleNamespace(stage=RunningStage.TRAINING)
    often = {"val_check_interval": 0.4, "val_check_batch": 2}
    trainer = SimpleNamespace(fit_loop=loop, state=state, limit_train_batches=limit, **often)
    recount_batches(trainer, "lightning.pytorch")
    assert combined.limits == iterator.limits == [batches]
    assert loop.max_batches == loop._data_fetcher.length == batches
    assert trainer.val_check_batch == int(0.4 * batches)
