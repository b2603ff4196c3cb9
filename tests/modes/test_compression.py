"""Compressed gradients in real processes: what they change, what is the same on all ranks, what survives a resume."""

import copy
import logging

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, HeteroDDPStrategy, LookAheadCallback
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.compressors import auto
from lightning_hetero.compression import MessageFormat
from lightning_hetero.core.compression.auto import LinkMeasurement
from lightning_hetero.core.compression.settings import parse_compression
from lightning_hetero.simulate import ThinLink
from tests.helpers import Points, Regressor, collected, fit, trainer_of
from tests.ranks import run_ranks

N, FEATURES = 60, 40
SPARSE = {"density": 0.2, "warmup_steps": 2}
COMPRESSORS = {
    "exact": BlockTopK(**SPARSE),
    "histogram, int8": BlockTopK(**SPARSE, selector="histogram", value_dtype="int8"),
    "sample, float32": BlockTopK(**SPARSE, selector="sample", value_dtype="float32", block=32),
    "elements, balanced": BlockTopK(**SPARSE, block=1, scores="balanced"),
    "aimd": BlockTopK(**SPARSE, selector="aimd"),
    "low rank": "powersgd(rank=2, start=3)",
    "fp16": "fp16",
    "bf16": "bf16",
    "auto": "auto",
}
WHOLE = BlockTopK(density=1.0, value_dtype="float32")
TINY = {"bucket_cap_mb": 1e-4}


class Wide(Regressor):
    def __init__(self, lr=0.01, momentum=0.0):
        super().__init__(features=FEATURES, lr=lr, momentum=momentum, dtype=torch.float32)


class Clipped(Wide):
    """Looks at gradients behind the clipping."""

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step > len(self.grads) and any(p.grad is not None for p in self.parameters()):
            super().on_before_optimizer_step(optimizer)

    def on_before_optimizer_step(self, optimizer):
        """Not yet clipped."""


def points():
    return Points(N, features=FEATURES, dtype=torch.float32)


class Over:
    """Lets ``"auto"`` find a link of so many bytes per second."""

    def __init__(self, rate, latency=1e-6):
        self.found = LinkMeasurement(latency, rate, 1e-6, 2, 10**8)

    def __enter__(self):
        self.before, auto.measure = auto.measure, lambda *args: self.found

    def __exit__(self, *error):
        auto.measure = self.before


def train(rank, compression, sizes=(3, 1), *, strategy=None, **kwargs):
    """With what is left in the residuals, of all parameters in order."""
    strategy = HeteroDDPStrategy(local_batch_sizes=list(sizes), compression=compression, **(strategy or {}))
    kwargs = {"model": Wide(), "dataset": points(), "max_epochs": 2, **kwargs}
    done = fit(rank, strategy, len(sizes), sum(sizes) // len(sizes), **kwargs)
    return {**done, "left": left(strategy, kwargs["model"])}


def left(strategy, model):
    held = strategy.engine.compression and strategy.engine.compression.averager
    residuals = held.residuals() if held is not None and hasattr(held, "residuals") else {}
    kept = [residuals[n].numpy().ravel() for n, _ in model.named_parameters() if n in residuals]
    return np.concatenate(kept) if kept else 0.0


def alike(results):
    """The results of rank 0, which are those of the other ranks."""
    for result in results[1:]:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        np.testing.assert_array_equal(result["grads"], results[0]["grads"])
    return results[0]


def by_name(ranks):
    return {name: [found[name] for found in ranks] for name in ranks[0]}


# what is applied


def _applied(rank):
    """A hundred steps with each compressor, over a link so thin that ``"auto"`` compresses, and without any."""
    found = {"none": train(rank, None)}
    for name, settings in COMPRESSORS.items():
        with Over(1e7):
            found[name] = train(rank, settings, max_epochs=7, strategy=TINY)
    with Over(1e20):
        found["auto, dense"] = train(rank, "auto")
    return found


def test_what_is_applied_is_the_compressed_gradient_the_same_on_all_ranks():
    """The first steps are dense, later ones are not; block top-k touches its share of blocks and no more."""
    results = by_name(run_ranks(_applied, 2, timeout=200))
    dense = results.pop("none")[0]["grads"]
    assert not (alike(results.pop("auto, dense"))["grads"][auto.AUTO.first_try_step :] == 0).mean() > 0.5
    for name, ranks in results.items():
        ours, settings = alike(ranks), COMPRESSORS[name]
        assert ours["steps"] >= 100
        assert np.isfinite(ours["weights"]).all()
        first, later = ours["grads"][: len(dense)], ours["grads"][auto.AUTO.first_try_step :]
        if isinstance(settings, BlockTopK):
            np.testing.assert_allclose(first[:2], dense[:2], rtol=1e-5, atol=1e-7, err_msg=name)
            assert 0.02 < (first[2:] != 0).mean() < 0.4, name
        elif name == "auto":
            assert (later == 0).mean() > 0.5, "it has chosen plain sums"
        elif name == "low rank":
            np.testing.assert_allclose(first[:3], dense[:3], rtol=1e-5, atol=1e-7)
            matrices = ours["grads"][3:, : 7 * FEATURES].reshape(-1, 7, FEATURES)
            assert (np.linalg.matrix_rank(matrices, tol=1e-5) == 2).all()
        else:
            error = np.abs(first[0] - dense[0]).max() / np.abs(dense[0]).max()
            assert (2**-12 < error < 2**-10) if name == "fp16" else (2**-9 < error < 2**-7)


DENSE = {
    "views": {"strategy": {"gradient_as_bucket_view": True}},
    "static graph": {"strategy": {"static_graph": True}, "sizes": (4, 0)},
    "three ranks": {"sizes": (2, 1, 1), "accumulate_grad_batches": 3},
    "clusters": {"sizes": (2, 1, 1), "strategy": {"hierarchy": [[0, 2], [1]]}},
    "clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "model": Clipped},
}


def _dense(rank, ranks):
    found = {}
    for name, case in DENSE.items():
        if len(case.get("sizes", (3, 1))) == ranks:
            given = {**case, "model": case.get("model", Wide)}
            found[name] = [train(rank, how, **{**given, "model": given["model"]()}) for how in (None, WHOLE)]
    if ranks == 3:  # sums of two are the same in any order; those of three ranks with most blocks in common are not
        found["order"] = [train(rank, BlockTopK(density=0.9, value_dtype="float32"), (2, 1, 1), strategy=TINY)] * 2
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_density_1_is_the_dense_gradient(ranks):
    for name, results in by_name(run_ranks(_dense, ranks, ranks, timeout=240)).items():
        plain, ours = (alike(pair) for pair in zip(*results, strict=True))
        np.testing.assert_allclose(ours["grads"], plain["grads"], rtol=1e-4, atol=2e-7, err_msg=name)
        if name == "clipped":
            assert np.linalg.norm(ours["grads"], axis=1).max() <= 0.01 * (1 + 1e-4)


# nothing is lost


class Branched(Wide):
    """Takes no step; every other batch leaves a branch out, whose gradient is the largest."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.extra = nn.Linear(FEATURES, 8)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss + 10 * self.extra(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        parts = (torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters())
        self.grads.append(torch.cat(list(parts)).clone())


class Densities(Callback):
    """From indices to a bitmap, to everything and back."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        held = trainer.strategy.engine.compression
        if held is not None:
            held.averager.set_density((0.02, 0.3, 0.001, 1.0)[batch_idx % 4])


UNUSED = {"find_unused_parameters": True}
LOSSLESS = {
    "few": BlockTopK(density=0.0006, value_dtype="float32", warmup_steps=0),  # less than the branch
    "int8, dense steps": BlockTopK(density=0.3, value_dtype="int8", selector="histogram", dense_every=4),
    "elements": BlockTopK(density=0.1, block=1, value_dtype="float32", scores="balanced"),
    "aimd": BlockTopK(density=0.02, value_dtype="float32", warmup_steps=0, selector="aimd"),
}


def _nothing_lost(rank):
    found = {"none": train(rank, None, model=Branched(), strategy=UNUSED)}
    for name, settings in LOSSLESS.items():
        for cap in (1e-4, 25):
            how = {"model": Branched(), "strategy": {**UNUSED, "bucket_cap_mb": cap}}
            found[name, cap] = train(rank, settings, **how)
    for name in ("few", "aimd"):
        found[name, "densities"] = train(
            rank, LOSSLESS[name], model=Branched(), strategy=UNUSED, callbacks=[Densities()]
        )
    return found


def test_applied_and_left_make_up_all_gradients():
    """At weights that stay; also of a branch that some batches leave out, and when the density changes."""
    results = by_name(run_ranks(_nothing_lost, 2, timeout=200))
    expected = results.pop("none")[0]["grads"].sum(axis=0)
    for name, ranks in results.items():
        applied = alike(ranks)["grads"].sum(axis=0)
        np.testing.assert_allclose(
            applied + sum(r["left"] for r in ranks), expected, rtol=1e-3, atol=2e-3, err_msg=name
        )
        assert np.abs(ranks[0]["left"]).max() > 0.01 or name[1] == "densities"


class Forked(nn.Module):
    """With a branch that no rank uses in odd steps; its gradient is the largest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.extra = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 8)

    def forward(self, x, step):
        out = self.net(x)
        return out if step % 2 else out + 10 * self.extra(x).sum(1, keepdim=True)

    def flat_grads(self):
        parts = (torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters())
        return torch.cat(list(parts)).numpy().copy()


def _own_loop(rank, name):
    """The same in a user's own loop: sums of applied gradients and of this rank's own, and what it has not sent."""
    settings = {"local_batch_sizes": (7, 3), "compression": LOSSLESS["elements"]}
    model, loader = Forked(), DataLoader(Points(70, features=FEATURES, dtype=torch.float32), 5, shuffle=True)
    alone = copy.deepcopy(model)
    if name == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

        training = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings, **UNUSED))
        training.launch()
        wrapped, loader = training.setup(model), training.setup_dataloaders(loader)
        engine = training.strategy.engine
    else:
        from accelerate import DistributedDataParallelKwargs

        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        handlers = [DistributedDataParallelKwargs(**UNUSED)]
        training = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings), kwargs_handlers=handlers)
        wrapped, loader = training.prepare(model, loader)
        engine = training.engine
    applied, local = 0.0, 0.0
    for step, (x, y, _) in enumerate(loader):
        model.zero_grad()
        alone.zero_grad()
        training.backward(nn.functional.mse_loss(wrapped(x, step), y))
        (nn.functional.mse_loss(alone(x, step), y) * len(x) / 10).backward()
        applied, local = applied + model.flat_grads(), local + alone.flat_grads()
    residuals = engine.compression.averager.residuals()
    return applied, local, np.concatenate([residuals[n].numpy() for n, _ in model.named_parameters()])


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_applied_and_left_make_up_all_gradients_of_an_own_loop(name):
    (applied, one, kept), (same, other, rest) = run_ranks(_own_loop, 2, name, timeout=240)
    np.testing.assert_array_equal(applied, same)
    np.testing.assert_allclose(applied + kept + rest, one + other, rtol=1e-3, atol=1e-3)
    assert np.abs(kept).max() > 0.01


def _wrong_densities(rank):
    held = {}

    class Asks(Callback):
        def on_train_start(self, trainer, pl_module):
            averager = trainer.strategy.engine.compression.averager
            for density in (0, 1.5, float("nan"), "1 %"):
                with pytest.raises((TypeError, ValueError), match="density="):
                    averager.set_density(density)
            held["density"] = averager.density

    train(rank, BlockTopK(), callbacks=[Asks()], max_steps=1)
    return held["density"]


def test_densities_that_cannot_be_are_refused():
    assert run_ranks(_wrong_densities, 2, timeout=240) == [0.01, 0.01]


# gradients that are not finite


class Poisoned(Wide):
    """One rank's loss is not finite in some steps."""

    def __init__(self, *steps):
        super().__init__()
        self.bad = steps

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step in self.bad
        return super().loss(batch) * (float("inf") if bad else 1.0)


class Healed(Poisoned):
    """Whose user leaves steps out by hand."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if not torch.isfinite(self.grads[-1]).all():
            self.zero_grad()


class Scaled(Poisoned):
    """With a loss scaler; remembers scales."""

    def __init__(self):
        super().__init__(6)
        self.scales = []

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


KEPT = {"blocks": BlockTopK(**SPARSE), "low rank": "powersgd(rank=1, start=3)"}


def _not_finite(rank):
    found = {name: train(rank, how, model=Poisoned(1, 6, 9), strategy=TINY) for name, how in KEPT.items()}
    found |= {name: train(rank, name, model=Healed(6)) for name in ("fp16", "bf16")}
    for name, how in {"plain": None, "whole": WHOLE, **KEPT}.items():
        model, scaler = Scaled(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        done = train(rank, how, model=model, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        found[f"scaled, {name}"] = {**done, "grads": np.array(model.scales)}
    return found


def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks():
    """In a dense step as in compressed ones. A loss scaler skips the step; 16 bits keep no state, as under ddp."""
    results = by_name(run_ranks(_not_finite, 2, timeout=200))
    for name, ranks in results.items():
        ours = alike(ranks)
        assert np.isfinite(ours["weights"]).all(), name
        steps = np.arange(len(ours["grads"]))
        if name in KEPT:
            np.testing.assert_array_equal(np.abs(ours["grads"]).max(axis=1) == 0, np.isin(steps, (1, 6, 9)), name)
        elif name in ("fp16", "bf16"):
            np.testing.assert_array_equal(~np.isfinite(ours["grads"]).all(axis=1), steps == 6, name)
        else:
            np.testing.assert_array_equal(ours["grads"], results["scaled, plain"][0]["grads"], name)
            assert len(set(ours["grads"])) > 3, "the scale changes all the time"
    plain, whole = (results[f"scaled, {name}"][0]["weights"] for name in ("plain", "whole"))
    np.testing.assert_allclose(whole, plain, rtol=2e-2, atol=2e-3)


# checkpoints


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 10:
            trainer.save_checkpoint(self.path)


RESUMED = ("exact", "aimd", "sample, float32", "elements, balanced", "low rank")


def _resumed(rank, folder):
    found = {}
    for name in RESUMED:
        path = f"{folder}/{name}"
        whole = train(rank, COMPRESSORS[name], callbacks=[Saves(path)])
        found[name] = whole, train(rank, COMPRESSORS[name], ckpt_path=path)
    return found


def test_a_resumed_run_goes_on_identically(tmp_path):
    for found in run_ranks(_resumed, 2, str(tmp_path), timeout=200):
        for name, (whole, rest) in found.items():
            np.testing.assert_array_equal(rest["grads"], whole["grads"][10:], name)
            np.testing.assert_array_equal(rest["weights"], whole["weights"], name)


def _owe(rank, path, ranks, settings):
    """Ten steps at fixed weights."""
    return train(rank, settings, (6 // ranks,) * ranks, model=Wide(lr=0.0), max_steps=10, callbacks=[Saves(path)])


ELSEWHERE = {
    "fewer": (2, {"compression": BlockTopK(**SPARSE, value_dtype="float32")}),
    "one": (1, {"compression": BlockTopK(**SPARSE, value_dtype="float32")}),
    "more": (4, {"compression": BlockTopK(**SPARSE, value_dtype="float32")}),
    "low rank": (3, {"compression": "powersgd"}),
    "clusters": (3, {"compression": BlockTopK(**SPARSE), "hierarchy": [[0, 1], [2]]}),
    "auto, dense": (2, {"compression": "auto"}),
}


def _go_on(rank, path, ranks, settings):
    sizes = {1: (6,), 2: (3, 3), 3: (2, 2, 2), 4: (2, 2, 1, 1)}[ranks]
    how = {"model": Wide(lr=0.0), "max_steps": 22, "max_epochs": -1, "ckpt_path": path}
    with Over(1e12, latency=1.0):
        return train(rank, settings.get("compression"), sizes, strategy={"hierarchy": settings.get("hierarchy")}, **how)


def test_nothing_that_is_owed_is_lost_on_another_number_of_ranks_or_by_another_compressor(tmp_path):
    """Applied and left is all that was owed and came up since; on one rank, or by dense sums, it is paid at once."""
    path = str(tmp_path / "owed")
    before = run_ranks(_owe, 3, path, 3, BlockTopK(**SPARSE, value_dtype="float32"))
    owed = sum(result["left"] for result in before)
    assert np.abs(owed).max() > 0.1
    plain = run_ranks(_go_on, 1, path, 1, {}, timeout=240)[0]["grads"]
    for name, (ranks, settings) in ELSEWHERE.items():
        results = run_ranks(_go_on, ranks, path, ranks, settings, timeout=240)
        applied, kept = alike(results)["grads"], sum(result["left"] for result in results)
        total = plain.sum(axis=0) + owed
        np.testing.assert_allclose(applied.sum(axis=0) + kept, total, rtol=1e-3, atol=1e-3, err_msg=name)
        if ranks == 1:
            np.testing.assert_allclose(applied[0], plain[0] + owed, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(applied[1:], plain[1:], rtol=1e-5, atol=1e-6)


# what is seen


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


LOGGED = {"blocks": BlockTopK(density=0.2, warmup_steps=0), "fp16": "fp16", "low rank": "powersgd(start=2, rank=1)"}


def _logged(rank):
    found = {}
    for name, settings in LOGGED.items():
        logger = Rows()
        train(rank, settings, (3, 2, 1), strategy={"replan": 4}, logger=logger)
        found[name] = [row for row in logger.rows if "hetero/bytes_sent" in row]
    return found


def test_bytes_density_and_time_are_logged():
    """To the byte: of blocks, a message to each other rank; of sums, a ring."""
    shapes = [p.shape for p in Wide().parameters()]
    blocks = sum(-(-shape.numel() // 16) for shape in shapes)
    k, ring = -(-round(0.2 * blocks) // 3), 2 * 2 / 3
    due = {
        "blocks": 2 * MessageFormat(blocks, k, 16, "bfloat16").num_bytes,
        "fp16": ring * 2 * sum(shape.numel() for shape in shapes),
        "low rank": ring * 4 * (40 + 7 + 7 + 7 + 1),  # the factors of the one matrix that is worth it, and all else
    }
    for name, rows in run_ranks(_logged, 3, timeout=240)[0].items():
        assert len(rows) >= 2
        for row in rows[1:]:  # the first has the dense steps
            assert row["hetero/bytes_sent"] == row["hetero/bytes_received"] == pytest.approx(due[name], rel=1e-6)
            assert 0 < row["hetero/compression_density"] <= 1
            if name == "blocks":
                assert row["hetero/encode_time"] > 0
                assert row["hetero/compression_density"] == pytest.approx(3 * k / blocks)


class Shifted(Points):
    """Targets with a mean, so that the gradient has a signal."""

    def __init__(self):
        super().__init__(N, features=FEATURES, dtype=torch.float32)
        self.y = self.y + 3.0


def _noise(rank):
    found = []
    for sizes in ((5, 1), (3, 3)):
        for settings in (None, BlockTopK(density=0.05, dense_every=4)):
            callback = GNSCallback(horizon=1e9)
            how = {"model": Wide(lr=0.0), "dataset": Shifted(), "callbacks": [callback], "max_epochs": 25}
            train(rank, settings, sizes, strategy={"replan": 10}, **how)
            found.append((callback.estimate.trace, callback.estimate.grad_sq_norm, callback.estimate.samples))
    return found


def test_noise_scale_does_not_see_the_compression():
    """From local norms where batches are unequal, from dense steps where they are equal."""
    (uneven, ours, even, other), *others = run_ranks(_noise, 2, timeout=240)
    assert others[0][1] == ours
    assert ours[2] == uneven[2]
    assert 0.2 * even[2] < other[2] < 0.3 * even[2]
    np.testing.assert_allclose([ours[:2], other[:2]], [uneven[:2], even[:2]], rtol=0.3)


LINKS = {0.05: (1e7, 1e-6), 0.4: (1e7, 1e3), None: (1e20, 1e-6)}


def _auto(rank):
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    found = []
    for rate, latency in LINKS.values():
        lines = collected()
        with Over(rate, latency):
            grads = train(rank, "auto(densities=[0.05, 0.4])")["grads"]
        found.append((grads, [line for line in lines if line.startswith("compression='auto'")]))
    return found


def test_auto_compresses_where_it_pays_and_says_why():
    """The first steps are dense and timed; the choice changes the very next message."""
    first, range_of = auto.AUTO.first_try_step, {0.05: (0.02, 0.15), 0.4: (0.2, 0.5), None: (0.5, 1.0)}
    for density, (ours, lines), (other, _) in zip(LINKS, *run_ranks(_auto, 2, timeout=240), strict=True):
        np.testing.assert_array_equal(ours, other)
        touched, (low, high) = (ours != 0).mean(axis=1), range_of[density]
        assert touched[:first].min() > 0.5
        assert low < touched[first:].min() <= touched[first:].max() <= high
        assert len(touched) > 2 * first
        assert ["dense sums" in line if density is None else f"density {density}" in line for line in lines] == [True]


RATE = 4e6


def _measured(rank):
    """Of three quarters of a million elements, over a link of that many bytes per second."""
    from lightning_hetero.comm.agreement.control_plane import ControlPlane
    from lightning_hetero.comm.collectives.topology import Topology

    torch.distributed.init_process_group("gloo")
    p = nn.Parameter(torch.zeros(750_000))
    with ThinLink(RATE, world_size=2):
        return auto.measure({"p": p}, ControlPlane(rank, 2), Topology(rank, ((0,), (1,))), parse_compression("auto"))


@pytest.mark.slow("measures time")
def test_what_auto_knows_is_measured():
    one, other = run_ranks(_measured, 2, timeout=240)
    assert one == other
    assert RATE / 2 < one.rate < 1.1 * RATE
    assert 0 < one.latency < auto.BENCHMARK.probe_bytes / RATE
    assert one.encode > 0
    assert (one.world_size, one.numel, one.element_size) == (2, 750_000, 4)


# a default dtype of the user's

DEFAULTS = [
    {"compression": COMPRESSORS["histogram, int8"]},
    {"compression": COMPRESSORS["elements, balanced"], "sparse_optimizer": True},
    {"compression": COMPRESSORS["exact"], "sparse_optimizer": "later", "staleness": 1},
    {"compression": COMPRESSORS["low rank"]},
    {"compression": "bf16"},
    {"staleness": 1},
]


class Delayed(Callback):
    """Delays what can be."""

    def on_train_start(self, trainer, pl_module):
        late = trainer.strategy.engine.hook_state.staleness
        if late is not None:
            late.make_all_stale()
            late.control_externally(True)


class NoGradients(Wide):
    """Keeps none, which may be sparse."""

    def on_before_optimizer_step(self, optimizer):
        """Nothing."""


def _default_dtypes(rank):
    """Weights of each setting with torch's default dtype, and with another one."""
    found = []
    for settings in DEFAULTS:
        for default in (torch.float32, torch.float64):
            model = NoGradients(momentum=0.5)
            torch.set_default_dtype(default)
            strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], **settings)
            trainer = trainer_of(strategy, 2, max_epochs=1, callbacks=[Delayed(), LookAheadCallback()])
            trainer.fit(model, DataLoader(points(), 2, shuffle=True))
            torch.set_default_dtype(torch.float32)
            found.append(model.flat())
    return found


def test_a_default_dtype_of_float64_changes_nothing():
    one, other = run_ranks(_default_dtypes, 2, timeout=240)
    for number, settings in enumerate(DEFAULTS):
        for found in (*one[2 * number : 2 * number + 2], *other[2 * number : 2 * number + 2]):
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, one[2 * number], str(settings))


# what is wrong


class Half(Wide):
    """Whose first layer no optimizer has: it is frozen, has a gradient all the same, or is used in no loss."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.net[0].requires_grad_(first != "frozen")

    def forward(self, x):
        hidden = self.net[0](x)
        return self.net[1:](hidden.detach() if self.first == "unused" else hidden)

    def on_before_optimizer_step(self, optimizer):
        """Keep no gradients."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.01)


def _half(rank):
    found = {}
    for first in ("trained by nobody", "frozen", "unused"):
        lines = collected()
        strategy = {"find_unused_parameters": first == "unused"}
        train(rank, BlockTopK(**SPARSE), model=Half(first), strategy=strategy)
        found[first] = [line for line in lines if "no optimizer has" in line]
    return found


def test_gradients_that_no_optimizer_takes_and_that_are_sent_are_named_once():
    """They would take the places of all others, because nobody sets them to zero."""
    zero, one = run_ranks(_half, 2, timeout=240)
    assert [len(lines) for lines in zero.values()] == [1, 0, 0]
    assert "net.0.weight" in zero["trained by nobody"][0]
    assert not any(one.values())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"compression": "topk"}, "block_topk"),
        ({"compression": 0.01}, "compression=0.01"),
        ({"compression": "fp16", "ddp_comm_hook": print}, "ddp_comm_hook"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(given, match):
    with pytest.raises((TypeError, ValueError), match=match):
        HeteroDDPStrategy(**given)


def _different(rank):
    train(rank, BlockTopK(density=0.1 * (rank + 1)))


def _corrupted(rank):
    gather = async_ops.async_all_gather

    def flip(rows, *args):
        def arrived(done):
            rows[0, -1] ^= 4

        return gather(rows, *args).then(arrived)

    async_ops.async_all_gather = flip
    train(rank, BlockTopK(**SPARSE))


def test_ranks_with_different_settings_and_corrupted_messages_end_the_run_on_every_rank():
    errors = run_ranks(_different, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]
    errors = run_ranks(_corrupted, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all("rank 0, bucket 0, step 2" in message for *_, message in errors)
