"""The adaptive total end to end, with really unequal processes: what a decision changes, and what stays as it is."""

import csv
import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero import AdaptiveBatchCallback, GNSCallback, TTACallback
from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.comm.timing import clock
from lightning_hetero.comm.timing import step_timer as observer
from lightning_hetero.core import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.engine import parts, sync_rounds
from lightning_hetero.optim import LearningRateMultiplier
from tests.equations.test_total_batch import context, seen
from tests.equations.test_total_batch import planner as learned
from tests.helpers import Points, RankError, Regressor, covered, fit, run_ranks

pytestmark = pytest.mark.alone

N, BATCH, LR = 240, 4, 0.02
SPEEDS = (0.0002, 0.0008)  # seconds of a sample, of each rank
FIXED = 0.004  # seconds of a step
WARM_UP = 40  # steps, beyond the first decision
LATTER = 0.5  # of the learning rate, for the second of two groups


class Uneven(Regressor):
    """Sleeps in proportion to its samples; keeps the learning rates of every step and when it validated.

    With ``gamma`` it has two groups of parameters, a warm-up by steps, and a decay by epochs.
    """

    def __init__(self, optimizer="sgd", gamma=None):
        super().__init__(lr=LR)
        self.optimizer, self.gamma = optimizer, gamma
        self.used, self.latter, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        time.sleep(FIXED + len(batch[0]) * SPEEDS[min(self.global_rank, 1)])
        return super().training_step(batch, batch_idx)

    def val_dataloader(self):
        return DataLoader(Points(4), 2)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.current_epoch)

    def configure_optimizers(self):
        cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[self.optimizer]
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


def warmed(step):
    """Factor of the warm-up on the rate of a step."""
    return min(1.0, 0.2 + 0.8 * step / WARM_UP)


def shown_total(trainer):
    """Number of batches that the progress bar shows, on the rank that has one."""
    bar = trainer.progress_bar_callback
    return bar.train_progress_bar.total if bar is not None and bar.is_enabled else None


class Epochs(Callback):
    """At the end of each epoch: what the trainer believes of it, and the plan that it ended with."""

    def __init__(self):
        self.rows, self.scheduled, self.windows = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.scheduled.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.windows.append(trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer, pl_module):
        batches = trainer.fit_loop.epoch_loop.batch_progress
        self.rows.append(
            {
                "sizes": trainer.strategy.plan.local_batch_sizes,
                "num": trainer.num_training_batches,
                "max": trainer.fit_loop.max_batches,
                "done": batches.current.completed,
                "last": batches.is_last_batch,
                "lr": pl_module.used[-1],
                "accumulation": trainer.accumulate_grad_batches,
                "steps": trainer.global_step,
                "bar": shown_total(trainer),
            }
        )


class Noise(GNSCallback):
    """Measures, and reports this noise scale whatever was measured; ``inf``: larger totals cost no samples."""

    def __init__(self, phi=math.inf):
        super().__init__()
        signal = 0.5 / 16 if phi == math.inf else 1.0 + phi / 16
        self.pinned = RunningNoiseScale().update(
            trace=1.0 if phi == math.inf else phi, global_sq_norm=signal, total_batch_size=16
        )

    @property
    def estimate(self):
        return self.pinned

    def load_state_dict(self, state_dict):
        pass


def steps_only(rank, ranks, options, callback, kwargs):
    """Fit with the callback; what a test may want to know."""
    kwargs = dict(kwargs)
    pinned = kwargs.pop("noise", math.inf)
    adaptive = AdaptiveBatchCallback(**{"max_total_batch_size": 64, "min_steps": 8, "lr_scaling": "linear", **callback})
    epochs = Epochs()
    extra = [] if pinned is None else [Noise(pinned)]
    extra += [kwargs.pop("bar")] if "bar" in kwargs else []
    model = kwargs.pop("model", None) or Uneven()
    strategy = options if isinstance(options, str) else {"replan": "epoch", **options}
    result = fit(
        rank,
        strategy,
        ranks,
        kwargs.pop("batch_size", BATCH),
        model=model,
        dataset=kwargs.pop("dataset", None) or Points(N),
        callbacks=[*kwargs.pop("callbacks", []), adaptive, epochs, *extra],
        **{"max_epochs": 4, **kwargs},
    )
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
        "state": adaptive.state_dict(),
        "callbacks": [type(c).__name__ for c in trainer.callbacks],
        "measured": float(adaptive._engine.noise_scale().noise_scale),
        "rule": adaptive.lr_scaling,
    }


def run(ranks=2, options=None, callback=None, **kwargs):
    return run_ranks(steps_only, ranks, ranks, options or {}, callback or {}, kwargs)


def saving(folder, **kwargs):
    return {
        "callbacks": [ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", save_top_k=-1, **kwargs)],
        "enable_checkpointing": True,
    }


def totals(result):
    return [sum(row["sizes"]) * row["accumulation"] for row in result["epochs"]]


def micro_batches(results):
    """Samples of all ranks in each micro-batch, in order, with their epoch."""
    for row in zip(*(r["seen"] for r in results), strict=True):
        yield row[0][0], [i for _, _, indices in row for i in indices]


def replay(results, model=None, windows=None):
    """Weights of one process that trains on the same global batches with the same learning rates."""
    model, data = model or Regressor(lr=LR), Points(N)
    groups = [{"params": model.net[:2].parameters()}, {"params": model.net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    window, grads, used, latter = [], [], iter(results[0]["used"]), iter(results[0]["latter"])
    sizes = iter(windows or [1] * len(results[0]["seen"]))
    batches = list(micro_batches(results))
    for position, (epoch, indices) in enumerate(batches):
        window.append(indices)
        count = next(sizes)
        last_of_epoch = position + 1 == len(batches) or batches[position + 1][0] != epoch
        if len(window) < count and not last_of_epoch:
            continue
        optimizer.zero_grad()
        for part in window:
            (model.loss((data.x[part], data.y[part], None)) / count).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = next(used), next(latter)
        optimizer.step()
        window = []
    assert next(used, None) is None
    return model.flat(), np.stack(grads)


# one run, looked at from all sides


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """Four epochs of two unequal workers, the total from 8 to 64, with all that a trainer may have."""
    folder = tmp_path_factory.mktemp("adaptive")
    results = run(
        logger=CSVLogger(str(folder), name="", version=""),
        model=Uneven(gamma=0.9),
        log_every_n_steps=1,
        enable_progress_bar=True,
        bar=TQDMProgressBar(),
        **saving(folder, every_n_epochs=1),
    )
    return results, folder


def test_a_decision_changes_total_split_rate_and_number_of_batches(adaptive):
    (first, _), _ = adaptive
    assert totals(first) == [8, 12, 24, 48]  # half as much again to learn a second size, then by two
    assert first["epochs"][0]["sizes"] == (4, 4)
    for row in first["epochs"][2:]:
        assert row["sizes"][0] > row["sizes"][1]
    assert [row["max"] for row in first["epochs"]] == [30, 20, 10, 5]
    assert [row["num"] for row in first["epochs"]] == [30, 20, 10, 5]
    assert [row["done"] for row in first["epochs"]] == [30, 20, 10, 5]
    assert all(row["last"] for row in first["epochs"])
    assert [row["steps"] for row in first["epochs"]] == [30, 50, 60, 65]
    assert [row["lr"] for row in first["epochs"]] == pytest.approx(
        [LR * warmed((29, 49, 59, 64)[epoch]) * 0.9**epoch * total / 8 for epoch, total in enumerate([8, 12, 24, 48])]
    )


def test_warm_up_decay_and_factor_multiply_in_every_group(adaptive):
    (first, _), _ = adaptive
    epochs = [epoch for epoch, count in enumerate([30, 20, 10, 5]) for _ in range(count)]
    wanted = [LR * warmed(step) * 0.9**epoch * (1.0, 1.5, 3.0, 6.0)[epoch] for step, epoch in enumerate(epochs)]
    assert first["used"] == pytest.approx(wanted)
    assert first["latter"] == pytest.approx([LATTER * rate for rate in wanted])


def test_the_schedule_does_not_see_the_factor(adaptive):
    (first, _), _ = adaptive
    epochs = [epoch for epoch, count in enumerate([30, 20, 10, 5]) for _ in range(count)]
    assert first["scheduled"] == pytest.approx([LR * warmed(step) * 0.9**e for step, e in enumerate(epochs)])
    assert first["rates"] == pytest.approx([LR * 0.9**4, LATTER * LR * 0.9**4])


def test_scale_invariant_steps_are_the_sum_of_the_factors(adaptive):
    results, _ = adaptive
    for result in results:
        assert result["scale_invariant_steps"] == pytest.approx(30 + 20 * 1.5 + 10 * 3 + 5 * 6)


def test_every_sample_once_an_epoch(adaptive):
    results, _ = adaptive
    for epoch in range(4):
        assert covered(results, epoch) == list(range(N))


def test_replicas_are_identical(adaptive):
    (first, second), _ = adaptive
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_array_equal(first["grads"], second["grads"])
    assert first["history"] == second["history"]
    assert first["used"] == second["used"]


def test_equals_one_process_with_the_same_global_batches(adaptive):
    results, _ = adaptive
    weights, grads = replay(results)
    np.testing.assert_allclose(results[0]["grads"], grads, rtol=0, atol=1e-13)
    np.testing.assert_allclose(results[0]["weights"], weights, rtol=0, atol=1e-13)


def test_progress_bar_shows_the_new_number_of_batches(adaptive, measured):
    """At the start of an epoch (tqdm), and inside one (rich)."""
    (first, second), _ = adaptive
    assert [row["bar"] for row in first["epochs"]] == [30, 20, 10, 5]
    (inside,) = measured[0]["epochs"]
    assert inside["bar"] == inside["done"] < 200
    assert [row["bar"] for row in (*second["epochs"], *measured[1]["epochs"])] == [None] * 5


def test_every_epoch_validates_once(adaptive):
    (first, _), _ = adaptive
    assert first["validated"] == [0, 1, 2, 3]


def test_every_epoch_has_its_checkpoint(adaptive):
    _, folder = adaptive
    found = sorted(path.stem for path in folder.glob("*.ckpt"))
    assert found == ["epoch=0-step=30", "epoch=1-step=50", "epoch=2-step=60", "epoch=3-step=65"]


def test_metrics(adaptive):
    _, folder = adaptive
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    gains = [float(row["hetero/lr_gain"]) for row in rows if row.get("hetero/lr_gain")]
    assert gains == pytest.approx([1.5, 3.0, 6.0])  # all three are of the total that was decided on
    goodput = [float(row["hetero/goodput"]) for row in rows if row.get("hetero/goodput")]
    efficiency = [float(row["hetero/efficiency"]) for row in rows if row.get("hetero/efficiency")]
    assert len(goodput) == len(efficiency) == 3
    assert all(value > 0 for value in goodput)
    assert efficiency == [1.0, 1.0, 1.0]  # noise alone


def test_candidates_as_a_table(adaptive):
    _, folder = adaptive
    rows = list(csv.DictReader((folder / "hetero_candidates.csv").read_text().splitlines()))
    fields = ["total_batch_size", "accumulation", "step_time", "throughput", "efficiency", "goodput"]
    assert list(rows[0]) == ["step", *fields, "running"]
    assert sorted({int(row["step"]) for row in rows}) == [30, 50, 60]
    running = [(int(row["step"]), int(row["total_batch_size"])) for row in rows if row["running"] == "1"]
    assert running == [(30, 12), (50, 24), (60, 48)]
    for row in rows:
        assert float(row["goodput"]) == pytest.approx(float(row["throughput"]) * float(row["efficiency"]))
        assert int(row["total_batch_size"]) <= 64


def test_noise_scale_callback_of_the_user_is_used(adaptive):
    (first, second), _ = adaptive
    assert first["callbacks"].count("Noise") == 1
    assert "GNSCallback" not in first["callbacks"]
    assert first["measured"] == second["measured"] == math.inf


# decisions from what was really measured


@pytest.fixture(scope="module")
def measured():
    """Nothing pinned, decisions inside one long epoch."""
    options = {"replan": 8}
    bar = {"bar": RichProgressBar(), "enable_progress_bar": True}
    return run(options=options, noise=None, max_epochs=1, dataset=Points(1600), callback={"lr_scaling": "auto"}, **bar)


def test_noise_scale_callback_is_added_once(measured):
    for result in measured:
        assert result["callbacks"].count("GNSCallback") == 1
        assert result["callbacks"].index("GNSCallback") == 1
        assert result["measured"] > 0.0  # infinite where noise is all that is seen
        assert result["rule"] == "adascale"


def test_total_changes_inside_a_long_epoch(measured):
    first, second = measured
    seen = [len(indices) for _, indices in micro_batches(measured)]
    assert covered(measured, 0) == list(range(1600))
    changes = [(e, s, sum(sizes)) for e, s, sizes in first["history"]]
    assert len({total for _, _, total in changes}) > 1
    assert all(epoch == 0 for epoch, _, _ in changes)
    for (_, start, total), following in zip(changes, [*changes[1:], (0, len(seen), 0)], strict=True):
        assert set(seen[start : following[1]][:-1]) <= {total}
    (row,) = first["epochs"]
    assert row["max"] == row["num"] == row["done"] == len(seen) == first["steps"] < 200
    assert row["last"]
    assert first["validated"] == [0]
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert first["used"] == second["used"]
    assert max(first["used"]) > LR  # AdaScale's factor was between 1 and the ratio of totals
    assert max(first["used"]) <= LR * max(seen) / 8


@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
def test_auto_is_the_square_root_for_other_optimizers(optimizer):
    results = run(noise=None, model=Uneven(optimizer), callback={"lr_scaling": "auto"}, max_epochs=2)
    first, second = results
    assert totals(first) == [8, 12]
    assert first["rule"] == "sqrt"
    assert first["used"][-1] == pytest.approx(LR * math.sqrt(1.5))
    assert not math.isnan(first["measured"])
    np.testing.assert_array_equal(first["weights"], second["weights"])


def test_one_worker_adapts_as_well():
    (result,) = run(1, batch_size=8, noise=None, max_epochs=3)
    assert totals(result)[1] > 8
    assert covered([result], 1) == list(range(N))
    assert result["used"][-1] == pytest.approx(LR * totals(result)[-1] / 8)
    assert [row["max"] for row in result["epochs"]] == [math.ceil(N / total) for total in totals(result)]
    np.testing.assert_allclose(result["weights"], replay([result])[0], rtol=0, atol=1e-13)


def test_three_workers():
    results = run(3, batch_size=3, max_epochs=3)
    first = results[0]
    assert totals(first)[0] == 9
    assert totals(first)[2] > totals(first)[1] > 9
    assert len({len(row["sizes"]) for row in first["epochs"]}) == 1
    for epoch in range(3):
        assert covered(results, epoch) == list(range(N))
    for other in results[1:]:
        np.testing.assert_array_equal(first["weights"], other["weights"])


def test_total_shrinks():
    """Smaller totals make longer epochs and lower rates."""
    callback = {"max_total_batch_size": 24, "min_steps": 4}
    (first, second) = run(noise=0.0, batch_size=12, max_epochs=3, callback=callback)
    assert totals(first)[0] == 24
    assert 12 <= totals(first)[1] < 24  # nothing above is allowed, so the second size is a smaller one
    assert totals(first)[2] <= 24
    assert [row["max"] for row in first["epochs"]] == [math.ceil(N / total) for total in totals(first)]
    assert [row["lr"] for row in first["epochs"]] == pytest.approx([LR * total / 24 for total in totals(first)])
    assert first["validated"] == [0, 1, 2]
    for epoch in range(3):
        assert covered([first, second], epoch) == list(range(N))


def test_a_total_is_never_more_than_the_samples_of_an_epoch():
    """With ``drop_last`` an epoch would have no batch; without, the rate would be that of a batch that never comes."""
    few, callback = Points(44), {"max_total_batch_size": 4096, "min_steps": 1}
    results = run(dataset=few, callback=callback, max_epochs=7, loader_kwargs={"drop_last": True})
    first = results[0]
    assert [row["done"] for row in first["epochs"]] == [44 // total for total in totals(first)]
    assert len(first["epochs"]) == 7
    assert 22 < totals(first)[-1] <= 44


def test_max_steps_stops_exactly():
    results = run(max_epochs=-1, max_steps=57)
    assert [r["steps"] for r in results] == [57, 57]
    assert [len(r["used"]) for r in results] == [57, 57]
    assert sum(results[0]["epochs"][-1]["sizes"]) > 8


class Returns(StaticPlanner):
    """Doubles the total and takes that back before its first step, which loader workers put off."""

    moves_total = True

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "plans", [BatchPlan(8, (4, 4)), BatchPlan(4, (2, 2))])

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        return self, Proposal(self.plans.pop(0), "as told") if self.plans else None


def _returning(rank):
    options = {"replan": 1}
    callbacks, loader = [PolicyCallback(Returns())], {"num_workers": 2, "prefetch_factor": 3}
    return fit(rank, options, 2, 2, dataset=Points(101), callbacks=callbacks, max_epochs=1, loader_kwargs=loader)


def test_a_total_that_is_taken_back_leaves_the_epoch_as_long_as_it_was():
    results = run_ranks(_returning, 2)
    (_, changed), (_, back) = [(e, s) for e, s, _ in results[0]["history"][1:]]
    assert changed < back <= changed + 1
    assert covered(results, 0) == list(range(101))


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
        assert part["state"]["gains"] == full["state"]["gains"]
        assert part["state"]["planner"]["initial_total"] == 8
    assert [row["max"] for row in rest[0]["epochs"]] == [20, 20]


def test_checkpoint_of_the_decision_is_plain(uninterrupted):
    _, folder = uninterrupted
    (path,) = folder.glob("*step=57.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["AdaptiveBatchCallback"]
    assert state["gains"][12] == pytest.approx(1.5)
    assert state["scale_invariant_steps"] == pytest.approx(30 + 27 * 1.5)
    assert state["engine"]["history"]["entries"][-1]["plan"]["total_batch_size"] == 12
    assert [g["lr"] for g in checkpoint["optimizer_states"][0]["param_groups"]] == [LR, LR]


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_with_other_workers_keeps_the_total(uninterrupted, ranks):
    _, folder = uninterrupted
    (path,) = folder.glob("*step=50.ckpt")
    rest = pinned(ranks=ranks, batch_size=12 // ranks, ckpt_path=str(path), max_epochs=3)
    assert totals(rest[0]) == [12]
    assert rest[0]["used"] == pytest.approx([1.5 * LR] * 20)
    assert rest[0]["state"]["planner"]["initial_total"] == 8
    assert covered(rest, 2) == list(range(N))


def test_a_checkpoint_beyond_the_bounds_of_the_new_run_is_refused_on_every_rank(uninterrupted):
    _, folder = uninterrupted
    (path,) = folder.glob("*step=50.ckpt")
    arguments = (2, {"hysteresis": 1.0}, {"max_total_batch_size": 10}, {"ckpt_path": str(path)})
    errors = run_ranks(steps_only, 2, *arguments, expect_errors=True, timeout=30)
    assert [rank for rank, _, _ in errors] == [0, 1]
    assert all("the checkpoint goes on with 12 samples, outside max_total_batch_size=10" in e for _, _, e in errors)


TICK = 2.0**-12


class Scripted(Uneven):
    """Its time is told, not measured: computing takes what it says, in ticks that add up exactly, and nothing else."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def training_step(self, batch, batch_idx):
        self.now += (16 + len(batch[0]) * (1, 4)[self.global_rank]) * TICK
        return Regressor.training_step(self, batch, batch_idx)

    def backward(self, loss):
        self.now += 4 * TICK
        loss.backward()


class Estimates(Callback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append(trainer.strategy.engine.noise_scale().state_dict())


def _scripted(rank, kwargs, **options):
    model, estimates = Scripted(), Estimates()
    told = SimpleNamespace(perf_counter=lambda: model.now, process_time=lambda: model.now)
    clock.time = observer.time = sync_rounds.time = told
    parts.cpu_quota = lambda: None
    arguments = {"dataset": Points(640), "noise": None, "model": model, "max_epochs": 4, **kwargs}
    arguments["callbacks"] = [*arguments.get("callbacks", []), estimates]
    result = steps_only(rank, 2, options, {"lr_scaling": "adascale", "hysteresis": 0.05}, arguments)
    return {**result, "estimates": estimates.rows}


class SavesAt(Callback):
    """After a step, or at the end of an epoch."""

    def __init__(self, path, moment):
        self.path, self.moment = path, moment

    def on_train_batch_end(self, trainer, *_):
        if self.moment == ("step", trainer.global_step):
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, *_):
        if self.moment == ("epoch", trainer.current_epoch):
            trainer.save_checkpoint(self.path)


def _broken_off(rank, folder, moments, options, kwargs):
    """The run without a break, and for each of the moments the rest of it from a checkpoint."""
    saves = [SavesAt(folder / f"{i}.ckpt", moment) for i, moment in enumerate(moments)]
    whole = _scripted(rank, {**kwargs, "callbacks": saves}, **options)
    return whole, [_scripted(rank, {**kwargs, "ckpt_path": str(save.path)}, **options) for save in saves]


@pytest.mark.parametrize(
    ("options", "kwargs", "breaks"),
    [
        ({"replan": "epoch"}, {"max_epochs": 3}, {("epoch", 0): [(2, 0)], ("step", 85): [(2, 0)], ("epoch", 1): []}),
        (
            {"replan": "auto"},
            {"max_epochs": 1},
            {("step", 15): [(0, 23), (0, 32)], ("step", 17): [(0, 25), (0, 34)], ("step", 25): [(0, 33), (0, 42)]},
        ),
        (
            {"replan": "auto"},
            {"max_epochs": 1, "loader_kwargs": {"num_workers": 1, "prefetch_factor": 5}},
            {("step", 20): [(0, 22)]},
        ),
    ],
    ids=["epoch", "auto", "loader workers"],
)
def test_a_resumed_run_keeps_plans_rates_and_noise_and_decides_by_new_times(tmp_path, options, kwargs, breaks):
    """What is decided on times of another process is not repeated; a plan that was to come comes, as (0, 22) does.

    The history of the rest begins with the plan that ran at the break.
    """
    for rank, (whole, rests) in enumerate(run_ranks(_broken_off, 2, tmp_path, list(breaks), options, kwargs)):
        for rest, (moment, starts) in zip(rests, breaks.items(), strict=True):
            assert rest["history"][0] in whole["history"]
            assert [entry[:2] for entry in rest["history"][1:]] == starts
            if moment[0] == "step":
                at = moment[1]
                steps = [one == other for one, other in zip(whole["seen"][at:], rest["seen"], strict=False)]
                agreed = steps.index(False) if False in steps else len(steps)
                assert agreed > 0
                now = slice(0, min(agreed, 5))  # later, a sync round of the run without a break moves its rate
                assert rest["used"][now] == pytest.approx(whole["used"][at:][now], rel=1e-12)
            if moment == ("step", 85):  # the noise of the steps before the break, which no round had seen yet
                assert rest["estimates"][-1] == pytest.approx(whole["estimates"][-1], rel=1e-12)
            if rank == 0:  # which decides
                assert rest["state"]["planner"]["solved"]["solved"]  # step times of candidates, kept


# accumulation


def slow_network(state, bucket):
    """Averages as DDP does, 30 ms later: what makes it worth to synchronise less often."""
    time.sleep(0.03)
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.fixture(scope="module")
def accumulating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accumulating")
    options = {"max_local_batch_sizes": [8, 6], "ddp_comm_hook": slow_network}
    arguments = {"options": options, "max_epochs": 4, "callback": {"max_total_batch_size": 24}}
    return run(**arguments, **saving(folder, every_n_train_steps=1, save_on_train_epoch_end=False)), arguments, folder


def test_totals_beyond_memory_accumulate_from_an_epoch_on(accumulating):
    results, _, _ = accumulating
    first = results[0]
    counts = [row["accumulation"] for row in first["epochs"]]
    assert counts[0] == 1
    assert counts[-1] == 2
    for row in first["epochs"]:
        assert all(size <= most for size, most in zip(row["sizes"], (8, 6), strict=True))
        assert row["max"] == row["done"] == math.ceil(N / sum(row["sizes"]))
    assert 14 < totals(first)[-1] <= 24
    per_epoch = np.diff([0, *(row["steps"] for row in first["epochs"])])
    assert per_epoch.tolist() == [math.ceil(row["max"] / row["accumulation"]) for row in first["epochs"]]
    assert len(first["used"]) == first["steps"]
    assert first["used"][-1] == pytest.approx(LR * totals(first)[-1] / 8)
    for epoch in range(4):
        assert covered(results, epoch) == list(range(N))
    windows = [count for row, count in zip(first["epochs"], counts, strict=True) for _ in range(row["max"])]
    assert first["windows"] == windows  # it changes with an epoch
    assert [r["state"]["planner"]["accumulation"] for r in results] == [2, 2]  # on all ranks, for another fit


class Watches(StaticPlanner):
    """Keeps whether an epoch began at each look, and the steps that it was shown."""

    def __init__(self, moves_total=False):
        super().__init__()
        object.__setattr__(self, "moves_total", moves_total)
        object.__setattr__(self, "looks", [])

    def decide(self, observations, current, context):
        self.looks.append((context.epoch_begins, observations.num_steps))
        return Decision(self)


def _watching(rank, replan, samples, moves_total, epochs):
    planner = Watches(moves_total)
    known = {"dataset": Points(samples), "callbacks": [PolicyCallback(planner)], "max_epochs": epochs}
    fit(rank, {"replan": replan}, 2, 1, **known)
    return planner.looks


def test_planners_are_told_where_the_number_of_micro_batches_may_change():
    """Looks after 12 and 24 of 33 steps, at the second epoch, after 12 and 24 steps of that, and when training ends."""
    looks = run_ranks(_watching, 2, 12, 66, False, 2)[0]
    assert [begins for begins, _ in looks] == [False, False, True, False, False, False]


@pytest.mark.parametrize(("replan", "samples"), [(8, 48), (4, 42)], ids=["nothing new", "few steps"])
def test_a_planner_of_the_total_is_asked_at_the_start_of_each_epoch_however_often_within(replan, samples):
    """Of 24 and of 21 steps; another planner is not asked again so soon after the last look."""
    for moves_total in (True, False):
        looks = run_ranks(_watching, 2, replan, samples, moves_total, 3)[0]
        steps = [steps for begins, steps in looks if begins]
        assert len(steps) == (2 if moves_total else 0)
        assert all(few < 2 for few in steps)


def test_a_planner_of_the_total_is_not_asked_at_the_start_of_each_short_epoch():
    """Of four steps each: every second one, and when training ends."""
    looks = run_ranks(_watching, 2, 1000, 8, True, 6)[0]
    assert [begins for begins, _ in looks] == [True, True, False]


@pytest.mark.parametrize("replan", [1, 4])
def test_micro_batches_move_however_often_ranks_look(replan):
    options = {"max_local_batch_sizes": [8, 6], "ddp_comm_hook": slow_network, "replan": replan}
    results = run(options=options, max_epochs=6, callback={"max_total_batch_size": 24})
    first = results[0]
    assert max(row["accumulation"] for row in first["epochs"]) == 2
    for epoch in range(6):
        assert covered(results, epoch) == list(range(N))
    np.testing.assert_allclose(first["weights"], replay(results, windows=first["windows"])[0], rtol=0, atol=1e-13)


def test_accumulated_gradients_are_those_of_one_process(accumulating):
    results, _, _ = accumulating
    weights, grads = replay(results, windows=results[0]["windows"])
    np.testing.assert_allclose(results[0]["grads"], grads, rtol=0, atol=1e-13)
    np.testing.assert_allclose(results[0]["weights"], weights, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


def test_resume_goes_on_with_the_micro_batches(accumulating):
    """Inside the last epoch, three optimizer steps before its end, so that nothing is decided again."""
    whole, arguments, folder = accumulating
    (path,) = folder.glob(f"*step={whole[0]['steps'] - 3}.ckpt")
    rest = run(**arguments, ckpt_path=str(path))
    assert rest[0]["windows"] == [2] * len(rest[0]["seen"])
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][-len(part["seen"]) :]
        assert part["used"] == full["used"][-3:]
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["steps"] == full["steps"]


class Alternates(StaticPlanner):
    """Another total at every look; keeps what it was asked about."""

    moves_total = True

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "asked", [])

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        self.asked.append(current.local_batch_sizes)
        size = 6 - current.local_batch_sizes[0]
        return self, Proposal(BatchPlan(2 * size, (size, size)), "as told")


def _alternating(rank, prefetch):
    planner, loader = Alternates(), {"num_workers": 1, "prefetch_factor": prefetch}
    arguments = {"max_epochs": 2, "loader_kwargs": loader, "accumulate_grad_batches": 2}
    done = fit(rank, {"replan": 1}, 2, 2, dataset=Points(N), callbacks=[PolicyCallback(planner)], **arguments)
    return {**done, "asked": planner.asked}


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


@pytest.mark.parametrize("prefetch", [2, 3])
def test_a_window_of_micro_batches_has_one_total(prefetch):
    """However far loader workers have drawn ahead."""
    results = run_ranks(_alternating, 2, prefetch)
    steps = [step for _, step, _ in results[0]["history"]]
    assert len(set(steps)) > 4
    assert all(step % 2 == 0 for step in steps)
    asked = results[0]["asked"]  # about the plan that is to come, not the one that still runs
    assert asked == [(2, 2), (4, 4)] * (len(asked) // 2) + [(2, 2)] * (len(asked) % 2)
    for epoch in range(2):
        assert covered(results, epoch) == list(range(N))
        sizes = [len(indices) for e, indices in micro_batches(results) if e == epoch]
        assert all(one == other for one, other in list(zip(sizes[::2], sizes[1::2], strict=False))[:-1])


def test_the_users_accumulation_counts_in_the_initial_total():
    """2 x 2 x 4 samples; without known bounds a micro-batch stays what the user can hold."""
    results = run(accumulate_grad_batches=2, options={"ddp_comm_hook": slow_network}, max_epochs=3)
    first = results[0]
    assert first["state"]["planner"]["initial_total"] == totals(first)[0] == 16
    assert totals(first)[-1] > 16
    assert all(sum(row["sizes"]) <= 8 for row in first["epochs"])
    assert first["used"][-1] == pytest.approx(LR * totals(first)[-1] / 16)
    np.testing.assert_allclose(first["weights"], replay(results, windows=first["windows"])[0], rtol=0, atol=1e-13)


# faults


class Poisoned(Uneven):
    """A loss of one worker is no number, another is infinite, and its user leaves such gradients out."""

    def loss(self, batch):
        loss = super().loss(batch)
        factor = {5: math.nan, 7: math.inf}.get(self.trainer.global_step, 1.0)
        return loss * factor if self.global_rank == 1 else loss

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().on_before_optimizer_step(optimizer)


def test_nan_and_inf_in_one_workers_gradient_leave_the_decision_alive():
    first, second = run(noise=None, model=Poisoned(), max_epochs=2)
    assert math.isfinite(first["measured"])
    assert first["measured"] == second["measured"]
    assert totals(first) == [8, 12]
    assert np.isfinite(first["weights"]).all()
    np.testing.assert_array_equal(first["weights"], second["weights"])


class Fails(Uneven):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 2:
            raise RuntimeError("out of coffee")
        return super().training_step(batch, batch_idx)


class SavesAtExceptions(Callback):
    """As ``OnExceptionCheckpoint``."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


def test_checkpoint_of_an_exception_has_the_scheduled_rate(tmp_path):
    path = tmp_path / "failed.ckpt"
    with pytest.raises(RankError, match="out of coffee"):
        pinned(model=Fails(), callbacks=[SavesAtExceptions(path)])
    checkpoint = torch.load(path, weights_only=True)
    assert [g["lr"] for g in checkpoint["optimizer_states"][0]["param_groups"]] == [LR, LR]
    state = checkpoint["callbacks"]["AdaptiveBatchCallback"]
    assert state["scale_invariant_steps"] == pytest.approx(30 + 20 * 1.5)


@pytest.mark.parametrize("callback", [AdaptiveBatchCallback(64), GNSCallback()], ids=["total", "noise scale"])
def test_a_checkpoint_of_an_exception_asks_no_other_rank(callback):
    """They may be gone."""
    gone = SimpleNamespace(sampler=(), roster=(), interval=rule_that_raises(AssertionError, "asked"))
    callback._engine = callback._source = gone
    checkpoint = {"callbacks": {callback.state_key: {}}}
    callback.on_save_checkpoint(SimpleNamespace(interrupted=True), None, checkpoint)
    assert checkpoint == {"callbacks": {callback.state_key: {}}}


def test_an_exception_inside_an_optimizer_leaves_the_scheduled_rate():
    """Whose hook after the step is not called: a checkpoint of the exception is not to have the factor."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=LR)
    callback = AdaptiveBatchCallback(64)
    callback._total._lr = LearningRateMultiplier([optimizer], lambda: 3.0)
    optimizer.register_step_pre_hook(rule_that_raises(RuntimeError, "out of coffee"))
    with pytest.raises(RuntimeError, match="coffee"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 3 * LR
    callback.on_exception(None, None, RuntimeError())
    assert optimizer.param_groups[0]["lr"] == LR


class NotBuiltAnewError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class NotSentError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def rule_that_raises(error, *arguments):
    def rule(*_):
        raise error(*arguments)

    return rule


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda *_: -1.0, "lr_scaling gave -1.0 for a total of 12; it has to be a positive number"),
        (lambda *_: "fast", "lr_scaling gave 'fast' for a total of 12"),
        (rule_that_raises(KeyError, "no such total"), "no such total"),
        (rule_that_raises(NotBuiltAnewError, "nothing is", "known"), "nothing is known"),
        (rule_that_raises(NotSentError, "nothing is known"), "nothing is known"),
    ],
    ids=["negative", "no number", "raises", "raises what cannot be built anew", "raises what cannot be sent"],
)
def test_a_rule_that_fails_raises_on_every_rank(rule, says):
    arguments = (2, {}, {"lr_scaling": rule}, {"max_epochs": 2})
    errors = run_ranks(steps_only, 2, *arguments, expect_errors=True, timeout=20)
    assert [rank for rank, _, _ in errors] == [0, 1]
    assert all(says in text for _, _, text in errors)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"max_total_batch_size": 0}, ValueError, "max_total_batch_size=0 is too small"),
        ({"max_total_batch_size": 2.5}, TypeError, "max_total_batch_size=2.5 is a float"),
        ({"max_total_batch_size": True}, TypeError, "max_total_batch_size=True is a bool"),
        ({"min_total_batch_size": 0}, ValueError, "min_total_batch_size=0 is too small"),
        ({"min_total_batch_size": 65}, ValueError, "min_total_batch_size=65 is above max_total_batch_size=64"),
        ({"lr_scaling": "cubic"}, ValueError, "lr_scaling='cubic' is unknown; allowed are 'auto', 'adascale'"),
        ({"lr_scaling": None}, ValueError, "lr_scaling=None"),
        ({"lr_scaling": 2.0}, ValueError, "lr_scaling=2.0"),
        ({"hysteresis": -0.1}, ValueError, "hysteresis=-0.1 is out of range"),
        ({"hysteresis": math.nan}, ValueError, "hysteresis=nan"),
        ({"hysteresis": "5%"}, TypeError, "hysteresis='5%'"),
        ({"min_steps": 0}, ValueError, "min_steps=0 is too small"),
        ({"min_steps": 1.5}, TypeError, "min_steps=1.5 is a float"),
    ],
    ids=str,
)
def test_constructor_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        AdaptiveBatchCallback(**{"max_total_batch_size": 64, **arguments})


@pytest.mark.parametrize("callback", [AdaptiveBatchCallback, TTACallback])
def test_arguments_reach_the_next_total(callback):
    """A total of 40 would double at a high noise scale, and halve at a low one."""

    def following(phi, **arguments):
        given = {"max_total_batch_size": 4096, **arguments}
        planner = replace(callback(**given).planner, model=learned().model, initial_total=40)
        _, proposal = planner.decide(seen((30, 10), times=40), BatchPlan(40, (30, 10)), context(40, phi))
        return 40 if proposal is None else proposal.plan.total_batch_size

    assert following(900.0) == 80
    assert 40 < following(900.0, max_total_batch_size=60) <= 60
    assert following(900.0, hysteresis=0.9) == 40
    assert following(900.0, min_steps=41) == 40
    assert following(1.0) == 20
    assert 35 <= following(1.0, min_total_batch_size=35) < 40


@pytest.mark.parametrize(
    ("options", "callback", "kwargs", "says"),
    [
        ({}, {"max_total_batch_size": 7}, {}, "the initial total batch is 8 samples, outside max_total_batch_size=7"),
        ({}, {"min_total_batch_size": 32}, {}, "the initial total batch is 8 samples, outside min_total_batch_size=32"),
        ({}, {}, {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        ({"policy": "pid"}, {}, {}, "several policies would decide on the same split: AdaptiveBatchCallback, pid"),
        ({"local_batch_sizes": [6, 2]}, {}, {}, r"AdaptiveBatchCallback, local_batch_sizes=\(6, 2\)"),
        ("ddp", {}, {}, "AdaptiveBatchCallback needs a strategy .* got DDPStrategy. Use .*'hetero_ddp'"),
    ],
    ids=["total above", "total below", "scheduler", "pid", "fixed split", "ddp"],
)
def test_contradictions_are_refused_on_every_rank(options, callback, kwargs, says):
    arguments = (2, options, callback, {"max_epochs": 1, **kwargs})
    errors = run_ranks(steps_only, 2, *arguments, expect_errors=True, timeout=30)
    assert [(rank, name) for rank, name, _ in errors] == [
        (0, "MisconfigurationException"),
        (1, "MisconfigurationException"),
    ]
    for _, _, text in errors:
        with pytest.raises(RuntimeError, match=says):
            raise RuntimeError(text)
