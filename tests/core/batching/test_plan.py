"""Plans and their history: every sample of an epoch is taken once, whatever changes in the middle of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory

moderate = settings(max_examples=200, deadline=None, derandomize=True)


def plans(workers):
    sizes = st.lists(st.integers(0, 12), min_size=workers, max_size=workers).filter(any)
    return sizes.map(lambda b: BatchPlan(sum(b), tuple(b)))


def test_shares_are_sizes_over_the_total():
    assert BatchPlan(8, (5, 3, 0)).shares == (0.625, 0.375, 0.0)


@st.composite
def histories(draw):
    """Plans of one to eight workers over three epochs, changed at any step, the total included."""
    workers = draw(st.integers(1, 8))
    keys = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=5, unique=True))
    entries = [PlanEntry(epoch, step, draw(plans(workers))) for epoch, step in sorted({(0, 0), *keys})]
    return PlanHistory(tuple(entries))


def walk(history, epoch, num_samples, *, drop_last=False, min_local=1):
    """Take the epoch step by step, as a sampler does: ``(first sample, sizes)`` of each step."""
    steps, taken = [], 0
    while taken < num_samples:
        full = sum(history.sizes_at(epoch, len(steps)))
        if drop_last and num_samples - taken < full:
            break
        sizes = history.sizes_at(epoch, len(steps), num_samples, min_local=min_local)
        steps.append((taken, sizes))
        taken += sum(sizes)
    return steps


@moderate
@given(histories(), st.integers(0, 2), st.integers(1, 400), st.integers(1, 4))
def test_every_sample_is_taken_exactly_once(history, epoch, num_samples, min_local):
    seen = np.zeros(num_samples, dtype=int)
    for first, sizes in walk(history, epoch, num_samples, min_local=min_local):
        ends = first + np.cumsum(sizes)
        for start, end in zip([first, *ends[:-1]], ends, strict=True):
            assert end <= num_samples
            seen[start:end] += 1
    assert (seen == 1).all()


@moderate
@given(histories(), st.integers(0, 2), st.integers(1, 400), st.booleans())
def test_length_and_offsets_are_those_of_the_walk(history, epoch, num_samples, drop_last):
    steps = walk(history, epoch, num_samples, drop_last=drop_last)
    assert history.num_batches(epoch, num_samples, drop_last=drop_last) == len(steps)
    for step, (first, sizes) in enumerate(steps):
        assert history.offset(epoch, step) == first
        if drop_last:
            assert sizes == history.sizes_at(epoch, step)


@moderate
@given(histories(), st.integers(0, 2))
def test_what_is_needed_from_an_epoch_on_says_the_same(history, epoch):
    later = history.since(epoch)
    assert later.version <= history.version
    assert all((e.epoch, e.step) > (epoch, 0) for e in later.entries[1:])
    for e in range(epoch, 4):
        for step in range(14):
            assert later.sizes_at(e, step) == history.sizes_at(e, step)
            assert later.offset(e, step) == history.offset(e, step)


@moderate
@given(histories())
def test_history_comes_back_from_json(history):
    back = PlanHistory.from_state_dict(json.loads(json.dumps(history.state_dict())))
    assert back == history
    assert back.digest() == history.digest()
    assert 0 <= history.digest() < 2**48


def test_history_of_numpy_values_is_plain():
    plain = PlanHistory((PlanEntry(1, 4, BatchPlan(8, (6, 2), step_time=0.5)),))
    plan = BatchPlan(np.int64(8), np.array([6, 2]), step_time=np.float32(0.5))
    of_numpy = PlanHistory((PlanEntry(np.int64(1), np.int32(4), plan),))
    assert of_numpy.digest() == plain.digest()
    assert json.dumps(of_numpy.state_dict()) == json.dumps(plain.state_dict())


BASE = PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))), PlanEntry(1, 5, BatchPlan(8, (6, 2)))))


@pytest.mark.parametrize(
    "last",
    [
        PlanEntry(1, 6, BatchPlan(8, (6, 2))),
        PlanEntry(2, 5, BatchPlan(8, (6, 2))),
        PlanEntry(1, 5, BatchPlan(8, (2, 6))),
        PlanEntry(1, 5, BatchPlan(9, (6, 3))),
        PlanEntry(1, 5, BatchPlan(8, (6, 2, 0))),
    ],
)
def test_digest_changes_with_what_ranks_must_agree_on(last):
    assert replace(BASE, entries=(BASE.entries[0], last)).digest() != BASE.digest()
    assert BASE.extended(PlanEntry(3, 0, BatchPlan(8, (6, 2)))).digest() != BASE.digest()


def test_digest_leaves_out_what_is_for_people():
    told = replace(BASE.last, plan=BatchPlan(8, (6, 2), step_time=1.0), reason="because")
    assert replace(BASE, entries=(BASE.entries[0], told)).digest() == BASE.digest()


def test_first_plan_holds_before_it_starts_and_later_ones_from_their_step():
    history = PlanHistory((PlanEntry(1, 3, BatchPlan(4, (2, 2))), PlanEntry(2, 2, BatchPlan(4, (3, 1)))))
    assert history.sizes_at(0, 0) == history.sizes_at(1, 7) == history.sizes_at(2, 1) == (2, 2)
    assert history.sizes_at(2, 2) == history.sizes_at(9, 0) == (3, 1)
    assert history.at(2, 2) == history.last
    assert history.version == 2


def test_entry_at_the_same_step_replaces():
    history = BASE.extended(PlanEntry(1, 5, BatchPlan(8, (7, 1))))
    assert history.version == 2
    assert history.sizes_at(1, 5) == (7, 1)
    assert BASE.sizes_at(1, 5) == (6, 2)


@pytest.mark.parametrize(
    "entries", [(), BASE.entries[::-1], (BASE.entries[0], BASE.entries[0])], ids=["empty", "backwards", "twice"]
)
def test_history_is_strictly_ordered(entries):
    with pytest.raises(ValueError, match="strictly ordered"):
        PlanHistory(entries)


def test_history_never_changes_the_past():
    with pytest.raises(ValueError, match="strictly ordered"):
        BASE.extended(PlanEntry(1, 4, BatchPlan(8, (7, 1))))


@pytest.mark.parametrize(
    ("epoch", "step", "error"), [(-1, 0, ValueError), (0, -1, ValueError), (0.0, 0, TypeError), (0, None, TypeError)]
)
def test_entry_names_a_bad_step(epoch, step, error):
    with pytest.raises(error, match="epoch=|step="):
        PlanEntry(epoch, step, BatchPlan(1, (1,)))


# -- one plan


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ((0, (0, 0)), ValueError, "total_batch_size=0"),
        ((8.0, (4, 4)), TypeError, "total_batch_size=8.0"),
        ((True, (1,)), TypeError, "total_batch_size=True"),
        ((8, (4, 3)), ValueError, "sum to 7, not to total_batch_size=8"),
        ((8, (9, -1)), ValueError, r"local_batch_sizes\[1\]=-1"),
        ((8, (4.0, 4.0)), TypeError, r"local_batch_sizes\[0\]=4.0"),
        ((8, None), TypeError, "local_batch_sizes=None"),
        ((8, ()), ValueError, "local_batch_sizes is empty"),
        ((8, (4, 4), 0.0), ValueError, "step_time must be positive"),
        ((8, (4, 4), float("nan")), ValueError, "step_time must be positive"),
        ((8, (4, 4), "fast"), ValueError, "step_time must be positive"),
        ((8, (4, 4), 1.0, ("compute",)), ValueError, "one per worker"),
        (
            (8, (4, 4), 1.0, (), (), None, -0.1),
            ValueError,
            "step_time_error=-0.1 is out of range; give a finite number, 0",
        ),
        (
            (8, (4, 4), 1.0, (), (), None, "small"),
            TypeError,
            "step_time_error='small' is a str; give a finite number, 0",
        ),
    ],
)
def test_bad_plans(fields, error, says):
    with pytest.raises(error, match=says):
        BatchPlan(*fields)


def test_plan_comes_back_from_json():
    plan = BatchPlan(
        np.int64(8),
        [6, 2, 0],
        np.float64(0.5),
        ("compute", "communication", "compute"),
        (np.int64(2),),
        np.float64(0.4),
        np.float64(0.02),
    )
    back = BatchPlan.from_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert back == plan
    assert (back.world_size, back.shares) == (3, (0.75, 0.25, 0.0))
