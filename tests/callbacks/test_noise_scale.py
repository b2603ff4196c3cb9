"""Noise scale while training: the numbers are those of the gradients, for any split; logger and checkpoint get them."""

import csv
import inspect
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback, HeteroDDPStrategy
from lightning_hetero.callbacks._gns.sources import source_of
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.noise.window_sums import NOISE_FIELDS
from lightning_hetero.core.noise.estimators import estimate_from_two_sizes, estimate_noise_scale
from lightning_hetero.core.noise.running import RunningNoiseScale
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of

N, STEPS = 48, 4
HORIZON = 1e9  # all steps count alike


def model():
    """Parameters stay where they are, so that gradients of every batch can be computed afterwards."""
    return Regressor(lr=0.0, momentum=0.0)


def gradient(indices):
    module, data = model(), Points(N)
    loss = module.loss((data.x[indices], data.y[indices], None))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def groups_of(results):
    """Samples of every rank in every step of the first epoch."""
    return [[r["seen"][step][2] for r in results] for step in range(STEPS)]


def expected(steps, method):
    """What one process that has the same samples in micro-batches estimates."""
    running = RunningNoiseScale(horizon=HORIZON)
    for groups in steps:
        sizes = [len(g) for g in groups]
        norms = [float(gradient(g).square().sum()) if g else 0.0 for g in groups]
        whole = float(gradient([i for g in groups for i in g]).square().sum())
        estimate = estimate_noise_scale(norms, whole, sizes, method=method)
        seen = estimate.grad_sq_norm + estimate.trace / sum(sizes)  # |g|^2, unless the weights are the printed ones
        running = running.update(trace=estimate.trace, global_sq_norm=seen, total_batch_size=sum(sizes))
    return running


def expected_windows(windows, known=True):
    """The same with micro-batches: of each window, the groups of all ranks in each micro-batch.

    What is known of the noise scale weights the parts of an estimate; before the first message, nothing is.
    """
    running = RunningNoiseScale(horizon=HORIZON)
    for window in windows:
        everyone = [sum(groups, []) for groups in zip(*window, strict=True)]
        sizes, first = [len(g) for g in everyone], [len(g) for g in window[0]]
        norms = [float(gradient(g).square().sum()) for g in everyone]
        whole = float(gradient(sum(everyone, [])).square().sum())
        parts = [] if len(sizes) == 1 else [(len(sizes) - 1, estimate_noise_scale(norms, whole, sizes).trace)]
        phi = running.noise_scale if known and not math.isnan(running.noise_scale) else math.inf
        for b, n, g, norm in zip(first, sizes, window[0], norms, strict=True):
            if n > b:
                apart = 1 / b - 1 / n
                within = (float(gradient(g).square().sum()) - norm) / apart
                parts.append((apart / (1 / b + 1 / n + 2 / phi), within))
        trace = sum(freedom * s for freedom, s in parts) / sum(freedom for freedom, _ in parts)
        running = running.update(trace=trace, global_sq_norm=whole, total_batch_size=sum(sizes))
    return running


def windows_of(results, count):
    """Micro-batches of one epoch in windows of ``count``; the last may be cut short."""
    micro = [[r["seen"][s][2] for r in results] for s in range(len(results[0]["seen"]))]
    return [micro[i : i + count] for i in range(0, len(micro), count)]


def count_messages():
    """Lengths of the messages that ranks gather from now on; to be called in a forked process."""
    lengths, gather = [], ControlPlane.gather

    def counted(self, values):
        lengths.append(values.size)
        return gather(self, values)

    ControlPlane.gather = counted
    return lengths


class Keep(Callback):
    def on_train_end(self, trainer, pl_module):
        gns = next(c for c in trainer.callbacks if isinstance(c, GNSCallback))
        pl_module.result = gns.estimate.state_dict()


def _run(rank, strategy, ranks, method, kwargs):
    kwargs = {"dataset": Points(N), "model": model(), "max_epochs": 1, **kwargs}
    settings = {name: kwargs.pop(name) for name in ("every_n_steps", "preconditioner") if name in kwargs}
    gns = GNSCallback(method=method, horizon=HORIZON, **settings)
    callbacks = [gns, Keep(), *kwargs.pop("callbacks", [])]
    module, messages = kwargs["model"], count_messages()
    out = fit(rank, strategy, ranks, kwargs.pop("batch_size", 4), callbacks=callbacks, **kwargs)
    return {**out, "estimate": module.result, "messages": messages}


@pytest.mark.parametrize("method", ["pooled", "mean", "cannikin"])
@pytest.mark.parametrize("sizes", [(9, 3), (6, 6), (5, 4, 2, 1), (8, 0, 4)], ids=str)
def test_estimate_is_that_of_the_workers_gradients(sizes, method):
    strategy = {"local_batch_sizes": sizes, "replan": STEPS}
    results = run_ranks(_run, len(sizes), strategy, len(sizes), method, {})
    reference = expected(groups_of(results), method)
    for result in results:
        assert result["estimate"]["samples"] == pytest.approx(N)
        assert result["estimate"]["trace_sum"] == pytest.approx(reference.trace_sum, rel=1e-9)
        assert result["estimate"]["sq_norm_sum"] == pytest.approx(reference.sq_norm_sum, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "ranks", "count"),
    [("hetero_ddp", 2, 2), ("hetero_ddp", 2, 3), ("hetero_ddp", 1, 3), ("ddp", 2, 3)],
    ids=str,
)
def test_micro_batches_of_a_window_are_seen(name, ranks, count):
    """Eight batches: three at a time, the end of the epoch cuts the last window short.

    Each has a message of its own with ``hetero_ddp``; plain ``ddp`` has one at the end.
    """
    split = {2: (4, 2), 1: (6,)}[ranks]
    kwargs = {"accumulate_grad_batches": count, "batch_size": 6 // ranks}
    strategy = {"local_batch_sizes": split, "replan": 1} if name == "hetero_ddp" else name
    results = run_ranks(_run, ranks, strategy, ranks, "pooled", kwargs)
    windows = windows_of(results, count)
    assert [len(w) for w in windows] == {2: [2] * 4, 3: [3, 3, 2]}[count]
    reference = expected_windows(windows, known=name == "hetero_ddp")
    for result in results:
        assert result["estimate"]["samples"] == pytest.approx(N)
        assert result["estimate"]["trace_sum"] == pytest.approx(reference.trace_sum, rel=1e-6)
        assert result["estimate"]["sq_norm_sum"] == pytest.approx(reference.sq_norm_sum, rel=1e-6)
        assert result["estimate"]["biased"] is False


MANY, TOGETHER = 240, 12


def slanted():
    """Points with a signal in them: the model is wrong about all of them in one direction."""
    data = Points(MANY)
    data.y += 1.5
    return data


def truth():
    """``tr(Sigma)`` and ``|G|^2`` as batches without repetition see them, from the gradient of every sample."""
    module, data = model(), slanted()
    each = []
    for i in range(MANY):
        loss = module.loss((data.x[i : i + 1], data.y[i : i + 1], None))
        each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    each = torch.stack(each)
    trace = float(each.var(dim=0).sum())
    return trace, float(each.mean(dim=0).square().sum()) - trace / MANY


@pytest.fixture(scope="module")
def everywhere():
    """The same samples in the same order on 1, 2 and 4 workers, uneven ones, and in micro-batches of one."""
    common = {"dataset": slanted(), "max_epochs": 4}
    often = {"replan": MANY // TOGETHER}
    runs = {
        "one": ("hetero_ddp", 1, {"batch_size": 4, "accumulate_grad_batches": 3}),
        "two": ({"local_batch_sizes": (9, 3), **often}, 2, {"batch_size": 6}),
        "two, in parts": ({"local_batch_sizes": (4, 2), **often}, 2, {"batch_size": 3, "accumulate_grad_batches": 2}),
        "four": ({"local_batch_sizes": (6, 3, 2, 1), **often}, 4, {"batch_size": 3}),
    }
    return {
        name: run_ranks(_run, ranks, strategy, ranks, "pooled", {**common, **kwargs})[0]["estimate"]
        for name, (strategy, ranks, kwargs) in runs.items()
    }


def test_workers_and_micro_batches_agree(everywhere):
    """With the truth, not with each other: of a window only the first micro-batch and the whole are seen.

    So one process with micro-batches sees other parts of the same noise than workers do. That the estimates of workers
    and of micro-batches are equal where the same norms are known is ``test_micro_batches_count_as_workers``.
    """
    trace, grad_sq_norm = truth()
    squares = []
    for state in everywhere.values():
        estimate = RunningNoiseScale.from_state_dict(state)
        assert estimate.samples == pytest.approx(4 * MANY)
        assert estimate.inverse_sum / estimate.weight == pytest.approx(1 / TOGETHER)
        assert estimate.trace == pytest.approx(trace, rel=0.15)
        assert estimate.grad_sq_norm == pytest.approx(grad_sq_norm, rel=0.05)
        assert not estimate.biased
        squares.append(estimate.sq_norm_sum / estimate.weight)
    assert squares == pytest.approx([squares[0]] * len(squares), rel=1e-5)  # of the very same batches


def test_a_summed_loss_has_the_estimate_of_its_mean():
    summed = Regressor(reduction="sum", lr=0.0, momentum=0.0)
    strategy = {"local_batch_sizes": (9, 3), "replan": STEPS, "loss_reduction": "sum"}
    results = run_ranks(_run, 2, strategy, 2, "pooled", {"model": summed})
    reference = expected(groups_of(results), "pooled")
    assert results[0]["estimate"]["trace_sum"] == pytest.approx(reference.trace_sum, rel=1e-6)
    assert results[0]["estimate"]["sq_norm_sum"] == pytest.approx(reference.sq_norm_sum, rel=1e-6)


def _messages(rank, callbacks):
    messages = count_messages()
    options = {"local_batch_sizes": (9, 3), "replan": STEPS}
    fit(rank, options, 2, 6, dataset=Points(N), model=model(), max_epochs=3, callbacks=callbacks)
    return messages


def test_it_rides_with_the_message_of_the_observations():
    """One message an interval with the callback and without, of one length; in the end a short one about weights."""
    with_it, without = (run_ranks(_messages, 2, callbacks) for callbacks in ([GNSCallback()], []))
    assert with_it == without
    *looks, last = with_it[0]
    assert 1 <= len(looks) <= 3
    assert last < min(looks)


def test_every_n_steps():
    kwargs = {"every_n_steps": 2}
    results = run_ranks(_run, 2, {"local_batch_sizes": (9, 3), "replan": STEPS}, 2, "pooled", kwargs)
    assert results[0]["estimate"]["samples"] == pytest.approx(N / 2)


def test_plain_ddp_gives_the_same_numbers_as_equal_batches():
    kwargs = {"batch_size": 6, "max_epochs": 14}  # 56 steps: one message after 50
    plain = run_ranks(_run, 2, "ddp", 2, "pooled", kwargs)
    steps = [[r["seen"][s][2] for r in plain] for s in range(50)]
    assert plain[0]["estimate"]["samples"] == pytest.approx(600)
    assert plain[1]["estimate"] == plain[0]["estimate"]
    assert [result["messages"] for result in plain] == [[NOISE_FIELDS]] * 2
    assert plain[0]["estimate"]["trace_sum"] == pytest.approx(expected(steps, "pooled").trace_sum, rel=1e-6)


class Unlike(Points):
    """Each rank has its own number of samples in a batch, which plain DDP knows nothing of."""

    def __getitems__(self, indices):
        rank = torch.distributed.get_rank()
        return [self[i] for i in indices[: len(indices) - rank]]


@pytest.mark.parametrize("dataset", [Points(N), Unlike(N)], ids=["equal batches", "unequal ones"])
def test_plain_ddp_too_short_for_a_message(dataset, tmp_path):
    """It has an estimate at its end, unless its batches are none to compare."""
    logger = CSVLogger(str(tmp_path), name="", version="")
    plain = run_ranks(_run, 2, "ddp", 2, "pooled", {"batch_size": 6, "dataset": dataset, "logger": logger})
    steps = [[r["seen"][s][2] for r in plain] for s in range(STEPS)]
    assert {len(groups[1]) for groups in steps} == {5 if isinstance(dataset, Unlike) else 6}
    for result in plain:
        assert result["estimate"]["samples"] == (0 if isinstance(dataset, Unlike) else N)
    if not isinstance(dataset, Unlike):
        assert plain[0]["estimate"]["trace_sum"] == pytest.approx(expected(steps, "pooled").trace_sum, rel=1e-6)
        assert "hetero/noise_scale" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.parametrize("strategy", ["hetero_ddp", "auto"])
def test_single_worker_with_accumulation_takes_two_sizes(strategy):
    kwargs = {"batch_size": 4, "accumulate_grad_batches": 3}
    (result,) = run_ranks(_run, 1, strategy, 1, "pooled", kwargs)
    running = RunningNoiseScale(horizon=HORIZON)
    for w in range(4):
        micro = [result["seen"][3 * w + k][2] for k in range(3)]
        small, big = (float(gradient(g).square().sum()) for g in (micro[0], sum(micro, [])))
        estimate = estimate_from_two_sizes(small, 4, big, 12)
        running = running.update(trace=estimate.trace, global_sq_norm=big, total_batch_size=12)
    assert result["estimate"]["trace_sum"] == pytest.approx(running.trace_sum, rel=1e-9)
    assert result["estimate"]["biased"] is False


def test_single_worker_without_accumulation_is_flagged_biased():
    (result,) = run_ranks(_run, 1, "auto", 1, "pooled", {"batch_size": 4})
    assert result["estimate"]["biased"] is True
    assert result["estimate"]["samples"] == pytest.approx(N - 4)


class Poisoned(Regressor):
    """The gradient of rank 1 is NaN in its second step; in its third one element of it is infinite.

    Each rank takes the norm of its own half of the averaged gradient, at whose end the first parameter lies: that of
    the third step is finite for all that rank 0 knows.
    """

    def __init__(self):
        super().__init__(lr=0.0, momentum=0.0)

    def on_fit_start(self):
        super().on_fit_start()
        if self.trainer.global_rank == 1:
            next(self.parameters()).register_hook(self.poisoned)

    def poisoned(self, grad):
        if self.trainer.global_step == 2:
            grad = grad.clone()
            grad.view(-1)[-1] = float("inf")
        return grad

    def loss(self, batch):
        loss = super().loss(batch)
        return loss * float("nan") if self.trainer.global_rank == 1 and self.trainer.global_step == 1 else loss

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().on_before_optimizer_step(optimizer)


@pytest.mark.parametrize("strategy", [{"local_batch_sizes": (9, 3), "replan": STEPS}, "ddp"], ids=["hetero_ddp", "ddp"])
def test_nan_and_inf_in_one_workers_gradient_leave_the_estimate_finite(strategy):
    results = run_ranks(_run, 2, strategy, 2, "pooled", {"model": Poisoned(), "batch_size": 6})
    steps = [groups for step, groups in enumerate(groups_of(results)) if step not in (1, 2)]
    for result in results:
        assert result["estimate"]["skipped"] == 2
        assert result["estimate"]["samples"] == pytest.approx(24)
        assert result["estimate"]["trace_sum"] == pytest.approx(expected(steps, "pooled").trace_sum, rel=1e-6)


def test_logged_under_the_fixed_names(tmp_path):
    kwargs = {"logger": CSVLogger(str(tmp_path), name="", version=""), "max_epochs": 3}
    first, _ = run_ranks(_run, 2, {"local_batch_sizes": (9, 3), "replan": 2}, 2, "pooled", kwargs)
    estimate = RunningNoiseScale.from_state_dict(first["estimate"])
    wanted = {
        "noise_scale": estimate.noise_scale,
        "grad_sq_norm": estimate.grad_sq_norm,
        "grad_variance": estimate.trace,
    }
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    for name, last in wanted.items():
        values = [float(row[f"hetero/{name}"]) for row in rows if row.get(f"hetero/{name}")]
        assert len(values) >= 5
        assert all(value >= 0 for value in values)
        assert values[-1] == pytest.approx(last, rel=1e-6)
        steps = [int(row["step"]) for row in rows if row.get(f"hetero/{name}")]
        assert steps == sorted(set(steps))
        assert 3 * STEPS - 2 <= steps[-1] <= 3 * STEPS


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ({"name": "cat", "x": [torch.tensor(1.0), torch.zeros(2, 5)]}, 2),
        ((torch.zeros(90), torch.zeros(4)), 4),  # values of a sparse matrix, rather than samples
        ("nothing to count", 4),
    ],
)
def test_samples_of_a_batch_are_counted_where_no_plan_tells(batch, size):
    callback, counted = GNSCallback(), []
    callback._source = SimpleNamespace(begin=lambda trainer, samples: counted.append(samples))
    trainer = SimpleNamespace(train_dataloader=SimpleNamespace(batch_size=4))
    callback.on_train_batch_start(trainer, None, batch, 0)
    assert counted == [size]


def test_a_checkpoint_that_knows_of_no_estimate_begins_anew():
    callback = GNSCallback()
    callback.load_state_dict(RunningNoiseScale().update(trace=1, global_sq_norm=1, total_batch_size=8).state_dict())
    assert callback.estimate.samples == 8
    callback.on_load_checkpoint(None, None, {"callbacks": {callback.state_key: {}}})
    assert callback.estimate.samples == 8  # what it knows is loaded after that
    callback.on_load_checkpoint(None, None, {"callbacks": {"Other": {}}})
    assert callback.estimate.samples == 0


def test_estimate_survives_a_checkpoint(tmp_path):
    strategy = {"local_batch_sizes": (9, 3), "replan": 1}
    saving = {"callbacks": [ModelCheckpoint(dirpath=tmp_path)], "enable_checkpointing": True}
    first = run_ranks(_run, 2, strategy, 2, "pooled", saving)
    path = str(next(tmp_path.glob("*.ckpt")))
    again = run_ranks(_run, 2, strategy, 2, "pooled", {"ckpt_path": path, "max_epochs": 2})
    whole = run_ranks(_run, 2, strategy, 2, "pooled", {"max_epochs": 2})
    assert first[0]["estimate"]["samples"] == pytest.approx(N)
    assert again[0]["estimate"]["samples"] == pytest.approx(2 * N)
    assert again[0]["estimate"]["trace_sum"] == pytest.approx(whole[0]["estimate"]["trace_sum"], rel=1e-9)


class Saves(Callback):
    """Saves inside an interval between two messages, and goes on; at a step, or at the end of an epoch."""

    def __init__(self, path, step=None, epoch=None):
        self.path, self.step, self.epoch = path, step, epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [
        ({"local_batch_sizes": (9, 3), "replan": "epoch"}, 2, {}),
        ("hetero_ddp", 1, {"batch_size": 4, "accumulate_grad_batches": 2}),
    ],
    ids=["two workers", "one worker"],
)
def test_resume_inside_an_interval_goes_on_identically(tmp_path, strategy, ranks, more):
    """Every second step is observed, from an odd one on: neither sums nor phase may be lost."""
    path = tmp_path / "inside.ckpt"
    settings = {"every_n_steps": 2, "max_epochs": 2, "batch_size": 6, **more}
    whole = run_ranks(_run, ranks, strategy, ranks, "pooled", {**settings, "callbacks": [Saves(path, step=3)]})
    again = run_ranks(_run, ranks, strategy, ranks, "pooled", {**settings, "ckpt_path": str(path)})
    assert len(again[0]["seen"]) < len(whole[0]["seen"])
    assert whole[0]["estimate"]["samples"] > 0
    for one, other in zip(whole, again, strict=True):
        assert one["estimate"] == pytest.approx(other["estimate"], rel=1e-12)


def test_resume_inside_an_interval_with_plain_ddp(tmp_path):
    """It observes 56 steps, of which a message after the 50th tells; plain DDP resumes exactly at an epoch's end only.

    The checkpoint knows of 28 steps. Without them no message would be sent before the end.
    """
    path, settings = tmp_path / "inside.ckpt", {"max_epochs": 28, "batch_size": 6, "every_n_steps": 2}
    whole = run_ranks(_run, 2, "ddp", 2, "pooled", {**settings, "callbacks": [Saves(path, epoch=13)]})
    again = run_ranks(_run, 2, "ddp", 2, "pooled", {**settings, "ckpt_path": str(path)})
    steps = [[r["seen"][s][2] for r in whole] for s in range(0, 2 * 50, 2)]
    assert whole[0]["estimate"]["trace_sum"] == pytest.approx(expected(steps, "pooled").trace_sum, rel=1e-6)
    for one, other in zip(whole, again, strict=True):
        assert (len(one["seen"]), len(other["seen"])) == (112, 56)
        assert one["estimate"]["samples"] == 50 * 12
        assert one["estimate"] == pytest.approx(other["estimate"], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"every_n_steps": 0}, ValueError, ">= 1"),
        ({"every_n_steps": 1.5}, TypeError, "float"),
        ({"method": "best"}, ValueError, "'pooled', 'cannikin', 'mean'"),
        ({"horizon": 0}, ValueError, "horizon"),
        ({"preconditioner": "rmsprop"}, ValueError, "preconditioner='rmsprop' is unknown; allowed are None, 'adam'"),
    ],
)
def test_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        GNSCallback(**arguments)


# several optimizers


class Two(Regressor):
    """Each half of the network has an optimizer of its own; both step on every batch."""

    def __init__(self, steps_every=1):
        super().__init__(lr=0.0, momentum=0.0)
        self.automatic_optimization, self.steps_every = False, steps_every

    def on_before_optimizer_step(self, optimizer):
        """Keeps nothing: each optimizer has other gradients."""

    def configure_optimizers(self):
        halves = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.SGD(half, lr=0.0) for half in halves]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.steps_every == 0:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


def test_two_optimizers_on_one_worker_are_as_one():
    one, two = (run_ranks(_run, 1, "auto", 1, "pooled", {"batch_size": 4, "model": m})[0] for m in (model(), Two()))
    assert one["estimate"]["samples"] == pytest.approx(N - 4)
    assert two["estimate"] == pytest.approx(one["estimate"], rel=1e-9)


def test_two_optimizers_on_two_workers_are_as_one():
    strategy = {"local_batch_sizes": (9, 3), "replan": STEPS}
    results = run_ranks(_run, 2, strategy, 2, "pooled", {"model": Two()})
    reference = expected(groups_of(results), "pooled")
    assert results[0]["estimate"]["trace_sum"] == pytest.approx(reference.trace_sum, rel=1e-9)


def _accumulating_by_hand(rank):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("lightning_hetero").addHandler(handler)
    return _run(rank, "auto", 1, "pooled", {"batch_size": 4, "model": Two(steps_every=2)})["estimate"], heard


def test_two_optimizers_that_accumulate_on_one_worker_are_told_that_nothing_is_seen():
    ((estimate, heard),) = run_ranks(_accumulating_by_hand, 1)
    assert estimate["samples"] == 0
    assert len([text for text in heard if "several optimizers accumulate gradients over 2 batches" in text]) == 1


# where gradients cannot be seen


def test_a_strategy_without_a_hook_is_refused():
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace())
    with pytest.raises(MisconfigurationException, match="SimpleNamespace has none. Use strategy='hetero_ddp' or 'ddp'"):
        source_of(trainer, method="pooled", every_n_steps=1, horizon=1.0)


def _with_a_hook(rank):
    return _run(rank, DDPStrategy(ddp_comm_hook=fp16_compress_hook), 2, "pooled", {})


def test_plain_ddp_with_a_hook_of_its_own_is_an_error_on_every_rank():
    errors = run_ranks(_with_a_hook, 2, expect_errors=True, timeout=30)
    assert [(rank, name) for rank, name, _ in errors] == [(r, "MisconfigurationException") for r in range(2)]
    assert all("the strategy has one of its own" in text for _, _, text in errors)


# as Adam scales it

FIRST = 10  # steps that fill Adam's second moments


class WithAdam(Regressor):
    """Gradients fill the second moments, parameters stay where they are."""

    def __init__(self, cls=torch.optim.Adam, **kwargs):
        super().__init__(lr=0.0, **kwargs)
        self.cls = cls

    def configure_optimizers(self):
        return self.cls(self.parameters(), lr=0.0)


def preconditioned(steps):
    """By hand, of the groups of samples of every optimizer step: each step's squared norms, before its own moment."""
    moment, beta, eps = 0.0, 0.999, 1e-8
    for number, groups in enumerate(steps):
        whole = gradient([i for g in groups for i in g])
        if number >= FIRST:
            scale = 1.0 / ((moment / (1 - beta**number)).sqrt() + eps)
            norms = [float((scale * gradient(g)).square().sum()) for g in groups]
            yield groups, norms, float((scale * whole).square().sum())
        moment = beta * moment + (1 - beta) * whole**2


def expected_preconditioned(steps):
    running = RunningNoiseScale(horizon=HORIZON)
    for groups, norms, whole in preconditioned(steps):
        sizes = [len(g) for g in groups]
        estimate = estimate_noise_scale(norms, whole, sizes)
        running = running.update(trace=estimate.trace, global_sq_norm=whole, total_batch_size=sum(sizes))
    return running


def every_step(results):
    return [[r["seen"][s][2] for r in results] for s in range(len(results[0]["seen"]))]


def assert_is(result, reference):
    for name in ("samples", "trace_sum", "sq_norm_sum", "inverse_sum"):
        assert result["estimate"][name] == pytest.approx(getattr(reference, name), rel=1e-4)


@pytest.mark.parametrize(
    ("preconditioner", "options"),
    [("adam", {}), ("auto", {}), ("adam", {"bucket_cap_mb": 1e-4}), ("adam", {"gradient_as_bucket_view": True})],
    ids=["adam", "auto", "many buckets", "bucket views"],
)
def test_preconditioned_estimate_is_that_of_the_workers_gradients(preconditioner, options):
    strategy = {"local_batch_sizes": (9, 3), "replan": STEPS, **options}
    kwargs = {"model": WithAdam(), "max_epochs": 4, "preconditioner": preconditioner}
    results = run_ranks(_run, 2, strategy, 2, "pooled", kwargs)
    reference = expected_preconditioned(every_step(results))
    assert reference.samples == 6 * 12
    for result in results:
        assert_is(result, reference)
    plain = RunningNoiseScale.from_state_dict(results[0]["estimate"])
    assert plain.trace != pytest.approx(expected(every_step(results)[FIRST:], "pooled").trace, rel=0.5)


def test_preconditioned_estimate_with_plain_ddp():
    kwargs = {"model": WithAdam(torch.optim.AdamW), "max_epochs": 15, "batch_size": 6, "preconditioner": "adam"}
    results = run_ranks(_run, 2, "ddp", 2, "pooled", kwargs)
    assert_is(results[1], expected_preconditioned(every_step(results)))


def test_preconditioned_estimate_of_a_single_worker_with_accumulation():
    kwargs = {"batch_size": 2, "accumulate_grad_batches": 2, "model": WithAdam(), "preconditioner": "auto"}
    (result,) = run_ranks(_run, 1, "hetero_ddp", 1, "pooled", kwargs)
    micro = [indices for _, _, indices in result["seen"]]
    running = RunningNoiseScale(horizon=HORIZON)
    for _, norms, whole in preconditioned(zip(micro[::2], micro[1::2], strict=True)):
        estimate = estimate_from_two_sizes(norms[0], 2, whole, 4)
        running = running.update(trace=estimate.trace, global_sq_norm=whole, total_batch_size=4)
    assert running.samples == 2 * 4
    assert_is(result, running)


def test_preconditioned_estimate_of_a_single_worker_by_successive_steps():
    kwargs = {"batch_size": 4, "model": WithAdam(), "preconditioner": "adam", "max_epochs": 2}
    (result,) = run_ranks(_run, 1, "auto", 1, "pooled", kwargs)
    steps = [indices for _, _, indices in result["seen"]]
    moment, running = 0.0, RunningNoiseScale(horizon=HORIZON)
    for number, indices in enumerate(steps):
        if number >= FIRST:
            scale = 1.0 / ((moment / (1 - 0.999**number)).sqrt() + 1e-8)
            now, before = scale * gradient(indices), scale * gradient(steps[number - 1])
            one, both = (now.square().sum() + before.square().sum()) / 2, ((now + before) / 2).square().sum()
            estimate = estimate_from_two_sizes(float(one), 4, float(both), 8, biased=True)
            running = running.update(
                trace=estimate.trace, global_sq_norm=float(both), total_batch_size=8, steps=0.5, biased=True
            )
        moment = 0.999 * moment + 0.001 * gradient(indices) ** 2
    assert_is(result, running)


@pytest.mark.parametrize("preconditioner", ["auto", None], ids=["auto, and SGD", "none, and Adam"])
def test_gradients_are_taken_as_they_are(preconditioner):
    strategy, optimizer = (
        {"local_batch_sizes": (9, 3), "replan": STEPS},
        {} if preconditioner else {"model": WithAdam()},
    )
    results = run_ranks(_run, 2, strategy, 2, "pooled", {"preconditioner": preconditioner, **optimizer})
    reference = expected(groups_of(results), "pooled")
    assert results[0]["estimate"]["trace_sum"] == pytest.approx(reference.trace_sum, rel=1e-9)


@pytest.mark.parametrize(("strategy", "ranks"), [("hetero_ddp", 2), ("ddp", 2), ("auto", 1)])
def test_second_moments_that_are_not_there_are_an_error_on_every_rank(strategy, ranks):
    errors = run_ranks(
        _run, ranks, strategy, ranks, "pooled", {"preconditioner": "adam"}, expect_errors=True, timeout=30
    )
    assert [(rank, name) for rank, name, _ in errors] == [(r, "MisconfigurationException") for r in range(ranks)]
    for _, _, text in errors:
        assert "reads Adam's second moments, which SGD has not. Use preconditioner='auto' or None" in text


KEPT = {
    "plain": ({}, {}),
    "as Adam scales it, with accumulation": ({"preconditioner": "adam"}, {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("setting", list(KEPT))
def test_gradients_are_not_copied_with_several_workers(setting):
    """Nothing is kept per parameter: norms of a few steps wait as scalars, and then their sums."""
    small, large = (run_ranks(_kept, 2, features, *KEPT[setting]) for features in (5, 500))
    assert small == large
    assert max(np.concatenate(small)) <= 3
    assert sum(small[0]) <= 3 + 2 * 32


def _kept(rank, features, settings, more):
    """Sizes of all tensors that live on after training because of the collector, which the optimizers' own are not."""

    kept = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            engine = trainer.strategy.engine
            owned = [*pl_module.parameters(), *(p.grad for p in pl_module.parameters())]
            owned += [t for o in trainer.optimizers for state in o.state.values() for t in tensors_in(state)]
            alive = [t for part in (engine.noise, engine.hook_state) for t in tensors_in(part)]
            if engine.noise.sums.steps > 1:
                kept[:] = [t.numel() for t in alive if not any(t is other for other in owned)]

    cls = WithAdam if "preconditioner" in settings else Regressor
    module = cls(features=features)
    arguments = {"dataset": Points(N, features), "callbacks": [GNSCallback(**settings), Count()], "max_epochs": 9}
    options = {"local_batch_sizes": (9, 3), "replan": "epoch"}
    fit(rank, options, 2, 6, model=module, **arguments, **more)
    assert kept, "no step has waited"
    return kept


def tensors_in(value, depth=6):
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | bytes):
        return []
    inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    inside = inside or (vars(value).values() if hasattr(value, "__dict__") and not inspect.isroutine(value) else ())
    return [t for v in inside for t in tensors_in(v, depth - 1)]


def _scaled(rank, strategy, scaled, ranks, more):
    callback = GNSCallback()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) if scaled else None
    plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]} if scaled else {}
    model, data = Regressor(dtype=torch.float32, lr=0.01), Points(160, dtype=torch.float32)
    fit(rank, strategy, ranks, 8, model=model, dataset=data, callbacks=[callback], max_epochs=1, **plugins, **more)
    return callback.estimate


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [
        ({"local_batch_sizes": [12, 4], "replan": 5}, 2, {}),
        ("ddp", 2, {}),
        ("auto", 1, {"accumulate_grad_batches": 2}),
    ],
    ids=["hetero_ddp", "ddp", "one worker"],
)
def test_norms_are_those_without_the_factor_of_a_gradient_scaler(strategy, ranks, more):
    plain, scaled = (run_ranks(_scaled, ranks, strategy, flag, ranks, more)[0] for flag in (False, True))
    assert plain.samples > 0
    assert scaled.samples == plain.samples
    assert scaled.skipped == 0
    assert scaled.trace == pytest.approx(plain.trace, rel=0.03)
    assert scaled.grad_sq_norm == pytest.approx(plain.grad_sq_norm, rel=0.03, abs=0.03 * plain.trace / 16)


class Fails(Regressor):
    """Fails in a backward pass, with the norm of one bucket taken."""

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == 1:
            parameter = next(self.parameters())
            parameter.register_hook(lambda gradient: 1 / 0)


def _again(rank, another):
    """A training that fails, and one with the same strategy: with the callback again, or without it."""
    strategy = HeteroDDPStrategy(local_batch_sizes=(9, 3), replan=1, bucket_cap_mb=1e-5)
    gns, loader, second = GNSCallback(horizon=HORIZON), DataLoader(Points(N), 6, shuffle=True), model()
    trainer = trainer_of(strategy, 2, callbacks=[gns], max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(lr=0.0), loader)
    before = gns.estimate
    if not another:
        trainer.callbacks.remove(gns)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, loader)
    assert len(second.seen) >= STEPS
    left = len(strategy.engine.hook_state.squares.local)
    return {"seen": second.seen, "before": before, "estimate": gns.estimate, "left": left}


@pytest.mark.parametrize("another", [True, False], ids=["with the callback", "without"])
def test_a_training_that_failed_leaves_no_norms_to_the_next(another):
    for result in (results := run_ranks(_again, 2, another)):
        assert result["left"] == 0
        before, after = result["before"], result["estimate"]
        assert before.samples == 12
        if another:
            reference = expected(every_step(results), "pooled")
            assert after.samples == 12 + reference.samples
            assert after.trace_sum - before.trace_sum == pytest.approx(reference.trace_sum, rel=1e-6)
        else:
            assert after == before
