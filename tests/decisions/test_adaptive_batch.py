"""A total that moves, under Lightning's Trainer: what a decision changes, and what stays as it is."""

import csv
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_hetero import AdaptiveBatchCallback, BatchPlan, GNSCallback, TTACallback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.base import Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from tests.decisions.told import LR, micro_batches, replay, told_time
from tests.helpers import Points, Regressor, covered, fit, raised
from tests.ranks import run_ranks

tqdm.monitor_interval = 0  # no thread that outlives a test
N, BATCH = 240, 4
SPEEDS, FIXED, LINK = (0.0002, 0.0008), 0.004, 0.03
"""Seconds of a sample on each rank, of a step, and of a sum of gradients on a slow network."""
WARM_UP, LATTER = 40, 0.5
"""Steps of a warm-up, and the part of the learning rate that the second of two groups has."""


class Uneven(Regressor):
    """Takes what the clock is told; keeps the learning rates of every step and when it validated.

    With ``gamma`` it has two groups of parameters, a warm-up by steps, and a decay by epochs.
    """

    def __init__(self, optimizer="sgd", gamma=None):
        super().__init__(lr=LR)
        self.optimizer, self.gamma, self.clock = optimizer, gamma, None
        self.used, self.latter, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        self.clock.spend(FIXED + len(batch[0]) * SPEEDS[min(self.global_rank, 1)])
        return super().training_step(batch, batch_idx)

    def val_dataloader(self):
        return DataLoader(Points(4), 2)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.current_epoch)

    def configure_optimizers(self):
        cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimizer]
        momentum = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        first = {"params": self.net[:2].parameters()}
        groups = [first, {"params": self.net[2].parameters(), **({"lr": self.lr * LATTER} if self.gamma else {})}]
        optimizer = cls(groups, lr=self.lr, **momentum)
        optimizer.register_step_post_hook(lambda o, *_: self.used.append(o.param_groups[0]["lr"]))
        optimizer.register_step_post_hook(lambda o, *_: self.latter.append(o.param_groups[1]["lr"]))
        if self.gamma is None:
            return optimizer
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=WARM_UP)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}, decay]


class Epochs(Callback):
    """At the end of each epoch: what the trainer believes of it, and the plan that it ended with."""

    def __init__(self):
        self.rows, self.scheduled, self.windows = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.scheduled.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.windows.append(trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer, pl_module):
        batches, bar = trainer.fit_loop.epoch_loop.batch_progress, trainer.progress_bar_callback
        shown = bar.train_progress_bar.total if bar is not None and bar.is_enabled else None
        row = {"sizes": trainer.strategy.plan.local_batch_sizes, "num": trainer.num_training_batches, "bar": shown}
        row |= {"max": trainer.fit_loop.max_batches, "done": batches.current.completed, "last": batches.is_last_batch}
        row |= {"lr": pl_module.used[-1], "steps": trainer.global_step}
        self.rows.append(row | {"accumulation": trainer.accumulate_grad_batches})


class Noise(GNSCallback):
    """Measures, and reports this noise scale whatever was measured; ``inf``: larger totals cost no samples."""

    def __init__(self, phi=math.inf):
        super().__init__()
        trace, signal = (1.0, 0.5 / 16) if phi == math.inf else (phi, 1.0 + phi / 16)
        self.pinned = RunningNoiseScale().update(trace=trace, global_sq_norm=signal, total_batch_size=16)

    @property
    def estimate(self):
        return self.pinned

    def load_state_dict(self, state_dict):
        pass


CLOCK = []


def slow_network(state, bucket):
    """Averages as DDP does, on a network that takes its time: what makes it worth to synchronise less often."""
    CLOCK[-1].spend(LINK)
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def adapt(rank, ranks, options, callback, kwargs):
    """Fit with the callback; what a test may want to know."""
    kwargs = dict(kwargs)
    pinned = kwargs.pop("noise", math.inf)
    adaptive = AdaptiveBatchCallback(**{"max_total_batch_size": 64, "min_steps": 8, "lr_scaling": "linear", **callback})
    epochs, model = Epochs(), kwargs.pop("model", None) or Uneven()
    extra = [*([] if pinned is None else [Noise(pinned)]), *kwargs.pop("bars", ())]
    strategy = options if isinstance(options, str) else {"replan": "epoch", **options}
    callbacks = [*kwargs.pop("callbacks", []), adaptive, epochs, *extra]
    more = {"batch_size": BATCH, "dataset": Points(N), "max_epochs": 4, "callbacks": callbacks, **kwargs}
    with told_time() as clock:
        model.clock = clock
        CLOCK[:] = [clock]
        result = fit(rank, strategy, ranks, model=model, **more)
    trainer = model.trainer
    return {
        **result,
        "epochs": epochs.rows,
        "scheduled": epochs.scheduled,
        "windows": epochs.windows,
        "used": model.used,
        "latter": model.latter,
        "validated": model.validated,
        "rates": [g["lr"] for o in trainer.optimizers for g in o.param_groups],
        "scale_invariant_steps": adaptive.scale_invariant_steps,
        "callbacks": [type(c).__name__ for c in trainer.callbacks],
        "rule": adaptive.lr_scaling,
        "noise": trainer.strategy.engine.noise_scale().state_dict(),
    }


def run(ranks=2, options=None, callback=None, **kwargs):
    return run_ranks(adapt, ranks, ranks, options or {}, callback or {}, kwargs)


def saving(folder, **kwargs):
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", save_top_k=-1, **kwargs)
    return {"callbacks": [checkpoint], "enable_checkpointing": True}


def totals(result):
    return [sum(row["sizes"]) * row["accumulation"] for row in result["epochs"]]


def check_one_process(results):
    weights, grads = replay(results, Points(N))
    for result in results:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        assert (result["history"], result["used"]) == (results[0]["history"], results[0]["used"])
    np.testing.assert_allclose(results[0]["grads"], grads, rtol=0, atol=1e-13)
    np.testing.assert_allclose(results[0]["weights"], weights, rtol=0, atol=1e-13)
    for epoch in range(len(results[0]["epochs"])):
        assert covered(results, epoch) == list(range(N))


# one run, looked at from all sides


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """Four epochs of two unequal workers, the total from 8 to 48, with all that a trainer may have."""
    folder = tmp_path_factory.mktemp("adaptive")
    more = {"logger": CSVLogger(str(folder), name="", version=""), "log_every_n_steps": 1, "bars": [TQDMProgressBar()]}
    more |= {"model": Uneven(gamma=0.9), "enable_progress_bar": True, **saving(folder, every_n_epochs=1)}
    return run(callback={"max_total_batch_size": 48}, **more), folder


COUNTS, GAINS = [30, 19, 5, 5], [1.0, 13 / 8, 6.0, 6.0]


def test_a_decision_changes_total_split_and_number_of_batches(adaptive):
    (first, second), folder = adaptive
    assert first["callbacks"].count("Noise") == 1
    assert "GNSCallback" not in first["callbacks"], "that of the user is used"
    rows = list(csv.DictReader((folder / "hetero_candidates.csv").read_text().splitlines()))
    running = [(int(row["step"]), int(row["total_batch_size"])) for row in rows if row["running"] == "1"]
    assert running == [(30, 13), (49, 48), (54, 48)]
    assert totals(first) == [8, 13, 48, 48]  # half as much again to learn a second size, then the best
    assert first["epochs"][0]["sizes"] == (4, 4)
    assert all(row["sizes"][0] > row["sizes"][1] for row in first["epochs"][2:])
    for name in ("max", "num", "done", "bar"):
        assert [row[name] for row in first["epochs"]] == COUNTS, name
    assert all(row["last"] for row in first["epochs"])
    assert [row["bar"] for row in second["epochs"]] == [None] * 4
    assert first["validated"] == [0, 1, 2, 3]
    steps = np.cumsum(COUNTS).tolist()
    assert [row["steps"] for row in first["epochs"]] == steps
    found = sorted(path.stem for path in folder.glob("*.ckpt"))
    assert found == [f"epoch={epoch}-step={step}" for epoch, step in enumerate(steps)]
    check_one_process([first, second])


def test_the_factor_multiplies_the_schedule_in_every_group_and_the_schedule_does_not_see_it(adaptive):
    (first, second), _ = adaptive
    epochs = [epoch for epoch, count in enumerate(COUNTS) for _ in range(count)]
    scheduled = [LR * min(1.0, 0.2 + 0.8 * step / WARM_UP) * 0.9**epoch for step, epoch in enumerate(epochs)]
    used = [rate * GAINS[epoch] for rate, epoch in zip(scheduled, epochs, strict=True)]
    assert first["scheduled"] == pytest.approx(scheduled)
    assert first["used"] == pytest.approx(used)
    assert first["latter"] == pytest.approx([LATTER * rate for rate in used])
    assert first["rates"] == pytest.approx([LR * 0.9**4, LATTER * LR * 0.9**4])
    for result in (first, second):
        assert result["scale_invariant_steps"] == pytest.approx(np.dot(COUNTS, GAINS))


def test_a_total_changes_inside_a_long_epoch_by_the_noise_that_is_measured():
    more = {"max_epochs": 1, "dataset": Points(1600), "callback": {"lr_scaling": "auto"}}
    results = run(options={"replan": 8}, noise=None, bars=[RichProgressBar()], enable_progress_bar=True, **more)
    first, second = results
    assert [result["callbacks"].count("GNSCallback") for result in results] == [1, 1], "it brings one"
    assert [result["rule"] for result in results] == ["adascale"] * 2
    sizes = [len(indices) for _, indices in micro_batches(results)]
    assert covered(results, 0) == list(range(1600))
    assert len({sum(sizes) for *_, sizes in first["history"]}) > 1
    (row,) = first["epochs"]
    assert row["max"] == row["num"] == row["done"] == row["bar"] == len(sizes) == first["steps"] < 200
    assert row["last"]
    assert first["validated"] == [0]
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert first["used"] == second["used"]
    assert LR < max(first["used"]) <= LR * max(sizes) / 8  # AdaScale's factor is between 1 and the ratio of totals


def test_auto_is_the_square_root_for_other_optimizers():
    first, _ = run(model=Uneven("adam"), callback={"lr_scaling": "auto"}, max_epochs=2)
    assert (totals(first), first["rule"]) == ([8, 13], "sqrt")
    assert first["used"][-1] == pytest.approx(LR * math.sqrt(13 / 8))


LOW = {"noise": 0.0, "callback": {"max_total_batch_size": 24, "min_steps": 4}}


@pytest.mark.parametrize(
    ("ranks", "kwargs"), [(1, {"batch_size": 8, "noise": None}), (2, {"batch_size": 12, **LOW})], ids=["one", "shrinks"]
)
def test_any_number_of_workers_adapts_and_a_total_may_shrink(ranks, kwargs):
    results = run(ranks, max_epochs=3, **kwargs)
    first, initial = results[0], ranks * kwargs["batch_size"]
    assert totals(first)[0] == initial
    assert (totals(first)[1] > initial) != (initial == 24)
    assert first["used"][-1] == pytest.approx(LR * totals(first)[-1] / initial)
    assert [row["max"] for row in first["epochs"]] == [math.ceil(N / total) for total in totals(first)]
    check_one_process(results)


def test_a_total_is_never_more_than_the_samples_of_an_epoch_and_max_steps_stops_exactly():
    """With ``drop_last`` an epoch would have no batch; without, the rate would be that of a batch that never comes."""
    few = {"dataset": Points(44), "max_epochs": 7, "loader_kwargs": {"drop_last": True}}
    first = run(callback={"max_total_batch_size": 4096, "min_steps": 1}, **few)[0]
    assert [row["done"] for row in first["epochs"]] == [44 // total for total in totals(first)]
    assert len(first["epochs"]) == 7
    assert 22 < totals(first)[-1] <= 44
    stopped = run(max_epochs=-1, max_steps=57)
    assert [(r["steps"], len(r["used"])) for r in stopped] == [(57, 57)] * 2


# a planner of one's own that moves the total


@dataclass(frozen=True)
class Alternates(StaticPlanner):
    """Another total at every look."""

    moves_total: bool = True
    asked: list = field(default_factory=list)

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        self.asked.append(current.local_batch_sizes)
        size = 6 - current.local_batch_sizes[0]
        return self, Proposal(BatchPlan(2 * size, (size, size)), "as told")


def _planned(rank, planner, settings, batch_size, samples, kwargs):
    more = {"dataset": Points(samples), "callbacks": [PolicyCallback(planner)], **kwargs}
    done = fit(rank, settings, 2, batch_size, **more)
    return {**done, "asked": planner.asked}


def test_a_window_of_micro_batches_has_one_total():
    """However far loader workers have drawn ahead; a planner is asked about the plan that is to come."""
    ahead = {"num_workers": 1, "prefetch_factor": 3}
    more = {"max_epochs": 2, "loader_kwargs": ahead, "accumulate_grad_batches": 2}
    results = run_ranks(_planned, 2, Alternates(), {"replan": 1}, 2, N, more)
    steps = [step for _, step, _ in results[0]["history"]]
    assert len(set(steps)) > 4
    assert all(step % 2 == 0 for step in steps)
    asked = results[0]["asked"]
    assert asked == ([(2, 2), (4, 4)] * len(asked))[: len(asked)]
    for epoch in range(2):
        assert covered(results, epoch) == list(range(N))
        sizes = [len(indices) for e, indices in micro_batches(results) if e == epoch]
        assert all(one == other for one, other in list(zip(sizes[::2], sizes[1::2], strict=False))[:-1])


# resume


def pinned(folder=None, **kwargs):
    """From 8 to the greatest total, 12, at the second epoch: no later decision can change it."""
    kwargs = {"callback": {"max_total_batch_size": 12}, "options": {"hysteresis": 1.0}, "max_epochs": 4, **kwargs}
    return run(**(kwargs | saving(folder, every_n_train_steps=1, save_on_train_epoch_end=False) if folder else kwargs))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    return pinned(folder), folder


@pytest.mark.parametrize("step", [50, 57], ids=["after an epoch", "inside an epoch"])
def test_resume_after_the_decision_continues_identically(uninterrupted, step):
    whole, folder = uninterrupted
    assert totals(whole[0]) == [8, 12, 12, 12]
    (path,) = folder.glob(f"*step={step}.ckpt")
    rest = pinned(ckpt_path=str(path))
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][step:]
        assert part["used"] == full["used"][step:]
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["steps"] == full["steps"] == 90
        assert part["scale_invariant_steps"] == pytest.approx(30 + 60 * 1.5)
    assert [row["max"] for row in rest[0]["epochs"]] == [20, 20]
    rates = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in rates] == [LR, LR], "a checkpoint has the scheduled rate"


def test_resume_with_other_workers_keeps_the_total(uninterrupted):
    (path,) = uninterrupted[1].glob("*step=50.ckpt")
    rest = pinned(ranks=1, batch_size=12, ckpt_path=str(path), max_epochs=3)
    assert totals(rest[0]) == [12]
    assert rest[0]["used"] == pytest.approx([1.5 * LR] * 20)
    assert covered(rest, 2) == list(range(N))


# accumulation


def test_totals_beyond_memory_accumulate_from_an_epoch_on(tmp_path):
    options = {"max_local_batch_sizes": [8, 6], "ddp_comm_hook": slow_network}
    arguments = {"options": options, "max_epochs": 4, "callback": {"max_total_batch_size": 24}}
    saves = saving(tmp_path, every_n_train_steps=1, save_on_train_epoch_end=False)
    results = run(**arguments, **saves)
    first = results[0]
    counts = [row["accumulation"] for row in first["epochs"]]
    assert (counts[0], counts[-1]) == (1, 2)
    for row in first["epochs"]:
        assert all(size <= most for size, most in zip(row["sizes"], (8, 6), strict=True))
        assert row["max"] == row["done"] == math.ceil(N / sum(row["sizes"]))
    assert 14 < totals(first)[-1] <= 24
    per_epoch = np.diff([0, *(row["steps"] for row in first["epochs"])])
    assert per_epoch.tolist() == [math.ceil(row["max"] / row["accumulation"]) for row in first["epochs"]]
    assert first["used"][-1] == pytest.approx(LR * totals(first)[-1] / 8)
    check_one_process(results)
    (path,) = tmp_path.glob(f"*step={first['steps'] - 3}.ckpt")  # nothing is decided again
    for full, part in zip(results, run(**arguments, ckpt_path=str(path)), strict=True):
        assert part["windows"] == [2] * len(part["seen"])
        assert part["seen"] == full["seen"][-len(part["seen"]) :]
        assert part["used"] == full["used"][-3:]
        np.testing.assert_array_equal(part["weights"], full["weights"])


def test_under_the_users_accumulation_a_micro_batch_stays_what_the_user_can_hold():
    results = run(options={"ddp_comm_hook": slow_network}, max_epochs=3, accumulate_grad_batches=2)
    first = results[0]
    assert totals(first)[-1] > 16
    assert all(sum(row["sizes"]) <= 8 for row in first["epochs"])
    assert first["used"][-1] == pytest.approx(LR * totals(first)[-1] / 16)
    check_one_process(results)


class Manual(Uneven):
    """Steps by itself, and knows nothing of accumulation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_loop_of_the_modules_own_gets_no_total_that_would_need_accumulation():
    options = {"max_local_batch_sizes": (8, 6), "ddp_comm_hook": slow_network}  # so that larger totals pay
    first, _ = run(options=options, model=Manual(), max_epochs=3)
    assert totals(first)[-1] == 14
    assert set(first["windows"]) == {1}


# faults


class Poisoned(Uneven):
    """A loss of one worker is no number, another is infinite, and its user leaves such gradients out."""

    def loss(self, batch):
        factor = {5: math.nan, 7: math.inf}.get(self.trainer.global_step, 1.0)
        return super().loss(batch) * (factor if self.global_rank == 1 else 1.0)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().on_before_optimizer_step(optimizer)


def test_nan_and_inf_in_one_workers_gradient_leave_the_decision_alive():
    first, second = run(noise=None, model=Poisoned(), max_epochs=2)
    assert first["noise"] == second["noise"]
    assert first["noise"]["samples"] > 0
    assert totals(first) == [8, 12]
    assert np.isfinite(first["weights"]).all()
    np.testing.assert_array_equal(first["weights"], second["weights"])


# what is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_total_batch_size", 2.5),
        ("min_total_batch_size", 65),
        ("lr_scaling", "cubic"),
        ("lr_scaling", None),
        ("hysteresis", math.nan),
        ("min_steps", 0),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        AdaptiveBatchCallback(**{"max_total_batch_size": 64, name: value})


@pytest.mark.parametrize("callback", [AdaptiveBatchCallback, TTACallback])
def test_arguments_are_those_of_the_planner(callback):
    given = {"max_total_batch_size": 60, "min_total_batch_size": 35, "hysteresis": 0.9, "min_steps": 41}
    planner = callback(**given).planner
    assert {name: getattr(planner, name) for name in given} == given


def fast(total, initial, trace, grad_sq_norm):
    return "fast"


REFUSED = {
    "max_total_batch_size=7": ({}, {"max_total_batch_size": 7}),
    "min_total_batch_size=32": ({}, {"min_total_batch_size": 32}),
    "GradientAccumulationScheduler": ({}, {}),
    "AdaptiveBatchCallback, pid": ({"policy": "pid"}, {}),
    "AdaptiveBatchCallback, local_batch_sizes": ({"local_batch_sizes": [6, 2]}, {}),
    "hetero_ddp": ("ddp", {}),
    "lr_scaling gave 'fast'": ({}, {"lr_scaling": fast}),
    "max_total_batch_size=10": ({}, {"max_total_batch_size": 10}),  # a checkpoint is beyond it
}


def _refused(rank, path):
    found = {}
    for says, (options, callback) in REFUSED.items():
        more = {"callbacks": [GradientAccumulationScheduler({1: 2})]} if "Scheduler" in says else {}
        more |= {"ckpt_path": path} if "=10" in says else {}
        found[says] = raised(partial(adapt, rank, 2, options, callback, {"max_epochs": 3, **more}))
    return found


def test_what_cannot_be_is_refused_on_every_rank(uninterrupted):
    (path,) = uninterrupted[1].glob("*step=50.ckpt")
    for errors in run_ranks(_refused, 2, str(path)):
        assert all(says in text for says, text in errors.items()), errors
