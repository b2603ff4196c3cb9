"""The largest batch by dry runs, which leave nothing behind; and bounds that every plan respects."""

import random
import re
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hetero.callbacks import AdaptiveBatchCallback, PolicyCallback
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import BatchPlan
from lightning_hetero.core.policies.base import Proposal
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.hardware import identity
from lightning_hetero.strategies._lightning import ddp as _hetero_ddp
from lightning_hetero.strategies._lightning.probes import memory as _probe
from lightning_hetero.strategies._lightning.probes.memory import largest_training_batch, later_bytes, probe_module
from tests.helpers import Points, Regressor, covered, fit, run_ranks, trainer_of
from tests.learned import knowing

CPU = torch.device("cpu")


class Random(Dataset):
    """Samples that take random numbers of every kind, as augmentations do."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((5,), random.random() + np.random.rand()), torch.rand(1), i


class Stream(IterableDataset):
    """Samples without a number."""

    def __iter__(self):
        return iter([Points(1)[0]] * 8)


class Fits(Regressor):
    """Runs out of memory above ``bound`` samples, in the forward or in the backward pass."""

    def __init__(self, bound, where="forward"):
        super().__init__(dtype=torch.float32)
        self.bound, self.where = bound, where
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 1))
        self.tried, self.modes, self.given = [], [], None

    def training_step(self, batch, batch_idx):
        size = len(batch[0])
        self.tried.append(size)
        self.modes.append(tuple(m.training for m in self.modules()))
        self.log("loss", 1.0, prog_bar=True)
        self.log_dict({"a": 1.0})
        loss = self.loss(batch)
        if size > self.bound and self.where == "forward":
            raise torch.OutOfMemoryError("no memory")
        if size > self.bound:
            loss.register_hook(self.refuse)
        return loss if self.where == "forward" else {"loss": loss}

    def refuse(self, gradient):
        raise torch.OutOfMemoryError("no memory")


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch):
    """It takes most of the time of a trial, and matters for the memory of a device only."""
    monkeypatch.setattr(_probe.gc, "collect", lambda: 0)


def probe(model, batch_size=4, limit=1000):
    return largest_training_batch(model, DataLoader(Random(), batch_size), CPU, limit=limit)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bound", [2, 3, 4, 100, 333, 5000])
def test_bound_is_found(bound, where):
    model = Fits(bound, where)
    found, true = probe(model), min(bound, 1000)
    assert true - true // 16 <= found <= true
    assert max(model.tried) <= 1000


def test_another_error_is_the_users_own():
    class Broken(Fits):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("a bug")

    model = Broken(10)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        probe(model)
    assert "log" not in vars(model)


@pytest.mark.parametrize("own_log", [False, True])
def test_nothing_remains_of_a_dry_run(own_log):
    """Buffers (running statistics), random states, gradients, the mode of every submodule and logging."""
    model = Fits(50)
    model.net[2].eval()
    model.net[1].running_mean.fill_(3.0)
    if own_log:
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
    assert vars(model).get("log") is (print if own_log else None)


class Transfers(Fits):
    """Needs its transfer hooks, and takes no batch index."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch["x"] * 2, batch["y"], None

    def training_step(self, batch):
        return super().training_step(batch, 0)


def test_batches_come_through_the_hooks_of_the_module():
    assert probe(Transfers(50)) in range(47, 51)


class Half:
    """A precision plugin that trains in another precision."""

    def convert_input(self, batch):
        return [t.half() if t.is_floating_point() else t for t in batch]

    def train_step_context(self):
        return torch.autocast("cpu", torch.bfloat16)


def test_batches_run_in_the_precision_of_training():
    class Casts(Fits):
        def loss(self, batch):
            assert batch[0].dtype == torch.float16
            assert torch.is_autocast_enabled("cpu")
            return self(batch[0].float()).float().mean()

    loader = DataLoader(Random(), 4)
    assert largest_training_batch(Casts(20), loader, CPU, limit=100, precision=Half()) in (19, 20)


def attached(loader, model):
    trainer = trainer_of("ddp", 1)
    trainer.fit_loop._data_source.instance = loader
    return trainer, model


@pytest.mark.parametrize(
    ("loader", "manual", "error", "says"),
    [
        (DataLoader(Random(), 4), True, ValueError, "give max_local_batch_sizes"),
        ([DataLoader(Random(), 4)], False, ValueError, "give max_local_batch_sizes"),
        (DataLoader(Stream(), 4), False, ValueError, "map-style dataset; give max_local_batch_sizes"),
        (DataLoader(Random(), 4), False, RuntimeError, "not even one sample fits"),
    ],
)
def test_what_cannot_be_probed_is_refused(monkeypatch, loader, manual, error, says):
    trainer, model = attached(loader, Fits(0))
    model.automatic_optimization = not manual
    monkeypatch.setattr(_probe, "largest_training_batch", lambda *args, **kwargs: 0)
    with pytest.raises(error, match=says):
        probe_module(trainer, model, torch.device("cuda"), HeteroConfig())


def test_headroom_is_left_and_a_cpu_has_no_bound(monkeypatch):
    trainer, model = attached(DataLoader(Random(), 4), Fits(0))
    monkeypatch.setattr(_probe, "largest_training_batch", lambda *args, **kwargs: 2)
    assert probe_module(trainer, model, torch.device("cuda"), HeteroConfig()) == 1
    assert probe_module(trainer, model, CPU, HeteroConfig()) is None


@pytest.mark.parametrize(
    ("callbacks", "world_size", "samples", "most"),
    [
        ([], 3, 100, 12),
        ([], 3, 10, 10),
        ([AdaptiveBatchCallback(max_total_batch_size=50)], 3, 100, 100),
    ],
    ids=["the total", "the dataset", "a total that moves"],
)
def test_no_more_is_tried_than_a_plan_can_give_which_is_then_no_bound(
    monkeypatch, callbacks, world_size, samples, most
):
    trainer, model = attached(DataLoader(Points(samples), 4), Fits(0))
    trainer.callbacks += callbacks
    monkeypatch.setattr(type(trainer), "world_size", world_size)
    tried = []
    monkeypatch.setattr(_probe, "largest_training_batch", lambda *args, limit, **kwargs: tried.append(limit) or limit)
    assert probe_module(trainer, model, torch.device("cuda"), HeteroConfig()) is None
    assert tried == [most]


class Rationed:
    """Memory of a device in bytes, of which tensors take theirs for as long as they live."""

    def __init__(self, monkeypatch, num_bytes):
        self.left, empty = num_bytes, torch.empty

        def counted(*size, **kwargs):
            made = empty(*size, **kwargs)
            return self.take(made.numel(), made) if made.dtype == torch.uint8 else made

        monkeypatch.setattr(_probe.torch, "empty", counted)

    def take(self, num_bytes, tensor=None):
        if num_bytes > self.left:
            raise torch.OutOfMemoryError("no memory")
        self.left -= num_bytes
        if tensor is not None:
            weakref.finalize(tensor, self.give, num_bytes)
        return tensor

    def give(self, num_bytes):
        self.left += num_bytes


class Needs(Regressor):
    """Needs 10 bytes for each sample."""

    def __init__(self, memory):
        super().__init__(dtype=torch.float32)
        self.memory = memory

    def training_step(self, batch, batch_idx):
        self.memory.take(10 * len(batch[0]))
        self.memory.give(10 * len(batch[0]))
        return self.loss(batch)


def test_what_training_allocates_later_is_that_of_what_is_trained():
    """Bytes of 100 trained float32 elements: a bucket, two of the optimizer, and a residual and a sum."""
    model = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 10).requires_grad_(False))
    assert later_bytes(model, HeteroConfig()) == 400 * 3
    assert later_bytes(model, HeteroConfig(compression="block_topk(density=0.1)")) == 400 * (3 + 2)


def test_a_batch_is_made_of_the_samples_in_turn():
    """Their sizes may differ."""
    model, data = Fits(50), Points(5, dtype=torch.float32)
    seen = []
    model.training_step = lambda batch, batch_idx: seen.append(batch[2].tolist()) or model.loss(batch)
    largest_training_batch(model, DataLoader(data, 4), CPU, limit=7)
    assert seen[-1] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(("reserved", "expected"), [(0, 100), (600, 40), (995, 0), (2000, 0)])
def test_what_training_allocates_later_is_taken_while_trying_and_given_back(monkeypatch, reserved, expected):
    memory = Rationed(monkeypatch, 1000)
    loader = DataLoader(Points(16, dtype=torch.float32), 4)
    assert largest_training_batch(Needs(memory), loader, CPU, limit=1000, reserved=reserved) in (expected, expected - 1)
    assert memory.left == 1000


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_library_that_finds_no_memory_is_a_batch_that_does_not_fit(message):
    class Library(Fits):
        def loss(self, batch):
            if len(batch[0]) > self.bound:
                raise RuntimeError(message)
            return super().loss(batch)

    assert probe(Library(50)) in range(47, 51)


def test_another_runtime_error_is_the_users_own():
    class Broken(Fits):
        def loss(self, batch):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        probe(Broken(10))


class Together(Fits):
    """Waits for other workers in every forward pass."""

    def __init__(self, bound):
        super().__init__(bound)
        self.net[1] = nn.SyncBatchNorm(7)

    def training_step(self, batch, batch_idx):
        gathered = self.all_gather({"x": batch[0]})["x"]
        assert gathered.shape == (2, *batch[0].shape)
        return super().training_step(batch, batch_idx)


def _alone(rank):
    """Workers of unequal memory try different numbers of sizes. Who waits for another one is refused here."""
    dist.init_process_group("gloo")
    model = Together(20 + 70 * rank)
    loader = DataLoader(Random(), 4)
    found = largest_training_batch(model, loader, CPU, limit=100, world_size=2)
    return found, len(model.tried), "forward" in vars(model.net[1]), "all_gather" in vars(model)


def test_nothing_waits_for_another_worker_while_trying():
    small, large = run_ranks(_alone, 2)
    assert small[0] in (19, 20)
    assert large[0] in range(85, 91)
    assert small[1] != large[1]
    assert (small[2:], large[2:]) == ((False, False), (False, False))


# bounds of every rank, end to end


class Greedy(PerfModelPlanner):
    """Knows that rank 0 is nine times as fast, so that its optimum exceeds what rank 0 can hold."""

    def decide(self, observations, current, context):
        return self, self.initial(context)


def greedy():
    return greedily(Greedy)


def greedily(kind):
    models = {identity(CPU, slot): (0.025 * k, 0.0, 0.025 * k, 0.0) for slot, k in enumerate((1, 9))}
    known = knowing(models)
    return kind(known.times, known.link)


class Exceeds(Greedy):
    """Ignores its context."""

    def decide(self, observations, current, context):
        total = context.total_batch_size
        return self, Proposal(BatchPlan(total, (total - 1, 1)), "all to the first")


def _bounded(rank, bounds, planner):
    """Each rank finds a bound of its own by probing."""
    _hetero_ddp.probe_module = lambda trainer, module, device, config: bounds[rank]
    callbacks = [] if planner is None else [PolicyCallback(planner)]
    strategy = {"probe_memory": True, "replan": 3}
    return fit(rank, strategy, 2, 6, dataset=Points(120), callbacks=callbacks, max_epochs=2)


@pytest.mark.parametrize(
    ("bounds", "split"), [((9, 30), (9, 3)), ((4, 30), (4, 8)), ((None, 30), (11, 1)), ((6, 6), (6, 6))], ids=str
)
def test_every_plan_respects_the_bound_of_every_rank(bounds, split):
    results = run_ranks(_bounded, 2, bounds, greedy(), timeout=60)
    assert results[0]["history"][-1][2] == split
    for rank, (result, bound) in enumerate(zip(results, bounds, strict=True)):
        assert max(len(indices) for *_, indices in result["seen"]) <= (bound or 12)
        assert all(sizes[rank] <= (bound or 12) for *_, sizes in result["history"])
    assert covered(results, 0) == covered(results, 1) == list(range(120))


def _given(rank, bounds):
    """The bounds are the user's."""
    callbacks = [PolicyCallback(greedy())]
    return fit(rank, {**bounds, "replan": 3}, 2, 6, dataset=Points(120), callbacks=callbacks, max_epochs=1)


@pytest.mark.parametrize(
    ("bounds", "split"),
    [
        ({"max_local_batch_sizes": [7, 30]}, (7, 5)),
        ({"min_local_batch_size": 4}, (8, 4)),
        ({"local_batch_multiple": 3}, (9, 3)),
        ({"local_batch_multiple": 4, "max_local_batch_sizes": [7, 30]}, (4, 8)),
    ],
    ids=str,
)
def test_bounds_that_are_given_hold_for_the_next_batches(bounds, split):
    """The policy would give all but one sample to the first rank."""
    results = run_ranks(_given, 2, bounds, timeout=60)
    assert results[0]["history"][-1][2] == split
    taken = [[len(indices) for *_, indices in result["seen"]] for result in results]
    assert taken == [[split[0]] * 10, [split[1]] * 10]


def test_bounds_hold_before_anything_is_known():
    results = run_ranks(_bounded, 2, (4, 30), None, timeout=60)
    assert results[0]["history"][0] == (0, 0, (4, 8))
    assert max(len(indices) for *_, indices in results[0]["seen"]) <= 4


@pytest.mark.parametrize(
    ("bounds", "planner", "says"),
    [
        (
            (3, 8),
            None,
            r"12 samples does not fit: the workers hold at most \[3, 8\], together 11.*batches of at most 5",
        ),
        ((3, 8), greedy(), r"total.*12.*|12.*11"),
        ((9, 8), greedily(Exceeds), r"\[11, 1\] do not fit 2 workers.*at most \[9, 8\]"),
    ],
    ids=["impossible", "impossible for a known optimum", "planner that ignores them"],
)
def test_bounds_that_cannot_hold_are_an_error_with_numbers_on_every_rank(bounds, planner, says):
    errors = run_ranks(_bounded, 2, bounds, planner, expect_errors=True, timeout=60)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    for *_, message in errors:
        assert re.search(says, message, re.DOTALL), message
