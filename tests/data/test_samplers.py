"""Samplers as pure functions: who takes which samples of an epoch, whatever the plans, and from where a run resumes."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_hetero.core import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.data import (
    BroadcastStream,
    EvaluationBatchSampler,
    MegaBatch,
    PermutationStream,
    SamplerStream,
    UnevenBatchSampler,
)
from lightning_hetero.data.cost.division import CostDivision
from lightning_hetero.data.units.orders import BroadcastUnits, SeededUnits
from lightning_hetero.data.units.own_shards import OwnShards
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import BatchSource, LoaderSet, SampleSource


def generator(seed):
    return torch.Generator().manual_seed(seed)


def plans(*entries):
    return PlanHistory(tuple(PlanEntry(epoch, step, BatchPlan(sum(sizes), sizes)) for epoch, step, sizes in entries))


class Ragged:
    """Batches of one to five samples in an order of each epoch."""

    def __init__(self, n):
        self.n, self.generator = n, generator(2)

    def __iter__(self):
        order = torch.randperm(self.n, generator=self.generator).tolist()
        ends = [0, *itertools.takewhile(lambda end: end < self.n, itertools.accumulate(itertools.cycle([3, 1, 5, 2])))]
        yield from (order[a:b] for a, b in itertools.pairwise([*ends, self.n]))


def uneven(stream, **more):
    return lambda history, rank, **kwargs: UnevenBatchSampler(stream, history, rank, **more, **kwargs)


def units(make):
    return lambda history, rank, **kwargs: UnitSampler(LoaderSet([make()]), history, rank, **kwargs)


def costs(n):
    return CostDivision(np.random.default_rng(0).lognormal(4, 0.8, n), CostWeights.of("cost"))


SAMPLERS = {
    "permutation": lambda n: uneven(PermutationStream(n, shuffle=True, seed=3)),
    "in order": lambda n: uneven(PermutationStream(n, shuffle=False, seed=3)),
    "sampler": lambda n: uneven(SamplerStream(RandomSampler(range(n)), seed=7)),
    "by cost": lambda n: uneven(PermutationStream(n, shuffle=True, seed=3), division=costs(n)),
    "batches": lambda n: units(lambda: BatchSource(SeededUnits(Ragged(n), seed=0))),
    "batches of all": lambda n: units(lambda: BatchSource(SeededUnits(Ragged(n), seed=0), for_all=True)),
    "batches that rank 0 draws": lambda n: units(lambda: BatchSource(BroadcastUnits(list(Ragged(n))))),
    "samples of one of several": lambda n: units(lambda: SampleSource(PermutationStream(n, shuffle=True, seed=1), 4)),
}
every_kind = pytest.mark.parametrize("kind", SAMPLERS)


@st.composite
def histories(draw, multiple=1):
    """Plans of one total for some ranks, which change at some steps of two epochs; some ranks have no share."""
    ranks = draw(st.integers(1, 4))
    total = multiple * draw(st.integers(ranks, 16))

    def split():
        cuts = sorted(draw(st.lists(st.integers(0, total // multiple), min_size=ranks - 1, max_size=ranks - 1)))
        return tuple(multiple * (b - a) for a, b in itertools.pairwise([0, *cuts, total // multiple]))

    keys = draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=4)) - {(0, 0)}
    return plans((0, 0, split()), *((*key, split()) for key in sorted(keys)))


def counted(sampler, rank, epoch):
    """Batches of a rank that count, each with the sizes of all ranks; one of weight 0 is drawn and not empty."""
    sampler.set_epoch(epoch)
    found = []
    for step, batch in enumerate(sampler, start=sampler.start[1] if epoch == sampler.start[0] else 0):
        sizes = sampler.sizes_at(epoch, step)
        assert len(batch) == sizes[rank] or (batch and not sizes[rank])
        assert sampler.drawn == (epoch, step + 1)
        found.append((sizes, batch if sizes[rank] else []))
    assert sampler.num_batches(epoch) == len(sampler)
    assert sampler.drawn == (epoch + 1, 0)
    return found


def all_ranks(make, history, epochs=(0, 1), **kwargs):
    """``[epoch][rank][step]``: sizes of all ranks, and the samples of this one."""
    ranks = history.entries[-1].plan.world_size
    samplers = [make(lambda: history, rank, **kwargs) for rank in range(ranks)]
    return [[counted(sampler, rank, epoch) for rank, sampler in enumerate(samplers)] for epoch in epochs]


def global_batches(epoch):
    return [[i for _, own in step for i in own] for step in zip(*epoch, strict=True)]


@every_kind
@given(histories(), st.integers(1, 50))
def test_each_sample_once_an_epoch_in_steps_that_all_ranks_know(kind, history, n):
    for epoch in all_ranks(SAMPLERS[kind](n), history):
        batches = global_batches(epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(n))
        assert len({tuple(sizes for sizes, _ in rank) for rank in epoch}) == 1
        assert [sum(sizes) for sizes, _ in epoch[0]] == list(map(len, batches))


@every_kind
@given(histories(), st.integers(1, 50))
def test_a_plan_says_who_takes_what_of_global_batches_that_stay(kind, history, n):
    same = plans((0, 0, history.entries[0].plan.local_batch_sizes))
    made = SAMPLERS[kind](n)
    ours, theirs = all_ranks(made, history), all_ranks(made, same)
    for one, other in zip(ours, theirs, strict=True):
        assert list(map(sorted, global_batches(one))) == list(map(sorted, global_batches(other)))


@every_kind
@given(histories(), st.integers(1, 50), st.integers(0, 12))
def test_an_epoch_goes_on_behind_any_step(kind, history, n, step):
    made = SAMPLERS[kind](n)
    (whole,) = all_ranks(made, history, [1])
    step = min(step, len(whole[0]))
    assert all_ranks(made, history, [1], start=(1, step)) == [[rank[step:] for rank in whole]]
    fresh = made(lambda: history, 0)
    fresh.load_state_dict(made(lambda: history, 0, start=(1, step)).state_dict())
    assert counted(fresh, 0, 1) == whole[0][step:]


@every_kind
@given(histories(), histories(), st.integers(1, 50), st.integers(0, 12))
def test_other_ranks_with_other_totals_go_on_behind_what_was_taken(kind, history, later, n, step):
    made = SAMPLERS[kind](n)
    (whole,) = all_ranks(made, history, [0])
    step = min(step, len(whole[0]))
    plan = later.entries[0].plan
    before = tuple(entry for entry in history.entries if (entry.epoch, entry.step) < (0, step))
    both = PlanHistory((*before, PlanEntry(0, step, plan)))
    (rest,) = all_ranks(made, both, [0], start=(0, step))
    taken = global_batches([rank[:step] for rank in whole]) + global_batches(rest)
    assert sorted(i for batch in taken for i in batch) == list(range(n))


@given(histories(multiple=3), st.integers(1, 50), st.integers(1, 4))
def test_sizes_are_multiples_but_for_the_last_batch_and_stand_ins_are_large_enough(history, n, least):
    stream = PermutationStream(n, shuffle=True, seed=3)
    for epoch in all_ranks(uneven(stream, multiple=3, min_local=least), history):
        for sizes, _ in epoch[0][:-1]:
            assert all(size % 3 == 0 for size in sizes)
    sampler = UnevenBatchSampler(stream, lambda: plans((0, 0, (9, 0))), 1, min_local=least, multiple=3)
    drawn = [len(batch) for batch in sampler][:-1]
    assert all(size == -(-least // 3) * 3 for size in drawn)
    assert n <= 9 or set(next(iter(sampler))) <= set(stream.indices(0)[:9])


def test_full_steps_are_told_from_others_and_a_ragged_one_may_be_dropped():
    stream = PermutationStream(20, shuffle=False, seed=0)
    kept = UnevenBatchSampler(stream, lambda: plans((0, 0, (6, 2))), 0)
    assert [kept.step_at(0, step).regular for step in range(len(kept))] == [True, True, False]
    dropped = [UnevenBatchSampler(stream, lambda: plans((0, 0, (6, 2))), rank, drop_last=True) for rank in (0, 1)]
    assert [[len(batch) for batch in part] for part in dropped] == [[6, 6], [2, 2]]
    joint = UnitSampler(LoaderSet([in_order(12, 2), in_order(4, 1)], "max_size"), lambda: plans((0, 0, (2, 2))), 0)
    assert [joint.step_at(0, step).regular for step in range(3)] == [True, True, False]


# several loaders in one step


def in_order(samples, per_rank, drop_last=False):
    return SampleSource(PermutationStream(samples, shuffle=False, seed=0), per_rank, drop_last=drop_last)


def test_a_step_of_several_loaders_keeps_to_bounds_and_ranks_without_a_share_run_enough():
    bounded = UnitSampler(LoaderSet([in_order(8, 4)]), lambda: plans((0, 0, (7, 1))), 0, max_local=(5, 5))
    assert bounded.sizes_at(0, 0) == (5, 3)
    idle = UnitSampler(LoaderSet([in_order(8, 2)]), lambda: plans((0, 0, (4, 0))), 1, min_local=2)
    assert list(idle) == [[0, 1], [4, 5]]


def test_batches_count_by_their_mean_and_a_state_keeps_it():
    source = BatchSource(SeededUnits([[0], [1, 2, 3], [4, 5, 6, 7, 8]], seed=0))
    loaders = LoaderSet([source])
    assert (source.per_rank(), len(loaders), loaders.total(2)) == (3, 9, 6)
    state = loaders.state_dict(0)
    other = LoaderSet([BatchSource(SeededUnits([[0, 1]], seed=0))])
    other.load_state_dict(state, 0)
    assert other.total(2) == 6
    assert other.fingerprint() != loaders.fingerprint()


# evaluation, claims of elastic averaging, ranks with data of their own


@given(st.data())
def test_evaluation_repeats_nothing_and_keeps_step_counts_and_bounds(data):
    ranks = data.draw(st.integers(1, 6))
    n, batch = data.draw(st.integers(ranks, 200)), data.draw(st.integers(1, 20))
    shares = data.draw(st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks))
    bounds = data.draw(st.none() | st.just((batch + 2,) * ranks))
    made = [EvaluationBatchSampler(n, batch, lambda: shares, rank, ranks, max_local=bounds) for rank in range(ranks)]
    parts = list(map(list, made))
    assert {len(part) for part in parts} == {len(made[0])}
    assert all(batch for part in parts for batch in part)
    assert sorted(i for part in parts for b in part for i in b) == list(range(n))
    assert bounds is None or max(len(b) for part in parts for b in part) <= batch + 2
    if batch >= 10 and not bounds and min(shares) > 0.2:
        for share, own in zip(shares, parts, strict=True):
            assert abs(sum(map(len, own)) / n - share / sum(shares)) <= 0.1 + len(own) / n


@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    samples=st.integers(8, 120),
    size=st.integers(36, 60),
    least=st.integers(1, 2),
    order=st.randoms(use_true_random=False),
)
def test_an_epoch_is_covered_once_in_any_order_of_claims(sizes, samples, size, least, order):
    position, seen = 0, []
    while position < samples:
        mega = MegaBatch.at(position, samples=samples, size=size, batch_sizes=sizes, least=least)
        spans, counter = [mega.first(rank) for rank in range(len(sizes))], 0
        assert all(len(span) >= least for span in spans), "each rank has a share of what is left"
        while span := mega.claimed(counter, claim := order.choice(sizes)):
            assert least <= len(span) <= claim + least - 1
            spans.append(span)
            counter += claim
        seen += [i for span in spans for i in span]
        assert mega.stop - position >= min(size, samples - position)
        position = mega.stop
    assert sorted(seen) == list(range(samples))


# orders


class Passes:
    """A batch sampler that knows its epoch, of which its order does not follow."""

    def __init__(self):
        self.generator, self.sampler, self.epoch = torch.Generator(), self, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).reshape(4, 2).tolist())


def seeded_stream(sampler):
    return SamplerStream(sampler, seed=7).indices


ORDERS = {
    "permutation": lambda: PermutationStream(30, shuffle=True, seed=7).indices,
    "weighted, a generator": lambda: seeded_stream(WeightedRandomSampler([1.0, 2.0, 3.0], 30, generator=generator(5))),
    "distributed": lambda: seeded_stream(DistributedSampler(range(30), 1, 0)),
    "batches": lambda: SeededUnits(Passes(), seed=7).units,
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_follows_from_the_epoch_and_leaves_random_numbers_alone(name):
    found = []
    for seed in (1, 2):  # the ranks' own random states differ
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        order = ORDERS[name]()
        found.append([list(order(epoch)) for epoch in (1, 0, 2, 0)])
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert found[0] == found[1]
    one, first, two, again = found[0]
    assert first == again
    assert len({str(one), str(first), str(two)}) == 3


FINGERPRINTS = {
    "samples": lambda n: PermutationStream(n, shuffle=True, seed=0),
    "seed": lambda n: PermutationStream(20, shuffle=True, seed=n),
    "sampler": lambda n: SamplerStream(RandomSampler(range(n)), seed=0),
    "live": lambda n: BroadcastStream((RandomSampler if n > 20 else SequentialSampler)(range(20))),
    "batches": lambda n: SeededUnits([[0, 1] if n > 20 else [1, 0], [2]], seed=0),
    "loaders": lambda n: LoaderSet([in_order(n, 2)]),
    "costs": lambda n: costs(n),
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_ranks_can_compare_their_data_by_a_number(name):
    make = FINGERPRINTS[name]
    assert make(20).fingerprint() == make(20).fingerprint() != make(21).fingerprint()


class Liar(SequentialSampler):
    def __iter__(self):
        return iter(range(3))


class Fails:
    def __iter__(self):
        raise RuntimeError("no file")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: PermutationStream(0, shuffle=True, seed=0), ValueError, "at least one"),
        (lambda: BroadcastStream(SequentialSampler([])), ValueError, "at least one"),
        (lambda: SamplerStream(Liar(range(4)), seed=0).indices(0), ValueError, "Liar.* 4 .* 3"),
        (lambda: BroadcastStream(Liar(range(4))).indices(0), ValueError, "Liar.* 4 .* 3"),
        (lambda: SeededUnits([], seed=0).units(0), ValueError, "at least one"),
        (lambda: SeededUnits([3], seed=0).units(0), TypeError, "list of indices"),
        (lambda: SeededUnits(itertools.repeat([0, 1]), seed=0, samples=10).units(0), ValueError, "10 samples"),
        (lambda: BroadcastUnits(itertools.repeat([0, 1]), samples=10).units(0), ValueError, "10 samples"),
        (lambda: BroadcastUnits(Fails()).units(0), ValueError, "RuntimeError: no file"),
        (lambda: OwnShards(lambda own: [own, None], lambda: 2), ValueError, "shard='mine'.*rank 1"),
        (lambda: MegaBatch.at(0, samples=2, size=40, batch_sizes=(8, 8, 4)), ValueError, "total=2"),
        (lambda: EvaluationBatchSampler(2, 1, lambda: (1, 1, 1), 0, 3), ValueError, "balance_evaluation"),
    ],
)
def test_orders_that_cannot_be_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
