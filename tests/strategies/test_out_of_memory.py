"""A rank runs out of memory in a step: the step ends with the same gradient, the bound falls, and the plan follows."""

import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.gradients.ddp_hook import BackwardCheck
from lightning_hetero.config import HeteroConfig
from lightning_hetero.strategies._lightning.out_of_memory.pieces import (
    NotInPiecesError,
    loss_with_gradients,
    sum_in_pieces,
)
from lightning_hetero.strategies._lightning.out_of_memory.steps import OutOfMemoryMixin
from tests.helpers import Regressor, collected, covered, fit, run_ranks

ROWS, WIDTH = 13, 4


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# pieces


class Batch:
    """Rows and a model that holds at most ``bound`` of them.

    A parameter is used twice, two have one gradient, which is one tensor, and the last is not used.
    """

    def __init__(self, bound, where="forward"):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        self.parameters = [
            torch.randn(WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)
        ]
        self.bound, self.where, self.tried = bound, where, []

    def loss(self, start, stop):
        self.tried.append(stop - start)
        w, one, other, _ = self.parameters
        hidden = torch.tanh(self.x[start:stop] * w + (one + other))
        if stop - start > self.bound:
            if self.where == "forward":
                full()
            hidden.register_hook(full)
        return (hidden @ w).square().sum() / ROWS


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bound", [1, 2, 3, 4, 6, 7, 100])
def test_pieces_give_loss_and_gradient_of_the_whole(bound, where):
    whole, cut = Batch(100), Batch(bound, where)
    expected = torch.autograd.grad(whole.loss(0, ROWS), whole.parameters, allow_unused=True)
    loss, gradients, largest = sum_in_pieces(cut.loss, ROWS, cut.parameters)
    assert loss.item() == pytest.approx(whole.loss(0, ROWS).item(), rel=1e-14)
    torch.testing.assert_close(gradients[:3], list(expected[:3]), rtol=1e-13, atol=1e-15)
    assert gradients[3] is None
    assert largest <= min(bound, 7)


def test_pieces_leave_the_gradients_of_parameters_and_their_hooks_alone():
    """DDP would send what its hooks see."""
    batch, seen = Batch(3), []
    for parameter in batch.parameters[:3]:
        parameter.register_post_accumulate_grad_hook(seen.append)
    sum_in_pieces(batch.loss, ROWS, batch.parameters)
    assert seen == []
    assert all(parameter.grad is None for parameter in batch.parameters)


@pytest.mark.parametrize("rows", range(4, 12))
@pytest.mark.parametrize(("least", "multiple"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_no_piece_has_fewer_rows_than_the_model_can_run(rows, least, multiple):
    rows *= multiple
    w, sizes = torch.tensor(1.0, requires_grad=True), []

    def loss_of(start, stop):
        if stop - start > max(2, least + multiple):
            full()
        sizes.append(stop - start)
        return w * (stop - start)

    assert sum_in_pieces(loss_of, rows, [w], least=least, multiple=multiple)[0].item() == rows
    assert all(size % multiple == 0 for size in sizes)
    assert sum(sizes) == rows
    assert min(sizes) >= least


@pytest.mark.parametrize(("rows", "least"), [(1, 1), (3, 2)])
def test_a_batch_that_cannot_be_halved_is_an_error(rows, least):
    with pytest.raises(NotInPiecesError, match=f"{rows} samples cannot be cut into two pieces of {least} or more"):
        sum_in_pieces(lambda start, stop: None, rows, [], least=least)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_sample_that_does_not_fit_alone_is_an_error(where):
    batch = Batch(0, where)
    with pytest.raises(NotInPiecesError, match="not even 1 samples fit"):
        sum_in_pieces(batch.loss, ROWS, batch.parameters)
    assert batch.tried == [7, 3, 1]


def test_another_error_is_the_users_own():
    def loss_of(start, stop):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        sum_in_pieces(loss_of, ROWS, [torch.zeros(1, requires_grad=True)])


def test_a_scale_does_not_change_the_gradient():
    plain, scaled = Batch(3), Batch(3)
    expected = sum_in_pieces(plain.loss, ROWS, plain.parameters)
    found = sum_in_pieces(scaled.loss, ROWS, scaled.parameters, scale=1024.0)
    torch.testing.assert_close(found[1][:3], expected[1][:3], rtol=1e-14, atol=0.0)
    assert found[0] == expected[0]


def test_the_loss_gives_its_gradients_to_those_that_have_one():
    one, unused, other = (torch.zeros(3, requires_grad=True) for _ in range(3))
    gradient = torch.arange(3.0)
    loss = loss_with_gradients(torch.tensor(2.0), [one, unused, other], [gradient, None, gradient])
    (loss / 4).backward()
    assert loss.item() == 2.0
    assert one.grad.tolist() == other.grad.tolist() == [0.0, 0.25, 0.5]
    assert unused.grad is None


# trainings

SPLIT = {"local_batch_sizes": (12, 8)}
SMALL = {"bucket_cap_mb": 1e-4}  # a bucket for each layer: some are sent before a backward pass fails


class Full:
    """Runs out of memory when called; lives as long as what holds it."""

    __call__ = full


class Fits(Regressor):
    """Runs out of memory above ``bound`` samples on these ranks, behind the layer whose gradient comes last."""

    def __init__(self, bound=10**6, where="forward", ranks=(1,), say=(), **kwargs):
        super().__init__(**kwargs)
        self.bound, self.where, self.ranks, self.say = bound, where, ranks, say
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.held, self.left = [], 0

    def on_train_batch_start(self, batch, batch_idx):
        if "early" in self.say and batch_idx == 2 and self.global_rank == 1:
            self.trainer.strategy.model._pre_forward = full  # DDP's own, in which it may allocate buckets

    def training_step(self, batch, batch_idx):
        self.left += sum(one() is not None for one in self.held)  # of failed attempts, which needed that memory
        hidden, failure = self.net[:2](batch[0]), Full()
        if len(batch[0]) > self.bound and self.global_rank in self.ranks:
            self.held.append(weakref.ref(failure))
            if self.where == "forward":
                failure()
            hidden.register_hook(failure)
        loss = nn.functional.mse_loss(self.net[2:](hidden), batch[1], reduction=self.reduction)
        if "of its own" in self.say:
            torch.distributed.barrier()
        if "a sum" in self.say:
            torch.distributed.all_reduce(loss.detach())
        self.seen.append((self.trainer.current_epoch, batch_idx, batch[2].tolist()))
        self.log("loss", loss.detach(), on_step="at once" in self.say, on_epoch=True, sync_dist=True)
        return {"loss": loss, "extra": 1} if "more" in self.say else loss


def _train(rank, settings, model, trainer):
    said = collected()
    own = Fits(**model)
    result = fit(rank, {**SMALL, **settings}, 2, 10, model=own, max_epochs=2, **trainer)
    return {**result, "left": own.left, "said": [line for line in said if "ran out of memory" in line]}


def train(settings, model=None, **trainer):
    return run_ranks(_train, 2, settings, model or {}, trainer, timeout=60.0)


@pytest.fixture(scope="module")
def undisturbed():
    """Two epochs of four steps of 20 samples, the last of 4: weights do not depend on the split."""
    return train(SPLIT)[0]


def ends_as(results, expected):
    assert [result["left"] for result in results] == [0, 0]
    for result in results:
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-14)
        assert result["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-12)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


@pytest.mark.parametrize(("where", "rank"), [("forward", 0), ("backward", 1)])
def test_the_step_has_the_same_gradient_and_the_next_plan_keeps_the_new_bound(where, rank, undisturbed):
    counts = {"weight_fn": lambda batch: 3.0 * len(batch[0])} if where == "forward" else {}  # weigh pieces as well
    results = train({"policy": "pid", **counts}, {"bound": 8, "where": where, "ranks": (rank,)})
    ends_as(results, undisturbed)
    own = [sizes[rank] for _, _, sizes in results[0]["history"]]
    assert own[0] == 10
    assert own[1:]
    assert all(size <= 8 for size in own[1:])  # 8 = int(0.85 * 10)
    assert results[0]["history"][1][:2] == (0, 3)  # heard of before batch 2, decided behind it
    assert all(sum(sizes) == 20 for _, _, sizes in results[0]["history"])
    assert results[0]["history"] == results[1]["history"]
    assert [bool(result["said"]) for result in results] == [rank == 0, rank == 1]
    assert (
        f"rank {rank} ran out of memory with 10 samples, in the {where} pass of batch 0 of epoch 0"
        in (results[rank]["said"][0])
    )
    if where == "forward":
        for epoch in range(2):
            assert covered(results, epoch) == list(range(64))


@pytest.fixture(scope="module")
def undisturbed_windows():
    """The same in windows of two micro-batches, of which DDP sends the second only."""
    return train(SPLIT, accumulate_grad_batches=2)[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_given_split_stays_and_each_batch_is_done_in_pieces(where, undisturbed_windows):
    results = train(SPLIT, {"bound": 7, "where": where}, accumulate_grad_batches=2)
    ends_as(results, undisturbed_windows)
    assert {sizes for _, _, sizes in results[0]["history"]} == {(12, 8)}
    assert "the given split stays" in results[1]["said"][0]
    assert "(4 so far)" in results[1]["said"][-1]  # three full batches in each epoch


def test_a_sum_is_the_sum_of_its_pieces():
    settings = {**SPLIT, "loss_reduction": "sum"}
    expected = train(settings, {"reduction": "sum", "lr": 1e-3})[0]
    ends_as(train(settings, {"reduction": "sum", "lr": 1e-3, "bound": 3, "where": "backward"}), expected)


class Strategy(OutOfMemoryMixin):
    """As far as it says whether a step can be done again."""

    def __init__(self, module, *, split=True, **ddp):
        self.lightning_module, self.model = module, object.__new__(DistributedDataParallel)
        vars(self.model).update({"static_graph": False, "gradient_as_bucket_view": False, **ddp})
        hooks = SimpleNamespace(backwards=BackwardCheck())
        self.engine = SimpleNamespace(sampler=split or None, workers=(), hook_state=hooks)

    def obstacle(self, **gradients):
        parameters = list(self.lightning_module.parameters())
        return self._obstacle(parameters, [(gradients.get("held"), 0)] * len(parameters))


def test_nothing_is_in_the_way_by_default():
    assert Strategy(Fits()).obstacle() is None
    assert Strategy(Fits()).obstacle(held=torch.zeros(1)) is None
    assert Strategy(Fits(), gradient_as_bucket_view=True).obstacle() is None


def hooked():
    model = Fits()
    model.net[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def synchronized():
    model = Fits()
    model.net = nn.SyncBatchNorm(3)
    return model


def manual():
    model = Fits()
    model.automatic_optimization = False
    return model


@pytest.mark.parametrize(
    ("strategy", "held", "reason"),
    [
        (lambda: Strategy(Fits(), split=False), None, "this training's data is not split by the strategy"),
        (lambda: Strategy(Fits(), static_graph=True), None, "static_graph=True"),
        (lambda: Strategy(manual()), None, "runs its own optimizers"),
        (lambda: Strategy(synchronized()), None, "SyncBatchNorm"),
        (lambda: Strategy(hooked()), None, "has a hook of the user's"),
        (lambda: Strategy(Fits(), gradient_as_bucket_view=True), torch.zeros(1), "accumulated in DDP's buckets"),
    ],
    ids=["data", "static graph", "manual", "batch norm", "hook", "view"],
)
def test_what_stands_in_the_way_is_said(strategy, held, reason):
    assert reason in strategy().obstacle(held=held)


@pytest.mark.parametrize(
    ("settings", "said"), [({}, "at most 8 from now on"), ({"local_batch_sizes": (10, 10)}, "the given split stays")]
)
def test_a_step_in_pieces_is_left_out_of_the_timings_and_told(settings, said):
    strategy, calls, lines = Strategy(Fits()), [], collected()
    strategy.config, strategy._signals = (
        HeteroConfig(**settings),
        SimpleNamespace(note_memory=partial(calls.append, "told")),
    )
    vars(strategy.engine).update(rank=1, position=(2, 7))
    strategy.engine.observer = SimpleNamespace(discard=partial(calls.append, "discarded"))
    strategy.engine.data = SimpleNamespace(lower_memory_bound=calls.append)
    for _ in range(5):
        strategy._lower_bound(10, 8, "forward", 5)
    assert calls == ["discarded", 8, "told"] * 5
    assert [line.rpartition(" (")[2] for line in lines] == ["1 so far)", "2 so far)", "4 so far)"]
    assert "rank 1 ran out of memory with 10 samples, in the forward pass of batch 7 of epoch 2" in lines[0]
    assert said in lines[0]


def full_hook(state, bucket):
    if torch.distributed.get_rank() == 1 and not bucket.is_last():  # gradients are missing behind it
        full()
    return allreduce_hook(None, bucket)


def errors_of(settings, model):
    return run_ranks(_train, 2, settings, model, {}, timeout=60.0, expect_errors=True)


def test_a_total_that_no_longer_fits_is_an_error_on_every_rank():
    errors = errors_of({"policy": "pid"}, {"bound": 7, "ranks": (0, 1)})
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    for _, _, text in errors:
        assert "a total batch of 20 samples does not fit: the workers hold at most [8, 8], together 16" in text


@pytest.mark.parametrize(
    ("settings", "model", "reason"),
    [
        ({}, {"say": ("at once",)}, "training_step waits for the other ranks"),
        ({}, {"say": ("of its own",)}, "training_step waits for the other ranks"),
        ({"policy": "even"}, {"say": ("a sum",), "where": "backward"}, "training_step waits for the other ranks"),
        ({}, {"say": ("more",)}, "training_step returns more than its loss"),
        ({}, {"say": ("early",), "bound": 100}, "it ran out before training_step"),
        ({"ddp_comm_hook": full_hook}, {"bound": 100}, "it ran out while gradients were sent"),
    ],
    ids=["a collective", "a raw one", "a raw one with equal sizes", "other outputs", "before", "a hook"],
)
def test_what_cannot_be_done_again_is_one_named_error_on_every_rank(settings, model, reason):
    errors = errors_of({**({} if "policy" in settings else SPLIT), **settings}, {"bound": 7, **model})
    assert [rank for rank, _, _ in errors] == [0, 1]
    (_, others, other), (_, kind, own) = errors
    assert (others, kind) == ("RuntimeError", "OutOfMemoryError")
    assert f"The step cannot be done again in smaller pieces: {reason}" in own
    assert f"rank 1 failed first: OutOfMemoryError: {own[:30]}" in other
