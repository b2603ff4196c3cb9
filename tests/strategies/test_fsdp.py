"""Sharded models (``hetero_fsdp``): gradients of one process, the learned split, checkpoints, and what is refused."""

import logging
import pickle
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import (
    AdaptiveBatchCallback,
    BatchPlan,
    GNSCallback,
    HeteroDDPStrategy,
    HeteroFSDPStrategy,
    LookAheadCallback,
    TTACallback,
)
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.probe_job import VARIABLE
from lightning_hetero.strategies._lightning.fsdp.requirements import unsupported_sharding, unsupported_trainer
from lightning_hetero.strategies._lightning.fsdp.sharding import blocks_of, networks_of, spread_from_first
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, collected, covered, fit, run_ranks, trainer_of

EXACT = {"rtol": 1e-12, "atol": 1e-13}
SAMPLES = 73  # a prime number: the last batch is ragged

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command|ignore::FutureWarning", "ignore::UserWarning")


def whole(tensor):
    """A sharded tensor of all ranks, a collective call; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Sharded(Regressor):
    """Knows its whole gradients and weights, of which a rank has shards."""

    def on_before_optimizer_step(self, optimizer):
        grads = [whole(p.grad).detach().flatten().clone() for p in self.net.parameters()]
        self.grads.append(torch.cat(grads))

    def flat(self):
        return torch.cat([whole(p).detach().flatten() for p in self.parameters()]).numpy()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 9, dtype=torch.float64), nn.Linear(9, 5, dtype=torch.float64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Body(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Deep(Sharded):
    def __init__(self, compiled=False):
        super().__init__()
        self.body = Body()
        if compiled:
            self.body.compile(dynamic=True, backend="aot_eager")

    def forward(self, x):
        return self.net(self.body(x))


class Manual(Sharded):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.on_before_optimizer_step(optimizer)
        optimizer.step()


class Adversaries(Manual):
    """Two networks, two optimizers, several backward passes of one batch."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def training_step(self, batch, batch_idx):
        Regressor.training_step(self, batch, batch_idx)
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.loss(batch)), (second, self.critic(batch[0]).square().mean())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            if optimizer is first:
                self.on_before_optimizer_step(optimizer)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.net, self.critic)]


class ShardsItself(Sharded):
    def configure_model(self):
        mesh = getattr(self.trainer.strategy, "data_parallel_mesh", None)
        if mesh is not None and not isinstance(self.net, FSDPModule):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh)


def _one(rank, model, kwargs):
    ddp = "ddp_find_unused_parameters_true"
    return fit(rank, ddp, 1, 16, model=model(), dataset=Points(SAMPLES), **kwargs)


def _hetero(rank, sizes, model, settings, kwargs):
    settings = settings if isinstance(settings, str) else HeteroFSDPStrategy(local_batch_sizes=sizes, **settings)
    model = model()
    result = fit(rank, settings, len(sizes), sum(sizes) // len(sizes), model=model, dataset=Points(SAMPLES), **kwargs)
    return {**result, "shards": sum(p.to_local().numel() for p in model.parameters())}


def summed(scale=1.0):
    return Sharded(reduction="sum", lr=0.003, loss_scale=scale)


def summed_alone():
    """As under DDP, ranks average their sums: half of the sum of two ranks."""
    return summed(0.5)


CASES = {
    "uneven": (Sharded, {}, {}),
    "accumulation": (Sharded, {}, {"accumulate_grad_batches": 2}),
    "norm": (Sharded, {}, {"gradient_clip_val": 0.05}),
    "value": (Sharded, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "sum": (summed, {"loss_reduction": "sum"}, {}),
    "counts": (Sharded, {"weight_fn": lambda batch: len(batch[0])}, {}),
    "recomputed": (Deep, {}, {}),
    "compiled": (lambda: Deep(compiled=True), {"auto_wrap_policy": {Block}}, {}),
    "kept": (Deep, {"reshard_after_forward": False}, {}),
    "manual": (Manual, {}, {}),
    "adversaries": (Adversaries, {}, {}),
    "shards itself": (ShardsItself, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_equal_one_process(case):
    model, settings, kwargs = CASES[case]
    reference = run_ranks(_one, 1, summed_alone if model is summed else model, kwargs)[0]
    results = run_ranks(_hetero, 2, [12, 4], model, settings, kwargs)
    for result in results:
        assert result["steps"] == reference["steps"]
        np.testing.assert_allclose(result["grads"], reference["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], reference["weights"], **EXACT)
    for epoch in range(2):
        assert covered(results, epoch) == list(range(SAMPLES))
    assert sum(r["shards"] for r in results) == len(reference["weights"]), "each rank has its own part of the model"


class ShardsByItsMesh(Sharded):
    """Takes the mesh from where Lightning's documentation has it."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, HeteroFSDPStrategy):
            fully_shard(self.net, mesh=self.device_mesh["replicate", "shard"])


@pytest.mark.parametrize("model", [Deep, ShardsByItsMesh])
def test_replicas_of_a_sharded_model_equal_one_process(model):
    """Two replicas of two shards: sums of gradients over shards, then over replicas."""
    reference = run_ranks(_one, 1, model, {})[0]
    results = run_ranks(_hetero, 4, [7, 1, 3, 5], model, {"replicate_size": 2}, {})
    for result in results:
        np.testing.assert_allclose(result["grads"], reference["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], reference["weights"], **EXACT)
    assert sum(r["shards"] for r in results) == 2 * len(reference["weights"])
    assert covered(results, 1) == list(range(SAMPLES))


def _bf16(rank, world_size):
    strategy = HeteroFSDPStrategy(local_batch_sizes=[12, 4]) if world_size == 2 else "ddp"
    model = Sharded(dtype=torch.float32)
    points = Points(SAMPLES, dtype=torch.float32)
    return fit(rank, strategy, world_size, 16 // world_size, model=model, dataset=points, precision="bf16-mixed")


def test_bf16_equals_one_process_up_to_its_rounding():
    reference = run_ranks(_bf16, 1, 1)[0]
    for result in run_ranks(_bf16, 2, 2):
        np.testing.assert_allclose(result["weights"], reference["weights"], atol=5e-3)


def _differs(rank):
    model = Sharded()
    torch.manual_seed(rank)
    model.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).double()
    model.net[1].running_mean.fill_(float(rank))
    first = model.net[0].weight.detach().clone().numpy()
    trainer = trainer_of(HeteroFSDPStrategy(), 2, max_epochs=1, limit_train_batches=1)
    model.lr = 0.0
    model.on_train_start = lambda: (began.append(model.net[1].running_mean.clone()), began.append(model.flat()))
    began = []
    trainer.fit(model, DataLoader(Points(16), 4))
    return first, began[0].tolist(), began[1], trainer.strategy.engine.data.min_local


def test_all_ranks_begin_with_the_weights_of_rank_0():
    (first, mean, flat, least), (other, other_mean, other_flat, _) = run_ranks(_differs, 2)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(flat[: first.size], first.ravel())
    np.testing.assert_array_equal(flat, other_flat)
    assert mean == other_mean == [0.0] * 7
    assert least == 2, "batch normalization needs two samples"


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
        self.linear, self.tanh = nn.Linear(5, 5, dtype=torch.float64), nn.Tanh()

    def forward(self, x):
        return Spend.apply(self.tanh(self.linear(x)), self.spend, self.per_sample * len(x))


class Timed(L.LightningModule):
    def __init__(self, spend, per_sample, blocks=3):
        super().__init__()
        timed = [TimedBlock(spend, per_sample / blocks) for _ in range(blocks)]
        self.net = nn.Sequential(*timed, nn.Linear(5, 1).double())
        self.ran = []

    def training_step(self, batch, batch_idx):
        self.ran.append(len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _counted(rank, timed=True):
    """Time of a rank that waits for the last one at each collective of a sharded model, with marks or without."""
    counted, waiting = CountedTime(rank, 1e9), StepTimer.waiting if timed else nullcontext

    @contextmanager
    def waits(timer):
        with waiting(timer):
            yield
            counted.now = counted.last_ready()

    StepTimer.waiting = waits
    return counted


def _learns(rank, per_sample, settings, kwargs, timed):
    model = Timed(_counted(rank, timed).spend, per_sample[rank])
    strategy = HeteroFSDPStrategy(replan=6, **settings)
    trainer = trainer_of(strategy, len(per_sample), max_epochs=1, **kwargs)
    trainer.fit(model, DataLoader(Points(16 * len(per_sample) * 26), 16, shuffle=True))
    plans = [entry.plan.local_batch_sizes for entry in strategy.plan_history]
    return model.ran, plans, strategy.engine.observer.synced_steps == trainer.global_step


SPEEDS = [0.0008, 0.0024]  # seconds per sample: of 32 samples, 24 and 8 take equally long


def slowest(sizes, speeds):
    return max(size * per_sample for size, per_sample in zip(sizes, speeds, strict=True))


@pytest.mark.parametrize(
    ("speeds", "settings", "kwargs"),
    [
        (SPEEDS, {}, {}),
        (SPEEDS, {"policy": "pid"}, {}),
        (SPEEDS, {}, {"accumulate_grad_batches": 2}),
        ([0.0005, 0.001, 0.002, 0.004], {"replicate_size": 2}, {}),
    ],
    ids=["perf_model", "pid", "accumulation", "replicas"],
)
def test_the_split_that_is_learned_is_close_to_the_optimum(speeds, settings, kwargs):
    """Although every rank waits for the slowest before each block, so that all take equally long. Time is counted."""
    results = run_ranks(_learns, len(speeds), speeds, settings, kwargs, True)
    plans = results[0][1]
    assert plans[0] == (16,) * len(speeds)
    optimum = min(slowest(sizes, speeds) for sizes in _splits(16 * len(speeds), speeds))
    assert optimum / slowest(plans[-1], speeds) > 0.95, plans
    for rank, (ran, told, counts_steps) in enumerate(results):
        assert told == plans
        assert counts_steps, "micro-batches count as steps"
        assert ran[0] == plans[0][rank]
        assert plans[-1][rank] in ran, "the decision changes the batches that follow"


def _splits(total, speeds):
    """The split in proportion to the speeds, rounded in every way."""
    shares = np.array([1 / s for s in speeds]) / sum(1 / s for s in speeds) * total
    for up in np.ndindex((2,) * len(speeds)):
        sizes = np.floor(shares).astype(int) + np.array(up)
        if sizes.sum() == total:
            yield sizes.tolist()


def test_timing_without_marks_finds_all_ranks_equally_fast():
    """What the marks are there for: the times of a whole step tell nothing of a rank's own speed."""
    results = run_ranks(_learns, 2, SPEEDS, {}, {}, False)
    assert all(abs(size - 16) <= 3 for plan in results[0][1] for size in plan), results[0][1]


def test_memory_bounds_the_split():
    results = run_ranks(_learns, 2, SPEEDS, {"max_local_batch_sizes": [18, 32]}, {}, True)
    assert results[0][1][-1] == (18, 14)
    assert max(results[0][0]) <= 18


def _static(rank, policy):
    strategy = HeteroFSDPStrategy(policy=policy)
    fit(rank, strategy, 2, 8, model=Sharded(), dataset=Points(64))
    return [(entry.plan.local_batch_sizes, entry.reason) for entry in strategy.plan_history]


@pytest.mark.parametrize(("policy", "reason"), [("static", "cores or peak FLOPs"), ("even", "")])
def test_other_policies(policy, reason):
    """On equal workers, both give equal sizes, and neither changes them."""
    for history in run_ranks(_static, 2, policy):
        assert [sizes for sizes, _ in history] in ([], [(8, 8)])
        assert all(reason in why for _, why in history)


def _adopts(rank):
    class Adopts(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (0, 2):
                trainer.strategy.adopt(BatchPlan(16, (3, 13)), "by hand")

    strategy, model = HeteroFSDPStrategy(local_batch_sizes=[8, 8]), Sharded()
    result = fit(rank, strategy, 2, 8, model=model, dataset=Points(SAMPLES), callbacks=[Adopts()])
    return {**result, "sizes": [len(indices) for _, _, indices in model.seen]}


def test_an_adopted_plan_changes_the_next_batches_and_no_gradient():
    reference = run_ranks(_one, 1, Sharded, {})[0]
    results = run_ranks(_adopts, 2)
    for result, after in zip(results, (3, 13), strict=True):
        assert result["sizes"][:3] == [8, 8, 8]
        assert after in result["sizes"][3:5]
        np.testing.assert_allclose(result["grads"], reference["grads"], **EXACT)


# checkpoints

BATCH = 10


class AsksForSteps(Sharded):
    """Sets up the loaders before the position of the checkpoint is known."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


def _saved(rank, world_size, sizes, model, files, kwargs):
    settings = {"local_batch_sizes": sizes, "save_distributed_checkpoint": files}
    strategy = HeteroFSDPStrategy(**settings, replicate_size=2 if world_size == 4 else 1)
    return fit(
        rank, strategy, world_size, BATCH // world_size, model=model(), dataset=Points(70), max_epochs=3, **kwargs
    )


def saves(folder, **kwargs):
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}-{step}", **kwargs)
    return {"callbacks": [callback], "enable_checkpointing": True}


@pytest.mark.parametrize("files", [True, False], ids=["shards", "one file"])
def test_training_resumes_inside_an_epoch_on_any_number_of_ranks(tmp_path, files):
    """7 steps an epoch, saved after 10: inside the second epoch. Four ranks hold two replicas."""
    full = run_ranks(_saved, 2, 2, [7, 3], Sharded, files, saves(tmp_path, every_n_train_steps=5))
    path = next(tmp_path.glob("*step=10.ckpt"))
    assert path.is_dir() == files
    before = [i for r in full for epoch, step, seen in r["seen"] if epoch == 1 and step < 3 for i in seen]
    runs = [(2, [7, 3], AsksForSteps), (3, [5, 4, 1], Sharded), (1, [10], Sharded), (4, [1, 2, 3, 4], Sharded)]
    for world_size, sizes, model in runs:
        rest = run_ranks(_saved, world_size, world_size, sizes, model, files, {"ckpt_path": str(path)})
        assert sorted(before + covered(rest, 1)) == list(range(70))
        assert covered(rest, 2) == list(range(70))
        for result in rest:
            assert result["steps"] == 21
            np.testing.assert_allclose(result["weights"], full[0]["weights"], **EXACT)


class Planted:
    """Says that somebody's code was called."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        function, *arguments = self.call
        return function, tuple(arguments)


def _damaged(rank, path, changes):
    """Error of each change of a checkpoint, which rank 0 makes and takes back."""
    found = []
    for name, change in changes:
        content = (path / name).read_bytes()
        if rank == 0:
            (path / name).write_bytes(change(content))
        trainer, model = trainer_of(HeteroFSDPStrategy(), 2, max_epochs=3), Sharded()
        try:
            trainer.fit(model, DataLoader(Points(70), 5), ckpt_path=str(path))
            found.append(None)
        except DamagedCheckpointError as error:
            found.append(str(error))
        torch.distributed.barrier()
        if rank == 0:
            (path / name).write_bytes(content)
    return found


def flipped(content):
    """The content with one bit less or more, in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


def test_shards_that_changed_are_named_on_every_rank_before_they_are_read(tmp_path):
    run_ranks(_saved, 2, 2, [7, 3], Sharded, True, saves(tmp_path, every_n_train_steps=5))
    path, called = next(tmp_path.glob("*step=10.ckpt")), tmp_path / "called"
    files = sorted(one.name for one in path.iterdir())
    assert len(files) == 5, "metadata of torch and of Lightning, a file of each rank, checksums"
    hostile = pickle.dumps(Planted(Path.touch, called))
    torchs = pickle.dumps(Planted(torch.save, [], str(called)))  # of a module whose classes are in such files
    changes = [*((name, flipped) for name in files), (".metadata", lambda content: hostile), (files[0], bytes)]
    for *errors, whole in run_ranks(_damaged, 2, path, changes):
        for (name, _), error in zip(changes, errors, strict=False):
            assert f"{path} is not a whole checkpoint ({'' if name == 'hetero_state.sha256' else name}" in error
        assert whole is None
    (path / "hetero_state.sha256").unlink()  # as of plain fsdp
    changes = [(".metadata", lambda content: hostile), (".metadata", lambda content: torchs), (".metadata", bytes)]
    for *errors, whole in run_ranks(_damaged, 2, path, changes):
        assert all(f"{path} is not a whole checkpoint (.metadata" in error for error in errors)
        assert whole is None
    assert not called.exists()


def _ddp(rank, kwargs):
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 7])
    return fit(rank, strategy, 2, BATCH // 2, model=Sharded(), dataset=Points(70), max_epochs=3, **kwargs)


def test_one_file_leads_from_hetero_ddp_and_back(tmp_path):
    full = run_ranks(_ddp, 2, saves(tmp_path / "ddp", every_n_train_steps=5))
    path = next((tmp_path / "ddp").glob("*step=10.ckpt"))
    sharded = saves(tmp_path / "fsdp", every_n_train_steps=15)
    there = run_ranks(_saved, 2, 2, [7, 3], Sharded, False, {"ckpt_path": str(path), **sharded})
    path = next((tmp_path / "fsdp").glob("*step=15.ckpt"))
    back = run_ranks(_ddp, 2, {"ckpt_path": str(path)})
    for result in (*there, *back):
        np.testing.assert_allclose(result["weights"], full[0]["weights"], **EXACT)


def _knows(rank, folder, path):
    strategy, model = HeteroFSDPStrategy(replan=6), Timed(_counted(rank).spend, SPEEDS[rank])
    trainer = trainer_of(strategy, 2, max_epochs=1 if path is None else 2, **saves(folder))
    trainer.fit(model, DataLoader(Points(32 * 20), 16, shuffle=True), ckpt_path=path)
    return [entry.plan.local_batch_sizes for entry in strategy.plan_history]


def test_a_resumed_run_begins_with_what_was_learned(tmp_path):
    learned = run_ranks(_knows, 2, tmp_path, None)[0][-1]
    assert learned[0] > learned[1]
    first = run_ranks(_knows, 2, tmp_path / "again", str(next(tmp_path.glob("*.ckpt"))))[0][0]
    assert first == learned


def _raises(rank, folder, ranks):
    class Raises(Sharded):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError(f"of rank {rank}")
            return super().training_step(batch, batch_idx)

    lines = [OnExceptionCheckpoint(folder)]
    fit(rank, HeteroFSDPStrategy(), ranks, 8, model=Raises(), callbacks=lines, enable_checkpointing=True)


def test_a_rank_alone_saves_no_shards_and_waits_for_nobody(tmp_path):
    errors = run_ranks(_raises, 2, tmp_path, 2, expect_errors=True, timeout=60)
    assert [rank for rank, *_ in errors] == [0, 1]
    for _, kind, message in errors:
        assert kind == "RuntimeError"
        assert "this rank has only its shards" in message
    assert not list(tmp_path.iterdir())


def test_one_rank_that_is_all_saves_at_an_exception(tmp_path):
    assert run_ranks(_raises, 1, tmp_path, 1, expect_errors=True)[0][1:] == ("ArithmeticError", "of rank 0")
    assert [file.name for file in tmp_path.iterdir()] == ["on_exception.ckpt"]


# what is refused


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"compression": "block_topk"}, ValueError, r"compression='block_topk'\): .*strategy='hetero_ddp'"),
        ({"hierarchy": "nodes"}, ValueError, "replicate_size="),
        ({"sparse_optimizer": True}, ValueError, "block top-k"),
        ({"staleness": 1}, ValueError, "Leave it out"),
        ({"transfer_priority": True}, ValueError, "Leave it out"),
        ({"probe_memory": True}, ValueError, "max_local_batch_sizes="),
        ({"on_nonfinite": "skip"}, ValueError, "it at 'ignore'"),
        ({"tensor_parallel_size": 2}, ValueError, "ModelParallelStrategy"),
        ({"ddp_comm_hook": print}, ValueError, "no DDP"),
        ({"find_unused_parameters": True}, ValueError, "Leave it out"),
        ({"sharding_strategy": "HYBRID_SHARD"}, ValueError, "replicate_size="),
        ({"max_total_batch_size": 64}, TypeError, "AdaptiveBatchCallback"),
        ({"max_local_batch_size": 64}, TypeError, "max_local_batch_sizes"),
        ({"auto_wrap_policy": ["Block"]}, TypeError, "classes of modules"),
        ({"auto_wrap_policy": nn.Linear}, TypeError, "auto_wrap_policy=.*must be a set of classes"),
        ({"auto_wrap_policy": print}, TypeError, "auto_wrap_policy=.*functions belong to FSDP1"),
        ({"mp_policy": "bf16"}, TypeError, "mp_policy='bf16' must be a"),
        ({"reshard_after_forward": "True"}, TypeError, "reshard_after_forward='True' must be"),
        ({"replicate_size": 0}, ValueError, "replicate_size=0"),
        ({"local_batch_sizes": [3, 1], "policy": "static"}, ValueError, "Give one"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_an_argument_of_another_strategy_is_refused_by_name(given, error, says):
    with pytest.raises(error, match=says):
        HeteroFSDPStrategy(**given)


def test_settings_that_are_off_may_stay():
    strategy = HeteroFSDPStrategy(compression=None, staleness=0, on_nonfinite="ignore", find_unused_parameters=False)
    assert strategy.config == HeteroFSDPStrategy().config


class Shared(Sharded):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(5, 7, dtype=torch.float64)
        self.other.weight = self.net[0].weight


class Own(Sharded):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class Partly(ShardsItself):
    def configure_model(self):
        fully_shard(self.net[0], mesh=self.trainer.strategy.data_parallel_mesh)


class Divided(ShardsItself):
    def configure_model(self):
        super().configure_model()
        self.net[0].set_gradient_divide_factor(1.0)


class HalfMesh(Sharded):
    def configure_model(self):
        fully_shard(self.net, mesh=self.trainer.strategy.device_mesh["tensor_parallel"])


class Rescaled(Sharded):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2, max_norm=1.0)


class SparseTable(Sharded):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


class OtherDevice(Sharded):
    """The second rank is on a device of another kind, as far as the strategy can tell."""

    def configure_model(self):
        if self.trainer.global_rank == 1:
            type(self.trainer.strategy).root_device = torch.device("meta")


class OtherCheckpoint(L.Callback):
    """Each rank believes to have read another file."""

    def setup(self, trainer, pl_module, stage):
        trainer.strategy._loaded = str(trainer.global_rank)


class Direct(Manual):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()


REFUSED = {
    "shared": (Shared, {}, {}, "net and other share a parameter.*one nn.Module"),
    "own": (Own, {}, {}, "the parameter scale belongs to the LightningModule itself.*part of an nn.Module"),
    "partly": (Partly, {}, {}, r"the parameter net.2.weight is not sharded.*fully_shard"),
    "divided": (Divided, {}, {}, r"set_gradient_divide_factor\(1.0\).*Leave it out"),
    "mesh": (HalfMesh, {}, {}, "a mesh of 1 of 2 ranks.*data_parallel_mesh"),
    "rescaled": (Rescaled, {}, {}, "max_norm=1.0"),
    "sparse": (SparseTable, {}, {}, "table has sparse gradients.*sparse=False"),
    "kinds": (OtherDevice, {}, {}, "kind of device.*rank 0: 'cpu', rank 1: 'meta'"),
    "checkpoints": (Sharded, {}, {"callbacks": OtherCheckpoint}, "checkpoint that training goes on from.*rank 1: '1'"),
    "rates": (Sharded, {}, {"callbacks": LearningRateFinder}, "LearningRateFinder goes back.*Leave it out"),
    "direct": (Direct, {}, {}, r"loss.backward\(\) was called directly"),
    "no such block": (Sharded, {"auto_wrap_policy": {Block}}, {}, "auto_wrap_policy={Block}.*class of its blocks"),
    "replicas": (Sharded, {"replicate_size": 3}, {}, "replicate_size=3 does not divide 2 workers"),
    "mesh of others": (Sharded, {"data_parallel_size": 4}, {}, "data_parallel_size=4.*Leave it out"),
    "bounds": (Sharded, {"max_local_batch_sizes": [4]}, {}, "max_local_batch_sizes"),
    "noise": (Sharded, {}, {"callbacks": GNSCallback}, "GNSCallback needs the gradient of each worker.*hetero_ddp"),
    "total": (Sharded, {}, {"callbacks": lambda: AdaptiveBatchCallback(64)}, "AdaptiveBatchCallback needs"),
    "density": (Sharded, {}, {"callbacks": TTACallback}, "TTACallback needs"),
    "prediction": (Sharded, {}, {"callbacks": LookAheadCallback}, "LookAheadCallback needs"),
    "averages": (
        Sharded,
        {},
        {"callbacks": lambda: StochasticWeightAveraging(0.1)},
        "StochasticWeightAveraging copies",
    ),
    "moving": (Sharded, {}, {"callbacks": EMAWeightAveraging}, "EMAWeightAveraging copies.*Leave it out"),
    "sync": (Sharded, {}, {"sync_batchnorm": True}, "sync_batchnorm=True.*convert_sync_batchnorm"),
}


def _refused(rank, case):
    model, settings, kwargs, _ = REFUSED[case]
    if "callbacks" in kwargs:
        kwargs = {**kwargs, "callbacks": [kwargs["callbacks"]()]}
    strategy = HeteroFSDPStrategy(**settings) if settings else "hetero_fsdp"
    fit(rank, strategy, 2, 8, model=model(), **kwargs)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_refused_on_every_rank(case):
    errors = run_ranks(_refused, 2, case, expect_errors=True, timeout=60)
    assert [rank for rank, *_ in errors] == [0, 1]
    for _, _, message in errors:
        assert re.search(REFUSED[case][3], message, re.DOTALL), message


def test_a_scaled_loss_is_refused():
    """On GPUs; on CPUs Lightning takes bfloat16 in place of it."""
    strategy = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()), _layer_sync=None)
    assert "precision='bf16-mixed'" in unsupported_trainer(strategy, {})
    strategy.precision_plugin.scaler = None
    assert unsupported_trainer(strategy, {}) is None


def test_a_probe_training_is_refused():
    errors = run_ranks(_refused_in_a_probe, 2, expect_errors=True, env={VARIABLE: "{}"})
    assert len(errors) == 2
    assert all(VARIABLE in message and "unset" in message for *_, message in errors)


def _refused_in_a_probe(rank):
    fit(rank, "hetero_fsdp", 2, 8, model=Sharded())


# sharding


def test_networks_are_the_children_that_have_parameters():
    model = Sharded()
    model.loss_fn, model.heads = nn.MSELoss(), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 2)])
    model.more = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleList([nn.Linear(1, 1)])})
    assert list(networks_of(model)) == ["net", "heads.0", "heads.1", "more.a", "more.b.0"]


def test_frozen_parameters_may_stand_alone():
    model = Own()
    model.scale.requires_grad_(False)
    assert list(networks_of(model)) == ["net"]
    model.table = nn.Embedding(3, 2, sparse=True).requires_grad_(False)
    model.net.requires_grad_(False)
    assert unsupported_sharding(model, 2) is None
    model.table.requires_grad_(True)
    assert "table has sparse gradients" in unsupported_sharding(model, 2)
    model.table = nn.EmbeddingBag(3, 2, sparse=True)
    assert "table has sparse gradients" in unsupported_sharding(model, 2)


def test_parameters_without_values_are_left_to_lightning(monkeypatch):
    spread = []
    monkeypatch.setattr(dist, "broadcast", lambda value, source: spread.append((value.tolist(), source)))
    spread_from_first(nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.PReLU()]), torch.device("cpu"))
    assert spread == [([0.25], 0)]


def test_blocks_are_layers_of_several_modules_and_inner_ones_come_first():
    inner = nn.Sequential(Block(), Block())
    network = nn.Sequential(nn.Linear(5, 5), inner, Block())
    assert blocks_of(network) == [network[2], inner[1], inner[0], inner]
    assert blocks_of(network, {nn.Linear})[-1] is network[0]
    assert blocks_of(Body()) != []


def test_a_block_whose_parameter_is_used_elsewhere_is_gathered_with_the_network():
    body = Body()
    body.blocks[1].up.weight = body.blocks[0].up.weight
    assert blocks_of(body) == [body.blocks[2]]
    body.blocks[1] = body.blocks[0]  # one block that is run twice
    assert blocks_of(body) == [body.blocks[2]]


def test_lists_in_a_list_are_no_blocks():
    body = Body()
    body.blocks = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})])
    assert blocks_of(body) == [body.blocks[0][0]]


def _says(rank):
    lines = collected()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    strategy = HeteroFSDPStrategy(reshard_after_forward=False, auto_wrap_policy={Block})
    fit(rank, strategy, 2, 8, model=ShardsItself(), max_epochs=1)
    return [line for line in lines if "without effect" in line]


def test_settings_of_the_default_sharding_say_when_the_model_shards_itself():
    first, other = run_ranks(_says, 2)
    assert len(first) == 1
    assert re.match("reshard_after_forward, auto_wrap_policy: without effect.*fully_shard in configure_mod", first[0])
    assert other == []


def _twice(rank):
    model, weights = Sharded(), []
    for _ in range(2):
        trainer = trainer_of(HeteroFSDPStrategy(local_batch_sizes=[12, 4]), 2, max_epochs=1)
        trainer.fit(model, DataLoader(Points(SAMPLES), 8, shuffle=True))
        weights.append(model.flat())
    loss = model.net(torch.ones(3, 5, dtype=torch.float64)).sum()
    loss.backward()  # in a loop of one's own afterwards, nothing of ours is in the way
    return weights, trainer.strategy.engine.observer.synced_steps


def test_a_module_can_be_fitted_twice():
    for weights, steps in run_ranks(_twice, 2):
        assert steps == 5
        assert not np.array_equal(*weights)


def _evaluates(rank, settings):
    class Evaluated(Sharded):
        def test_step(self, batch, batch_idx):
            self.seen += batch[2].tolist()
            self.log("loss", self.loss(batch), sync_dist=True)

    trainer, model = trainer_of(HeteroFSDPStrategy(**settings), 2), Evaluated()
    return trainer.test(model, DataLoader(Points(8), 2))[0]["loss"], model.seen


@pytest.mark.parametrize("settings", [{"balance_evaluation": True}, {"replicate_size": 2}], ids=str)
def test_evaluation_needs_no_training_and_is_shared(settings):
    expected = Sharded().loss(next(iter(DataLoader(Points(8), 8)))).item()
    results = run_ranks(_evaluates, 2, settings)
    assert [loss for loss, _ in results] == pytest.approx([expected] * 2)
    assert sorted(i for _, seen in results for i in seen) == list(range(8))


def _diverges(rank):
    lines, trainer = collected(), trainer_of(HeteroFSDPStrategy(), 2)
    for number in (1, 2):
        trainer.fit_loop.max_epochs = number
        trainer.fit(Sharded(loss_scale=float("nan")), DataLoader(Points(16), 4))
    return [line for line in lines if "the loss is nan" in line]


def test_each_training_says_that_its_loss_is_not_finite():
    results = run_ranks(_diverges, 2)
    assert [len(said) for said in results] == [2, 2]
    assert all("detect_anomaly=True" in line and "on_nonfinite" not in line for said in results for line in said)
