"""Steps made of units: the walk through loaders, pieces of batches, orders, and ranks with their own data."""

import itertools
import random
from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.integer_split import joint_sizes
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.data import PermutationStream
from lightning_hetero.data.division import Parts
from lightning_hetero.data.rows import BatchRows, concat_batches, rows_by, rows_of, slice_batch
from lightning_hetero.data.units.orders import BroadcastUnits, SeededUnits
from lightning_hetero.data.units.own_shards import OwnShards, counted_rows
from lightning_hetero.data.units.pieces import PiecesDataset, pieces_of
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import BatchSource, ItemSource, LoaderSet, SampleSource
from lightning_hetero.data.units.walk import Lane, StepWalk

Pair = namedtuple("Pair", "x y")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum),
)
def test_joint_sizes_have_equal_shares_of_every_batch(multiples, unit, plan):
    totals = [unit * k for k in multiples]
    sizes = joint_sizes(totals, plan)
    assert [sum(part) for part in sizes] == totals
    for rank in range(len(plan)):
        pairs = zip(sizes, totals, strict=True)
        assert {part[rank] * totals[0] - sizes[0][rank] * total for part, total in pairs} == {0}
        assert plan[rank] > 0 or sizes[0][rank] == 0


def test_joint_sizes_keep_to_the_limits():
    assert joint_sizes([16, 8], (20, 4), max_local=(18, 100)) == ((12, 4), (6, 2))
    with pytest.raises(ValueError, match="raise max_local_batch_sizes"):
        joint_sizes([16, 8], (20, 4), max_local=(6, 6))


class Passes:
    """A batch sampler whose sampler and generator know the epoch."""

    def __init__(self):
        self.generator, self.sampler, self.epoch = torch.Generator(), self, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).reshape(4, 2).tolist())


class Outer:
    def __init__(self):
        self.sampler = Passes()

    def __iter__(self):
        return iter(self.sampler)


@pytest.mark.parametrize("make", [Passes, Outer])
def test_orders_depend_on_the_epoch_alone(make):
    order, again = SeededUnits(make(), seed=0), SeededUnits(make(), seed=0)
    first, second = order.units(0), order.units(1)
    assert first != second
    assert [again.units(1), again.units(0)] == [second, first]
    assert order.batches.sampler.epoch == 1
    handed_out = BroadcastUnits(make())
    handed_out.draw(3)
    assert handed_out.batches.sampler.epoch == 3


def test_ranks_compare_the_samples_and_not_only_their_number():
    first, other = (SeededUnits(batches, seed=0) for batches in ([[0, 1], [2]], [[1, 0], [2]]))
    assert first.fingerprint() != other.fingerprint()


def test_all_bounds_are_kept_where_that_is_possible():
    draw = random.Random(2)
    for _ in range(2000):
        ranks, least = draw.randint(1, 4), draw.randint(1, 3)
        most = [draw.randint(least, 9) for _ in range(ranks)]
        plan = [draw.randint(least, limit) for limit in most]
        total = draw.randint(1, sum(most))
        (sizes,) = joint_sizes([total], plan, min_local=least, max_local=most)
        assert sum(sizes) == total
        choices = [[0, *range(least, limit + 1)] for limit in most]
        possible = any(sum(choice) == total for choice in itertools.product(*choices))
        kept = all(size in allowed for size, allowed in zip(sizes, choices, strict=True))
        assert kept or not possible, (total, plan, least, most, sizes)


def endless():
    while True:
        yield [0, 1]


def test_a_batch_sampler_without_an_end_is_refused_after_a_while():
    drawn = []

    def counted():
        for batch in endless():
            drawn.append(1)
            yield batch

    for order in (SeededUnits(counted(), seed=0, samples=10), BroadcastUnits(counted(), samples=10)):
        drawn.clear()
        with pytest.raises(ValueError, match="not ended; the dataset has 10 samples"):
            order.units(0)
        assert len(drawn) <= 2**20 // 2 + 1
    assert len(SeededUnits([[0] * 2**21], seed=0, samples=2**19).units(0)) == 1


def test_the_orders_of_later_epochs_are_compared_once_each():
    order, told = SeededUnits([[0, 1], [2]], seed=0), []
    order.draw(1)
    order.compare_by(lambda what, value: told.append((what, value)))
    for epoch in (0, 1, 1, 2):
        order.draw(epoch)
    assert [what.split()[4] for what, _ in told] == ["1", "2"]
    assert len({value for _, value in told}) == 1


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 2), ("max_size", 4), ("max_size_cycle", 4)])
def test_a_walk_takes_what_the_modes_of_lightning_take(mode, steps):
    walk = StepWalk([Lane(7, lambda ranks: 2), Lane(3, lambda ranks: 2)], mode)
    assert len(walk) == steps
    for lane, n in ((0, 7), (1, 3)):
        takes = [take for step in range(steps) if (take := walk.of(lane, step)) is not None]
        taken = [i for take in takes for i in range(take.first, take.first + take.number)]
        expected = {"min_size": list(range(n))[: 2 * steps], "max_size": list(range(n))}
        assert taken == expected.get(mode, list(range(n)) * (1 if lane == 0 else 2))


def test_a_walk_without_a_full_batch_is_refused():
    with pytest.raises(ValueError, match="set drop_last=False"):
        StepWalk([Lane(3, lambda ranks: 4, True)])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_every_row_of_the_items_goes_to_one_rank(rows, sizes):
    if sum(sizes) == 0:
        return
    ends = np.cumsum(rows)
    items = [torch.arange(end - n, end) for n, end in zip(rows, ends, strict=True)]
    dataset = PiecesDataset(items, lambda item: item, BatchRows())
    loaded = [dataset[pieces_of(range(len(items)), sizes, rank)] for rank in range(len(sizes))]
    assert sorted(i for count, part in loaded for i in part[:count].tolist()) == list(range(ends[-1]))
    assert all(len(part) >= 1 for _, part in loaded)
    assert all(count == 0 for (count, _), size in zip(loaded, sizes, strict=True) if size == 0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.integers(2, 4),
)
def test_no_rank_has_a_part_that_is_too_small_to_run(rows, sizes, least):
    """Each row goes to one rank, or a rank says that the items are too short for it."""
    if sum(sizes) == 0:
        return
    ends = np.cumsum(rows)
    items = [torch.arange(end - n, end) for n, end in zip(rows, ends, strict=True)]
    dataset, loaded = PiecesDataset(items, lambda item: item, BatchRows()), []
    for rank in range(len(sizes)):
        request = pieces_of(range(len(items)), sizes, rank, least)
        own = sum(np.diff(piece.rows(rows[piece.index], least))[0] for piece in request.pieces)
        if 0 < own < least:
            with pytest.raises(ValueError, match="can run no fewer than min_local_batch_size"):
                dataset[request]
            assert min(rows) < least
            return
        count, part = dataset[request]
        assert count == 0 or count >= least
        assert len(part) >= least
        loaded += part[:count].tolist()
    assert sorted(loaded) == list(range(ends[-1]))


def test_items_of_the_plans_size_keep_to_the_plan():
    items = [torch.arange(first, first + 8) for first in (0, 8, 16)]
    dataset = PiecesDataset(items, lambda item: item, BatchRows())
    for sizes in ((12, 9, 3), (4, 8, 12), (2, 20, 2), (0, 22, 2)):
        counts = [dataset[pieces_of(range(3), sizes, rank, 2)][0] for rank in range(3)]
        assert counts == list(sizes)


class Table:
    """A batch of a class of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


def test_a_class_of_its_own_needs_a_length_and_two_functions():
    dataset = PiecesDataset(
        [Table(list("abcd")), Table(list("ef"))],
        lambda item: item,
        BatchRows(
            lambda table, start, stop: Table(table.rows[start:stop]),
            lambda tables: Table([row for table in tables for row in table.rows]),
        ),
    )
    loaded = [dataset[pieces_of(range(2), (3, 1), rank)] for rank in (0, 1)]
    assert [(count, "".join(table.rows)) for count, table in loaded] == [(5, "abcde"), (1, "f")]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, x.float()],
        lambda x: (x, {"y": x}),
        lambda x: Pair(x, x + 1),
        lambda x: {"x": x, "names": [str(i) for i in x.tolist()], "kind": "train"},
        lambda x: x.numpy(),
    ],
)
def test_slices_put_together_are_the_batch(make):
    batch = make(torch.arange(5))
    assert rows_of(batch) == 5
    joined = concat_batches([slice_batch(batch, 0, 2), slice_batch(batch, 2, 5)])
    assert repr(joined) == repr(batch)
    assert type(joined) is type(batch)


CONSTANT = {"classes": ["a", "b", "c"], "size": (224, 224), "sets": defaultdict(list, {"k": 1})}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "value", [str, float, lambda i: torch.tensor(i), lambda i: {"box": torch.zeros(i + 1)}], ids="sfbm"
)
def test_values_of_the_rows_are_cut_and_joined_and_constants_stay(kind, value):
    batch = {"x": torch.arange(5), "values": kind(value(i) for i in range(5)), **CONSTANT}
    parts = [slice_batch(batch, 0, 1), slice_batch(batch, 1, 4), slice_batch(batch, 4, 5)]
    assert [len(part["values"]) for part in parts] == [1, 3, 1]
    assert repr(concat_batches(parts)) == repr(batch)
    whole = concat_batches([batch, batch])
    assert [len(whole[key]) for key in ("x", "values", "classes", "size")] == [10, 10, 3, 2]


IMAGES = [torch.full((channels, 2, 2), float(i)) for i, channels in enumerate((3, 1, 3, 3, 1))]


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1], IMAGES[1:2], [image[:1] for image in IMAGES]])
def test_a_function_that_cuts_tells_how_the_rows_are_counted(images):
    assert rows_by(images, lambda batch, start, stop: batch[start:stop]) == len(images)
    pair = [torch.zeros(len(images), 4), torch.zeros(len(images))]
    assert rows_by(pair, lambda batch, start, stop: [part[start:stop] for part in batch]) == len(images)
    with pytest.raises(TypeError, match=r"of slice_fn\(batch, 0, 1\), neither"):
        rows_by({"x": IMAGES[0]}, lambda batch, start, stop: batch)


def test_lists_of_samples_are_trained_on_once_with_functions_that_cut_and_join():
    items = [IMAGES[:3], IMAGES[3:]]
    dataset = PiecesDataset(
        items, list, BatchRows(lambda batch, start, stop: batch[start:stop], lambda parts: sum(parts, []))
    )
    loaded = [dataset[pieces_of(range(2), (3, 2), rank)] for rank in (0, 1)]
    assert [int(image[0, 0, 0]) for count, part in loaded for image in part[:count]] == list(range(5))
    with pytest.raises(ValueError, match="Give slice_fn"):
        PiecesDataset(items, list, BatchRows())[pieces_of(range(2), (3, 2), 0)]


def test_a_step_with_one_loader_left_needs_no_common_divisor():
    loaders = LoaderSet([BatchSource(SeededUnits([[i] for i in range(n)], seed=0)) for n in (7, 3)], "max_size")
    history = PlanHistory((PlanEntry(0, 0, BatchPlan(6, (2, 2, 2))),))
    sampler = UnitSampler(loaders, lambda: history, rank=0)
    sizes = [sampler.sizes_at(0, step) for step in range(len(sampler))]
    assert [sum(step) for step in sizes] == [6, 3, 1]


def test_batches_that_cannot_be_cut_or_joined_say_what_to_give():
    with pytest.raises(ValueError, match="Give slice_fn"):
        slice_batch([torch.zeros(3), torch.zeros(2)], 0, 1)
    with pytest.raises(TypeError, match="Give slice_fn"):
        slice_batch([torch.zeros(3), object()], 0, 1)
    with pytest.raises(ValueError, match="give concat_fn"):
        concat_batches([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(TypeError, match="cannot be counted"):
        rows_of(object())


def test_orders_are_drawn_once_an_epoch_and_restore_the_generators():
    class Draws:
        def __iter__(self):
            yield from torch.randperm(6).view(3, 2).tolist()

    before = torch.get_rng_state()
    first, second = SeededUnits(Draws(), seed=1), SeededUnits(Draws(), seed=1)
    assert first.units(0) == second.units(0) != first.units(1)
    assert torch.equal(before, torch.get_rng_state())
    saved = BroadcastUnits(Draws())
    drawn = saved.units(2)
    other = BroadcastUnits(Draws())
    other.load_state_dict(saved.state_dict(2), 2)
    assert other.units(2) == drawn


@pytest.mark.parametrize("batches", [[], [[]]])
def test_a_batch_sampler_without_batches_is_refused(batches):
    with pytest.raises(ValueError, match="at least one"):
        SeededUnits(batches, seed=0).units(0)


def test_an_error_of_rank_0_reaches_all_ranks():
    class Fails:
        def __iter__(self):
            raise RuntimeError("no file")

    seen = []
    with pytest.raises(ValueError, match="RuntimeError: no file"):
        BroadcastUnits(Fails(), lambda value: seen.append(value) or value).units(0)
    assert seen == ["RuntimeError: no file"]


class Odd:
    """The last rank gets the odd samples."""

    features = 1

    def divide(self, samples, sizes, plan):
        parts = [i for i in samples if i % 2 == 0], [i for i in samples if i % 2]
        return Parts(parts, tuple((float(sum(part)),) for part in parts))


def test_a_division_gives_out_the_samples_of_a_step():
    history = PlanHistory((PlanEntry(0, 0, BatchPlan(4, (2, 2))),))
    loaders = LoaderSet([BatchSource(SeededUnits([[0, 1, 3], [5, 2]], seed=0))])
    samplers = [UnitSampler(loaders, lambda: history, rank, division=Odd()) for rank in (0, 1)]
    assert [list(sampler) for sampler in samplers] == [[[0, 2]], [[1, 3, 5]]]
    assert samplers[1].step_at(0, 0)[:4] == ((2, 3), True, 2, (9.0,))


def test_own_data_without_length_or_batches_is_refused():
    for length, words in ((None, "has no length"), (0, "has no batches")):
        with pytest.raises(ValueError, match=f"rank 1 {words}"):
            OwnShards(lambda own, length=length: [own, length], lambda: 2)


def plans(*entries):
    return PlanHistory(tuple(PlanEntry(epoch, step, BatchPlan(sum(sizes), sizes)) for epoch, step, sizes in entries))


def in_order(samples, per_rank, drop_last=False):
    return SampleSource(PermutationStream(samples, shuffle=False, seed=0), per_rank, drop_last=drop_last)


def listed(*batches):
    return BatchSource(SeededUnits([list(batch) for batch in batches], seed=0))


def test_several_loaders_are_divided_in_one_proportion_and_not_by_cost():
    history = plans((0, 0, (2, 2)))
    both = UnitSampler(LoaderSet([in_order(8, 2), in_order(4, 1)]), lambda: history, 0, division=Odd())
    assert both.division is None
    assert list(both.members[0]) == [[0, 1], [4, 5]]
    items = LoaderSet([ItemSource(PermutationStream(4, shuffle=False, seed=0), lambda index: 4)])
    assert UnitSampler(items, lambda: history, 0, division=Odd()).division is None


def test_the_step_drawn_last_is_that_of_the_loader_that_is_ahead():
    history = plans((0, 0, (2, 2)))
    steps = UnitSampler(LoaderSet([in_order(16, 2), in_order(8, 1)]), lambda: history, 0)
    ahead, behind = map(iter, steps.members)
    assert [next(ahead) for _ in range(3)]
    assert steps.drawn == (0, 3)
    assert next(behind) == [0]
    assert steps.drawn == (0, 3)
    assert list(ahead)
    assert steps.drawn == (1, 0)


def test_steps_that_are_not_full_are_not_timed():
    history = plans((0, 0, (2, 2)))
    steps = UnitSampler(LoaderSet([in_order(10, 2), in_order(4, 1)], "max_size"), lambda: history, 0)
    assert [steps.step_at(0, step).regular for step in range(3)] == [True, True, False]
    alone = UnitSampler(LoaderSet([in_order(10, 2)]), lambda: history, 0)
    assert [alone.step_at(0, step).regular for step in range(4)] == [True, True, False, False]
    both = UnitSampler(LoaderSet([in_order(12, 2), in_order(4, 1)], "max_size"), lambda: history, 0)
    assert [both.step_at(0, step).regular for step in range(3)] == [True, True, False]  # full, of one loader


def test_a_plan_that_changes_counts_for_steps_that_were_looked_at():
    history = [plans((0, 0, (2, 2)))]
    steps = UnitSampler(LoaderSet([listed([0, 1, 2, 3], [4, 5, 6, 7])]), lambda: history[0], 0)
    assert steps.sizes_at(0, 0) == (4, 4)
    history[0] = plans((0, 0, (3, 1)))
    assert steps.sizes_at(0, 0) == (6, 2)
    assert list(steps) == [[0, 1, 2, 3, 4, 5]]


def test_more_ranks_from_a_step_on_take_more_units_of_each():
    history = [plans((0, 0, (2, 2)))]
    steps = UnitSampler(LoaderSet([listed(*([i] for i in range(12)))]), lambda: history[0], 0)
    assert len(steps) == 6
    history[0] = plans((0, 0, (2, 2)), (0, 3, (2, 1, 1)))
    assert len(steps) == 5
    assert [sum(steps.sizes_at(0, step)) for step in range(5)] == [2, 2, 2, 3, 3]


def test_a_rank_without_a_share_runs_the_smallest_batch():
    history = plans((0, 0, (4, 0)))
    steps = UnitSampler(LoaderSet([in_order(8, 2)]), lambda: history, 1, min_local=2)
    assert list(steps) == [[0, 1], [4, 5]]


def test_a_rank_has_no_more_than_its_bound():
    history = plans((0, 0, (7, 1)))
    steps = UnitSampler(LoaderSet([in_order(8, 4)]), lambda: history, 0, max_local=(5, 5))
    assert steps.sizes_at(0, 0) == (5, 3)


def test_a_loader_that_is_cycled_ends_each_of_its_passes():
    """As any loader does, so that ``CombinedLoader`` knows that it has been used up."""
    history = plans((0, 0, (2, 2)))
    steps = UnitSampler(LoaderSet([in_order(12, 2), in_order(4, 2)], "max_size_cycle"), lambda: history, 0)
    assert [list(steps.members[1]) for _ in range(3)] == [[[0, 1]]] * 3


def test_batches_count_by_their_mean():
    source = listed([0], [1, 2, 3], [4, 5, 6, 7, 8])
    assert source.per_rank() == 3
    assert len(LoaderSet([source])) == 9
    assert LoaderSet([source]).total(2) == 6
    source.restore(5)
    assert source.per_rank() == 5


def test_samples_of_an_epoch_are_drawn_when_they_are_asked_for():
    source = SampleSource(PermutationStream(6, shuffle=True, seed=0), 2)
    whole = StepWalk([source.lane(0)]).at(0)[0]._replace(number=6)
    orders = [source.samples(epoch, whole) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(6))


def test_an_order_is_drawn_once_in_each_of_two_epochs():
    class Counted(Passes):
        drawn = 0

        def __iter__(self):
            self.drawn += 1
            return super().__iter__()

    order = SeededUnits(Counted(), seed=0)
    for epoch in (0, 1, 0, 1):
        order.units(epoch)
    assert order.batches.drawn == 2


def test_batches_that_the_user_weights_need_not_be_counted():
    assert counted_rows(True)(object()) == 1
    assert counted_rows(False)([[1, 2], [3, 4]]) == 2
    with pytest.raises(TypeError, match="cannot be counted"):
        counted_rows(False)(object())
