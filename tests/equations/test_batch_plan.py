"""Plans, their history, whole-number splits and steps over streams: every sample once, the same on all ranks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.integer_split import even_sizes, joint_sizes, proportional_sizes, tail_sizes
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.batching.stream_steps import StreamRules, next_block, wanted_samples


def plans(workers):
    sizes = st.lists(st.integers(0, 12), min_size=workers, max_size=workers).filter(any)
    return sizes.map(lambda b: BatchPlan(sum(b), tuple(b)))


@st.composite
def histories(draw):
    """Plans of some workers over three epochs, changed at any step, the total included."""
    workers = draw(st.integers(1, 8))
    keys = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=5, unique=True))
    return PlanHistory(tuple(PlanEntry(*key, draw(plans(workers))) for key in sorted({(0, 0), *keys})))


def walk(history, epoch, num_samples, *, drop_last=False, **known):
    """Take the epoch step by step, as a sampler does: ``(first sample, sizes)`` of each step."""
    steps, taken = [], 0
    while taken < num_samples:
        full = sum(history.sizes_at(epoch, len(steps)))
        if drop_last and num_samples - taken < full:
            break
        steps.append((taken, history.sizes_at(epoch, len(steps), num_samples, **known)))
        taken += sum(steps[-1][1])
    return steps


@given(histories(), st.integers(0, 2), st.integers(1, 400), st.integers(1, 4), st.booleans())
def test_every_sample_of_an_epoch_is_taken_once_and_lengths_and_offsets_say_so(history, epoch, number, least, drop):
    steps = walk(history, epoch, number, drop_last=drop, min_local=least)
    taken = sum(sum(sizes) for _, sizes in steps)
    left_out = number - taken
    assert left_out == 0 if not drop else 0 <= left_out < sum(history.sizes_at(epoch, len(steps)))
    assert history.num_batches(epoch, number, drop_last=drop) == len(steps)
    for step, (first, sizes) in enumerate(steps):
        assert history.offset(epoch, step) == first
        assert step == len(steps) - 1 or sizes == history.sizes_at(epoch, step)
        assert not drop or sizes == history.at(epoch, step).plan.local_batch_sizes


@given(histories(), st.integers(0, 2))
def test_what_is_needed_from_an_epoch_on_says_the_same_and_comes_back_from_json(history, epoch):
    back = PlanHistory.from_state_dict(json.loads(json.dumps(history.state_dict())))
    assert (back, back.digest()) == (history, history.digest())
    assert 0 <= history.digest() < 2**48
    later = history.since(epoch)
    assert all((e.epoch, e.step) > (epoch, 0) for e in later.entries[1:])
    for e in range(epoch, 4):
        for step in range(14):
            assert later.sizes_at(e, step) == history.sizes_at(e, step)
            assert later.offset(e, step) == history.offset(e, step)
            starts = [one.step for one in history.entries if one.epoch == e and one.step > step]
            assert history.until(e, step) == min(starts, default=math.inf)


BASE = PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))), PlanEntry(1, 5, BatchPlan(8, (6, 2)))))
LEARNED = CostWeights((0.1, 0.0, 0.9, 0.0, 0.0), (2.0, 1.0))


def test_the_digest_is_of_what_ranks_must_agree_on():
    others = [(1, 6, (6, 2)), (2, 5, (6, 2)), (1, 5, (2, 6)), (1, 5, (6, 3)), (1, 5, (6, 2, 0))]
    entries = [PlanEntry(epoch, step, BatchPlan(sum(sizes), sizes)) for epoch, step, sizes in others]
    entries += [replace(BASE.last, plan=BatchPlan(8, (6, 2), cost=c)) for c in (LEARNED, CostWeights.of("cost"))]
    histories = [BASE, BASE.extended(PlanEntry(3, 0, BatchPlan(8, (6, 2))))]
    histories += [PlanHistory((BASE.entries[0], entry)) for entry in entries]
    assert len({history.digest() for history in histories}) == len(histories)
    for_people = replace(BASE.last, plan=BatchPlan(8, (6, 2), step_time=1.0), reason="because")
    assert PlanHistory((BASE.entries[0], for_people)).digest() == BASE.digest()


def test_a_plan_holds_from_its_step_on_and_never_changes_the_past():
    history = PlanHistory((PlanEntry(1, 3, BatchPlan(4, (2, 2))), PlanEntry(2, 2, BatchPlan(4, (3, 1)))))
    assert history.sizes_at(0, 0) == history.sizes_at(1, 7) == history.sizes_at(2, 1) == (2, 2)
    assert history.sizes_at(2, 2) == history.sizes_at(9, 0) == (3, 1)
    assert (history.at(2, 2), history.version) == (history.last, 2)
    again = BASE.extended(PlanEntry(1, 5, BatchPlan(8, (7, 1))))
    assert (again.version, again.sizes_at(1, 5), BASE.sizes_at(1, 5)) == (2, (7, 1), (6, 2))
    for entries in ((), BASE.entries[::-1], (BASE.entries[0],) * 2, (*BASE.entries, PlanEntry(1, 4, BASE.last.plan))):
        with pytest.raises(ValueError, match="entries"):
            PlanHistory(entries)
    with pytest.raises(ValueError, match="entries"):
        BASE.extended(PlanEntry(1, 4, BatchPlan(8, (7, 1))))


def test_a_plan_is_plain_python_whatever_it_was_made_of():
    plain = BatchPlan(8, (6, 2, 0), 0.5, ("compute",) * 3, (2,), 0.25, 0.125, LEARNED)
    numpy = BatchPlan(
        np.int64(8), np.array([6, 2, 0]), np.float32(0.5), plain.bottlenecks, [np.int64(2)],
        np.float64(0.25), np.float64(0.125), LEARNED,
    )  # fmt: skip
    assert (plain.world_size, plain.shares) == (3, (0.75, 0.25, 0.0))
    one, other = PlanHistory((PlanEntry(1, 4, plain),)), PlanHistory((PlanEntry(np.int64(1), np.int64(4), numpy),))
    assert json.dumps(one.state_dict()) == json.dumps(other.state_dict())
    assert (PlanHistory.from_state_dict(other.state_dict()), other.digest()) == (one, one.digest())


def test_a_split_by_cost_is_told_as_shares_of_the_work():
    lines = [PlanEntry(0, 0, BatchPlan(8, (6, 2), cost=cost)).describe() for cost in (None, LEARNED)]
    assert ["75/25 %" in line for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: BatchPlan(0, (0, 0)), ValueError, "total_batch_size"),
        (lambda: BatchPlan(8.0, (4, 4)), TypeError, "total_batch_size"),
        (lambda: BatchPlan(8, (4, 3)), ValueError, "local_batch_sizes.*total_batch_size"),
        (lambda: BatchPlan(8, (4.0, 4.0)), TypeError, r"local_batch_sizes\[0\]"),
        (lambda: CostWeights((1.0, 1, 0, 0, 0), (-1.0,)), ValueError, "fixed"),
        (lambda: proportional_sizes(4, [1, 1], min_local=3), ValueError, "total=4"),
        (lambda: proportional_sizes(4, [1, 1], max_local=[1, 2]), ValueError, "total=4"),
        (lambda: proportional_sizes(5, [1, 1], multiple=2), ValueError, "total=5"),
        (lambda: joint_sizes([8, 8], (4, 4), max_local=(5, 5)), ValueError, "max_local_batch_sizes"),
        (lambda: StreamRules(2, (9, 2)), ValueError, "max_local_batch_sizes"),
        (lambda: next_block([(2, 2)], (9, 1), (False, True), StreamRules(2)), ValueError, "min_local_batch_size"),
    ],
)
def test_what_is_no_plan_or_split_is_refused_by_name(make, error, names):
    with pytest.raises(error, match=names):
        make()


# whole numbers


@given(st.integers(0, 5000), st.integers(1, 20))
def test_even_sizes_differ_by_one_and_the_larger_ones_come_first(total, workers):
    sizes = even_sizes(total, workers)
    assert (sum(sizes), len(sizes)) == (total, workers)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.data(), st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=8).filter(any))
def test_sizes_are_in_proportion_within_their_bounds(data, shares):
    unit = data.draw(st.sampled_from([1, 1, 4]))
    free = data.draw(st.booleans())
    low = [0 if free else data.draw(st.integers(0, 20)) for _ in shares]
    high = [10_000 if free else b + data.draw(st.integers(0, 50)) for b in low]
    total = data.draw(st.integers(sum(low), min(sum(high), 10_000)))
    bounds = {"min_local": [unit * b for b in low], "max_local": [unit * b + unit - 1 for b in high]}
    sizes = np.array(proportional_sizes(unit * total, shares, multiple=unit, **bounds)) / unit
    assert sizes.sum() == total
    assert (sizes == sizes.round()).all()
    assert all(a <= b <= c for a, b, c in zip(low, sizes, high, strict=True))
    weights = np.maximum(np.array(shares) / max(shares), 1e-12)
    below, above = 0.0, 1e18
    for _ in range(200):  # the level at which all together get the total
        level = math.sqrt(max(below, 1e-9) * above)
        below, above = (level, above) if np.clip(level * weights, low, high).sum() < total else (below, level)
    assert np.abs(sizes - np.clip(above * weights, low, high)).max() <= 1 + 1e-6


def test_only_ratios_of_shares_count_and_the_largest_remainder_gets_a_sample():
    for scale in (1e-305, 1.0, 1e305):
        assert proportional_sizes(10, [3 * scale, 0.0, scale, scale]) == (6, 0, 2, 2)
    assert proportional_sizes(10, [0.46, 0.27, 0.27]) == (4, 3, 3)
    assert proportional_sizes(12, [3, 1], max_local=[7, 100], multiple=4) == (4, 8)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=8).filter(any), st.sampled_from([1, 1, 2, 8]), st.data())
def test_the_tail_is_split_in_proportion_with_no_crumbs(units, multiple, data):
    least = data.draw(st.integers(1, 4))
    sizes = [multiple * (size + least - 1) if size else 0 for size in units]  # a plan's sizes can be run
    remaining = data.draw(st.integers(1, sum(sizes)))
    shares = tail_sizes(remaining, sizes, least, multiple)
    assert sum(shares) == remaining
    assert all(share == 0 or share >= min(least, remaining) for share in shares)
    assert all(share < size + least for share, size in zip(shares, sizes, strict=True))
    assert sorted(share % multiple for share in shares)[:-1] == [0] * (len(sizes) - 1)
    if least == multiple == 1:
        assert shares == proportional_sizes(remaining, sizes)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(0, 9), min_size=2, max_size=5), st.data()
)
def test_batches_of_several_loaders_are_split_in_one_proportion(factors, sizes, data):
    sizes = sizes if any(sizes) else [1, *sizes]
    parts = data.draw(st.integers(1, 2 * sum(sizes)))
    totals = [factor * parts for factor in factors]
    most = data.draw(st.one_of(st.none(), st.just([sum(totals)] * (len(sizes) - 1) + [sum(factors)])))
    split = joint_sizes(totals, sizes, max_local=most)
    assert [sum(own) for own in split] == totals
    for own, total in zip(split, totals, strict=True):
        assert [size * totals[0] for size in own] == [size * total for size in split[0]]
    assert most is None or all(sum(own) <= limit for own, limit in zip(zip(*split, strict=True), most, strict=True))


# streams


def played(lengths, plan, block, rules):
    """Steps of a pass in which every rank draws what is wanted; the samples that no step took; most ever held."""
    ranks = range(len(plan))
    left, held, ended = list(lengths), [0 for _ in ranks], [False for _ in ranks]
    known, steps, most = (list(held), list(ended)), [], 0
    while True:
        wanted = wanted_samples([plan] * block, *known, rules)
        for rank in ranks:
            asked = max(0, wanted[rank] - held[rank])
            drawn = min(asked, left[rank])
            left[rank], held[rank], ended[rank] = left[rank] - drawn, held[rank] + drawn, ended[rank] or drawn < asked
        most = max(most, *held)
        found = next_block([plan] * block, held, ended, rules)
        assert found.sizes or found.over or ended != known[1], "no step, although nothing new is known"
        held = [own - sum(sizes[rank] for sizes in found.sizes) for rank, own in enumerate(held)]
        known = list(held), list(ended)
        steps.extend(found.sizes)
        if found.over:
            return steps, [a + b for a, b in zip(held, left, strict=True)], most


def test_each_sample_of_streams_is_taken_once_and_ranks_run_what_they_can(seed):
    draw = np.random.default_rng(seed)
    for _ in range(80):
        ranks, low, unit = draw.integers(1, 6), int(draw.choice([1, 1, 2, 3])), int(draw.choice([1, 1, 2, 3, 8]))
        plan = tuple(unit * int(draw.choice([0, *range(low, 12)])) for _ in range(ranks))
        if sum(plan) == 0:
            continue
        bound = tuple(max(size, unit * (2 * low - 1)) + unit * int(draw.integers(4)) for size in plan)
        rules = StreamRules(low, bound if draw.random() < 0.4 else None, draw.random() < 0.3, unit)
        lengths = [int(draw.choice([0, low, draw.integers(low, 60 * unit + 1)])) for _ in range(ranks)]
        block = int(draw.integers(1, 5))
        steps, rest, most = played(lengths, plan, block, rules)
        for rank, length in enumerate(lengths):
            own = [sizes[rank] for sizes in steps]
            assert sum(own) + rest[rank] == length
            assert all(size == 0 or size >= low for size in own)
            assert rules.max_local is None or max(own, default=0) <= rules.max_local[rank]
            odd = [step for step, size in enumerate(own) if size % unit]
            last = max((step for step, size in enumerate(own) if size), default=0)
            assert not odd or low > 1 or (odd == [last] and not rules.drop_last)
        assert sum(rest) < sum(plan) + len(plan) * (rules.stand_in - 1) if rules.drop_last else sum(rest) == 0
        assert most <= (block + 1) * sum(plan) + rules.reserve
        if low == unit == 1 and rules.max_local is None:
            assert all(sum(sizes) == sum(plan) for sizes in (steps if rules.drop_last else steps[:-1]))
            assert len(steps) == (sum(lengths) // sum(plan) if rules.drop_last else -(-sum(lengths) // sum(plan)))


def test_sizes_are_those_of_the_plan_until_a_stream_ends_and_others_then_take_its_share_in_proportion():
    assert played([60, 20], (6, 2), 4, StreamRules())[0] == [(6, 2)] * 10
    steps, _, _ = played([600, 20], (6, 2), 4, StreamRules())
    assert steps[:9] == [(6, 2)] * 9
    assert steps[10:-1] == [(8, 0)] * (len(steps) - 11)
    assert next_block([(6, 2)] * 3, (13, 99), (False, False), StreamRules()).sizes == ((6, 2),) * 2
    assert next_block([(6, 2, 4)], (0, 99, 99), (True, False, False), StreamRules()).sizes == ((0, 4, 8),)
    for length in range(2, 12):  # with batch normalization no rank can run a single sample
        for plan in ((4, 4), (8, 3)):
            steps, rest, _ = played([length, 40], plan, 2, StreamRules(2))
            assert sum(rest) == 0
            assert all(size != 1 for sizes in steps for size in sizes)
