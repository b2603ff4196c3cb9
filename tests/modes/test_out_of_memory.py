"""A rank runs out of memory in a step: the step ends with the same gradient, the bound falls, and the plan follows."""

import re
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_hetero.strategies._lightning.out_of_memory.pieces import NotInPiecesError, sum_in_pieces
from tests.helpers import Regressor, collected, covered, fit
from tests.ranks import run_ranks


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# pieces


class Batch:
    """Rows and a model that holds at most ``bound`` of them.

    A parameter is used twice, two have one gradient, which is one tensor, and the last is not used.
    """

    def __init__(self, rows, bound, where="forward"):
        generator = torch.Generator().manual_seed(0)
        self.x, *vectors = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (rows, 1, 1, 1, 1))
        self.parameters = [vector[0].requires_grad_() for vector in vectors]
        self.bound, self.where, self.rows = bound, where, rows

    def loss(self, start, stop):
        w, one, other, _ = self.parameters
        hidden = torch.tanh(self.x[start:stop] * w + (one + other))
        if stop - start > self.bound:
            if self.where == "forward":
                full()
            hidden.register_hook(full)
        return (hidden @ w).square().sum() / self.rows


@given(st.integers(2, 40), st.integers(1, 45), st.sampled_from(["forward", "backward"]), st.sampled_from([1.0, 1024.0]))
def test_pieces_give_loss_and_gradient_of_the_whole_and_touch_no_parameter(rows, bound, where, scale):
    """DDP would send what a parameter's hooks see."""
    whole, cut, seen = Batch(rows, rows), Batch(rows, bound, where), []
    for parameter in cut.parameters:
        parameter.register_post_accumulate_grad_hook(seen.append)
    expected = torch.autograd.grad(whole.loss(0, rows), whole.parameters, allow_unused=True)
    loss, gradients, largest = sum_in_pieces(cut.loss, rows, cut.parameters, scale=scale)
    assert loss.item() == pytest.approx(whole.loss(0, rows).item(), rel=1e-13)
    torch.testing.assert_close(gradients[:3], list(expected[:3]), rtol=1e-12, atol=1e-14)
    assert gradients[3] is None
    assert largest <= min(bound, -(-rows // 2))
    assert (seen, [parameter.grad for parameter in cut.parameters]) == ([], [None] * 4)


@given(st.integers(4, 40), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_no_piece_has_fewer_rows_than_the_model_can_run(rows, bounds):
    least, multiple = bounds
    rows, w, sizes = rows * multiple, torch.tensor(1.0, requires_grad=True), []

    def loss_of(start, stop):
        if stop - start > max(2, least + multiple):
            full()
        sizes.append(stop - start)
        return w * (stop - start)

    assert sum_in_pieces(loss_of, rows, [w], least=least, multiple=multiple)[0].item() == sum(sizes) == rows
    assert all(size % multiple == 0 for size in sizes)
    assert min(sizes) >= least


def test_what_cannot_be_cut_or_does_not_fit_at_all_is_an_error():
    for rows, least in ((1, 1), (3, 2)):
        with pytest.raises(NotInPiecesError, match=f"{rows} samples"):
            sum_in_pieces(lambda start, stop: None, rows, [], least=least)
    for where in ("forward", "backward"):
        batch = Batch(13, 0, where)
        with pytest.raises(NotInPiecesError, match="not even 1"):
            sum_in_pieces(batch.loss, 13, batch.parameters)


# trainings

SPLIT = {"local_batch_sizes": (12, 8)}
SMALL = {"bucket_cap_mb": 1e-4}  # a bucket for each layer: some are sent before a backward pass fails


class Full:
    """Runs out of memory when called; lives as long as what holds it."""

    __call__ = full


class Fits(Regressor):
    """Runs out of memory above ``bound`` samples on these ranks, behind the layer whose gradient comes last."""

    def __init__(self, bound=10**6, where="forward", ranks=(1,), say="", **kwargs):
        super().__init__(**kwargs)
        self.bound, self.where, self.ranks, self.say = bound, where, ranks, say
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.held, self.left = [], 0
        if say == "a hook of the user's":
            self.net[0].weight.register_hook(lambda gradient: 1.0 * gradient)
        self.automatic_optimization = say != "manual"

    def on_train_batch_start(self, batch, batch_idx):
        if self.say == "early" and batch_idx == 2 and self.global_rank == 1:
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
        if self.say == "of its own":
            torch.distributed.barrier()
        if self.say == "manual":
            self.manual_backward(loss)
        self.seen.append((self.trainer.current_epoch, batch_idx, batch[2].tolist()))
        self.log("loss", loss.detach(), on_step=self.say == "at once", on_epoch=True, sync_dist=True)
        return {"loss": loss, "extra": 1} if self.say == "more" else loss


def train(rank, settings, model=None, **trainer):
    said, own = collected(), Fits(**(model or {}))
    result = fit(rank, {**SMALL, **settings}, 2, 10, model=own, max_epochs=2, **trainer)
    return {**result, "left": own.left, "said": [line for line in said if "ran out of memory" in line]}


WINDOWS, SUMS = {"accumulate_grad_batches": 2}, {**SPLIT, "loss_reduction": "sum"}
UNDISTURBED = {
    "": (SPLIT, {}, {}),
    "windows": (SPLIT, {}, WINDOWS),
    "sums": (SUMS, {"reduction": "sum", "lr": 1e-3}, {}),
}
COUNTED = {"policy": "pid", "weight_fn": lambda batch: 3.0 * len(batch[0])}
FULL = {  # what it ends as, and the training
    "counts": ("", (COUNTED, {"bound": 8, "ranks": (0,)}, {})),
    "pid": ("", ({"policy": "pid"}, {"bound": 8, "where": "backward"}, {})),
    "given": ("windows", (SPLIT, {"bound": 7}, WINDOWS)),
    "given, backward": ("windows", (SPLIT, {"bound": 7, "where": "backward"}, WINDOWS)),
    "sums": ("sums", (SUMS, {"reduction": "sum", "lr": 1e-3, "bound": 3, "where": "backward"}, {})),
    "views": ("", ({**SPLIT, "gradient_as_bucket_view": True}, {"bound": 7, "where": "backward"}, {})),
}


def _trainings(rank):
    undisturbed = {name: train(rank, *case[:2], **case[2]) for name, case in UNDISTURBED.items()}
    return undisturbed, {name: train(rank, *case[:2], **case[2]) for name, (_, case) in FULL.items()}


def test_the_step_has_the_same_gradient_and_the_next_plan_keeps_the_new_bound():
    """Two epochs of four steps of 20 samples, the last of 4: weights do not depend on the split."""
    (undisturbed, one), (_, other) = run_ranks(_trainings, 2)
    for name, (like, _) in FULL.items():
        results, expected = (one[name], other[name]), undisturbed[like]
        np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
        assert results[0]["history"] == results[1]["history"]
        assert [result["left"] for result in results] == [0, 0]
        for result in results:
            np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-14, err_msg=name)
            assert result["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-12)
    for name, rank in (("counts", 0), ("pid", 1)):
        history, said = one[name]["history"], [bool(results[name]["said"]) for results in (one, other)]
        own = [sizes[rank] for _, _, sizes in history]
        assert own[0] == 10
        assert own[1:]
        assert all(size <= 8 for size in own[1:])  # 8 = int(0.85 * 10)
        assert history[1][:2] == (0, 3)  # heard of before batch 2, decided behind it
        assert all(sum(sizes) == 20 for _, _, sizes in history)
        assert said == [rank == 0, rank == 1]
    for epoch in range(2):
        assert covered([one["counts"], other["counts"]], epoch) == list(range(64))
    assert {sizes for _, _, sizes in one["given"]["history"]} == {(12, 8)}
    assert re.search(r"\b4\b", other["given"]["said"][-1]), "after 1, 2, 4, ... of three full batches in each epoch"


def full_hook(state, bucket):
    if torch.distributed.get_rank() == 1 and not bucket.is_last():  # gradients are missing behind it
        full()
    return allreduce_hook(None, bucket)


REASONS = {
    "a collective": (SPLIT, {"say": "at once"}, "waits for the other ranks"),
    "a raw one": (SPLIT, {"say": "of its own"}, "waits for the other ranks"),
    "other outputs": (SPLIT, {"say": "more"}, "returns more than its loss"),
    "before": (SPLIT, {"say": "early", "bound": 100}, "before training_step"),
    "a hook of DDP": ({**SPLIT, "ddp_comm_hook": full_hook}, {"bound": 100}, "while gradients were sent"),
    "static graph": ({**SPLIT, "static_graph": True}, {}, "static_graph=True"),
    "manual": (SPLIT, {"say": "manual"}, "own optimizers"),
    "a hook": (SPLIT, {"say": "a hook of the user's"}, "a hook of the user's"),
}


def _fails(rank, reason):
    settings, model, _ = REASONS[reason]
    train(rank, settings, {"bound": 7, **model})


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_done_again_is_one_named_error_on_every_rank(reason):
    errors = run_ranks(_fails, 2, reason, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "RuntimeError"), (1, "OutOfMemoryError")]
    assert REASONS[reason][2] in errors[1][2]
    assert "rank 1" in errors[0][2]


def _too_much(rank):
    train(rank, {"policy": "pid"}, {"bound": 7, "ranks": (0, 1)})


def test_a_total_that_no_longer_fits_is_an_error_on_every_rank():
    errors = run_ranks(_too_much, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all("20" in text and "[8, 8]" in text for *_, text in errors)
