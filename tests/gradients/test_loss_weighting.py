"""The weight of a loss: ``W b_i / B``, counts of a batch or sums; and which batch a loss belongs to."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.config import HeteroConfig
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def weighting_of(ranks=2, notices=None, device=CPU, **config):
    return LossWeighting(HeteroConfig(**config), ranks, device, notices)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.sampled_from(("mean", "sum")))
def test_weights_make_the_mean_over_ranks_that_over_samples(sizes, reduction):
    """``W b_i / B`` (C eq. 9); of sums, each rank with a share has weight 1. A weight of 1 changes nothing at all."""
    for own in sizes:
        weighting = weighting_of(len(sizes), loss_reduction=reduction)
        weighting.begin(own, sum(sizes), None, sizes)
        x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        weighted = weighting.scale(loss := x.square())
        expected = len(sizes) * own / sum(sizes) if reduction == "mean" else float(own > 0)
        assert (weighted is loss) == (expected == 1.0)
        weighted.backward()
        assert (float(loss.detach()), float(x.grad)) == (9.0, pytest.approx(6.0 * expected))
        assert not weighting.waits
        weighting.reset()
        assert weighting.scale(loss) is loss, "a loss after that belongs to no batch"


def _counted(rank, counts, own):
    """Weights of two losses of each batch, where ranks count; or where no rank knows the sizes in advance."""
    dist.init_process_group("gloo")
    calls, weights = [], {"fn": [], "front end": [], "counted": []}
    one = torch.tensor(1.0, dtype=torch.float64)
    for kind, found in weights.items():
        weighting = weighting_of(2, **({"weight_fn": lambda b: calls.append(b) or b["n"]} if kind == "fn" else {}))
        if kind != "fn":
            weighting.count_with(lambda batch: batch["n"])
        for count in counts[rank]:
            if kind == "counted":
                weighting.begin_counted(own[rank], {"n": count})
            else:
                weighting.begin(own[rank], sum(own), {"n": count})
            assert weighting.waits
            found.append([float(weighting.scale(one)), float(weighting.scale(one))])
            assert not weighting.waits, "counts are there"
    assert len(calls) == (len(counts[rank]) if own[rank] else 0), "a rank without a share counts nothing"
    sums = weighting_of(2, loss_reduction="sum")
    sums.begin_counted(own[rank], None)
    weights["sums"] = float(sums.scale(one))
    return weights


def test_counts_of_all_ranks_take_the_place_of_sizes():
    """10 and 30 tokens, then 5 and 0, then none at all; a count that is no number is no weight of 0."""
    nan = torch.tensor(float("nan"))  # on a GPU, to look at it would have to wait
    counts = [[10, torch.tensor(5), 0, nan], [torch.tensor([30.0]), 0, 0, torch.tensor(3)]]
    for rank, weights in enumerate(run_ranks(_counted, 2, counts, (2, 2))):
        for kind in ("fn", "front end", "counted"):
            *known, bad = weights[kind]
            assert known == [[w, w] for w in ((0.5, 2.0, 0.0), (1.5, 0.0, 0.0))[rank]]
            assert np.isnan(bad).all(), "training would stand still without a word"
        assert weights["sums"] == 1.0
    first, second = run_ranks(_counted, 2, [[10], [30]], (2, 0))
    assert [first["fn"], second["fn"]] == [[[2.0] * 2], [[0.0] * 2]], "it runs some samples, whatever their count"
    assert [first["sums"], second["sums"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("count", "error"),
    [(None, TypeError), (torch.ones(2), TypeError), (-1, ValueError), (float("nan"), ValueError)],
    ids=repr,
)
def test_a_count_that_is_none_is_refused_by_name(count, error):
    weighting = weighting_of(1, weight_fn=lambda batch: count)
    weighting.begin(own=0, total=8, batch=None)
    with pytest.raises(error, match="weight_fn"):
        weighting.begin(own=3, total=8, batch=None)


def test_a_batch_in_which_nothing_counts_adds_nothing():
    """The mean over its tokens is nan; torch's own losses have a gradient of 0 there."""
    weighting = weighting_of(1, weight_fn=lambda batch: (batch != -100).sum())
    labels, outputs = torch.full((4,), -100), torch.randn(4, 7, requires_grad=True)
    weighting.begin(4, 4, labels)
    weighting.scale(nn.functional.cross_entropy(outputs, labels)).backward()
    assert not outputs.grad.any()


def test_counts_of_a_front_end_go_behind_the_settings():
    for config in ({"weight_fn": len}, {"loss_reduction": "sum"}):
        weighting = weighting_of(1, **config)
        weighting.count_with(lambda batch: 1 / 0)
        weighting.begin(3, 3, [1, 2, 3])
        assert float(weighting.scale(torch.tensor(2.0))) == 2.0


# notices; `tests/one_process/test_losses.py` has the losses


SIX, FIVE = torch.ones(6, 3), torch.ones(5, 3)
ARRIVED = {
    "as planned": ([SIX, SIX[:, 0]], False),
    "images of different sizes": ([[torch.ones(3, size, size) for size in range(4, 10)], [{}] * 6], False),
    "graphs": ([torch.ones(40, 3), torch.ones(2, 90), SIX[:, 0]], False),
    "dropped": ([FIVE, FIVE[:, 0]], True),
    "packed": ({"input_ids": torch.ones(1, 40), "labels": torch.ones(1, 40)}, True),
}


@pytest.mark.parametrize("kind", ARRIVED)
def test_a_batch_of_other_rows_than_planned_is_named_once(kind):
    batch, expected = ARRIVED[kind]
    weighting = weighting_of(notices=(notices := Notices(speaks=True)))
    for _ in range(2):
        weighting.begin(6, 8, batch, (6, 2))
    assert ["weight_fn" in line for line in notices.said] == [True] * expected


def test_to_name_a_loss_never_runs_a_checkpointed_forward_pass_again():
    """It may have collectives, and other ranks would not take part in them."""
    forwards = []

    def loss(x):
        forwards.append(x)
        return nn.functional.cross_entropy(x, torch.tensor([0, 1]), weight=torch.tensor([0.2, 0.8]))

    weighting = weighting_of(notices=Notices(speaks=True))
    weighting.begin(2, 3, None, (2, 1))
    weighted = weighting.scale(checkpoint(loss, torch.zeros(2, 2, requires_grad=True), use_reentrant=False))
    assert len(forwards) == 1
    weighted.backward()
    assert len(forwards) == 2


# which batch a loss belongs to


FULL, TAIL = (6, 2), (1, 1)  # of which rank 0 has weight 1.5 and 1


class Loop:
    """Rank 0 of some, which may hold several batches at once, with a model that is watched."""

    def __init__(self, ranks=2, **config):
        self.weighting, self.model = weighting_of(ranks, **config), nn.Linear(3, 1)
        self.weighting.hold_several()
        self.weighting.trace.watch(self.model)

    def fetch(self, sizes, dtype=torch.float32):
        batch = {"x": torch.ones(sizes[0] or 1, 3, dtype=dtype), "y": torch.zeros(sizes[0] or 1)}
        self.weighting.begin(sizes[0], sum(sizes), batch, sizes)
        return batch

    def beside(self, rows=4):
        batches = iter([{"x": torch.ones(rows, 3)} for _ in range(2)])
        return self.weighting.beside(batches, lambda: not torch.is_grad_enabled())

    def loss(self, batch):
        return self.model(batch["x"]).squeeze(1).sub(batch["y"]).square().mean()

    def untraced(self, batch):
        """A loss whose inputs are not those of the batch any more."""
        return self.model(batch["x"].sum(0)).mean()

    def weight(self, loss):
        return round(float(self.weighting.scale(loss).detach() / loss.detach()), 6)


def test_losses_kept_for_later_in_any_order():
    """The forward pass of each comes with its batch, so that its inputs may be anything."""
    loop, losses = Loop(), []
    for sizes in (FULL, TAIL, FULL):
        batch = loop.fetch(sizes)
        losses.append(loop.loss({"x": batch["x"] * 2, "y": batch["y"]}))
    assert [loop.weight(losses[i]) for i in (2, 0, 1, 1)] == [1.5, 1.5, 1.0, 1.0]
    loop = Loop()
    loss = loop.untraced(loop.fetch(FULL))
    loop.fetch(TAIL)
    assert loop.weight(loss) == 1.5, "a single batch is known whatever the model is given"


class Wraps(nn.Module):
    """Takes a structure by its name, and gives another one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return {"outputs": (self.net(batch["x"]).mean(),)}


def _wrapped(loop, batch, second):
    model = Wraps(nn.Linear(3, 1))
    loop.weighting.trace.watch(model)
    return model(batch=batch)["outputs"][0]


def _copies(loop, batch, second):
    copied = batch["x"].double()
    batch.clear()  # as after a move to another device: what was handed out is gone
    return loop.model(copied.float()).mean()


def _many_ways(loop, batch, second):
    out = loop.model(batch["x"]).mean()
    for _ in range(60):
        out = (out + out) / 2
    return out


TRACED = {
    "a view": lambda loop, batch, second: loop.model(batch["x"][:1]).mean(),
    "a copy": _copies,
    "structures": _wrapped,
    "many ways": _many_ways,
    "a second model on the output of the first": lambda loop, batch, second: second(loop.model(batch["x"])).sum(),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_batch_is_known_by_what_the_model_is_given(name):
    loop, second = Loop(), nn.Linear(1, 1)
    loop.weighting.trace.watch(second)
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    assert [loop.weight(TRACED[name](loop, batch, second)) for batch in batches] == [1.5, 1.0]


def test_what_cannot_be_told_apart_is_refused_unless_weights_are_equal():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(FULL)]
    assert loop.weight(loop.untraced(batches[0])) == 1.5
    assert loop.weight(loop.loss(batches[0]) + loop.loss(batches[1])) == 1.5
    batches.append(loop.fetch(TAIL))
    with pytest.raises(RuntimeError, match="3 batches"):
        loop.weight(loop.untraced(batches[0]))
    with pytest.raises(RuntimeError, match="several batches"):
        loop.weight(loop.loss(batches[1]) + loop.loss(batches[2]))
    assert [loop.weight(loop.loss(batch)) for batch in batches] == [1.5, 1.5, 1.0], "a loss of several ended none"
    loop = Loop(policy="even")  # which never moves the split, so that a loss may be of two loaders
    first, other = loop.fetch((4, 4)), next(loop.beside())
    assert loop.weight(loop.loss(first) + loop.model(other["x"]).mean()) == 1.0


@pytest.mark.parametrize(
    ("config", "first", "other"),
    [({}, FULL, (2, 2)), ({}, (6, 0), (2, 1)), ({"loss_reduction": "sum"}, (0, 4), FULL)],
    ids=["as many on rank 1", "who has no share runs a sample as well", "sums"],
)
def test_sizes_that_one_rank_cannot_tell_apart_are_refused_on_all(config, first, other):
    """An error on one rank alone would leave the others waiting."""
    loop = Loop(**config)
    batch, _ = loop.fetch(first), loop.fetch(other)
    with pytest.raises(RuntimeError, match="weights differ"):
        loop.weight(loop.model(batch["x"].clone().sum(0) if config else batch["x"].clone()).mean())


def test_a_batch_that_was_run_backward_is_over():
    """A loss that could be of anything belongs to the batch that is left."""
    loop = Loop()
    batch = loop.fetch(FULL)
    assert [loop.weight(loop.loss(batch)) for _ in range(2)] == [1.5, 1.5]
    assert loop.weight(loop.untraced(loop.fetch(TAIL))) == 1.0


def test_a_batch_may_be_selected_until_the_next_one():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    for batch, expected in zip(batches, (1.5, 1.0), strict=True):
        assert float(loop.weighting.select(batch)) == expected
        assert [loop.weight(loop.untraced(batch)) for _ in range(2)] == [expected] * 2
    with pytest.raises(ValueError, match="select"):
        loop.weighting.select(torch.ones(5, 5))


def test_a_new_pass_begins_with_nothing_but_loaders_that_go_on():
    loop = Loop()
    loop.fetch(FULL)
    loop.weighting.reset()
    assert loop.weight(loop.untraced(loop.fetch(TAIL))) == 1.0
    goes_on = loop.beside()
    next(goes_on)
    loop.weighting.reset()
    batch = loop.fetch(FULL)
    with pytest.raises(RuntimeError, match="two loaders"):
        loop.weight(loop.untraced(batch))


def test_an_evaluation_changes_nothing():
    loop = Loop()
    first = loop.fetch(FULL)
    with torch.no_grad():
        next(loop.beside())
    assert loop.weight(loop.untraced(first)) == 1.5
    first = loop.fetch(FULL)
    for _ in loop.beside():  # with gradients on, to the end
        pass
    assert loop.weight(loop.untraced(first)) == 1.5


class Counts(nn.Linear):
    def forward(self, x, num_items_in_batch=None):
        return super().forward(x)


@pytest.mark.parametrize(
    ("config", "ranks", "refused"),
    [({}, 2, True), ({"loss_reduction": "sum"}, 2, False), ({"policy": "even"}, 2, False), ({}, 1, False)],
)
def test_a_loss_with_a_global_count_is_not_weighted_again(config, ranks, refused):
    weighting, model = weighting_of(ranks, **config), Counts(3, 1)
    weighting.trace.watch(model)
    model(torch.ones(2, 3), num_items_in_batch=None)
    if refused:
        with pytest.raises(ValueError, match="loss_reduction"):
            model(torch.ones(2, 3), num_items_in_batch=7)
        weighting.count_with(len)  # a front end that counts by itself knows what it gives the model
    model(torch.ones(2, 3), num_items_in_batch=torch.tensor(7))


def test_a_copy_of_a_watched_model_marks_nothing():
    """Averaged weights, say, whose losses are not run backward."""
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    with pytest.raises(RuntimeError, match="2 batches"):
        loop.weight(copy.deepcopy(loop.model)(batches[0]["x"]).mean())
    assert loop.weight(loop.loss(batches[0])) == 1.5
