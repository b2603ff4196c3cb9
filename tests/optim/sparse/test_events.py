"""Sparse optimizers through what happens to optimizers in a training, beside torch's dense ones."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from tests.optim.sparse.pairs import BLOCK, KINDS, SHAPES, Pair, tolerance_of

# layers that are frozen


@pytest.mark.parametrize("pay", ["later", "ahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_layer_takes_what_it_is_owed_and_then_stays_as_it_is(kind, pay):
    """Through saves too; unfrozen it goes on as under the dense optimizer, and so do the others all the time."""
    pair = Pair(kind, pay)
    for step in range(12):
        pair.step(dense=step == 0)
    for p in (pair.ours[1], pair.theirs[1]):
        p.requires_grad_(False)
    pair.step()
    still = pair.ours[1].detach().clone()
    if pay == "later":
        torch.testing.assert_close(still, pair.theirs[1].detach(), rtol=tolerance_of(kind), atol=tolerance_of(kind))
    for step in range(20):
        pair.step(dense=step == 13)
        if step % 5 == 4:
            pair.sparse.state_dict()
        assert torch.equal(pair.ours[1], still)
    for p in (pair.ours[1], pair.theirs[1]):
        p.requires_grad_(True)
    for _ in range(12):
        pair.step()
    assert not torch.equal(pair.ours[1], still)
    pair.sparse.sparse.flush()
    if pay == "later":
        pair.same(tolerance_of(kind))


def test_a_layer_that_comes_back_takes_sparse_steps_again():
    """AdamW counts a parameter's steps, and they then differ within the group."""
    pair = Pair("adamw", shapes=("vector", "vector"))
    pair.step(dense=True)
    pair.ours[1].requires_grad_(False)
    for _ in range(3):
        pair.step()
    pair.ours[1].requires_grad_(True)
    for _ in range(2):
        before = [p.detach().clone() for p in pair.ours]
        pair.step(share=0.3)
        for p, was in zip(pair.ours, before, strict=True):
            moved = (p.detach() != was).view(-1, BLOCK).any(1).nonzero().view(-1)
            assert set(moved.tolist()) <= set(pair.given[p].rows.tolist())


# groups that are added


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_may_be_added(kind):
    pair = Pair(kind)
    for step in range(6):
        pair.step(dense=step == 0)
    pair.add_group(SHAPES["tail"], lr=0.01)
    before = pair.ours[0].detach().clone()
    pair.step()
    moved = (pair.ours[0].detach() != before).view(-1, BLOCK).any(1).nonzero().view(-1)
    assert set(moved.tolist()) <= set(pair.given[pair.ours[0]].rows.tolist()), "the others' step was dense"
    for _ in range(8):
        pair.step()
    pair.sparse.sparse.flush()
    pair.same(tolerance_of(kind))


def test_a_parameter_that_is_not_compressed_takes_dense_steps_beside_the_others():
    """One that was unfrozen after the set-up, say: it has a plain gradient."""
    pair = Pair("momentum decay")
    for step in range(8):
        if step == 3:
            pair.add_group(SHAPES["vector"])
        pair.step(dense=step == 0)
    late = pair.ours[-1]
    for _ in range(4):
        pair.given, before = {}, pair.ours[0].detach().clone()
        for p, other in zip(pair.ours, pair.theirs, strict=True):
            if p is late:
                p.grad = torch.ones_like(p)
                other.grad = torch.ones_like(p)
            else:
                one = BlockGradient.of(p, torch.zeros(1, dtype=torch.int64), torch.ones(1, BLOCK, dtype=p.dtype))
                pair.given[p], p.grad = one, one.grad
                other.grad = torch.zeros_like(p)
                other.grad.view(-1)[:BLOCK] = 1.0
        pair.sparse.step()
        pair.dense.step()
        assert (pair.ours[0].detach() != before).sum() == BLOCK
        assert not late.grad.is_sparse
    pair.sparse.sparse.flush()
    pair.same()


def test_state_may_be_cleared():
    """What was owed is gone with it, and the next step is dense."""
    for kind in KINDS:
        pair = Pair(kind)
        for step in range(4):
            pair.step(dense=step == 0)
        pair.sparse.state.clear()
        for _ in range(3):
            pair.step()
        pair.sparse.sparse.flush()
        assert all(torch.isfinite(p).all() for p in pair.ours)


# saving


@pytest.mark.parametrize("pay", ["later", "ahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_saving_changes_nothing(kind, pay):
    """But for rounding: what is owed may be paid in two parts, and how long blocks wait is not forgotten."""
    pairs = [Pair(kind, pay) for _ in range(2)]
    for step in range(60):
        for pair, saves in zip(pairs, (False, True), strict=True):
            pair.step(dense=step in (0, 25), share=0.1)
            if saves and step % 5 == 4:
                copy.deepcopy(pair.sparse.state_dict())
    for pair in pairs:
        pair.sparse.sparse.flush()
    for one, other in zip(pairs[0].ours, pairs[1].ours, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance_of(kind) / 10, atol=tolerance_of(kind) / 10)


# rates that change


@pytest.mark.parametrize("kind", ["momentum decay", "nesterov", "adamw"])
def test_under_one_cycle_it_is_exact(kind):
    """Momentum and the first beta change in each step."""
    pair, steps = Pair(kind), 400
    pair.step(dense=True)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, KINDS[kind][2]["lr"], steps + 2)
        for optimizer in (pair.sparse, pair.dense)
    ]
    cycled, worst = set(), 0.0
    for step in range(steps):
        pair.step(share=0.03)
        for schedule in schedules:
            schedule.step()
        group = pair.sparse.param_groups[0]
        cycled.add(group["betas"][0] if "betas" in group else group["momentum"])
        if step % 100 == 99:
            pair.sparse.sparse.flush()
            apart = [(a - b).detach().abs().max() for a, b in zip(pair.ours, pair.theirs, strict=True)]
            worst = max(worst, *map(float, apart))
    assert len(cycled) > 300
    assert worst < (1e-8 if kind == "adamw" else 1e-11)


# any of it, in any order

RATES = st.sampled_from([0.01, 0.02, 0.05])
EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("dense"), st.just(0)),
    st.tuples(st.just("all blocks"), st.just(0)),
    st.tuples(st.just("freeze"), st.integers(0, 8)),
    st.tuples(st.just("unfreeze"), st.integers(0, 8)),
    st.tuples(st.just("add"), st.sampled_from(list(SHAPES))),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("load"), st.just(0)),
    st.tuples(st.just("through torch"), st.just(0)),
    st.tuples(st.just("lr"), RATES),
    st.tuples(st.just("weight_decay"), st.sampled_from([0.0, 0.05, 0.2])),
    st.tuples(st.just("momentum"), st.sampled_from([0.0, 0.5, 0.9])),
    st.tuples(st.just("betas"), st.sampled_from([(0.9, 0.999), (0.85, 0.99), (0.0, 0.95)])),
    st.tuples(st.just("replaced"), st.just(0)),
)


def replaced(pair):
    """A gradient of the user's own in place of the merged one."""
    for p, twin in zip(pair.ours, pair.theirs, strict=True):
        if p.requires_grad:
            p.grad, twin.grad = torch.ones_like(p), torch.ones_like(p)
    pair.sparse.step()
    pair.dense.step()


def through_torch(pair):
    """Torch's optimizer goes on from ours, and ours from its state."""
    pair.dense.load_state_dict(copy.deepcopy(pair.sparse.state_dict()))
    pair.sparse.load_state_dict(copy.deepcopy(pair.dense.state_dict()))


def frozen(pair, number, trained):
    for p in (pair.ours[number % len(pair.ours)], pair.theirs[number % len(pair.ours)]):
        p.requires_grad_(trained)


HAPPENINGS = {
    "steps": lambda pair, value: [pair.step() for _ in range(value)],
    "dense": lambda pair, _: pair.step(dense=True),
    "all blocks": lambda pair, _: pair.step(share=1.0),
    "freeze": lambda pair, value: frozen(pair, value, False),
    "unfreeze": lambda pair, value: frozen(pair, value, True),
    "add": lambda pair, value: pair.add_group(SHAPES[value]),
    "save": lambda pair, _: copy.deepcopy(pair.sparse.state_dict()),
    "load": lambda pair, _: pair.sparse.load_state_dict(copy.deepcopy(pair.sparse.state_dict())),
    "through torch": lambda pair, _: through_torch(pair),
    "replaced": lambda pair, _: replaced(pair),
    "momentum": lambda pair, value: pair.set(momentum=value or 0.9 * (pair.kind == "nesterov")),
}


def happen(pair, event, value):
    if event in HAPPENINGS:
        HAPPENINGS[event](pair, value)
    else:
        pair.set(**{event: value})


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4),
    events=st.lists(EVENTS, min_size=4, max_size=14),
)
def test_whatever_happens_settled_it_is_the_dense_optimizer(kind, shapes, events):
    """Paid later, what blocks owe is what the dense optimizer did to them in the meantime."""
    pair = Pair(kind, shapes=tuple(shapes))
    pair.step(dense=True)
    for event, value in events:
        happen(pair, event, value)
    pair.sparse.sparse.flush()
    pair.same(2e-6 if kind == "adamw" else 1e-8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4),
    events=st.lists(EVENTS, min_size=4, max_size=14),
)
def test_whatever_happens_only_touched_blocks_move_and_frozen_parameters_stay(kind, shapes, events):
    """The lazy rule, with momentum that is paid ahead: between two settlements nothing else is written."""
    pair = Pair(kind, "ahead", shapes=tuple(shapes))
    pair.step(dense=True)
    for event, value in events:
        happen(pair, event, value)
        pair.step()  # new parameters get their state, those that were frozen now are paid
        before = [p.detach().clone() for p in pair.ours]
        pair.step()
        for p, was in zip(pair.ours, before, strict=True):
            assert torch.isfinite(p).all()
            if not p.requires_grad:
                assert torch.equal(p, was)
            elif p in pair.given and p.numel():
                flat, old = (t.detach().permute(0, 2, 3, 1) if t.dim() == 4 else t.detach() for t in (p, was))
                moved = nn.functional.pad((flat != old).reshape(-1), (0, -p.numel() % BLOCK)).view(-1, BLOCK).any(1)
                assert set(moved.nonzero().view(-1).tolist()) <= set(pair.given[p].rows.tolist())
