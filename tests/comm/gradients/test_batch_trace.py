"""Which batch a loss belongs to: windows fetched first, kept losses, two loaders, and what cannot be told apart."""

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_hetero.comm.gradients.batch_trace import BatchTrace, HandedOut
from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.config import HeteroConfig

FULL, TAIL = (6, 2), (1, 1)  # of which rank 0 has weight 1.5 and 1
ONE = torch.device("cpu")


class Loop:
    """Rank 0 of two, with a model that is watched."""

    def __init__(self, **config):
        self.weighting = LossWeighting(HeteroConfig(**config), 2, ONE)
        self.weighting.trace.several = True
        self.model = nn.Linear(3, 1)
        self.weighting.trace.watch(self.model)

    def fetch(self, sizes, dtype=torch.float32):
        batch = {"x": torch.ones(sizes[0], 3, dtype=dtype), "y": torch.zeros(sizes[0])}
        self.weighting.begin(sizes[0], sum(sizes), batch, sizes)
        return batch

    def loss(self, batch):
        return self.model(batch["x"]).squeeze(1).sub(batch["y"]).square().mean()

    def weight(self, loss):
        return round(float(self.weighting.scale(loss).detach() / loss.detach()), 6)


def test_a_window_fetched_first():
    loop = Loop()
    for _ in range(2):
        batches = [loop.fetch(sizes) for sizes in (FULL, FULL, TAIL)]
        assert [loop.weight(loop.loss(batch)) for batch in batches] == [1.5, 1.5, 1.0]


def test_losses_kept_for_later_in_any_order():
    """The forward pass of each comes with its batch, so that its inputs may be anything."""
    loop = Loop()
    losses = []
    for sizes in (FULL, TAIL, FULL):
        batch = loop.fetch(sizes)
        losses.append(loop.loss({"x": batch["x"] * 2, "y": batch["y"]}))
    assert [loop.weight(losses[i]) for i in (2, 0, 1, 1)] == [1.5, 1.5, 1.0, 1.0]


def test_one_batch_ahead():
    loop, weights = Loop(), []
    following = loop.fetch(FULL)
    for sizes in (FULL, FULL, TAIL, FULL):
        batch, following = following, loop.fetch(sizes)
        weights += [loop.weight(loop.loss(batch)), loop.weight(loop.loss(batch))]
    assert weights == [1.5, 1.5] * 3 + [1.0, 1.0]
    assert loop.weight(loop.loss(following)) == 1.5


def test_views_and_copies_of_the_batch_are_known():
    """As after a move to another device, when the tensors that were handed out are gone."""
    loop = Loop()
    first, last = loop.fetch(FULL), loop.fetch(TAIL, dtype=torch.float64)
    assert loop.weight(loop.model(first["x"][1:]).mean()) == 1.5
    copied = last["x"].float()
    del last
    assert loop.weight(loop.model(copied).mean()) == 1.0


def test_a_second_model_on_the_output_of_the_first():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    second = nn.Linear(1, 1)
    loop.weighting.trace.watch(second)
    assert [loop.weight(second(loop.model(batch["x"])[:1]).sum()) for batch in batches] == [1.5, 1.0]


def test_a_second_model_may_be_given_what_looks_like_another_batch():
    """One row of the features of six, where another batch has one row."""
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    for model in (first, second):
        loop.weighting.trace.watch(model)
    assert [loop.weight(second(first(batch["x"])[:1]).sum()) for batch in batches] == [1.5, 1.0]


@dataclass
class Output:
    loss: torch.Tensor
    others: tuple


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, batch, flag=None):
        out = self.net(batch["x"])
        return Output(out.mean(), (out, {"again": out}))


def test_structures_go_in_and_come_out():
    loop = Loop()
    model = Wraps()
    loop.weighting.trace.watch(model)
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    outputs = [model(flag=True, batch=batch) for batch in batches]
    assert [loop.weight(output.loss / 2) for output in outputs] == [1.5, 1.0]
    assert [loop.weight(output.others[1]["again"].sum()) for output in outputs] == [1.5, 1.0]


def test_what_cannot_be_told_apart_is_refused_unless_weights_are_equal():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(FULL)]
    assert loop.weight(loop.model(batches[0]["x"].sum(0)).mean()) == 1.5
    loop.fetch(TAIL)
    with pytest.raises(RuntimeError, match="3 batches were fetched before the backward pass of this loss"):
        loop.weight(loop.model(batches[0]["x"].sum(0)).mean())


def test_a_single_batch_is_known_whatever_the_model_is_given():
    loop = Loop()
    loss = loop.model(loop.fetch(FULL)["x"].sum(0)).mean()
    loop.fetch(TAIL)
    assert loop.weight(loss) == 1.5


@pytest.mark.parametrize("how", ["alone", "several", "selected", "twice"])
def test_a_batch_that_was_run_backward_is_over(how):
    """A loss that could be of anything belongs to the batch that is left."""
    loop = Loop()
    batches = [loop.fetch(FULL) for _ in range(1 if how == "alone" else 2)]
    for batch in batches:
        if how == "selected":
            loop.weighting.trace.select(batch)
        loss = loop.loss(batch)
        assert loop.weight(loss + loop.loss(batch) if how == "twice" else loss) == 1.5
    assert loop.weight(loop.model(loop.fetch(TAIL)["x"].sum(0)).mean()) == 1.0


def test_a_tensor_that_is_gone_is_not_known_by_its_address():
    """Its memory may be another one's by now."""
    handed, batch = HandedOut(1.5), torch.ones(6, 3)
    handed.remember(batch)
    address = batch.untyped_storage().data_ptr()
    assert handed.holds({address})
    del batch
    assert not handed.holds({address})


def test_sizes_that_are_equal_on_one_rank_are_refused_on_all():
    """Rank 1 has two samples in both; rank 0 could tell them apart, and would go on without it."""
    loop = Loop()
    first, _ = loop.fetch(FULL), loop.fetch((2, 2))
    with pytest.raises(RuntimeError, match="batches were fetched"):
        loop.weight(loop.model(first["x"].clone()).mean())
    loop = Loop()
    first, _ = loop.fetch((6, 0)), loop.fetch((2, 1))  # who has no share runs one sample as well
    with pytest.raises(RuntimeError, match="batches were fetched"):
        loop.weight(loop.model(first["x"].clone()).mean())
    loop = Loop()
    first, _ = loop.fetch(FULL), loop.fetch(TAIL)
    assert loop.weight(loop.model(first["x"].clone()).mean()) == 1.5


def test_a_batch_may_be_selected():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    for batch, expected in zip(batches, (1.5, 1.0), strict=True):
        loop.weighting.trace.select(batch)
        loss = loop.model(batch["x"].sum(0)).mean()
        assert [loop.weight(loss), loop.weight(loss)] == [expected, expected]
    for none_of_them in (torch.ones(5, 5), [batch["x"] for batch in batches]):
        with pytest.raises(ValueError, match="not one of the batches"):
            loop.weighting.trace.select(none_of_them)


def test_a_selection_holds_until_the_next_batch():
    loop = Loop()
    loop.weighting.trace.select(loop.fetch(FULL))
    assert loop.weight(loop.loss(loop.fetch(TAIL))) == 1.0


def test_sums_of_batches_in_which_a_rank_has_a_share_and_has_none_are_told_apart():
    loop = Loop(loss_reduction="sum")
    loop.fetch(FULL)
    batch = loop.fetch((0, 4))
    with pytest.raises(RuntimeError, match="their weights differ"):
        loop.weight(loop.model(batch["x"].sum(0)).mean())


def test_a_loss_of_several_batches():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(FULL), loop.fetch(TAIL)]
    losses = [loop.loss(batch) for batch in batches]
    assert loop.weight(losses[0] + losses[1]) == 1.5
    with pytest.raises(RuntimeError, match=r"made of several batches.*backward\(\) for each"):
        loop.weight(losses[1] + losses[2])


def test_a_graph_with_many_ways_is_walked_once():
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    for batch, expected in zip(batches, (1.5, 1.0), strict=True):
        out = loop.model(batch["x"]).mean()
        for _ in range(60):
            out = (out + out) / 2
        assert loop.weight(out) == expected


def test_a_new_pass_begins_with_nothing():
    loop = Loop()
    loop.fetch(FULL)
    loop.weighting.trace.forget()
    assert loop.weight(loop.model(loop.fetch(TAIL)["x"].sum(0)).mean()) == 1.0


def test_counts_travel_too():
    counts = iter([30.0, 10.0])
    loop = Loop(weight_fn=lambda batch: next(counts))
    loop.weighting.world_size = 1  # nobody to add counts with
    batches = [loop.fetch(FULL), loop.fetch(FULL)]
    assert [handed.weight._own.item() for handed in map(loop.weighting.trace.of, map(loop.loss, batches))] == [30, 10]


def evaluates():
    return not torch.is_grad_enabled()


def beside(loop, rows=4, batches=2):
    return loop.weighting.beside(iter([{"x": torch.ones(rows, 3)} for _ in range(batches)]), evaluates)


@pytest.mark.parametrize("sizes", [FULL, (4, 4)], ids=str)
def test_a_loss_of_two_loaders_is_refused_also_while_the_split_is_even(sizes):
    loop = Loop()
    second = beside(loop)
    first, other = loop.fetch(sizes), next(second)
    with pytest.raises(RuntimeError, match="made of batches of two loaders"):
        loop.weight(loop.loss(first) + loop.model(other["x"]).mean())
    with pytest.raises(RuntimeError, match="may be of either of two loaders"):
        loop.weight(loop.model(torch.cat([first["x"], other["x"]])).mean())


def test_losses_of_two_loaders_by_themselves_have_their_own_weights():
    loop = Loop()
    for _, other in zip(range(2), beside(loop), strict=False):
        first = loop.fetch(FULL)
        assert loop.weight(loop.model(other["x"]).mean()) == 1.0
        assert loop.weight(loop.loss(first)) == 1.5


def test_an_evaluation_changes_nothing():
    loop = Loop()
    first = loop.fetch(FULL)
    with torch.no_grad():
        probe = beside(loop)
        next(probe)
    assert loop.weight(loop.model(first["x"].sum(0)).mean()) == 1.5
    first = loop.fetch(FULL)
    for _ in beside(loop):  # with gradients on, to the end
        pass
    assert loop.weight(loop.model(first["x"].sum(0)).mean()) == 1.5


def test_a_new_pass_forgets_other_loaders_that_nobody_iterates_any_more():
    loop = Loop()
    left, goes_on = beside(loop), beside(loop)
    next(left)
    next(goes_on)
    left.close()
    loop.weighting.reset()
    (kept,) = loop.weighting.trace.open
    assert not kept.beside.left
    goes_on.close()
    loop.weighting.reset()
    assert loop.weighting.trace.open == ()


def test_a_split_that_stays_even_may_have_two_loaders():
    loop = Loop(policy="even")
    first, other = loop.fetch((4, 4)), next(beside(loop))
    assert loop.weight(loop.loss(first) + loop.model(other["x"]).mean()) == 1.0


def test_a_loss_with_a_global_count_is_not_weighted_again():
    class Model(nn.Linear):
        def forward(self, x, num_items_in_batch=None):
            return super().forward(x)

    for config, ranks, refused in (
        *(({}, 2, True), ({"weight_fn": len}, 2, True), ({"loss_reduction": "sum"}, 2, False)),
        *(({"policy": "even"}, 2, False), ({}, 1, False)),
    ):
        weighting = LossWeighting(HeteroConfig(**config), ranks, ONE)
        model = Model(3, 1)
        weighting.trace.watch(model)
        model(torch.ones(2, 3), num_items_in_batch=None)
        if not refused:
            model(torch.ones(2, 3), num_items_in_batch=torch.tensor(7))
            continue
        with pytest.raises(ValueError, match="set loss_reduction='sum'"):
            model(torch.ones(2, 3), num_items_in_batch=7)


def test_a_watched_model_can_be_copied_and_saved():
    loop = Loop()
    copied = copy.deepcopy(loop.model)
    buffer = io.BytesIO()
    torch.save(loop.model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    batches = [loop.fetch(FULL), loop.fetch(TAIL)]
    for model in (copied, loaded):
        assert model(batches[0]["x"]).shape == (6, 1)
    assert loop.weight(loop.loss(batches[0])) == 1.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_marks_nothing(copied):
    """Averaged weights, say, whose losses are not run backward."""
    trace, seen = BatchTrace(several=True), []
    trace.mark = lambda given, output: seen.append(output)
    model = nn.Linear(2, 1)
    trace.watch(model)
    copied(model)(torch.ones(3, 2))
    assert seen == []
    model(torch.ones(3, 2))
    assert len(seen) == 1


def test_a_loss_of_several_batches_ends_none_of_them():
    """Each may have a loss of its own later."""
    loop = Loop()
    batches = [loop.fetch(FULL), loop.fetch(FULL)]
    assert loop.weight(loop.loss(batches[0]) + loop.loss(batches[1])) == 1.5
    loop.fetch(TAIL)
    assert [loop.weight(loop.loss(batch)) for batch in batches] == [1.5, 1.5]
