"""Noise scale and moving total in loops of the user's own: Fabric and Accelerate, both by a session."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.decisions.told import LR, TICK, replay, told_time
from tests.helpers import Points, Regressor, fit, raised
from tests.loops import flat, global_batches, network
from tests.ranks import run_ranks


class Loop:
    """A training loop of one rank: what a front end makes of a model, two optimizers and a loader, and what was seen.

    Each optimizer has half of the parameters; with unequal rates the weights are not those of one process.
    """

    def __init__(
        self, settings, batch_size, *, dataset, accumulate=1, adam=False, scaled=False, lr=LR, shuffle=True, logs=None
    ):
        self.accumulate, self.dataset, self.batch_size, self.shuffle = accumulate, dataset, batch_size, shuffle
        self.metrics, self.seen, self.used, self.scheduled, self.logs = [], [], [], [], logs
        self.inner = network()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        kind, parameters = torch.optim.Adam if adam else torch.optim.SGD, list(self.inner.parameters())
        momentum = {} if adam else {"momentum": 0.9}
        self.raw = [kind(half, lr=lr, **momentum) for half in (parameters[:2], parameters[2:])]
        self.raw[0].register_step_post_hook(lambda optimizer, *_: self.used.append(optimizer.param_groups[0]["lr"]))
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.99**step) for one in self.raw]
        self.first = 0
        self.set_up(settings)
        self.batches = self.loader

    def data(self):
        return DataLoader(self.dataset, self.batch_size, shuffle=self.shuffle)

    def final(self):
        step = self.session.position[1]
        return step % self.accumulate == 0 or step == len(self.loader)

    def pace(self, rank, samples):
        """Take some time for the samples of a batch."""

    def train(self, rank, epochs, save=None, another=False):
        save = dict(save or {})
        for epoch in range(self.first, epochs):
            for x, y, index in self.batches:
                own = self.session.engine.own_size
                self.seen.append((epoch, self.session.position[1] - 1, index[:own].tolist()))
                self.pace(rank, len(x))
                if self.step(x, y):
                    self.scheduled.append(self.raw[0].param_groups[0]["lr"])
                    for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                if len(self.used) in save:
                    self.save(save.pop(len(self.used)), epoch)
            self.batches = self.loader
        session, estimate = self.session, self.session.noise_scale
        result = {
            "weights": flat(self.inner),
            "seen": self.seen,
            "used": self.used,
            "windows": [self.accumulate] * len(self.seen),
            "scheduled": self.scheduled,
            "metrics": self.metrics,
            "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in session.engine.plan_history],
            "estimate": None if estimate is None else estimate.state_dict(),
            "steps": session.scale_invariant_steps,
            "gain": session.lr_gain,
            "candidates": [candidate.total_batch_size for candidate in session.candidates],
            "rates": [one.state_dict()["param_groups"][0]["lr"] for one in self.raw],
        }
        if not another:
            self.end()
        return result


def numbered(name, parts):
    return {f"{name}{number}": part for number, part in enumerate(parts)}


class Scaled(Precision):
    """Full precision with a gradient scaler, which Lightning has for GPUs only."""

    def __init__(self, scaler):
        self.scaler = scaler

    def backward(self, tensor, model, *args, **kwargs):
        super().backward(self.scaler.scale(tensor), model, *args, **kwargs)


class FabricLoop(Loop):
    def set_up(self, settings):
        plugins = [Scaled(self.scaler)] if self.scaler else []
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings), plugins=plugins)
        self.fabric.launch()
        self.model, *self.optimizers = self.fabric.setup(self.inner, *self.raw)
        self.loader = self.fabric.setup_dataloaders(self.data())
        self.session = self.fabric.strategy.session
        self.session.on_metrics = self.metrics.append
        self.session.directory = self.logs

    def step(self, x, y):
        final = self.final()
        with self.fabric.no_backward_sync(self.model, enabled=not final):
            self.fabric.backward(nn.functional.mse_loss(self.model(x), y) / self.accumulate)
        return final

    def state(self):
        parts = numbered("optimizer", self.optimizers) | numbered("schedule", self.schedules)
        return {"model": self.model, "loader": self.loader, **parts}

    def save(self, path, epoch):
        self.fabric.save(path, {**self.state(), "epoch": epoch})

    def load(self, path):
        state = {**self.state(), "epoch": 0}
        self.fabric.load(path, state)
        self.first = state["epoch"]

    def end(self):
        self.fabric.strategy.teardown()


class AccelerateLoop(Loop):
    def set_up(self, settings):
        from accelerate.utils import set_seed

        folder = {} if self.logs is None else {"project_dir": self.logs}
        self.accelerator = HeteroAccelerator(
            cpu=True, hetero_plugin=HeteroPlugin(**settings), gradient_accumulation_steps=self.accumulate, **folder
        )
        set_seed(3)
        self.accelerator.register_for_checkpointing(*self.schedules)
        self.accelerator.scaler = self.scaler
        self.model, self.loader, *self.optimizers = self.accelerator.prepare(self.inner, self.data(), *self.raw)
        self.session = self.accelerator.hetero_session
        self.session.on_metrics = self.metrics.append

    def step(self, x, y):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
            return self.accelerator.sync_gradients

    def save(self, path, epoch):
        self.accelerator.save_state(path)

    def load(self, path):
        self.accelerator.load_state(path)
        self.first = self.session.position[0]
        self.batches = self.accelerator.skip_first_batches(self.loader)

    def end(self):
        self.accelerator.end_training()


LOOPS = {"fabric": FabricLoop, "accelerate": AccelerateLoop}
every_loop = pytest.mark.parametrize("loop", LOOPS)

# the noise scale

CASES = {
    "one batch a step": {"sizes": (9, 3)},
    "two batches a step": {"sizes": (4, 2), "accumulate": 2},
    "Adam": {"sizes": (2, 1), "adam": True},
    "a loss scaler": {"sizes": (9, 3), "scaled": True},
}


def _settings(sizes, accumulate):
    return {"local_batch_sizes": sizes, "replan": 48 // sum(sizes) // accumulate // 2}


class Still(Regressor):
    """Its weights stay."""

    def __init__(self, adam):
        super().__init__(lr=0.0, momentum=0.0)
        self.adam = adam

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.0) if self.adam else super().configure_optimizers()


def _through_the_trainer(rank):
    out = {}
    for name, case in CASES.items():
        sizes, count, noise = case["sizes"], case.get("accumulate", 1), GNSCallback()
        more = {"max_epochs": 1, "accumulate_grad_batches": count, "callbacks": [noise], "dataset": Points(48)}
        done = fit(rank, _settings(sizes, count), 2, sum(sizes) // 2, model=Still(case.get("adam", False)), **more)
        out[name] = {"estimate": noise.estimate.state_dict(), "seen": done["seen"]}
    return out


def in_order(samples):
    """The points as the trainer took them, which shuffles in its own way."""
    data = Points(48)
    data.x, data.y = data.x[samples], data.y[samples]
    return data


def _through_a_loop(rank, loop, orders):
    out = {}
    for name, case in CASES.items():
        sizes, arguments = case["sizes"], {k: v for k, v in case.items() if k != "sizes"}
        settings = {**_settings(sizes, case.get("accumulate", 1)), "noise_scale": True}
        more = {"dataset": in_order(orders[name]), "lr": 0.0, "shuffle": False, **arguments}
        out[name] = LOOPS[loop](settings, sum(sizes) // 2, **more).train(rank, 1, another=name != list(CASES)[-1])
    return out


@pytest.fixture(scope="module")
def trainers():
    return run_ranks(_through_the_trainer, 2)


@every_loop
def test_the_noise_scale_is_that_of_the_trainer(loop, trainers):
    """Of the same samples in the same steps, to rounding; and it is among the metrics."""
    orders = {name: sum(global_batches([ranks[name] for ranks in trainers]), []) for name in CASES}
    for result in run_ranks(_through_a_loop, 2, loop, orders):
        for name in CASES:
            one = result[name]
            assert one["estimate"] == pytest.approx(trainers[0][name]["estimate"], rel=1e-12)
            assert one["estimate"]["samples"] > 0
            last = RunningNoiseScale.from_state_dict(one["estimate"])
            shown = [metrics for metrics in one["metrics"] if "hetero/noise_scale" in metrics]
            assert shown[-1]["hetero/noise_scale"] == pytest.approx(last.noise_scale)
            assert shown[-1]["hetero/grad_sq_norm"] == last.grad_sq_norm
            assert shown[-1]["hetero/grad_variance"] == last.trace


# the moving total

SAMPLES = {"fabric": 264, "accelerate": 256}  # Accelerate's loader is ahead
BREAKS = (10, 14)
"""Optimizer steps until a checkpoint: in the middle of an epoch, between sync rounds and before one."""


def _moving(rank, loop, folder, resume, kwargs):
    """A run whose time is told; its noise is what it is."""
    with told_time() as clock:
        given = {"batch_size": 4, "dataset": Points(SAMPLES[loop]), "logs": folder / f"logs-{resume}", **kwargs}
        training = LOOPS[loop]({"max_total_batch_size": 64}, **given)
        training.pace = lambda rank, count: clock.spend((16 + count * (1, 4)[rank]) * TICK)
        if resume:
            training.load(str(folder / f"{resume}"))
        saves = {} if resume or "accumulate" in kwargs else {at: str(folder / f"{at}") for at in BREAKS}
        return training.train(rank, 4, save=saves)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    found = {}

    def of(loop):
        if loop not in found:
            folder = tmp_path_factory.mktemp(loop)
            found[loop] = run_ranks(_moving, 2, loop, folder, 0, {}), folder
        return found[loop]

    return of


def check(results, samples):
    """Each sample once an epoch, the weights of one process, and the factor of the rate beside its schedule."""
    first, second = results
    for epoch in range(4):
        taken = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        assert taken == list(range(samples))
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_allclose(first["weights"], replay(results, Points(samples))[0], rtol=1e-12, atol=1e-13)
    assert first["used"] == second["used"]
    assert first["scheduled"] == pytest.approx([LR * 0.99**k for k in range(len(first["scheduled"]))])
    assert first["rates"] == pytest.approx([LR * 0.99 ** len(first["used"])] * 2), "a state has the scheduled rate"
    assert first["steps"] == pytest.approx(np.divide(first["used"], first["scheduled"]).sum())
    assert [result["gain"] for result in results] == pytest.approx([first["metrics"][-1]["hetero/lr_gain"]] * 2)


@every_loop
def test_a_decision_changes_the_next_total_and_the_rate(loop, moved):
    results, folder = moved(loop)
    first, second = results
    check(results, SAMPLES[loop])
    totals = [sum(sizes) for _, _, sizes in first["history"]]
    assert totals[0] == 8
    assert len(set(totals)) > 2
    assert max(totals) <= 64
    assert first["history"][-1][2][0] > first["history"][-1][2][1]
    plans = dict(zip([at[:2] for at in first["seen"]], map(len, global_batches(results)), strict=True))
    for (epoch, step, sizes), ends in zip(first["history"], [*first["history"][1:], (9, 0)], strict=True):
        own = [size for at, size in plans.items() if (epoch, step) <= at < ends[:2] and (at[0], at[1] + 1) in plans]
        assert set(own) <= {sum(sizes)}
    last = first["metrics"][-1]
    gain = totals[-1] / 8 * last["hetero/efficiency"]
    assert last["hetero/lr_gain"] == pytest.approx(gain) != 1.0, "that of 'auto' for SGD"
    assert 0 < last["hetero/efficiency"] <= 1
    assert last["hetero/goodput"] > 0
    assert first["metrics"] == second["metrics"]
    assert totals[-1] in first["candidates"]
    assert second["candidates"] == []
    if loop == "accelerate":  # its folder is that of its logger, which these loops have none of
        rows = (next(folder.rglob("hetero_candidates.csv"))).read_text().splitlines()
        assert str(totals[-1]) in [row.split(",")[1] for row in rows if row.endswith(",1")]


@every_loop
@pytest.mark.parametrize("at", BREAKS)
def test_a_resumed_run_keeps_total_rates_and_noise_and_decides_by_new_times(loop, at, moved):
    """What is decided on times of another process is not repeated: the next decision comes after six new steps."""
    whole, folder = moved(loop)
    rest = run_ranks(_moving, 2, loop, folder, at, {})
    assert rest[0]["history"] == rest[1]["history"]
    assert rest[0]["history"][0] in whole[0]["history"], "the plan of the checkpoint"
    assert any(sum(sizes) != sum(rest[0]["history"][0][2]) for _, _, sizes in rest[0]["history"]), "decides"
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"][0] == full["seen"][at]
        assert part["used"][0] == pytest.approx(full["used"][at], rel=1e-12)
        first = next((n for n, index in enumerate(part["seen"]) if index[:2] >= part["history"][1][:2]), None)
        assert first is None or first >= 6


@every_loop
def test_a_total_moves_in_windows_of_micro_batches(loop, tmp_path):
    results = run_ranks(_moving, 2, loop, tmp_path, 0, {"batch_size": 2, "accumulate": 2})
    first = results[0]
    np.testing.assert_allclose(first["weights"], replay(results, Points(SAMPLES[loop]))[0], rtol=1e-12, atol=1e-13)
    assert len({sum(sizes) for _, _, sizes in first["history"]}) > 1
    assert all(step % 2 == 0 for _, step, _ in first["history"])


# what is refused


REFUSED = {
    "max_total_batch_size=3": {"max_total_batch_size": 3},  # that of one micro-batch is 4
    "max_total_batch_size=7": {"max_total_batch_size": 7},
    "min_total_batch_size=9": {"max_total_batch_size": 64, "min_total_batch_size": 9},
    "no optimizer": {"max_total_batch_size": 16},
}


def _refused(rank, loop, says):
    training = LOOPS[loop]({"replan": 3, **REFUSED[says]}, 2, dataset=Points(48), accumulate=2)
    if says == "no optimizer":
        training.session.lead([])
    return raised(lambda: training.train(rank, 1))


@pytest.mark.parametrize(("loop", "says"), [*(("fabric", says) for says in REFUSED), ("accelerate", "no optimizer")])
def test_a_total_that_cannot_move_is_an_error_on_every_rank(loop, says):
    assert all(says in text for text in run_ranks(_refused, 2, loop, says))


def _at_its_rate(rank, loop):
    training = LOOPS[loop]({"replan": 3, "max_total_batch_size": 16, "lr_scaling": "none"}, 2, dataset=Points(48))
    training.session.lead([])
    return training.train(rank, 1)["used"]


@every_loop
def test_a_rate_that_need_not_follow_needs_no_optimizer(loop):
    for used in run_ranks(_at_its_rate, 2, loop):
        assert used == pytest.approx([LR * 0.99**step for step in range(len(used))])
