"""Each index once an epoch, whatever the split, the number of ranks, or a change of plan."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from lightning_hetero.core import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.data import EvaluationBatchSampler, PermutationStream, SamplerStream, UnevenBatchSampler


def samplers(history, ranks, n, **kwargs):
    stream = kwargs.pop("stream", None) or PermutationStream(n, shuffle=True, seed=3)
    return [UnevenBatchSampler(stream, lambda: history[0], rank, **kwargs) for rank in range(ranks)]


def counted(sampler, epoch):
    """Batches of a rank that count: those with weight 0 are empty."""
    sampler.set_epoch(epoch)
    for step, batch in enumerate(sampler, start=sampler.start[1] if epoch == sampler.start[0] else 0):
        yield batch if sampler.sizes_at(epoch, step)[sampler.rank] else []


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 8))
    total = draw(st.integers(ranks, 40))

    def split():
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))

    entries = [PlanEntry(0, 0, BatchPlan(total, split()))]
    keys = draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=4)) - {(0, 0)}
    entries += [PlanEntry(e, s, BatchPlan(total, split())) for e, s in sorted(keys)]
    return ranks, draw(st.integers(1, 200)), PlanHistory(tuple(entries)), draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_each_index_once(case):
    ranks, n, history, min_local = case
    parts = samplers([history], ranks, n, min_local=min_local)
    for epoch in range(2):
        batches = [list(counted(part, epoch)) for part in parts]
        assert len({len(b) for b in batches}) == 1 == len({len(part) for part in parts})
        assert sorted(i for b in batches for batch in b for i in batch) == list(range(n))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), cases())
def test_sizes_are_those_of_the_history_that_holds(case, other):
    """Also of one that took the place of another, for an earlier epoch, and for a stream of another length."""
    (_, n, first, min_local), (_, longer, second, _) = case, other
    history, stream = [first], PermutationStream(n, shuffle=False, seed=0)
    (sampler,) = samplers(history, 1, n, min_local=min_local, stream=stream)
    for history[0], stream.num_samples in ((first, n), (second, n), (second, longer)):
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)  # from then on the stream may have another length
            steps = range(history[0].num_batches(epoch, len(stream)))
            expected = [history[0].sizes_at(epoch, step, len(stream), min_local=min_local) for step in steps]
            assert [sampler.sizes_at(epoch, step) for step in steps] == expected


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 12))
def test_resumed_epoch_goes_on_where_it_stopped(case, step):
    ranks, n, history, _ = case
    whole = [list(counted(part, 0)) for part in samplers([history], ranks, n)]
    step = min(step, len(whole[0]))
    rest = [list(counted(part, 0)) for part in samplers([history], ranks, n, start=(0, step))]
    assert rest == [batches[step:] for batches in whole]


@pytest.mark.parametrize("step", [None, 2])
def test_state_dict_goes_on_inside_an_epoch(step):
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (6, 2))),))]
    parts = samplers(history, 2, 40)
    whole = [list(counted(part, 1)) for part in parts]
    for part, batches in zip(parts, whole, strict=True):
        part.set_epoch(1)
        iterator = iter(part)
        taken = [next(iterator) for _ in range(3)]
        state = part.state_dict(step)
        (fresh,) = samplers(history, 1, 40)
        fresh.rank = part.rank
        fresh.load_state_dict(state)
        assert taken[: state["step"]] + list(fresh) == batches
        assert state == {"epoch": 1, "step": 3 if step is None else step}


@pytest.mark.parametrize("new_ranks", [1, 2, 3, 5])
def test_resume_with_another_number_of_ranks(new_ranks):
    """The epoch goes on behind the samples that were taken, in batches of the new total."""
    n, old = 101, PlanHistory((PlanEntry(0, 0, BatchPlan(12, (7, 5))),))
    first = [batch for part in samplers([old], 2, n) for batch in list(counted(part, 0))[:4]]
    new = old.extended(PlanEntry(0, 4, BatchPlan(5 * new_ranks, (5,) * new_ranks)))
    rest = [b for part in samplers([new], new_ranks, n, start=(0, 4)) for b in counted(part, 0)]
    assert sorted(i for batch in first + rest for i in batch) == list(range(n))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_plan_change_with_prefetching_workers(workers, persistent):
    """A plan that holds from beyond what any rank has drawn changes the batches from there on, on every rank."""
    if persistent and not workers:
        pytest.skip("persistent workers need workers")
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))),))]
    parts = samplers(history, 2, 160)
    loaders = [
        DataLoader(range(160), batch_sampler=part, num_workers=w, persistent_workers=persistent and w > 0)
        for part, w in zip(parts, (workers, 0), strict=True)
    ]
    for epoch in range(2):
        for part in parts:
            part.set_epoch(epoch)
        seen, sizes = [], []
        for step, batches in enumerate(zip(*loaders, strict=True)):
            seen += torch.cat(batches).tolist()
            sizes.append(tuple(map(len, batches)))
            if step == 3 and epoch == 0:
                start = max(part.drawn for part in parts)
                history[0] = history[0].extended(PlanEntry(*start, BatchPlan(8, (7, 1))))
        assert sorted(seen) == list(range(160))
        assert sizes == [(4, 4) if (epoch, step) < start else (7, 1) for step in range(20)]
    assert start == (0, 4 + workers * 2)


def test_drop_last():
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (6, 2))),))]
    parts = samplers(history, 2, 20, drop_last=True)
    assert [[len(b) for b in part] for part in parts] == [[6, 6], [2, 2]]


def test_rank_without_a_share_runs_the_smallest_batch():
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (8, 0))),))]
    first, second = samplers(history, 2, 8, min_local=2)
    assert [len(b) for b in second] == [2]
    assert set(next(iter(second))) <= set(next(iter(first)))


def test_global_batches_are_those_of_distributed_sampler():
    n, batch, ranks = 64, 4, 2
    ours = samplers([PlanHistory((PlanEntry(0, 0, BatchPlan(batch * ranks, (3, 5))),))], ranks, n)
    theirs = [DistributedSampler(range(n), ranks, rank, shuffle=True, seed=3) for rank in range(ranks)]
    for epoch in range(2):
        for sampler in (*ours, *theirs):
            sampler.set_epoch(epoch)
        streams = [list(s) for s in theirs]
        expected = [{i for s in streams for i in s[k : k + batch]} for k in range(0, n // ranks, batch)]
        assert [set(a) | set(b) for a, b in zip(*ours, strict=True)] == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 30),
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 30, generator=torch.Generator().manual_seed(5)),
        lambda: RandomSampler(range(30)),
        lambda: RandomSampler(range(30), generator=torch.Generator().manual_seed(5)),
    ],
)
def test_users_sampler_gives_the_same_order_on_all_ranks(make):
    streams = []
    for seed in (1, 2):  # the ranks' own random states differ
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        stream = SamplerStream(make(), seed=7)
        streams.append([stream.indices(epoch) for epoch in (0, 1, 0)])
        assert torch.equal(before, torch.get_rng_state())
    assert streams[0] == streams[1]
    first, second, again = streams[0]
    assert first == again != second


def test_streams_say_what_is_wrong():
    with pytest.raises(ValueError, match="at least one"):
        PermutationStream(0, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="says that it has 3 samples and yielded 2"):
        SamplerStream(Liar(), seed=0).indices(0)


class Liar:
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([0, 1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_evaluation_repeats_nothing_and_keeps_step_counts(data):
    ranks = data.draw(st.integers(1, 6))
    n, batch = data.draw(st.integers(ranks, 200)), data.draw(st.integers(1, 20))
    shares = data.draw(st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks))
    parts = [list(EvaluationBatchSampler(n, batch, lambda: shares, rank, ranks)) for rank in range(ranks)]
    assert len({len(p) for p in parts}) == 1
    assert all(batch for part in parts for batch in part)
    assert sorted(i for part in parts for b in part for i in b) == list(range(n))


def test_evaluation_respects_memory_and_refuses_too_few_samples():
    part = EvaluationBatchSampler(100, 10, lambda: (9, 1), 0, 2, max_local=(12, 12))
    assert max(len(b) for b in part) <= 12
    with pytest.raises(ValueError, match="without repeating"):
        EvaluationBatchSampler(2, 1, lambda: (1, 1, 1), 0, 3)
