"""Noise scale while training: the numbers are those of the gradients, for any split; logger and checkpoint get them."""

import csv
import itertools
import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_hetero import GNSCallback
from lightning_hetero.core.noise.estimators import estimate_from_two_sizes, estimate_noise_scale
from lightning_hetero.core.noise.running import RunningNoiseScale
from tests.helpers import Points, Regressor, fit, raised
from tests.ranks import run_ranks

N, STEPS = 48, 4
HORIZON = 1e12  # all steps count alike
OFTEN = {"local_batch_sizes": (9, 3), "replan": STEPS}


def model(**kwargs):
    """Parameters stay where they are, so that gradients of every batch can be computed afterwards."""
    return Regressor(lr=0.0, momentum=0.0, **kwargs)


def gradient(indices, scale=1.0):
    module, data = model(), Points(N)
    loss = module.loss((data.x[indices], data.y[indices], None))
    return scale * torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def sq_norm(indices, scale=1.0):
    return float(gradient(indices, scale).square().sum()) if indices else 0.0


def every_step(results):
    """Samples of every rank in every step."""
    return [[r["seen"][s][2] for r in results] for s in range(len(results[0]["seen"]))]


def expected(steps, method="pooled", scales=None):
    """What one process that has the same samples in micro-batches estimates."""
    running = RunningNoiseScale(horizon=HORIZON)
    for number, groups in enumerate(steps):
        scale = 1.0 if scales is None else scales[number]
        if scale is None:
            continue
        sizes, whole = [len(g) for g in groups], sq_norm(sum(groups, []), scale)
        estimate = estimate_noise_scale([sq_norm(g, scale) for g in groups], whole, sizes, method=method)
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
        norms, whole = [sq_norm(g) for g in everyone], sq_norm(sum(everyone, []))
        parts = [] if len(sizes) == 1 else [(len(sizes) - 1, estimate_noise_scale(norms, whole, sizes).trace)]
        phi = running.noise_scale if known and not math.isnan(running.noise_scale) else math.inf
        for b, n, g, norm in zip(first, sizes, window[0], norms, strict=True):
            if n > b:
                apart = 1 / b - 1 / n
                parts.append((apart / (1 / b + 1 / n + 2 / phi), (sq_norm(g) - norm) / apart))
        trace = sum(freedom * s for freedom, s in parts) / sum(freedom for freedom, _ in parts)
        running = running.update(trace=trace, global_sq_norm=whole, total_batch_size=sum(sizes))
    return running


class Keep(Callback):
    def on_train_end(self, trainer, pl_module):
        gns = next(c for c in trainer.callbacks if isinstance(c, GNSCallback))
        pl_module.result = gns.estimate.state_dict()


def _run(rank, strategy, ranks, kwargs):
    kwargs = {"dataset": Points(N), "model": model(), "max_epochs": 1, **kwargs}
    settings = {name: kwargs.pop(name) for name in ("every_n_steps", "preconditioner", "method") if name in kwargs}
    callbacks = [GNSCallback(**{"horizon": HORIZON, **settings}), Keep(), *kwargs.pop("callbacks", [])]
    out = fit(rank, strategy, ranks, kwargs.pop("batch_size", 4), callbacks=callbacks, **kwargs)
    return {**out, "estimate": kwargs["model"].result}


def run(strategy=OFTEN, ranks=2, **kwargs):
    return run_ranks(_run, ranks, strategy, ranks, kwargs)


def check(results, reference, rel=1e-6, names=("samples", "trace_sum", "sq_norm_sum")):
    for result in results:
        for name in names:
            assert result["estimate"][name] == pytest.approx(getattr(reference, name), rel=rel), name


# the gradients of workers and micro-batches


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        *((sizes, "pooled") for sizes in ((9, 3), (6, 6))),
        *(((9, 3), method) for method in ("mean", "cannikin")),
        pytest.param((8, 0, 4), "pooled", marks=pytest.mark.slow("three workers, one without samples")),
    ],
    ids=str,
)
def test_an_estimate_is_that_of_the_workers_gradients(sizes, method):
    results = run({"local_batch_sizes": sizes, "replan": STEPS}, len(sizes), method=method)
    check(results, expected(every_step(results), method), rel=1e-9)
    assert results[0]["estimate"]["samples"] == pytest.approx(N)


@pytest.mark.parametrize(("name", "ranks", "count"), [("hetero_ddp", 2, 3), ("hetero_ddp", 1, 3), ("ddp", 2, 3)])
def test_micro_batches_of_a_window_are_seen(name, ranks, count):
    """Eight batches: three at a time, the end of the epoch cuts the last window short.

    Each has a message of its own with ``hetero_ddp``; plain ``ddp`` has one at the end.
    """
    strategy = {"local_batch_sizes": {2: (4, 2), 1: (6,)}[ranks], "replan": 1} if name == "hetero_ddp" else name
    results = run(strategy, ranks, accumulate_grad_batches=count, batch_size=6 // ranks)
    micro = every_step(results)
    windows = [micro[i : i + count] for i in range(0, len(micro), count)]
    assert [len(w) for w in windows] == [3, 3, 2]
    check(results, expected_windows(windows, known=name == "hetero_ddp"))
    assert not any(result["estimate"]["biased"] for result in results)


class Two(Regressor):
    """Each half of the network has an optimizer of its own; both step on every batch."""

    def __init__(self):
        super().__init__(lr=0.0, momentum=0.0)
        self.automatic_optimization = False

    def on_before_optimizer_step(self, optimizer):
        """Keeps nothing: each optimizer has other gradients."""

    def configure_optimizers(self):
        return [torch.optim.SGD(half.parameters(), lr=0.0) for half in (self.net[0], self.net[2])]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "kwargs"),
    [
        ({**OFTEN, "loss_reduction": "sum"}, {"model": model(reduction="sum")}),
        (OFTEN, {"model": Two()}),
        (OFTEN, {"preconditioner": "auto"}),  # SGD has no second moments
        ({**OFTEN, "bucket_cap_mb": 1e-4}, {}),
        ({**OFTEN, "gradient_as_bucket_view": True}, {}),
    ],
    ids=["a summed loss", "two optimizers", "auto with SGD", "many buckets", "bucket views"],
)
def test_it_is_the_same_however_losses_optimizers_and_buckets_are(strategy, kwargs):
    results = run(strategy, **kwargs)
    check(results, expected(every_step(results)))


def test_every_n_steps():
    assert run(every_n_steps=2)[0]["estimate"]["samples"] == pytest.approx(N / 2)


def test_it_is_logged_under_the_fixed_names(tmp_path):
    more = {"logger": CSVLogger(str(tmp_path), name="", version=""), "max_epochs": 3}
    estimate = RunningNoiseScale.from_state_dict(run({**OFTEN, "replan": 2}, **more)[0]["estimate"])
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    last = [estimate.noise_scale, estimate.grad_sq_norm, estimate.trace]
    for name, value in zip(("noise_scale", "grad_sq_norm", "grad_variance"), last, strict=True):
        shown = [float(row[f"hetero/{name}"]) for row in rows if row.get(f"hetero/{name}")]
        assert len(shown) >= 5
        assert shown[-1] == pytest.approx(value, rel=1e-6)


# plain ddp, one worker


def test_plain_ddp_gives_the_same_numbers_as_equal_batches(tmp_path):
    """56 steps: one message after 50; a run too short for a message has an estimate at its end."""
    long = run("ddp", batch_size=6, max_epochs=14)
    assert long[0]["estimate"] == long[1]["estimate"]
    check(long, expected(every_step(long)[:50]))
    short = run("ddp", batch_size=6, logger=CSVLogger(str(tmp_path), name="", version=""))
    check(short, expected(every_step(short)))
    assert "hetero/noise_scale" in (tmp_path / "metrics.csv").read_text()


def test_a_single_worker_with_accumulation_takes_two_sizes():
    (result,) = run("auto", 1, batch_size=4, accumulate_grad_batches=3)
    running, micro = RunningNoiseScale(horizon=HORIZON), [own for *_, own in result["seen"]]
    for w in range(0, 12, 3):
        big = sq_norm(sum(micro[w : w + 3], []))
        estimate = estimate_from_two_sizes(sq_norm(micro[w]), 4, big, 12)
        running = running.update(trace=estimate.trace, global_sq_norm=big, total_batch_size=12)
    check([result], running, rel=1e-9)
    assert result["estimate"]["biased"] is False


def successive(steps):
    """Of one worker by successive steps."""
    running = RunningNoiseScale(horizon=HORIZON)
    for before, now in itertools.pairwise(map(gradient, steps)):
        one, both = (now.square().sum() + before.square().sum()) / 2, ((now + before) / 2).square().sum()
        estimate = estimate_from_two_sizes(float(one), 4, float(both), 8, biased=True)
        given = {"trace": estimate.trace, "global_sq_norm": float(both), "total_batch_size": 8}
        running = running.update(**given, steps=0.5, biased=True)
    return running


def test_a_single_worker_without_accumulation_is_flagged_biased():
    """Also with two optimizers."""
    for module in (model(), Two()):
        (result,) = run("auto", 1, batch_size=4, model=module)
        assert result["estimate"]["biased"] is True
        check([result], successive([own for *_, own in result["seen"]]))
        assert result["estimate"]["samples"] == pytest.approx(N - 4)


# faults


class Poisoned(Regressor):
    """The gradient of rank 1 is NaN in its second step, and infinite in its third."""

    def loss(self, batch):
        factor = {1: math.nan, 2: math.inf}.get(self.trainer.global_step, 1.0)
        return super().loss(batch) * (factor if self.trainer.global_rank == 1 else 1.0)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("strategy", [OFTEN, "ddp"], ids=["hetero_ddp", "ddp"])
def test_nan_and_inf_in_one_workers_gradient_leave_the_estimate_finite(strategy):
    results = run(strategy, model=Poisoned(lr=0.0, momentum=0.0), batch_size=6)
    check(results, expected([groups for step, groups in enumerate(every_step(results)) if step not in (1, 2)]))
    assert [result["estimate"]["skipped"] for result in results] == [2, 2]


# checkpoints


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
    ("strategy", "ranks", "more", "moment"),
    [
        ({"local_batch_sizes": (9, 3), "replan": "epoch"}, 2, {"max_epochs": 2, "batch_size": 6}, {"step": 3}),
        ("hetero_ddp", 1, {"max_epochs": 2, "batch_size": 4, "accumulate_grad_batches": 2}, {"step": 3}),
        ("ddp", 2, {"max_epochs": 28, "batch_size": 6}, {"epoch": 13}),
    ],
    ids=["two workers", "one worker", "ddp"],
)
def test_resume_inside_an_interval_goes_on_identically(tmp_path, strategy, ranks, more, moment):
    """Every second step is observed, from an odd one on: neither sums nor phase may be lost.

    Plain ddp observes 56 steps, of which a message after the 50th tells; the checkpoint knows of 28 of them.
    """
    path, settings = tmp_path / "inside.ckpt", {"every_n_steps": 2, **more}
    whole = run(strategy, ranks, callbacks=[Saves(path, **moment)], **settings)
    again = run(strategy, ranks, ckpt_path=str(path), **settings)
    assert len(again[0]["seen"]) < len(whole[0]["seen"])
    assert whole[0]["estimate"]["samples"] > 0
    for one, other in zip(whole, again, strict=True):
        assert one["estimate"] == pytest.approx(other["estimate"], rel=1e-12)


# what is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [("every_n_steps", 0), ("method", "best"), ("horizon", 0), ("preconditioner", "rmsprop")],
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        GNSCallback(**{name: value})


REFUSED = {"hooked": {}, "hetero_ddp": {"preconditioner": "adam"}, "ddp": {"preconditioner": "adam"}}


def _refused(rank):
    found = {}
    for name, kwargs in REFUSED.items():
        strategy = DDPStrategy(ddp_comm_hook=fp16_compress_hook) if name == "hooked" else name
        found[name] = raised(partial(_run, rank, strategy, 2, kwargs))
    return found


def test_gradients_that_cannot_be_seen_are_an_error_on_every_rank():
    for errors in run_ranks(_refused, 2):
        assert all(text.startswith("MisconfigurationException") for text in errors.values())
        assert "hook" in errors["hooked"]
        assert "preconditioner=" in errors["hetero_ddp"]
        assert "preconditioner=" in errors["ddp"]


# as Adam scales it

FIRST = 10  # steps that fill Adam's second moments


class WithAdam(Regressor):
    """Gradients fill the second moments, parameters stay where they are."""

    def __init__(self, cls=torch.optim.Adam):
        super().__init__(lr=0.0)
        self.cls = cls

    def configure_optimizers(self):
        return self.cls(self.parameters(), lr=0.0)


def adams(steps):
    """What Adam multiplies gradients by in every step, before its own moment; ``None`` in the first ones."""
    moment, beta, scales = 0.0, 0.999, []
    for number, indices in enumerate(steps):
        scales.append(1.0 / ((moment / (1 - beta**number)).sqrt() + 1e-8) if number >= FIRST else None)
        moment = beta * moment + (1 - beta) * gradient(indices) ** 2
    return scales


@pytest.mark.parametrize(
    ("strategy", "kwargs"),
    [
        (OFTEN, {"preconditioner": "adam"}),
        ({**OFTEN, "bucket_cap_mb": 1e-4}, {"preconditioner": "auto"}),
        ("ddp", {"preconditioner": "adam", "max_epochs": 15, "batch_size": 6, "model": WithAdam(torch.optim.AdamW)}),
    ],
    ids=["adam", "auto, many buckets", "ddp"],
)
def test_a_preconditioned_estimate_is_that_of_the_workers_gradients(strategy, kwargs):
    results = run(strategy, **{"model": WithAdam(), "max_epochs": 4, **kwargs})
    steps = every_step(results)
    check(results[1:], expected(steps, scales=adams([sum(groups, []) for groups in steps])), rel=1e-4)
    plain = RunningNoiseScale.from_state_dict(results[0]["estimate"])
    assert plain.trace != pytest.approx(expected(steps[FIRST:]).trace, rel=0.5)


def _scaled(rank, strategy, scaled, ranks, more):
    callback = GNSCallback()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) if scaled else None
    plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]} if scaled else {}
    module, data = Regressor(dtype=torch.float32, lr=0.01), Points(160, dtype=torch.float32)
    fit(rank, strategy, ranks, 8, model=module, dataset=data, callbacks=[callback], max_epochs=1, **plugins, **more)
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
    assert scaled.samples == plain.samples > 0
    assert scaled.skipped == 0
    assert scaled.trace == pytest.approx(plain.trace, rel=0.03)
    assert scaled.grad_sq_norm == pytest.approx(plain.grad_sq_norm, rel=0.03, abs=0.03 * plain.trace / 16)
