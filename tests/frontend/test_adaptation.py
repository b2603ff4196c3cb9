"""Noise scale and moving total in training loops of the user's own: Fabric, Accelerate, plain torch."""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.precision import Precision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback, HeteroDDPStrategy
from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.comm import gradient_hook
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.comm.timing import clock
from lightning_hetero.comm.timing import step_timer as observer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.lr_scaling import lr_gain
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine, parts, sync_rounds
from lightning_hetero.frontend.adaptation import Adaptation
from lightning_hetero.frontend.adaptive_total import AdaptiveTotal
from lightning_hetero.session import HeteroSession
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.engine.test_sync_rounds import alone
from tests.helpers import Points, Regressor, run_ranks, trainer_of
from tests.loops import flat, global_batches, network

LR, N, FIXED, SPEEDS = 0.02, 240, 0.003, (0.0002, 0.0006)
INFINITE = RunningNoiseScale().update(trace=1.0, global_sq_norm=0.5 / 16, total_batch_size=16)


class Loop:
    """A training loop of one rank: what a front end makes of a model, two optimizers and a loader, and what was seen.

    Each optimizer has half of the parameters; with unequal rates the weights are not those of one process.
    """

    ahead = {}  # how the loader fetches batches ahead

    def __init__(
        self, settings, batch_size, *, dataset, accumulate=1, adam=False, scaled=False, lr=LR, shuffle=True, logs=None
    ):
        self.accumulate, self.dataset, self.batch_size, self.shuffle = accumulate, dataset, batch_size, shuffle
        self.metrics, self.seen, self.used, self.scheduled, self.logs = [], [], [], [], logs
        self.inner = network()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        kind, parameters = torch.optim.Adam if adam else torch.optim.SGD, list(self.inner.parameters())
        self.raw = [kind(half, lr=lr) for half in (parameters[:2], parameters[2:])]
        self.raw[0].register_step_post_hook(lambda optimizer, *_: self.used.append(optimizer.param_groups[0]["lr"]))
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.99**step) for one in self.raw]
        self.first = 0
        self.set_up(settings)
        self.batches = self.loader

    def rates(self):
        return numbered("schedule", self.schedules)

    def data(self):
        return DataLoader(self.dataset, self.batch_size, shuffle=self.shuffle, **self.ahead)

    def final(self):
        step = self.session.position[1]
        return step % self.accumulate == 0 or step == len(self.loader)

    def pace(self, rank, samples):
        """Take some time for the samples of a batch."""

    def train(self, rank, epochs, save=None, another=False):
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
                if save and len(self.used) in save:
                    self.save(save.pop(len(self.used)), epoch)
            self.batches = self.loader
        estimate = self.session.noise_scale
        result = {
            "weights": flat(self.inner),
            "seen": self.seen,
            "used": self.used,
            "scheduled": self.scheduled,
            "metrics": self.metrics,
            "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in self.session.engine.plan_history],
            "estimate": None if estimate is None else estimate.state_dict(),
            "steps": self.session.scale_invariant_steps,
            "gain": self.session.lr_gain,
            "candidates": [candidate.total_batch_size for candidate in self.session.candidates],
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
        from lightning.fabric import Fabric

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
        return {"model": self.model, "loader": self.loader} | numbered("optimizer", self.optimizers) | self.rates()

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

        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

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


class PlainLoop(Loop):
    """Of somebody who uses no trainer at all."""

    def set_up(self, settings):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        config, device = HeteroConfig(**settings), torch.device("cpu")
        mechanism = HeteroEngine(config, rank=rank, world_size=2, device=device, local_rank=rank)
        self.session = HeteroSession(mechanism, on_metrics=self.metrics.append)
        self.session.directory = self.logs
        stream = PermutationStream(len(self.dataset), shuffle=self.shuffle, seed=0)
        self.inside = DataLoader(self.dataset, batch_sampler=self.session.shard(stream, self.batch_size), **self.ahead)
        self.model = DistributedDataParallel(self.inner)
        self.model.register_comm_hook(mechanism.hook_state, gradient_hook)
        self.optimizers = self.raw
        self.session.lead(self.raw, scaler=self.scaler)

    @property
    def loader(self):
        return self

    def __len__(self):
        return len(self.inside)

    def __iter__(self):
        return self.session.steps(lambda: iter(self.inside))

    def step(self, x, y):
        final = self.final()
        with nullcontext() if final else self.model.no_sync(), self.session.engine.backward():
            loss = nn.functional.mse_loss(self.model(x), y) / self.accumulate
            loss = self.session.engine.scale_loss(loss)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return final

    def parts(self):
        return {"model": self.inner} | numbered("optimizer", self.raw) | self.rates()

    def save(self, path, epoch):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        session = {**self.session.interval(), **self.session.state_dict()}
        if self.session.engine.rank == 0:
            torch.save({**state, "session": session}, path)
        torch.distributed.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.session.load_state_dict(state["session"])
        self.session.skip()
        self.first = self.session.position[0]

    def end(self):
        self.session.close()


LOOPS = {"fabric": FabricLoop, "accelerate": AccelerateLoop, "plain": PlainLoop}
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
    """Its weights stay, and the noise is what the callback says in the end."""

    def __init__(self, adam):
        super().__init__(lr=0.0, momentum=0.0)
        self.adam = adam

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.0) if self.adam else super().configure_optimizers()

    def on_train_end(self):
        (gns,) = [c for c in self.trainer.callbacks if isinstance(c, GNSCallback)]
        self.estimate = gns.estimate.state_dict()


def _through_the_trainer(rank):
    out = {}
    for name, case in CASES.items():
        sizes, count = case["sizes"], case.get("accumulate", 1)
        model, strategy = Still(case.get("adam", False)), HeteroDDPStrategy(**_settings(sizes, count))
        settings = {"max_epochs": 1, "accumulate_grad_batches": count, "callbacks": [GNSCallback()]}
        trainer_of(strategy, 2, **settings).fit(model, DataLoader(Points(48), sum(sizes) // 2))
        out[name] = {"estimate": model.estimate, "seen": model.seen}
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
        training = LOOPS[loop](
            settings, sum(sizes) // 2, dataset=in_order(orders[name]), lr=0.0, shuffle=False, **arguments
        )
        out[name] = training.train(rank, 1, another=name != list(CASES)[-1])
    return out


@cache
def trainers_estimates():
    return run_ranks(_through_the_trainer, 2)


@every_loop
def test_noise_scale_is_that_of_the_trainer(loop):
    """Of the same samples in the same steps, to rounding; and it is among the metrics."""
    trained = trainers_estimates()
    orders = {name: sum(global_batches([ranks[name] for ranks in trained]), []) for name in CASES}
    expected, results = trained[0], run_ranks(_through_a_loop, 2, loop, orders)
    for name in CASES:
        for result in results:
            assert result[name]["estimate"] == pytest.approx(expected[name]["estimate"], rel=1e-12)
            assert result[name]["estimate"]["samples"] > 0
            last = RunningNoiseScale.from_state_dict(result[name]["estimate"])
            shown = [metrics for metrics in result[name]["metrics"] if "hetero/noise_scale" in metrics][-1]
            assert shown["hetero/noise_scale"] == pytest.approx(last.noise_scale)
            assert shown["hetero/grad_sq_norm"] == last.grad_sq_norm
            assert shown["hetero/grad_variance"] == last.trace
            assert result[name]["steps"] == 0.0
            assert not any("hetero/lr_gain" in metrics for metrics in result[name]["metrics"])


# the moving total


class Moving:
    """Settings with which the total goes from 8 to 12 after 40 steps, ten into the second epoch, and stays there."""

    settings = {
        **{"max_total_batch_size": 12, "min_total_batch_size": 8, "lr_scaling": "linear"},
        **{"replan": 10, "hysteresis": 1.0},
    }
    counts = (1, 2)
    at = 47  # optimizer steps until the checkpoint


def _moving(rank, loop, folder, resume):
    out = []
    for count in Moving.counts:
        logs = str(folder / f"logs-{count}-{resume}")
        training = LOOPS[loop](Moving.settings, 4 // count, dataset=Points(N), accumulate=count, logs=logs)
        engine = training.session.engine
        engine.measure_noise(engine.noise, lambda: INFINITE)
        training.session.planner = replace(training.session.planner, min_steps=30)
        training.pace = lambda rank, samples: time.sleep(FIXED + samples * SPEEDS[rank])
        path = str(folder / f"saved-{count}")
        if resume:
            training.load(path)
        save = {} if resume else {Moving.at: path}
        out.append(training.train(rank, 3, save=save, another=count != Moving.counts[-1]))
    return out


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Each loop's results of all ranks, by the number of micro-batches, and the folder with what it left."""

    @cache
    def of(loop):
        folder = tmp_path_factory.mktemp(loop)
        return dict(
            zip(Moving.counts, zip(*run_ranks(_moving, 2, loop, folder, False), strict=True), strict=True)
        ), folder

    return of


every_count = pytest.mark.parametrize("count", Moving.counts)


def one_process(results, count):
    """Weights of one process that follows the same batches and rates."""
    model, data, used = network(), Points(N), iter(results[0]["used"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches, epochs = global_batches(results), [epoch for epoch, _, _ in results[0]["seen"]]
    steps = [step for _, step, _ in results[0]["seen"]]
    for i, indices in enumerate(batches):
        (nn.functional.mse_loss(model(data.x[indices]), data.y[indices]) / count).backward()
        if (steps[i] + 1) % count == 0 or i + 1 == len(batches) or epochs[i + 1] != epochs[i]:
            optimizer.param_groups[0]["lr"] = next(used)
            optimizer.step()
            optimizer.zero_grad()
    assert next(used, None) is None
    return flat(model)


@pytest.mark.alone
@every_count
@every_loop
def test_a_decision_changes_the_next_total_and_the_rate(loop, count, moved):
    results = moved(loop)[0][count]
    first = results[0]
    assert [sum(sizes) * count for _, _, sizes in first["history"]] == [8, 12]
    epoch, step, _ = first["history"][1]
    assert epoch == 1
    assert 10 * count <= step <= 11 * count  # a loader may have fetched one batch ahead
    sizes = [len(batch) for batch in global_batches(results)]
    before = 30 * count + step
    assert set(sizes[:before]) == {8 // count}
    assert sizes[before] == 12 // count
    assert set(sizes[-20 * count :]) == {12 // count}
    gains = [1.0] * (before // count) + [1.5] * (len(first["used"]) - before // count)
    assert first["scheduled"] == pytest.approx([LR * 0.99**k for k in range(len(gains))])
    assert first["used"] == pytest.approx([rate * gain for rate, gain in zip(first["scheduled"], gains, strict=True)])
    assert first["rates"] == pytest.approx([LR * 0.99 ** len(gains)] * 2)
    assert first["steps"] == pytest.approx(sum(gains))
    assert [result["gain"] for result in results] == [1.5, 1.5]


@pytest.mark.alone
@every_count
@every_loop
def test_every_sample_once_an_epoch_and_the_weights_of_one_process(loop, count, moved):
    results = moved(loop)[0][count]
    for epoch in range(3):
        taken = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        assert taken == list(range(N))
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    assert results[0]["used"] == results[1]["used"]
    np.testing.assert_allclose(results[0]["weights"], one_process(results, count), rtol=1e-12, atol=1e-13)


@pytest.mark.alone
@every_loop
def test_metrics_and_candidates(loop, moved):
    results, folder = moved(loop)
    for result in results[1]:
        shown = [metrics for metrics in result["metrics"] if "hetero/goodput" in metrics]
        assert [metrics["hetero/lr_gain"] for metrics in shown][-1] == 1.5
        assert all(metrics["hetero/efficiency"] == 1.0 for metrics in shown)  # noise alone
        predicted = [metrics for metrics in shown if "hetero/predicted_step_time" in metrics]
        assert predicted
        assert all(metrics["hetero/predicted_step_time_error"] > 0.0 for metrics in predicted)
    assert results[1][0]["metrics"] == results[1][1]["metrics"]
    assert {8, 12} <= set(results[1][0]["candidates"])
    assert results[1][1]["candidates"] == []
    rows = (folder / "logs-1-False" / "hetero_candidates.csv").read_text().splitlines()
    running = [row.split(",")[:2] for row in rows if row.endswith(",1")]
    assert ["40", "12"] in running


def test_a_pass_that_begins_with_a_known_total_takes_over_its_number_of_micro_batches():
    engine = alone()
    adaptation = Adaptation(engine)
    adaptation._total = AdaptiveTotal(64, "sqrt")  # with one worker there is none
    adaptation.starts(GoodputPlanner(64, initial_total=4, accumulation=3))
    assert engine.accumulation == 3


def test_the_noise_scale_is_reported_when_it_has_changed():
    engine = alone()
    adaptation = Adaptation(engine)
    adaptation._noise = WorkersNoise(engine.hook_state, engine.control)  # with one worker there is none
    adaptation._noise.take_over(INFINITE)
    shown = [adaptation.follow(None, None)[1] for _ in range(2)]
    adaptation._noise.take_over(INFINITE.update(trace=1.0, global_sq_norm=1.0, total_batch_size=16))
    assert [bool(metrics) for metrics in (*shown, adaptation.follow(None, None)[1])] == [True, False, True]


@pytest.mark.alone
@every_loop
def test_resume_in_the_middle_of_an_epoch_goes_on_with_total_and_rate(loop, moved):
    whole, folder = moved(loop)
    rest = dict(zip(Moving.counts, zip(*run_ranks(_moving, 2, loop, folder, True), strict=True), strict=True))
    for count in Moving.counts:
        for full, part in zip(whole[count], rest[count], strict=True):
            assert part["seen"] == full["seen"][Moving.at * count :]
            assert part["used"] == full["used"][Moving.at :]
            assert part["scheduled"] == full["scheduled"][Moving.at :]
            assert part["steps"] == pytest.approx(full["steps"])
            np.testing.assert_array_equal(part["weights"], full["weights"])


TICK = 2.0**-12
BREAKS = (16, 24, 25)
"""Optimizer steps until a checkpoint: in the middle of an epoch, before and between sync rounds, and at its end."""


def _scripted(rank, loop, folder, resume, breaks=BREAKS, **ahead):
    """A run whose time is told, not measured, in ticks that add up exactly; its noise is what it is."""
    now = [0.0]
    told = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    clock.time = observer.time = sync_rounds.time = told
    parts.cpu_quota = lambda: None
    settings = {"max_total_batch_size": 64}
    LOOPS[loop].ahead = ahead
    training = LOOPS[loop](settings, 4, dataset=Points(256 if loop == "accelerate" else 264))  # its loader is ahead

    def pace(rank, samples):
        now[0] += (16 + samples * (1, 4)[rank]) * TICK

    training.pace = pace
    if resume:
        training.load(str(folder / f"{resume}"))
    save = {} if resume else {at: str(folder / f"{at}") for at in breaks}
    return training.train(rank, 4, save=save)


def same_steps(full, part, at):
    """Number of steps after the break in which a run without it and the rest of one with it train on the same."""
    rest = full["seen"][at:]
    return next((n for n, (one, other) in enumerate(zip(rest, part["seen"], strict=False)) if one != other), len(rest))


@every_loop
def test_a_resumed_run_keeps_total_rates_and_noise_and_decides_by_new_times(loop, tmp_path):
    """What is decided on times of another process is not repeated: the next decision comes after eight new steps."""
    whole = run_ranks(_scripted, 2, loop, tmp_path, 0)
    assert len({sum(sizes) for _, _, sizes in whole[0]["history"]}) > 2
    ends = [step for step, (epoch, first, _) in enumerate(whole[0]["seen"]) if epoch and not first]
    assert BREAKS[-1] in ends
    last, total = whole[0]["metrics"][-1], sum(whole[0]["history"][-1][2])
    gain = lr_gain("adascale", total, 8, last["hetero/grad_variance"], last["hetero/grad_sq_norm"])  # "auto", for SGD
    assert last["hetero/lr_gain"] == pytest.approx(gain) != 1.0
    for at in BREAKS:
        rest = run_ranks(_scripted, 2, loop, tmp_path, at)
        assert rest[0]["history"] == rest[1]["history"]
        assert rest[0]["history"][0] in whole[0]["history"], "the plan of the checkpoint"
        assert any(sum(sizes) != sum(rest[0]["history"][0][2]) for _, _, sizes in rest[0]["history"]), "decides"
        for full, part in zip(whole, rest, strict=True):
            until = same_steps(full, part, at)
            assert until > 0 or at in ends  # where an epoch begins, the run without a break decides at once
            now = slice(0, 0 if at in ends else 1)  # then, a sync round of the run without a break moves its rate
            assert part["used"][now] == pytest.approx(full["used"][at:][now], rel=1e-12)
            first = next((n for n, index in enumerate(part["seen"]) if index[:2] >= part["history"][1][:2]), None)
            assert first is None or first >= 8


def _ahead(rank, loop, folder, resume):
    return _scripted(rank, loop, folder, resume, breaks=(10,), num_workers=1, prefetch_factor=5)


def test_a_plan_that_was_yet_to_come_comes_after_a_resume(tmp_path):
    """The ranks have agreed on it after eight steps, for the first step whose batch the loader had not fetched."""
    whole = run_ranks(_ahead, 2, "plain", tmp_path, 0)
    epoch, step, sizes = whole[0]["history"][1]
    assert (epoch, step) > (0, 10)
    for full, part in zip(whole, run_ranks(_ahead, 2, "plain", tmp_path, 10), strict=True):
        assert same_steps(full, part, 10) > step - 10 + 1
        assert part["history"][1] == (epoch, step, sizes)


# what is refused

BAD = [
    ({"max_total_batch_size": 0}, ValueError, "max_total_batch_size=0 is too small"),
    ({"max_total_batch_size": 2.5}, TypeError, "max_total_batch_size=2.5 is a float"),
    ({"max_total_batch_size": 8, "min_total_batch_size": 9}, ValueError, "min_total_batch_size=9 is above max_total"),
    ({"max_total_batch_size": 8, "lr_scaling": "cubic"}, ValueError, "lr_scaling='cubic' is unknown; allowed are 'au"),
    ({"min_total_batch_size": 8}, ValueError, "min_total_batch_size=8 has no meaning where the total stays"),
    ({"lr_scaling": "sqrt"}, ValueError, "lr_scaling='sqrt' has no meaning where the total stays"),
    ({"max_total_batch_size": 8, "policy": "pid"}, ValueError, "policy='pid' says otherwise. Give one of them"),
    ({"max_total_batch_size": 8, "policy": "even"}, ValueError, "policy='even' says otherwise"),
    ({"max_total_batch_size": 8, "local_batch_sizes": [6, 2]}, ValueError, r"local_batch_sizes=.* says otherwise"),
    ({"noise_scale": "yes"}, TypeError, "noise_scale='yes' must be True or False"),
]


@pytest.mark.parametrize("takes", [HeteroConfig, FabricStrategy, HeteroPlugin])
@pytest.mark.parametrize(("settings", "error", "says"), BAD, ids=str)
def test_settings_that_are_refused(takes, settings, error, says):
    with pytest.raises(error, match=says):
        takes(**settings)


@pytest.mark.parametrize(
    ("settings", "callback"),
    [
        ({"max_total_batch_size": 8}, "AdaptiveBatchCallback"),
        ({"min_total_batch_size": 8}, "AdaptiveBatchCallback"),
        ({"lr_scaling": "sqrt"}, "AdaptiveBatchCallback"),
        ({"noise_scale": True}, "GNSCallback"),
    ],
    ids=str,
)
def test_under_the_trainer_there_are_callbacks(settings, callback):
    (name,) = settings
    with pytest.raises(TypeError, match=rf"has no argument {name}, .*Trainer\(callbacks=\[{callback}"):
        HeteroDDPStrategy(**settings)


def _outside(rank, loop, settings):
    training = LOOPS[loop]({"replan": 3, **settings}, 2, dataset=Points(48), accumulate=2)
    training.train(rank, 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_total_batch_size": 3}, "the initial total batch is 4 samples, outside max_total_batch_size=3"),
        ({"max_total_batch_size": 7}, "the initial total batch is 8 samples, outside max_total_batch_size=7"),
        (
            {"max_total_batch_size": 64, "min_total_batch_size": 9},
            "the initial total batch is 8 samples, outside min_total_batch_size=9",
        ),
    ],
    ids=["one micro-batch above", "above", "below"],
)
@every_loop
def test_an_initial_total_outside_the_bounds_is_an_error_on_every_rank(loop, settings, says):
    errors = run_ranks(_outside, 2, loop, settings, expect_errors=True, timeout=30)
    assert [(rank, name) for rank, name, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all(says in text for _, _, text in errors)


def _not_led(rank, loop, rule):
    settings = {"max_total_batch_size": 16, "replan": 3, "lr_scaling": rule}
    training = LOOPS[loop](settings, 4, dataset=Points(48))
    training.session.lead([])
    return training.train(rank, 1)["used"]


@every_loop
def test_a_rate_that_would_not_follow_is_an_error_on_every_rank(loop):
    errors = run_ranks(_not_led, 2, loop, "auto", expect_errors=True, timeout=30)
    assert [(rank, name) for rank, name, _ in errors] == [(0, "RuntimeError"), (1, "RuntimeError")]
    assert all("no optimizer is known whose learning rate would follow" in text for *_, text in errors)
    for used in run_ranks(_not_led, 2, loop, "none"):
        assert used == pytest.approx([LR * 0.99**step for step in range(6)])
