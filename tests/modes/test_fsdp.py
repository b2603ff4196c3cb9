"""Sharded models (``hetero_fsdp``): the learned split, plans, checkpoints, and what is refused.

Gradients and weights are those of one process: tests/one_process.
"""

import pickle
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hetero import (
    GNSCallback,
    HeteroDDPStrategy,
    HeteroFSDPStrategy,
    LookAheadCallback,
)
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core import DamagedCheckpointError
from tests.counted import CountedTime
from tests.helpers import Points, collected, covered, fit, trainer_of
from tests.loops import Sharded
from tests.one_process.test_modules import Block, ShardsItself
from tests.ranks import at_end, run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}
D = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command|ignore::FutureWarning", "ignore::UserWarning")


# decisions


class Spend(torch.autograd.Function):
    """Takes a third of its counted time in the forward pass and the rest in the backward pass."""

    @staticmethod
    def forward(ctx, x, spend, seconds):
        ctx.spend, ctx.seconds = spend, seconds
        spend(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend(ctx.seconds * 2 / 3)
        return gradient, None, None


class TimedBlock(nn.Module):
    def __init__(self, spend, per_sample):
        super().__init__()
        self.spend, self.per_sample = spend, per_sample
        self.linear, self.tanh = nn.Linear(5, 5, dtype=D), nn.Tanh()

    def forward(self, x):
        return Spend.apply(self.tanh(self.linear(x)), self.spend, self.per_sample * len(x))


class Timed(Sharded):
    """Three blocks, each a third of the time of a sample."""

    def __init__(self, spend, per_sample):
        super().__init__()
        self.net = nn.Sequential(*[TimedBlock(spend, per_sample / 3) for _ in range(3)], nn.Linear(5, 1).double())


def counted(rank):
    """Time of a rank that waits for the last one at each collective of a sharded model."""
    time, waiting = CountedTime(rank, 1e9), StepTimer.waiting

    @contextmanager
    def waits(timer):
        with waiting(timer):
            yield
            time.now = time.last_ready()

    patch = pytest.MonkeyPatch()
    patch.setattr(StepTimer, "waiting", waits)
    at_end(patch.undo)
    return time


def _learns(rank, speeds, settings, kwargs, folder):
    """Sizes that were run and planned; with a folder, also those of a run that goes on from the end."""
    model, strategy = Timed(counted(rank).spend, speeds[rank]), HeteroFSDPStrategy(replan=6, **settings)
    save = {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True} if folder else {}
    kwargs = {"max_epochs": 1, "ckpt_path": next(folder.glob("*.ckpt"), None) if folder else None, **save, **kwargs}
    done = fit(rank, strategy, len(speeds), 16, model, Points(16 * len(speeds) * 26), **kwargs)
    return [len(own) for *_, own in done["seen"]], [sizes for *_, sizes in done["history"]]


def learned(speeds, settings=None, folder=None, **kwargs):
    return run_ranks(_learns, len(speeds), speeds, settings or {}, kwargs, folder)


SPEEDS = (0.0008, 0.0024)  # seconds per sample: of 32 samples, 24 and 8 take equally long
FOUR = (0.0005, 0.001, 0.002, 0.004)


@pytest.mark.parametrize(
    ("speeds", "settings", "kwargs"),
    [(SPEEDS, {"policy": "pid"}, {}), (SPEEDS, {}, {"accumulate_grad_batches": 2}), (FOUR, {"replicate_size": 2}, {})],
    ids=["pid", "accumulation", "replicas"],
)
def test_the_split_that_is_learned_is_close_to_the_optimum(speeds, settings, kwargs):
    """Although every rank waits for the slowest before each block, so that all take equally long. Time is counted."""
    results = learned(speeds, settings, **kwargs)
    plans = results[0][1]
    assert plans[0] == (16,) * len(speeds)
    optimum = 16 * len(speeds) / sum(1 / speed for speed in speeds)  # seconds, of shares that are no integers
    assert optimum / max(size * speed for size, speed in zip(plans[-1], speeds, strict=True)) > 0.93, plans
    for rank, (ran, told) in enumerate(results):
        assert told == plans
        assert ran[0] == plans[0][rank]
        assert plans[-1][rank] in ran, "the decision changes the batches that follow"


def test_memory_bounds_the_split_and_a_resumed_run_begins_with_what_was_learned(tmp_path):
    bounds = {"max_local_batch_sizes": [18, 32]}
    (ran, plans), _ = learned(SPEEDS, bounds, tmp_path)
    assert plans[-1] == (18, 14)
    assert max(ran) <= 18
    again = learned(SPEEDS, bounds, tmp_path, max_epochs=2)[0][1]
    assert again[0] == (18, 14)


# what it begins with, and what it says


class Normalised(Sharded):
    """Differs between ranks until the training begins."""

    def __init__(self, rank):
        super().__init__(lr=0.0)
        torch.manual_seed(rank)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).double()
        self.net[1].running_mean.fill_(float(rank))
        self.first = self.net[0].weight.detach().clone().numpy().ravel()

    def on_train_start(self):
        self.began = self.net[1].running_mean.tolist(), self.flat()


def _begins(rank):
    lines, model = collected(), Normalised(rank)
    fit(rank, HeteroFSDPStrategy(), 2, 4, model, Points(16), max_epochs=1)
    fit(rank, HeteroFSDPStrategy(), 2, 4, Sharded(loss_scale=float("nan")), Points(16))
    return model.first, *model.began, len([line for line in lines if "the loss is nan" in line])


def test_all_ranks_begin_with_the_weights_of_rank_0_and_say_what_is_wrong():
    (first, mean, flat, nan), (other, its_mean, its_flat, its_nan) = run_ranks(_begins, 2)
    assert not np.array_equal(first, other)
    assert mean == its_mean == [0.0] * 7
    np.testing.assert_array_equal(flat[: first.size], first)
    np.testing.assert_array_equal(flat, its_flat)
    assert (nan, its_nan) == (1, 1)


class Evaluated(Sharded):
    def __init__(self):
        super().__init__()
        self.tested = []

    def test_step(self, batch, batch_idx):
        self.tested += batch[2].tolist()
        self.log("loss", self.loss(batch), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


class EvaluatedShards(Evaluated, ShardsItself):
    """Its own sharding leaves the outermost module gathered after an evaluation."""


def _uses(rank):
    """Evaluations around a fit, and a loop of one's own behind it."""
    found = {}
    for kind in (Evaluated, EvaluatedShards):
        for settings in ({"balance_evaluation": True}, {"replicate_size": 2}):
            model, trainer, data = kind(), trainer_of(HeteroFSDPStrategy(**settings), 2, max_epochs=1), Points(8)
            loss = trainer.test(model, DataLoader(data, 2), verbose=False)[0]["loss"]
            found[kind.__name__, str(settings)] = loss, list(model.tested)
            trainer.validate(model, DataLoader(data, 2), verbose=False)
            trainer.fit(model, DataLoader(data, 2), DataLoader(data, 2))
            trainer.test(model, DataLoader(data, 2), verbose=False)
            model.net(torch.ones(3, 5, dtype=D)).sum().backward()
    return found


def test_a_module_can_be_evaluated_before_and_after_its_fit():
    expected = Sharded().loss(next(iter(DataLoader(Points(8), 8)))).item()
    first, second = run_ranks(_uses, 2)
    for name in first:
        assert [first[name][0], second[name][0]] == pytest.approx([expected] * 2)
        assert sorted(first[name][1] + second[name][1]) == list(range(8))


# checkpoints


class AsksForSteps(Sharded):
    """Sets up the loaders before the position of the checkpoint is known."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


def _train(rank, sizes, settings, kwargs, model=Sharded):
    """With ``settings`` of None under ``hetero_ddp``."""
    cls = HeteroDDPStrategy if settings is None else HeteroFSDPStrategy
    strategy, ranks = cls(local_batch_sizes=sizes, **(settings or {})), len(sizes)
    return fit(rank, strategy, ranks, 10 // ranks, model(), Points(70), max_epochs=3, **kwargs)


def saves(folder, steps=5):
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}-{step}", every_n_train_steps=steps)
    return {"callbacks": [callback], "enable_checkpointing": True}


@pytest.mark.parametrize("files", [True, False], ids=["shards", "one file"])
def test_training_resumes_inside_an_epoch_on_any_number_of_ranks(tmp_path, files):
    """7 steps an epoch, saved after 10: inside the second epoch. Four ranks hold two replicas."""
    settings = {"save_distributed_checkpoint": files}
    full = run_ranks(_train, 2, [7, 3], settings, saves(tmp_path))
    path = next(tmp_path.glob("*step=10.ckpt"))
    assert path.is_dir() == files
    before = [i for r in full for epoch, step, seen in r["seen"] if epoch == 1 and step < 3 for i in seen]
    for sizes in ([7, 3], [5, 4, 1], [10], [1, 2, 3, 4]):
        model = AsksForSteps if sizes == [7, 3] else Sharded
        more = {**settings, "replicate_size": 2 if len(sizes) == 4 else 1}
        rest = run_ranks(_train, len(sizes), sizes, more, {"ckpt_path": str(path)}, model)
        assert sorted(before + covered(rest, 1)) == covered(rest, 2) == list(range(70))
        for result in rest:
            assert result["steps"] == 21
            np.testing.assert_allclose(result["weights"], full[0]["weights"], **EXACT)


def test_one_file_leads_from_hetero_ddp_and_back(tmp_path):
    one = {"save_distributed_checkpoint": False}
    full = run_ranks(_train, 2, [3, 7], None, saves(tmp_path / "ddp"))
    path = next((tmp_path / "ddp").glob("*step=10.ckpt"))
    there = run_ranks(_train, 2, [7, 3], one, {"ckpt_path": str(path), **saves(tmp_path / "fsdp", 15)})
    path = next((tmp_path / "fsdp").glob("*step=15.ckpt"))
    for result in (*there, *run_ranks(_train, 2, [3, 7], None, {"ckpt_path": str(path)})):
        np.testing.assert_allclose(result["weights"], full[0]["weights"], **EXACT)


class Planted:
    """Says that somebody's code was called."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def flipped(content):
    """The content with one bit less or more, in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


def _damaged(rank, path, changes):
    """Error of each change of a checkpoint, which rank 0 makes and takes back."""
    found = []
    for name, change in changes:
        content = (path / name).read_bytes()
        if rank == 0:
            (path / name).write_bytes(flipped(content) if change is None else change)
        trainer, model = trainer_of(HeteroFSDPStrategy(), 2, max_epochs=3), Sharded()
        try:
            trainer.fit(model, DataLoader(Points(70), 5), ckpt_path=str(path))
            found.append(None)
        except DamagedCheckpointError as error:
            found.append(str(error))
        dist.barrier()
        if rank == 0:
            (path / name).write_bytes(content)
    return found


def test_shards_that_changed_are_named_on_every_rank_before_they_are_read(tmp_path):
    run_ranks(_train, 2, [7, 3], {"save_distributed_checkpoint": True}, saves(tmp_path))
    path, called = next(tmp_path.glob("*step=10.ckpt")), tmp_path / "called"
    files = sorted(one.name for one in path.iterdir())
    hostile = pickle.dumps(Planted(called))
    same = (files[0], (path / files[0]).read_bytes())
    changes = [*((name, None) for name in files), (".metadata", hostile), same]
    for *errors, whole in run_ranks(_damaged, 2, path, changes):
        for (name, _), error in zip(changes, errors, strict=False):
            assert str(path) in error
            assert name in error or name == "hetero_state.sha256"
        assert whole is None
    (path / "hetero_state.sha256").unlink()  # as of plain fsdp
    for error, whole in run_ranks(_damaged, 2, path, [(".metadata", hostile), same]):
        assert ".metadata" in error
        assert whole is None
    assert not called.exists()


class Raises(Sharded):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ArithmeticError(f"of rank {self.global_rank}")
        return super().training_step(batch, batch_idx)


def _raises(rank, folder, ranks):
    lines = [OnExceptionCheckpoint(folder)]
    fit(rank, HeteroFSDPStrategy(), ranks, 8, model=Raises(), callbacks=lines, enable_checkpointing=True)


def test_a_rank_alone_saves_no_shards_and_waits_for_nobody(tmp_path):
    """One rank that is all does save."""
    errors = run_ranks(_raises, 2, tmp_path, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "RuntimeError"), (1, "RuntimeError")]
    assert not list(tmp_path.iterdir())
    assert run_ranks(_raises, 1, tmp_path, 1, expect_errors=True)[0][1] == "ArithmeticError"
    assert [file.name for file in tmp_path.iterdir()] == ["on_exception.ckpt"]


# what is refused


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"compression": "block_topk"}, "hetero_ddp"),
        ({"hierarchy": "nodes"}, "replicate_size="),
        ({"staleness": 1}, "staleness"),
        ({"probe_memory": True}, "max_local_batch_sizes="),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"tensor_parallel_size": 2}, "ModelParallelStrategy"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "replicate_size="),
        ({"max_local_batch_size": 64}, "max_local_batch_sizes"),
        ({"auto_wrap_policy": print}, "FSDP1"),
        ({"mp_policy": "bf16"}, "mp_policy"),
        ({"reshard_after_forward": "True"}, "reshard_after_forward"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_an_argument_of_another_strategy_is_refused_by_name(given, match):
    with pytest.raises((TypeError, ValueError), match=match):
        HeteroFSDPStrategy(**given)


def test_settings_that_are_off_may_stay():
    HeteroFSDPStrategy(compression=None, staleness=0, on_nonfinite="ignore", find_unused_parameters=False)


class Odd(Sharded):
    """With one thing that cannot be sharded, or not be left to the default."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        if what == "shared":
            self.other = nn.Linear(5, 7, dtype=D)
            self.other.weight = self.net[0].weight
        elif what == "thawed":
            self.scale = nn.Parameter(torch.ones(1, dtype=D), requires_grad=False)
        elif what == "deeper" and dist.is_initialized() and dist.get_rank() == 1:
            self.more = nn.Linear(3, 3, dtype=D)
        self.automatic_optimization = what != "direct"

    def configure_model(self):
        strategy = self.trainer.strategy
        if self.what == "partly":
            fully_shard(self.net[0], mesh=strategy.data_parallel_mesh)
        elif self.what == "divided":
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=strategy.data_parallel_mesh)
            self.net[0].set_gradient_divide_factor(1.0)

    def forward(self, x):
        out = self.net(x) * (self.scale if hasattr(self, "scale") else 1.0)
        return self.late(out) if hasattr(self, "late") else out

    def on_train_epoch_start(self):
        if self.what == "thawed":
            self.scale.requires_grad_(True)
        elif self.what == "grown":
            self.late = nn.Linear(1, 1, dtype=D)
            self.trainer.optimizers[0].add_param_group({"params": list(self.late.parameters())})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.what == "direct":
            loss.backward()
        return loss


ODD = {
    "shared": "net.*other",
    "partly": "net.2.weight",
    "divided": "set_gradient_divide_factor",
    "direct": "loss.backward",
    "thawed": "scale",
    "grown": "late.weight",
}
REFUSED = {
    "auto_wrap_policy": ({"auto_wrap_policy": {Block}}, {}),
    "replicate_size=3": ({"replicate_size": 3}, {}),
    "data_parallel_size=4": ({"data_parallel_size": 4}, {}),
    "LearningRateFinder": ({}, {"callbacks": LearningRateFinder}),
    "GNSCallback": ({}, {"callbacks": GNSCallback}),
    "LookAheadCallback": ({}, {"callbacks": LookAheadCallback}),
    "sync_batchnorm=True": ({}, {"sync_batchnorm": True}),
}


def _refused(rank):
    for what, match in ODD.items():
        with pytest.raises(Exception, match=match):
            fit(rank, HeteroFSDPStrategy(), 2, 8, model=Odd(what))
    for match, (settings, kwargs) in REFUSED.items():
        kwargs = {name: [value()] if name == "callbacks" else value for name, value in kwargs.items()}
        with pytest.raises(Exception, match=match):
            fit(rank, HeteroFSDPStrategy(**settings), 2, 8, model=Sharded(), **kwargs)
    return True


def test_what_cannot_be_sharded_is_refused_on_every_rank():
    assert run_ranks(_refused, 2) == [True, True]


def _differs(rank):
    dist.init_process_group("gloo")
    fit(rank, HeteroFSDPStrategy(), 2, 8, model=Odd("deeper"))


def test_ranks_whose_models_differ_are_refused_on_every_rank():
    errors = run_ranks(_differs, 2, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("the model" in message for *_, message in errors)
