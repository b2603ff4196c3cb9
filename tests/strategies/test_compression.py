"""Compressed gradients in real processes: what they change, what is the same on all ranks, what survives a resume."""

import copy
import logging
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, HeteroDDPStrategy, LookAheadCallback
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors import auto as link
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.compressors.powersgd import PowerSGDAverager
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.compression import MessageFormat
from lightning_hetero.core.compression.auto import LinkMeasurement
from lightning_hetero.core.compression.settings import parse_compression
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse import lazy_update
from lightning_hetero.simulate import ThinLink
from tests.comm.gradients.test_ddp_hook import TINY, batches, build, loss_of
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of

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


class Wide(Regressor):
    def __init__(self, lr=0.01, momentum=0.0, dtype=torch.float32):
        super().__init__(features=FEATURES, lr=lr, momentum=momentum, dtype=dtype)


def points(dtype=torch.float32):
    return Points(N, features=FEATURES, dtype=dtype)


def _fit(rank, sizes, compression, kwargs):
    strategy = {"local_batch_sizes": sizes, "compression": compression, **kwargs.pop("strategy", {})}
    defaults = {"model": Wide(), "dataset": points(), "max_epochs": 2}
    return fit(rank, strategy, len(sizes), sum(sizes) // len(sizes), **{**defaults, **kwargs})


def run(compression, sizes=(3, 1), **kwargs):
    return run_ranks(_fit, len(sizes), list(sizes), compression, kwargs)


def same_everywhere(results):
    for result in results[1:]:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        np.testing.assert_array_equal(result["grads"], results[0]["grads"])
    return results[0]


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


def _half(rank, first):
    texts = []
    logging.getLogger("lightning_hetero").addHandler(Notes(texts))
    strategy = {"find_unused_parameters": first == "unused"}
    _fit(rank, [3, 1], BlockTopK(**SPARSE), {"model": Half(first), "strategy": strategy})
    return texts


class Notes(logging.Handler):
    def __init__(self, texts):
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("first", ["trained by nobody", "frozen", "unused"])
def test_gradients_that_no_optimizer_takes_and_that_are_sent_are_named_once(first):
    """They would take the places of all others, because nobody sets them to zero."""
    zero, one = run_ranks(_half, 2, first)
    zero = [text for text in zero if "has made all others wait" not in text]  # as a busy machine may
    assert one == []
    if first == "trained by nobody":
        assert zero[0].startswith("block top-k: no optimizer has net.0.weight and 1 other parameters")
        assert "requires_grad_(False)" in zero[0]
    assert len(zero) == (first == "trained by nobody")


def _hundred_steps(rank, sizes, compression):
    """Over a link so thin that ``"auto"`` compresses."""
    link.measure = lambda parameters, control, topology, settings: LinkMeasurement(1e-6, 1e7, 1e-6, len(sizes), 10**8)
    return _fit(rank, sizes, compression, {"max_epochs": 7, "strategy": {"bucket_cap_mb": TINY}})


@pytest.mark.parametrize("name", [*COMPRESSORS, "three ranks"])
def test_replicas_are_the_same_bit_by_bit_after_100_steps(name):
    """Sums of two are the same in any order; those of three ranks, which have most blocks in common, are not."""
    several = BlockTopK(density=0.9, value_dtype="float32")  # whose sums round, unlike those of three bfloat16
    settings, sizes = COMPRESSORS.get(name, several), [2, 1, 1] if name == "three ranks" else [3, 1]
    result = same_everywhere(run_ranks(_hundred_steps, len(sizes), sizes, settings))
    assert result["steps"] >= 100
    assert np.isfinite(result["weights"]).all()
    if name == "auto":
        assert (result["grads"][link.AUTO.first_try_step :] == 0).mean() > 0.5, "it has chosen plain sums"


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "auto"])
def test_what_is_applied_is_the_compressed_gradient(name):
    """The first steps are dense, later ones are not; block top-k touches its share of blocks and no more."""
    dense, ours = run(None)[0]["grads"], same_everywhere(run(COMPRESSORS[name]))["grads"]
    settings = COMPRESSORS[name]
    assert np.abs(ours[1:] - dense[1:]).max() > 0
    if isinstance(settings, BlockTopK):
        np.testing.assert_allclose(ours[:2], dense[:2], rtol=1e-5, atol=1e-7)
        assert (dense[2:] != 0).mean() > 0.95
        touched = (ours[2:] != 0).mean()
        assert 0.02 < touched < 0.4
    if name == "low rank":
        np.testing.assert_array_equal(ours[:3], dense[:3])
        first_layer = ours[3:, : 7 * FEATURES].reshape(-1, 7, FEATURES)
        assert (np.linalg.matrix_rank(first_layer, tol=1e-5) == 2).all()
    if name in ("fp16", "bf16"):
        error = np.abs(ours[0] - dense[0]).max() / np.abs(dense[0]).max()
        assert (2**-12 < error < 2**-10) if name == "fp16" else (2**-9 < error < 2**-7)


def test_density_1_is_the_dense_gradient():
    """Also of several micro-batches, and clipped."""
    settings, several = BlockTopK(density=1.0, value_dtype="float32"), {"accumulate_grad_batches": 3}
    for sizes, how, training in (
        ((3, 1), {"gradient_as_bucket_view": True}, {}),
        ((4, 0), {"static_graph": True}, {}),
        ((2, 1, 1), {}, several),
        ((3, 1), {}, {**several, "gradient_clip_val": 0.01, "model": ClippedGradients()}),
    ):
        expected = run(None, sizes, **training)[0]
        ours = same_everywhere(run(settings, sizes, strategy=how, **training))
        np.testing.assert_allclose(ours["grads"], expected["grads"], rtol=1e-4, atol=2e-7)


@pytest.mark.parametrize("name", ["exact", "histogram, int8"])
def test_three_ranks_accumulation_and_clipping(name):
    """Clipping holds for the merged gradient, which is the same on all ranks."""
    kwargs = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "model": ClippedGradients()}
    result = same_everywhere(run(COMPRESSORS[name], (3, 2, 1), **kwargs))
    norms = np.linalg.norm(result["grads"], axis=1)
    assert norms.max() <= 0.01 * (1 + 1e-4)
    assert (norms > 0).all()


class ClippedGradients(Wide):
    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step > len(self.grads) and any(p.grad is not None for p in self.parameters()):
            super().on_before_optimizer_step(optimizer)

    def on_before_optimizer_step(self, optimizer):
        pass


# nothing is lost


class Branched(nn.Module):
    """With a branch that no rank uses in odd steps; its gradient is the largest."""

    def __init__(self):
        super().__init__()
        self.net, self.extra, self.used = build(), nn.Linear(6, 30), True

    def forward(self, x):
        out = self.net(x)
        return out + self.extra(x).sum(1, keepdim=True) if self.used else out


def _flat(model):
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])


def _sums(rank, settings, steps, cap, unused, densities=None):
    """Applied gradients of several steps at fixed weights, what is left in the residual, and the local gradients."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Branched()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, find_unused_parameters=unused)
    state = HookState(StepTimer(HostClock()), 2)
    compression = GradientCompression(settings, ControlPlane(rank, 2), state)
    compression.attach(model, hold_unused=unused)
    ddp.register_comm_hook(state, gradient_hook)
    applied, local, sizes = 0.0, 0.0, []
    for step in range(steps):
        if densities is not None:
            compression.averager.set_density(densities[step % len(densities)])
            rows = compression.averager.path.rows
            sizes.append((rows.numel(), rows.untyped_storage().nbytes()))
        x = batches(rank)[step % 3]
        for replica in (alone, model):
            replica.used = not unused or step % 2 == 0
            replica.zero_grad()
        loss_of(alone, x).backward()
        loss_of(ddp, x).backward()
        applied, local = applied + _flat(model), local + _flat(alone) / 2
    left = compression.averager.residuals()
    left = torch.cat([left[name] for name, _ in model.named_parameters()])
    return applied.numpy(), left.numpy(), local.numpy(), sizes


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("cap", [25, TINY])
@pytest.mark.parametrize(
    "settings",
    [
        BlockTopK(density=0.0006, value_dtype="float32", warmup_steps=0),  # less than the branch
        BlockTopK(density=0.3, value_dtype="int8", selector="histogram", dense_every=4),
    ],
    ids=["1", "2"],
)
def test_applied_and_left_make_up_all_gradients(settings, cap, unused):
    a, b = run_ranks(_sums, 2, settings, 7, cap, unused)
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_allclose(a[0] + a[1] + b[1], a[2] + b[2], rtol=1e-4, atol=1e-5)
    assert np.abs(a[1]).max() > 0.01


class Unused(Wide):
    """Takes no step; every other batch leaves a branch out, whose gradient Lightning's DDP then does not hand on."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.extra = nn.Linear(FEATURES, 8)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss + 10 * self.extra(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(_flat(self))


def _unused(rank, compression):
    strategy = HeteroDDPStrategy(
        local_batch_sizes=[3, 1], compression=compression, bucket_cap_mb=TINY, find_unused_parameters=True
    )
    model = Unused()
    trainer_of(strategy, 2, max_epochs=1).fit(model, DataLoader(points(), 2))
    exchange = strategy.engine.compression and strategy.engine.compression.averager
    left = exchange.residuals() if exchange else {}
    return sum(model.grads).numpy(), [left[name].numpy() for name in left]


def test_a_branch_that_is_left_out_loses_nothing_with_find_unused_parameters():
    a, b = run_ranks(_unused, 2, BlockTopK(density=0.1, value_dtype="float32", warmup_steps=0))
    np.testing.assert_array_equal(a[0], b[0])
    expected = run_ranks(_unused, 2, None)[0][0]
    np.testing.assert_allclose(a[0] + np.concatenate(a[1]) + np.concatenate(b[1]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("selector", ["exact", "aimd"])
def test_nothing_is_lost_when_the_density_changes(selector):
    """From indices to a bitmap, to everything and back, over and over, with no more memory than the messages need."""
    settings = BlockTopK(density=0.02, value_dtype="float32", warmup_steps=0, selector=selector)
    densities = [0.02, 0.3, 0.001, 1.0]
    a, b = run_ranks(_sums, 2, settings, 12, 25, False, densities)
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_allclose(a[0] + a[1] + b[1], a[2] + b[2], rtol=1e-4, atol=1e-5)
    assert a[3] == b[3]
    messages, memory = np.array(a[3]).T
    assert messages[2] < messages[0] < messages[1] < messages[3]
    assert messages[:4].tolist() == messages[4:8].tolist() == messages[8:].tolist()
    assert memory.tolist() == messages.tolist()


def _wrong_densities(rank):
    dist.init_process_group("gloo")
    compression = GradientCompression(BlockTopK(), ControlPlane(rank, 2), HookState(StepTimer(HostClock()), 2))
    compression.attach(build())
    said = []
    for density in (0, 1.5, float("nan"), "1 %"):
        with pytest.raises((TypeError, ValueError)) as raised:
            compression.averager.set_density(density)
        said.append((density, str(raised.value)))
    return said, compression.averager.density


def test_densities_that_cannot_be_are_refused():
    for said, density in run_ranks(_wrong_densities, 2):
        assert density == 0.01
        for given, message in said:
            assert f"density={given!r}" in message
            assert "0.0 to 1.0" in message


# a default dtype of the user's

DEFAULTS = [
    {},
    {"compression": COMPRESSORS["exact"]},
    {"compression": COMPRESSORS["histogram, int8"]},
    {"compression": COMPRESSORS["elements, balanced"], "sparse_optimizer": True},
    {"compression": COMPRESSORS["exact"], "sparse_optimizer": "later", "staleness": 1},
    {"compression": COMPRESSORS["low rank"]},
    {"compression": "bf16"},
    {"compression": "auto"},
    {"staleness": 1},
]


class Delayed(Callback):
    """Delays what can be, and predicts weights."""

    def on_train_start(self, trainer, pl_module):
        late = trainer.strategy.engine.hook_state.staleness
        if late is not None:
            late.make_all_stale()
            late.control_externally(True)


def _default_dtypes(rank):
    """Weights of each setting with torch's default dtype, and with another one."""
    link.measure = lambda parameters, control, topology, settings: LinkMeasurement(1e-6, 1e7, 1e-6, 2, 10**8)
    found = []
    for settings in DEFAULTS:
        weights = []
        for default in (torch.float32, torch.float64):
            model, callbacks = Wide(momentum=0.5), [Delayed(), LookAheadCallback()]
            torch.set_default_dtype(default)
            try:
                model.on_before_optimizer_step = lambda optimizer: None  # keep no gradients, which may be sparse
                strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], **settings)
                trainer = trainer_of(strategy, 2, callbacks=callbacks)
                trainer.fit(model, DataLoader(points(), 2, shuffle=True))
                weights.append(model.flat())
            finally:
                torch.set_default_dtype(torch.float32)
        found.append(weights)
    return found


def test_a_default_dtype_of_float64_changes_nothing():
    for settings, (single, double), (other, _) in zip(DEFAULTS, *run_ranks(_default_dtypes, 2), strict=True):
        assert single.dtype == double.dtype == np.float32
        np.testing.assert_array_equal(double, single, err_msg=str(settings))
        np.testing.assert_array_equal(single, other, err_msg=str(settings))


# gradients that are not finite


class Poisoned(Wide):
    """One rank's loss is not finite in some steps."""

    def __init__(self, steps=(6,)):
        super().__init__()
        self.steps = steps

    def loss(self, batch):
        loss = super().loss(batch)
        bad = self.trainer.global_rank == 1 and self.trainer.global_step in self.steps
        return loss * float("inf") if bad else loss


@pytest.mark.parametrize("compression", [BlockTopK(**SPARSE), "powersgd(rank=1, start=3)"], ids=["blocks", "low rank"])
def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks(compression):
    """In a dense step as in compressed ones; what comes after is trained on as ever."""
    result = same_everywhere(run(compression, model=Poisoned((1, 6, 9)), strategy={"bucket_cap_mb": TINY}))
    assert np.isfinite(result["weights"]).all()
    assert (np.abs(result["grads"]).max(axis=1) == 0).tolist() == [i in (1, 6, 9) for i in range(result["steps"])]


def _told_later(rank, later):
    """What the host decides bucket by bucket is left to the device, as on a GPU, where the host would have to wait."""
    if later:
        begin = PowerSGDAverager.__init__

        def deferred(self, *args, **kwargs):
            begin(self, *args, **kwargs)
            self.deferred = True

        PowerSGDAverager.__init__ = deferred
    model, said = Poisoned((6, 9, 10)), []
    DroppedSteps.add = lambda self, step, where: said.append((step, where))
    result = _fit(rank, (3, 1), COMPRESSORS["low rank"], {"model": model, "strategy": {"bucket_cap_mb": TINY}})
    exchange = model.trainer.strategy.engine.compression.averager
    return {**result, "said": said, "left": {n: r.numpy() for n, r in exchange.residuals().items()}}


def test_low_rank_steps_that_the_device_leaves_out_are_those_that_the_host_does():
    on_host, on_device = run_ranks(_told_later, 2, False), run_ranks(_told_later, 2, True)
    for host, device in zip(on_host, on_device, strict=True):
        np.testing.assert_array_equal(device["grads"], host["grads"])
        np.testing.assert_array_equal(device["weights"], host["weights"])
        for name, residual in host["left"].items():
            np.testing.assert_array_equal(device["left"][name], residual, err_msg=name)
        assert device["said"] == host["said"] == [(step, "on some rank") for step in (6, 9, 10)]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_16_bit_sums_that_are_not_finite_are_that_on_all_ranks_as_under_ddp(compression):
    """Nothing is kept from step to step, so that a gradient is poisoned and no state."""
    result = same_everywhere(run(compression, model=Healed()))
    poisoned = [not np.isfinite(gradient).all() for gradient in result["grads"]]
    assert poisoned == [step == 6 for step in range(result["steps"])]
    assert np.isfinite(result["weights"]).all()


class Healed(Poisoned):
    """Whose user leaves steps out by hand."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if not torch.isfinite(self.grads[-1]).all():
            self.zero_grad()


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))


class Scaled(Poisoned):
    """With a loss scaler; remembers scales."""

    def __init__(self):
        super().__init__()
        self.scales = []

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _fit_scaled(rank, compression):
    model = Scaled()
    out = _fit(rank, [3, 1], compression, {"model": model, "plugins": [scaled()]})
    return {**out, "scales": model.scales}


def test_loss_scaler_and_residuals_agree():
    """The scale changes all the time; residuals do not. The step that overflows is skipped on all ranks."""
    results = run_ranks(_fit_scaled, 2, BlockTopK(density=1.0, value_dtype="float32"))
    same_everywhere(results)
    expected = run_ranks(_fit_scaled, 2, None)[0]
    assert results[0]["scales"] == results[1]["scales"] == expected["scales"]
    assert len(set(results[0]["scales"])) > 3
    np.testing.assert_allclose(results[0]["weights"], expected["weights"], rtol=2e-2, atol=2e-3)
    for compression in (BlockTopK(**SPARSE), "powersgd(rank=1, start=2)"):
        compressed = run_ranks(_fit_scaled, 2, compression)
        for result in compressed:
            np.testing.assert_array_equal(result["weights"], compressed[0]["weights"])
            assert np.isfinite(result["weights"]).all()
            assert result["scales"] == expected["scales"]


# checkpoints


def saving(folder):
    return {
        "callbacks": [ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)],
        "enable_checkpointing": True,
    }


@pytest.mark.parametrize("name", ["exact", "aimd", "sample, float32", "elements, balanced", "low rank"])
def test_a_resumed_run_goes_on_identically(tmp_path, name):
    whole = run(COMPRESSORS[name], **saving(tmp_path))
    path = next(tmp_path.glob("*step=10.ckpt"))
    state = torch.load(path, weights_only=True)["lightning_hetero_residuals"]
    assert [sum(float(r.abs().sum()) for r in rank["residuals"].values()) > 0 for rank in state["ranks"]] == [True] * 2
    rest = run(COMPRESSORS[name], ckpt_path=str(path))
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(part["grads"], full["grads"][10:])
        np.testing.assert_array_equal(part["weights"], full["weights"])


def test_low_rank_goes_on_on_three_workers_with_many_buckets(tmp_path):
    """To rounding: gloo adds up three parts in an order that depends on the bucket, and DDP's first are others."""
    for compression in ("low rank", None):
        folder, kwargs = tmp_path / str(compression), {"strategy": {"bucket_cap_mb": TINY}, "sizes": (3, 2, 1)}
        settings = None if compression is None else COMPRESSORS[compression]
        whole = same_everywhere(run(settings, **kwargs, **saving(folder)))
        rest = same_everywhere(run(settings, **kwargs, max_steps=13, ckpt_path=str(next(folder.glob("*step=10.ckpt")))))
        np.testing.assert_allclose(rest["grads"], whole["grads"][10:13], rtol=1e-4, atol=1e-5)
        assert not np.array_equal(rest["grads"], whole["grads"][10:13]), "then it can be promised on three workers too"


def _resumed_residuals(rank, path, world_size, compression):
    strategy = HeteroDDPStrategy(policy="even", compression=compression)
    trainer = trainer_of(strategy, world_size, max_steps=10, max_epochs=-1)
    trainer.fit(Wide(), DataLoader(points(), 2), ckpt_path=path)
    exchange = strategy.engine.compression.averager
    return {k: v.numpy() for k, v in exchange.residuals().items()}


@pytest.mark.parametrize(("world_size", "compression"), [(2, "block_topk"), (3, "block_topk"), (3, "powersgd")])
def test_residuals_are_kept_on_another_number_of_ranks(tmp_path, world_size, compression):
    """Their sum over ranks is what it was, also under another compressor."""
    run(COMPRESSORS["exact"], **saving(tmp_path))
    path = next(tmp_path.glob("*step=10.ckpt"))
    ranks = torch.load(path, weights_only=True)["lightning_hetero_residuals"]["ranks"]
    after = run_ranks(_resumed_residuals, world_size, str(path), world_size, compression)
    for name in ranks[0]["residuals"]:
        before = sum(rank["residuals"][name] for rank in ranks)
        np.testing.assert_allclose(sum(rank[name] for rank in after), before.flatten(), rtol=1e-5, atol=1e-6)


def _paid(rank, path, world_size, settings):
    """Gradients and residuals of steps at fixed weights, of one run that goes on from a checkpoint."""
    if settings == "auto":
        link.measure = lambda parameters, control, topology, settings: LinkMeasurement(1e-6, 1e12, 1.0, 2, 10**6)
    model = Wide(lr=0.0)
    strategy = HeteroDDPStrategy(policy="even", compression=settings)
    trainer = trainer_of(strategy, world_size, max_steps=22, max_epochs=-1)
    trainer.fit(model, DataLoader(points(), 6 // world_size), ckpt_path=path)
    exchange = None if settings is None else strategy.engine.compression.averager
    left = None if exchange is None else [r.numpy() for r in exchange.residuals().values()]
    return {"grads": np.stack(model.grads), "left": left}


@pytest.mark.parametrize(("before", "after", "compression"), [(2, 1, SPARSE), (3, 2, SPARSE), (2, 2, "auto")])
def test_nothing_is_lost_on_another_number_of_ranks(tmp_path, before, after, compression):
    """Applied and left is all that was owed and came up since; on one rank, or by dense sums, it is paid at once."""
    settings = BlockTopK(**SPARSE, value_dtype="float32")
    run(settings, (6 // before,) * before, model=Wide(lr=0.0), max_steps=10, **saving(tmp_path))
    path = next(tmp_path.glob("*step=10.ckpt"))
    ranks = torch.load(path, weights_only=True)["lightning_hetero_residuals"]["ranks"]
    owed = np.concatenate([sum(r["residuals"][name].flatten() for r in ranks) for name in ranks[0]["residuals"]])
    settings = "auto" if compression == "auto" else settings
    plain = run_ranks(_paid, after, str(path), after, None)[0]["grads"]
    results = run_ranks(_paid, after, str(path), after, settings)
    applied = results[0]["grads"]
    assert np.abs(owed).max() > 0.1
    left = 0.0 if results[0]["left"] is None else sum(np.concatenate(result["left"]) for result in results)
    np.testing.assert_allclose(applied.sum(axis=0) + left, plain.sum(axis=0) + owed, rtol=1e-4, atol=1e-4)
    if after == 1:
        np.testing.assert_allclose(applied[0], plain[0] + owed, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(applied[1:], plain[1:], rtol=1e-6, atol=1e-7)


def test_checkpoints_without_compression_are_as_before(tmp_path):
    run(None, max_epochs=1, **saving(tmp_path))
    assert "lightning_hetero_residuals" not in torch.load(next(tmp_path.glob("*.ckpt")), weights_only=True)


# what is seen


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def _logged(rank, compression):
    """On three ranks."""
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 2, 1], compression=compression, replan=4)
    logger = Rows()
    trainer = trainer_of(strategy, 3, logger=logger, max_epochs=2)
    trainer.fit(Wide(), DataLoader(points(), 2))
    return [row for row in logger.rows if "hetero/bytes_sent" in row]


LOGGED = {"blocks": BlockTopK(density=0.2, warmup_steps=0), "fp16": "fp16", "low rank": "powersgd(start=2, rank=1)"}


@pytest.mark.parametrize("name", LOGGED)
def test_bytes_density_and_time_are_logged(name):
    """To the byte: of blocks, a message to each other rank; of sums, a ring."""
    rows = run_ranks(_logged, 3, LOGGED[name])[0]
    assert len(rows) >= 2
    shapes = [p.shape for p in Wide().parameters()]
    blocks = sum(-(-shape.numel() // 16) for shape in shapes)
    low_rank = 40 + 7 + 7 + 7 + 1  # the factors of the one matrix that is worth it, and all else
    k = -(-round(0.2 * blocks) // 3)
    due = {
        "blocks": 2 * MessageFormat(blocks, k, 16, "bfloat16").num_bytes,
        "fp16": 2 * 2 / 3 * 2 * sum(shape.numel() for shape in shapes),
        "low rank": 2 * 2 / 3 * 4 * low_rank,
    }
    for row in rows[1:]:  # the first has the dense steps
        assert row["hetero/bytes_sent"] == pytest.approx(due[name], rel=1e-6)
        assert row["hetero/bytes_received"] == row["hetero/bytes_sent"]
        assert 0 < row["hetero/compression_density"] <= 1
        if name == "blocks":
            assert row["hetero/encode_time"] > 0
            assert row["hetero/compression_density"] == pytest.approx(3 * k / blocks)


class Shifted(Points):
    """Targets with a mean, so that the gradient has a signal."""

    def __init__(self):
        super().__init__(N, features=FEATURES, dtype=torch.float32)
        self.y = self.y + 3.0


def _noise(rank, settings, sizes):
    torch.manual_seed(0)
    callback = GNSCallback(horizon=1e9)
    strategy = HeteroDDPStrategy(local_batch_sizes=sizes, compression=settings, replan=10)
    trainer = trainer_of(strategy, 2, callbacks=[callback], max_epochs=25)
    trainer.fit(Wide(lr=0.0), DataLoader(Shifted(), sum(sizes) // 2, shuffle=True))
    estimate = callback.estimate
    return estimate.trace, estimate.grad_sq_norm, estimate.samples


@pytest.mark.parametrize("sizes", [[5, 1], [3, 3]], ids=str)
def test_noise_scale_does_not_see_the_compression(sizes):
    """From local norms where batches are unequal, from dense steps where they are equal."""
    expected = run_ranks(_noise, 2, None, sizes)[0]
    ours, other = run_ranks(_noise, 2, BlockTopK(density=0.05, dense_every=4), sizes)
    assert ours == other
    assert ours[2] == expected[2] if sizes == [5, 1] else 0.2 * expected[2] < ours[2] < 0.3 * expected[2]
    np.testing.assert_allclose(ours[:2], expected[:2], rtol=0.3)


def _auto(rank, latency, rate):
    link.measure = lambda parameters, control, topology, settings: LinkMeasurement(latency, rate, 1e-6, 2, 10**8)
    lines = []
    link.log.info = lambda text, *args: lines.append(text % args)
    out = _fit(rank, [3, 1], "auto(densities=[0.05, 0.4])", {})
    return out["grads"], lines


@pytest.mark.parametrize(("latency", "rate", "density"), [(1e-6, 1e7, 0.05), (1e3, 1e7, 0.4), (1e-6, 1e20, None)])
def test_auto_compresses_where_it_pays_and_says_why(latency, rate, density):
    """The first steps are dense and timed; the choice changes the very next message."""
    (ours, lines), (other, _) = run_ranks(_auto, 2, latency, rate)
    np.testing.assert_array_equal(ours, other)
    touched = (ours != 0).mean(axis=1)
    low, high = {0.05: (0.02, 0.15), 0.4: (0.2, 0.5), None: (0.5, 1.0)}[density]
    assert touched[: link.AUTO.first_try_step].min() > 0.5
    assert low < touched[link.AUTO.first_try_step :].min() <= touched[link.AUTO.first_try_step :].max() <= high
    assert len(touched) > 2 * link.AUTO.first_try_step
    said = [line for line in lines if line.startswith("compression='auto'")]
    assert len(said) == 1
    assert ("dense sums" if density is None else f"density {density}") + ", because dense takes" in said[0]
    assert float(said[0].split("computing takes ")[1].removesuffix(" ms")) > 0


RATE = 4e6


def _measured(rank):
    """Of three quarters of a million elements, over a link of that many bytes per second."""
    dist.init_process_group("gloo")
    p = nn.Parameter(torch.zeros(750_000))
    with ThinLink(RATE, world_size=2):
        return link.measure({"p": p}, ControlPlane(rank, 2), Topology(rank, ((0,), (1,))), parse_compression("auto"))


@pytest.mark.alone
def test_what_auto_knows_is_measured():
    one, other = run_ranks(_measured, 2)
    assert one == other
    assert RATE / 2 < one.rate < 1.1 * RATE
    assert 0 < one.latency < link.BENCHMARK.probe_bytes / RATE
    assert one.encode > 0
    assert (one.world_size, one.numel, one.element_size) == (2, 750_000, 4)


# what is wrong


def test_wrong_arguments_are_refused_at_construction():
    with pytest.raises(ValueError, match="Allowed are 'block_topk'"):
        HeteroDDPStrategy(compression="topk")
    with pytest.raises(TypeError, match="compression=0.01"):
        HeteroDDPStrategy(compression=0.01)
    with pytest.raises(ValueError, match="ddp_comm_hook"):
        HeteroDDPStrategy(compression="fp16", ddp_comm_hook=lambda state, bucket: None)


def _different(rank):
    return _fit(rank, [3, 1], BlockTopK(density=0.1 * (rank + 1)), {})


def test_ranks_with_different_settings_are_refused():
    errors = run_ranks(_different, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]


def _corrupted(rank):
    gather = sums.async_all_gather

    def flip(rows, *args):
        def arrived(done):
            rows[0, -1] ^= 4

        return gather(rows, *args).then(arrived)

    sums.async_all_gather = flip
    return _fit(rank, [3, 1], BlockTopK(**SPARSE), {})


def test_a_corrupted_message_ends_the_run_with_rank_and_bucket():
    errors = run_ranks(_corrupted, 2, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    for _, kind, message in errors:
        assert kind == "ValueError"
        assert "the gradient message of rank 0, bucket 0, step 2 is refused: checksum" in message


# sparse optimizers


class WithSparse(Wide):
    """Remembers which share of the weights each step has written."""

    def __init__(self, optimizer="SparseSGD", lr=0.01):
        super().__init__(lr=lr)
        self.optimizer, self.written = optimizer, []

    def configure_optimizers(self):
        cls = {"SparseSGD": SparseSGD, "SGD": torch.optim.SGD, "SparseAdamW": SparseAdamW}[self.optimizer]
        settings = {} if self.optimizer == "SparseAdamW" else {"momentum": 0.5}
        return cls(self.parameters(), lr=self.lr, **settings)

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for p in self.parameters()]
        self.grads.append(torch.cat([(g.to_dense() if g.is_sparse else g).flatten().clone() for g in grads]))
        self.before = self.flat().copy()

    def on_train_batch_end(self, *args):
        self.written.append((self.flat() != self.before).mean())


def _fit_sparse(rank, optimizer, settings, kwargs):
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    lazy_update.LazyUpdate.max_sparse_density = 0.5  # of a model of 20 blocks, one is a lot
    model = WithSparse(optimizer)
    out = _fit(rank, [3, 1], settings, {"model": model, **kwargs})
    return {**out, "written": model.written}


FEW = BlockTopK(density=0.05, value_dtype="float32")


@pytest.mark.parametrize("optimizer", ["SparseSGD", "SparseAdamW"])
def test_sparse_optimizers_write_what_the_gradient_touches(optimizer):
    results = run_ranks(_fit_sparse, 2, optimizer, FEW, {})
    same_everywhere(results)
    written = results[0]["written"]
    assert min(written[:2]) > 0.9, "warm-up steps are dense"
    assert 0 < np.mean(written[2:]) < 0.3
    dense = run_ranks(_fit_sparse, 2, "SGD", FEW, {})[0]
    assert np.mean(dense["written"][2:]) > 0.6


def test_a_resumed_run_with_a_sparse_optimizer_goes_on_identically(tmp_path):
    whole = run_ranks(_fit_sparse, 2, "SparseSGD", FEW, saving(tmp_path))
    path = next(tmp_path.glob("*step=10.ckpt"))
    rest = run_ranks(_fit_sparse, 2, "SparseSGD", FEW, {"ckpt_path": str(path), **saving(tmp_path)})
    np.testing.assert_array_equal(rest[0]["weights"], whole[0]["weights"])


def test_another_checkpoint_leaves_nothing_of_the_first_one_to_pay():
    """One worker loads two states before its first step: what the first one owed is not the second one's."""
    control = SimpleNamespace(world_size=1, rank=0)
    hook = HookState(StepTimer(HostClock()), 1)
    compression = GradientCompression(BlockTopK(), control, hook)
    model = nn.Linear(3, 1)
    compression.attach(model)
    owed = {"ranks": [{"kind": "BlockExchange", "residuals": {"weight": torch.ones(3)}, "extra": {}}]}
    compression.load_state_dict({**owed, "clusters": ((0,),)})
    assert hook.residual_payout is not None
    compression.load_state_dict({})
    assert hook.residual_payout is None
    assert compression.state_dict_of_rank() == {}
