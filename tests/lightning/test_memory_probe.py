"""The largest batch by dry runs, which leave nothing behind; and bounds that every plan respects."""

import random
import re
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.callbacks import AdaptiveBatchCallback, PolicyCallback
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import BatchPlan
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Proposal
from lightning_hetero.hardware import identity
from lightning_hetero.strategies._lightning import ddp
from lightning_hetero.strategies._lightning.probes import memory
from lightning_hetero.strategies._lightning.probes.memory import largest_training_batch, later_bytes, probe_module
from tests.helpers import Points, Regressor, covered, fit, trainer_of
from tests.learned import knowing
from tests.ranks import run_ranks
from tests.streams import Numbered

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Random(Dataset):
    """Samples that take random numbers of every kind, as augmentations do."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((5,), random.random() + np.random.rand()), torch.rand(1), i


class Fits(Regressor):
    """Runs out of memory above ``bound`` samples, in the forward or in the backward pass."""

    def __init__(self, bound, where="forward", error=torch.OutOfMemoryError, says="no memory"):
        super().__init__(dtype=torch.float32)
        self.bound, self.where, self.error = bound, where, error(says)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 1))
        self.tried, self.modes, self.indices = [], [], []

    def training_step(self, batch, batch_idx):
        self.tried.append(len(batch[0]))
        self.indices.append(batch[2])
        self.modes.append(tuple(m.training for m in self.modules()))
        self.log("loss", 1.0, prog_bar=True)
        self.log_dict({"a": 1.0})
        loss = self.loss(batch)
        if len(batch[0]) > self.bound:
            if self.where == "forward":
                raise self.error
            loss.register_hook(self.refuse)
        return loss if self.where == "forward" else {"loss": loss}

    def refuse(self, gradient):
        raise self.error


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch):
    """It takes most of the time of a trial, and matters for the memory of a device only."""
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)


def probe(model, batch_size=4, limit=1000, data=None, **kwargs):
    return largest_training_batch(model, DataLoader(data or Random(), batch_size), CPU, limit=limit, **kwargs)


LIBRARIES = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
]


@pytest.mark.parametrize(
    "failing",
    [(), ("backward",), *(("forward", RuntimeError, text) for text in LIBRARIES)],
)
@pytest.mark.parametrize(("bound", "multiple"), [(2, 1), (4, 1), (333, 1), (5000, 1), (333, 8)])
def test_the_bound_is_found(bound, multiple, failing):
    model = Fits(bound, *failing)
    found, true = probe(model, multiple=multiple), min(bound, 1000) // multiple * multiple
    assert true - true // 16 <= found <= true
    assert found % multiple == 0
    assert max(model.tried) <= 1000
    assert all(tried % multiple == 0 for tried in model.tried)
    batch = model.indices[-1].tolist()
    assert batch == [i % 16 for i in range(len(batch))], "the samples in turn: their sizes may differ"


def test_another_error_is_the_users_own():
    model = Fits(1, "forward", RuntimeError, "shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        probe(model)
    assert "log" not in vars(model)


def test_nothing_remains_of_a_dry_run():
    """Buffers (running statistics), random states, gradients, the mode of every submodule and logging."""
    model = Fits(50)
    model.net[2].eval()
    model.net[1].running_mean.fill_(3.0)
    model.log = print
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, attributes = tuple(m.training for m in model.modules()), set(vars(model))
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(3).tolist(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert probe(model) > 16
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert tuple(m.training for m in model.modules()) == modes
    assert set(model.modes) == {modes}, "a dry run is made in the modes that the user set"
    assert set(vars(model)) == attributes
    assert model.log is print


class Half:
    """A precision plugin that trains in another precision."""

    def convert_input(self, batch):
        return [t.half() if t.is_floating_point() else t for t in batch]

    def train_step_context(self):
        return torch.autocast("cpu", torch.bfloat16)


class Casts(Fits):
    def loss(self, batch):
        assert batch[0].dtype == torch.float16
        assert torch.is_autocast_enabled("cpu")
        return self(batch[0].float()).float().mean()


def test_batches_are_in_the_precision_of_training():
    assert probe(Casts(20), limit=100, precision=Half()) in (19, 20)


class Together(Fits):
    """Waits for other workers in every forward pass."""

    def __init__(self, bound):
        super().__init__(bound)
        self.net[1] = nn.SyncBatchNorm(7)

    def training_step(self, batch, batch_idx):
        assert self.all_gather({"x": batch[0]})["x"].shape == (2, *batch[0].shape)
        return super().training_step(batch, batch_idx)


def _alone(rank):
    """Workers of unequal memory try different numbers of sizes. Who waits for another one is refused here."""
    dist.init_process_group("gloo")
    model = Together(20 + 70 * rank)
    return probe(model, limit=100, world_size=2), "forward" in vars(model.net[1]) or "all_gather" in vars(model)


def test_nothing_waits_for_another_worker_while_trying():
    (small, left), (large, left_too) = run_ranks(_alone, 2)
    assert small in (19, 20)
    assert large in range(85, 91)
    assert not left
    assert not left_too


# what training needs beside, and what a plan can give


def test_what_training_allocates_later_is_that_of_what_is_trained():
    """Bytes of 100 trained float32 elements: a bucket, two of the optimizer, and a residual and a sum."""
    model = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 10).requires_grad_(False))
    assert later_bytes(model, HeteroConfig()) == 400 * 3
    assert later_bytes(model, HeteroConfig(compression="block_topk(density=0.1)")) == 400 * (3 + 2)
    assert later_bytes(model, HeteroConfig(staleness=1)) == 400 * (3 + 2)


class OnADevice(Regressor):
    """A sample takes ten of the bytes that are left."""

    def training_step(self, batch, batch_idx):
        if 10 * len(batch[0]) > self.left:
            raise torch.OutOfMemoryError("no memory")
        return self.loss(batch)


@pytest.mark.parametrize(("reserved", "fits"), [(0, 100), (600, 40), (995, 0), (2000, 0)])
def test_what_training_allocates_later_is_taken_while_trying_and_given_back(monkeypatch, reserved, fits):
    model, empty = OnADevice(dtype=torch.float32), torch.empty
    model.left = 1000

    def give(num_bytes):
        model.left += num_bytes

    def rationed(*size, **kwargs):
        made = empty(*size, **kwargs)
        if made.dtype == torch.uint8:
            if made.numel() > model.left:
                raise torch.OutOfMemoryError("no memory")
            give(-made.numel())
            weakref.finalize(made, give, made.numel())
        return made

    monkeypatch.setattr(memory.torch, "empty", rationed)
    assert fits - 1 <= probe(model, reserved=reserved) <= fits
    assert model.left == 1000


def attached(loader):
    trainer = trainer_of("ddp", 1)
    trainer.fit_loop._data_source.instance = loader
    return trainer


@pytest.mark.parametrize(
    ("loader", "manual", "error", "says"),
    [
        (DataLoader(Random(), 4), True, ValueError, "max_local_batch_sizes"),
        ([DataLoader(Random(), 4)], False, ValueError, "max_local_batch_sizes"),
        (DataLoader(Numbered([1]), 4), False, ValueError, "max_local_batch_sizes"),
        (DataLoader(Random(), 4), False, RuntimeError, "one sample"),
    ],
)
def test_what_cannot_be_probed_is_refused(monkeypatch, loader, manual, error, says):
    trainer, model = attached(loader), Fits(0)
    model.automatic_optimization = not manual
    monkeypatch.setattr(memory, "largest_training_batch", lambda *args, **kwargs: 0)
    with pytest.raises(error, match=says):
        probe_module(trainer, model, CUDA, HeteroConfig())


MOVES = [AdaptiveBatchCallback(max_total_batch_size=50)]


@pytest.mark.parametrize(
    ("callbacks", "samples", "multiple", "most"),
    [([], 100, 1, 12), ([], 10, 1, 10), (MOVES, 100, 1, 100), ([], 100, 5, 10)],
)
def test_no_more_is_tried_than_a_plan_can_give_which_is_then_no_bound(monkeypatch, callbacks, samples, multiple, most):
    trainer = attached(DataLoader(Points(samples), 4))
    trainer.callbacks += callbacks
    monkeypatch.setattr(type(trainer), "world_size", 3)
    tried, found = [], [0]
    monkeypatch.setattr(
        memory, "largest_training_batch", lambda *args, limit, **kwargs: tried.append(limit) or limit - found[0]
    )
    config = HeteroConfig(local_batch_multiple=multiple)
    assert probe_module(trainer, Fits(0), CUDA, config) is None
    assert probe_module(trainer, Fits(0), CPU, config) is None, "a CPU swaps instead of failing"
    assert tried == [most]
    found[0] = multiple
    assert probe_module(trainer, Fits(0), CUDA, config) == max(multiple, int(0.85 * (most - multiple))), "headroom"


# bounds of every rank, end to end


class Greedy(PerfModelPlanner):
    """Knows that rank 0 is nine times as fast, so that its optimum exceeds what rank 0 can hold."""

    def decide(self, observations, current, context):
        return self, self.initial(context)


class Exceeds(Greedy):
    """Ignores its context."""

    def decide(self, observations, current, context):
        total = context.total_batch_size
        return self, Proposal(BatchPlan(total, (total - 1, 1)), "all to the first")


def greedily(kind):
    known = knowing({identity(CPU, slot): (0.025 * k, 0.0, 0.025 * k, 0.0) for slot, k in enumerate((1, 9))})
    return [PolicyCallback(kind(known.times, known.link))]


BOUNDS = {(None, 30): (11, 1), (9, 30): (9, 3), (6, 6): (6, 6), (4, 30): (4, 8)}
IMPOSSIBLE = {
    "unknown": ((3, 8), None, r"12 .*\[3, 8\], together 11"),
    "known": ((3, 8), Greedy, "12.*11"),
    "ignored": ((9, 8), Exceeds, r"\[11, 1\].*\[9, 8\]"),
}


def _bounded(rank):
    """Each rank finds a bound of its own by probing, or it is given."""

    def run(kind, **bound):
        callbacks = [] if kind is None else greedily(kind)
        return fit(rank, {"replan": 3, **bound}, 2, 6, dataset=Points(120), callbacks=callbacks)

    found = {"given": run(Greedy, local_batch_multiple=4, max_local_batch_sizes=[7, 30])}
    with pytest.MonkeyPatch.context() as patch:
        for bounds in BOUNDS:
            patch.setattr(ddp, "probe_module", lambda *args, bounds=bounds: bounds[rank])
            found[bounds] = run(Greedy, probe_memory=True)
        found["before anything is known"] = run(None, probe_memory=True)
        for name, (bounds, kind, _) in IMPOSSIBLE.items():
            patch.setattr(ddp, "probe_module", lambda *args, bounds=bounds: bounds[rank])
            with pytest.raises(ValueError, match="fit") as error:
                run(kind, probe_memory=True)
            found[name] = str(error.value)
    return found


def test_every_plan_respects_the_bound_of_every_rank():
    results = run_ranks(_bounded, 2)
    for bounds, split in BOUNDS.items():
        runs = [result[bounds] for result in results]
        assert runs[0]["history"][-1][2] == split
        for rank, (run, bound) in enumerate(zip(runs, bounds, strict=True)):
            assert max(len(indices) for *_, indices in run["seen"]) <= (bound or 12)
            assert all(sizes[rank] <= (bound or 12) for *_, sizes in run["history"])
        assert covered(runs, 0) == covered(runs, 1) == list(range(120))
    assert [[len(own) for *_, own in result["given"]["seen"]] for result in results] == [[4] * 20, [8] * 20]
    assert results[0]["before anything is known"]["history"][0] == (0, 0, (4, 8)), "the last ones above"
    for result in results:
        for name, (*_, says) in IMPOSSIBLE.items():
            assert re.search(says, result[name], re.DOTALL), result[name]
