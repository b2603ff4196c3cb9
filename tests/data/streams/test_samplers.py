"""Ranks over streams: each sample once, equally many steps, whatever the lengths, plans, ends and errors."""

import itertools
import random

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.core import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.core.batching.stream_steps import StreamRules
from lightning_hetero.data.streams import own
from lightning_hetero.data.streams.own import BLOCK, ClaimedStreamSampler, OwnStreamSampler
from lightning_hetero.data.streams.sampler import WholeStreamSampler
from lightning_hetero.data.streams.source import SampleStream
from tests.data.streams.peers import Board, ThreadPeers, on_threads
from tests.streams import Batches, Numbered, Sharded, Sized

KINDS = {"mine": OwnStreamSampler, "whole": WholeStreamSampler, "claim": ClaimedStreamSampler}


def plans(*entries):
    return PlanHistory(tuple(PlanEntry(epoch, step, BatchPlan(sum(sizes), sizes)) for epoch, step, sizes in entries))


def indices(batch):
    return (batch["index"] if isinstance(batch, dict) else batch[2]).tolist()


def passed(
    shard, datasets, history, *, epochs=1, rules=None, batch_size=3, steps=None, start=(0, 0), state=None, **known
):
    """What each rank sees of each epoch: sizes of all ranks, and the samples that count, step by step."""
    store = dist.HashStore()

    def run(peers):
        loader = DataLoader(datasets[peers.rank], batch_size)
        if shard == "claim":
            known["counter"] = SharedCounter(store, "run")
        sampler = KINDS[shard](
            SampleStream(loader, shard), lambda: history[0], peers, rules or StreamRules(), start=start, **known
        )
        sampler.resume_from(state or {})
        seen, batches = [], []
        for epoch in range(start[0], epochs):
            sampler.set_epoch(epoch)
            first = start[1] if epoch == start[0] else 0
            for step, batch in enumerate(itertools.islice(sampler, steps), first):
                sizes = sampler.sizes_at(epoch, step)
                own = indices(batch) if sizes[peers.rank] else []
                assert len(own) == sizes[peers.rank]
                assert len(indices(batch)) >= 1
                assert sampler.drawn > (epoch, step)
                seen.append((epoch, sizes, own))
                batches.append(batch)
            assert steps is not None or sampler.num_batches(epoch) == step + 1
        at = (epoch, step)
        return {"seen": seen, "state": sampler.taken(at), "shards": getattr(sampler, "shards", lambda at: {})(at)}

    results = on_threads(len(datasets), run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def once(results, everything, epoch=0):
    assert len({tuple(sizes for _, sizes, _ in r["seen"]) for r in results}) == 1
    assert sorted(i for r in results for e, _, own in r["seen"] if e == epoch for i in own) == sorted(everything)


def test_random_streams_are_taken_once_by_any_number_of_ranks():
    draw = random.Random(3)
    for _ in range(40):
        ranks, low = draw.randint(1, 4), draw.choice([1, 1, 2])
        cuts = sorted(draw.choice(range(0, 74, low)) for _ in range(ranks - 1))
        borders = [0, *cuts, 72]
        data = [list(range(a, b)) for a, b in itertools.pairwise(borders)]
        sizes = [tuple(draw.randint(low, 9) for _ in range(ranks)) for _ in range(3)]
        history = [plans((0, 0, sizes[0]), (0, draw.randint(1, 4), sizes[1]), (1, 2, sizes[2]))]
        streams = [Numbered(own) for own in data]
        results = passed("mine", streams, history, epochs=2, rules=StreamRules(low), batch_size=draw.randint(1, 8))
        for epoch in range(2):
            once(results, range(72), epoch)
        whole = [Numbered(range(72))] * ranks
        results = passed("whole", whole, history, epochs=2, rules=StreamRules(low), batch_size=draw.randint(1, 8))
        for epoch in range(2):
            once(results, range(72), epoch)


def test_the_whole_stream_is_cut_in_the_order_of_one_process():
    results = passed("whole", [Numbered(range(20))] * 2, [plans((0, 0, (4, 2)), (0, 2, (1, 5)))])
    assert [own for _, _, own in results[0]["seen"]] == [[0, 1, 2, 3], [6, 7, 8, 9], [12], []]
    assert [own for _, _, own in results[1]["seen"]] == [[4, 5], [10, 11], [13, 14, 15, 16, 17], [18, 19]]


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_rows_of_batches_that_the_dataset_makes(shard):
    data = [range(31), range(31, 50)] if shard == "mine" else [range(50)] * 2
    results = passed(shard, [Batches(own) for own in data], [plans((0, 0, (5, 2)))], batch_size=None)
    once(results, range(50))


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_drop_last_drops_what_fills_no_batch(shard):
    data = [Numbered(range(13)), Numbered(range(13, 20))] if shard == "mine" else [Numbered(range(20))] * 2
    results = passed(shard, data, [plans((0, 0, (4, 2)))], rules=StreamRules(drop_last=True))
    assert [sum(sizes) for _, sizes, _ in results[0]["seen"]] == [6, 6, 6]


def test_a_plan_changes_the_first_step_that_no_rank_has_drawn():
    history = [plans((0, 0, (6, 2)))]
    seen = []

    def run(peers):
        stream = SampleStream(DataLoader(Numbered(range(100 * peers.rank % 73, 73)), 4), "mine")
        sampler = OwnStreamSampler(stream, lambda: history[0], peers, StreamRules())
        for step, _ in enumerate(sampler):
            if step == 2:
                drawn = max(peers.gather_objects(sampler.drawn))
                if peers.rank == 0:
                    history[0] = history[0].extended(PlanEntry(*drawn, BatchPlan(8, (3, 5))))
                    seen.append(drawn)
                peers.gather_objects(None)
            if peers.rank == 0:
                seen.append(sampler.sizes_at(0, step))

    assert on_threads(2, run) == [None, None]
    (drawn,) = [one for one in seen if one[0] == 0]
    changes = [one for one in seen if one[0] != 0].index((3, 5))
    assert changes == drawn[1] <= 3 + 2 * BLOCK


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_steps_that_wait_for_others_or_are_ragged_are_not_timed(shard):
    data = [range(20), range(20, 30)] if shard == "mine" else [range(30)] * 2

    def run(peers):
        stream = SampleStream(DataLoader(Numbered(data[peers.rank]), 2), shard)
        sampler = KINDS[shard](stream, lambda: plans((0, 0, (4, 2))), peers, StreamRules())
        return [sampler.step_at(0, step).regular for step, _ in enumerate(sampler)]

    assert on_threads(2, run) == [[False, False, True, True, True]] * 2


def test_a_buffer_holds_two_blocks_at_most():
    most = []

    def run(peers):
        stream = SampleStream(DataLoader(Numbered(range(73)), 1), "mine")
        sampler = OwnStreamSampler(stream, lambda: plans((0, 0, (2, 1))), peers, StreamRules())
        buffer = stream.buffer()
        stream.buffer = lambda: buffer
        for step, _ in enumerate(sampler):
            if step < 20:  # the stream of rank 0 ends later
                most.append(len(buffer) / (2, 1)[peers.rank])

    assert on_threads(2, run) == [None, None]
    assert BLOCK < max(most) <= 2 * BLOCK


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_an_epoch_is_resumed_behind_what_each_rank_has_taken(stop):
    data, history = [Numbered(range(50)), Numbered(range(50, 73))], [plans((0, 0, (3, 3)))]
    whole = passed("mine", data, history)
    first = passed("mine", data, history, steps=stop)
    state = first[0]["state"]
    assert all(r["state"] == state for r in first)
    rest = passed("mine", data, history, start=(0, stop), state=state)
    for before, after, all_of_it in zip(first, rest, whole, strict=True):
        both = [own for _, _, own in before["seen"] + after["seen"]]
        assert sum(both, []) == sum((own for _, _, own in all_of_it["seen"]), [])
    once([{"seen": a["seen"] + b["seen"]} for a, b in zip(first, rest, strict=True)], range(73))


def test_without_a_state_of_the_step_it_is_what_the_plans_say():
    data, history = [Numbered(range(40)), Numbered(range(40, 73))], [plans((0, 0, (3, 2)), (0, 2, (2, 3)))]
    whole, rest = passed("mine", data, history), passed("mine", data, history, start=(0, 4))
    assert [r["seen"] for r in rest] == [r["seen"][4:] for r in whole]


def test_a_whole_stream_is_resumed_by_any_number_of_ranks():
    first = passed("whole", [Numbered(range(73))] * 2, [plans((0, 0, (5, 3)))], steps=4)
    other = [plans((0, 0, (5, 3)), (0, 4, (3, 3, 2)))]
    rest = passed("whole", [Numbered(range(73))] * 3, other, start=(0, 4), state=first[0]["state"])
    assert sorted(i for r in first + rest for _, _, own in r["seen"] for i in own) == list(range(73))


def test_own_streams_are_not_resumed_inside_an_epoch_by_others():
    state = passed("mine", [Numbered(range(30)), Numbered(range(30, 73))], [plans((0, 0, (5, 3)))], steps=4)[0]["state"]
    other = [plans((0, 0, (5, 3)), (0, 4, (3, 3, 2)))]
    with pytest.raises(ValueError, match="saved inside an epoch by 2 ranks with a data stream each"):
        passed("mine", [Numbered(range(24))] * 3, other, start=(0, 4), state=state)
    with pytest.raises(ValueError, match="saved inside an epoch with shard='mine', and shard='whole'"):
        passed("whole", [Numbered(range(73))] * 3, other, start=(0, 4), state=state)
    passed("mine", [Numbered(range(24 * i, 24 * i + 24)) for i in range(3)], other, epochs=2, start=(1, 0), state=state)


@pytest.mark.parametrize("shard", ["mine", "whole", "claim"])
def test_an_error_of_one_stream_ends_every_rank(shard):
    def run(peers):
        data = Numbered(range(30), fails_at=11 if peers.rank else None)
        if shard == "claim":
            data = Sharded([40, 33])
            data.open_shard = lambda index: Numbered(range(40), fails_at=11 if index else None)
        if shard == "whole":
            data.fails_at = 0 if peers.rank else None
        extra = {"counter": counter} if shard == "claim" else {}
        stream = SampleStream(DataLoader(data, 3), shard)
        for _ in KINDS[shard](stream, lambda: plans((0, 0, (2, 2))), peers, StreamRules(), **extra):
            pass

    counter = SharedCounter(dist.HashStore(), "run")
    results = on_threads(2, run)
    assert sorted(type(error).__name__ for error in results) == ["OSError", "RuntimeError"]
    (other,) = [error for error in results if isinstance(error, RuntimeError)]
    assert "has raised an error" in str(other)
    assert shard == "whole" or "OSError: the archive ends here" in str(other)


def test_a_rank_without_any_sample_runs_with_weight_0():
    results = passed("mine", [Numbered([]), Numbered(range(12)), Numbered([])], [plans((0, 0, (2, 2, 2)))])
    once(results, range(12))
    assert [sizes for _, sizes, _ in results[0]["seen"]] == [(0, 6, 0)] * 2


def test_no_sample_at_all_is_an_epoch_of_no_steps():
    def run(peers):
        return list(
            OwnStreamSampler(
                SampleStream(DataLoader(Numbered([]), 2), "mine"), lambda: plans((0, 0, (2, 2))), peers, StreamRules()
            )
        )

    assert on_threads(2, run) == [[], []]


def test_ranks_that_read_the_same_as_their_own_are_told_once(monkeypatch):
    told = []
    monkeypatch.setattr(own.log, "warning", lambda text, *args: told.append(text % args))
    passed("mine", [Numbered(range(30)), Numbered(range(1, 31))], [plans((0, 0, (5, 3)))])
    assert not told
    passed("mine", [Numbered(range(30))] * 2, [plans((0, 0, (5, 3)))], epochs=2)
    assert len(told) == 1
    assert "of ranks 0, 1 begin with the same samples" in told[0]


def test_streams_that_are_called_whole_and_differ_are_refused():
    with pytest.raises(ValueError, match="shard='whole' says that all ranks read the same stream"):
        passed("whole", [Numbered(range(30)), Numbered(range(1, 31))], [plans((0, 0, (5, 3)))])


@pytest.mark.parametrize("length", [30, 33, 37, 40])
def test_whole_streams_that_end_at_different_samples_are_refused(length):
    with pytest.raises(ValueError, match="samples that are left of it differ"):
        passed("whole", [Numbered(range(73)), Numbered(range(length))], [plans((0, 0, (5, 3)))])


def test_a_whole_stream_that_fails_later_is_an_error_on_all_ranks():
    for streams in ([Numbered(range(73)), Numbered(range(73), fails_at=40)], [Numbered(range(73), fails_at=40)] * 2):
        with pytest.raises((OSError, RuntimeError), match="the archive ends here|stream of rank 1 has raised"):
            passed("whole", streams, [plans((0, 0, (5, 3)))])


def test_workers_that_stay_claim_shards_in_each_pass(tmp_path):
    loader = DataLoader(Sharded([9, 4, 17]), 4, num_workers=1, persistent_workers=True)
    stream, counter = SampleStream(loader, "claim"), SharedCounter(dist.FileStore(str(tmp_path / "store"), 1), "run")

    def run(peers):
        sampler = ClaimedStreamSampler(
            stream, lambda: plans((0, 0, (4,)), (1, 0, (4,))), peers, StreamRules(), counter=counter
        )
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append(sorted(i for batch in sampler for i in batch[2].tolist()))
        return seen

    assert on_threads(1, run) == [[list(range(30))] * 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_are_claimed_once_and_fast_ranks_read_more(ranks):
    lengths = [9, 0, 4, 17, 8, 1, 20, 14]
    sizes = (4, 1, 1)[:ranks]
    results = passed("claim", [Sharded(lengths)] * ranks, [plans((0, 0, sizes))], epochs=2)
    for epoch in range(2):
        once(results, range(73), epoch)
    if ranks > 1:
        assert results[0]["seen"][3][1] == sizes


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_claimed_shards_go_on_with_any_number_of_ranks(before, after):
    lengths = [9, 4, 17, 8, 1, 20, 14]
    data = Sharded(lengths)
    first = passed("claim", [data] * before, [plans((0, 0, (4, 2, 2)[:before]))], steps=4)
    state = {**first[0]["state"], **first[0]["shards"]}
    assert all(r["shards"] == first[0]["shards"] for r in first)
    history = [plans((0, 0, (4, 2, 2)[:after]))]
    rest = passed("claim", [data] * after, history, start=(0, 4), steps=2, state=state)
    assert sum(len(own) for r in rest for *_, own in r["seen"]) == 2 * sum((4, 2, 2)[:after])
    again = {**rest[0]["state"], **rest[0]["shards"]}
    last = passed("claim", [data] * before, [plans((0, 0, (4, 2, 2)[:before]))], start=(0, 6), state=again)
    assert sorted(i for r in first + rest + last for _, _, own in r["seen"] for i in own) == list(range(73))


def test_claims_need_the_state_of_their_step():
    with pytest.raises(ValueError, match="not known which shards the first 3 steps"):
        passed("claim", [Sharded([40, 33])], [plans((0, 0, (5,)))], start=(0, 3))


def test_a_known_length_is_told():
    stream = SampleStream(DataLoader(Sized(range(20)), 3), "mine")
    history = plans((0, 0, (4, 3)))
    assert stream.num_samples() == 20

    def run(peers):
        sampler = OwnStreamSampler(stream, lambda: history, peers, StreamRules(), num_samples=40)
        bounded = OwnStreamSampler(stream, lambda: history, peers, StreamRules(max_local=(9, 9)), num_samples=40)
        unknown = WholeStreamSampler(stream, lambda: history, peers, StreamRules())
        with pytest.raises(TypeError, match="not known before it has ended"):
            len(unknown)
        return len(sampler), bounded.num_batches(0), unknown.num_batches(0)

    assert on_threads(1, run) == [(6, NO_LIMIT, NO_LIMIT)]


def test_no_step_waits_for_a_message_that_was_not_sent_a_block_before():
    events, step = [], 0

    class Recorded(ThreadPeers):
        def gather_later(self, values):
            wait, sent = super().gather_later(values), step
            return lambda: (events.append((sent, step)), wait())[1]

    stream = SampleStream(DataLoader(Numbered(range(73)), 4), "mine")
    sampler = OwnStreamSampler(stream, lambda: plans((0, 0, (2,))), Recorded(Board(1), 0), StreamRules())
    for _ in sampler:
        step += 1
    assert events[:3] == [(0, 0), (0, 1), (1, 3)]
    assert all(waited - sent == BLOCK for sent, waited in events[3:-2])
    assert len(events) > 9


def test_samples_are_drawn_as_steps_take_them():
    drawn = []

    class Noted(Numbered):
        def __iter__(self):
            for place, sample in enumerate(super().__iter__()):
                drawn.append(place)
                yield sample

    stream = SampleStream(DataLoader(Noted(range(73)), 1), "mine")
    sampler = OwnStreamSampler(stream, lambda: plans((0, 0, (2,))), ThreadPeers(Board(1), 0), StreamRules())
    counts = [len(drawn) for _ in itertools.islice(sampler, 20)]
    assert all(after - before <= 2 for before, after in itertools.pairwise(counts[BLOCK:]))


def test_a_rank_that_runs_out_of_shards_keeps_what_it_has_finished():
    """What it runs with weight 0 afterwards is not trained on again."""
    everything = passed("claim", [Sharded([2, 9])] * 2, [plans((0, 0, (1, 3)))])
    for stop in range(1, len(everything[0]["seen"])):
        first = passed("claim", [Sharded([2, 9])] * 2, [plans((0, 0, (1, 3)))], steps=stop)
        state = {**first[0]["state"], **first[0]["shards"]}
        rest = passed("claim", [Sharded([2, 9])] * 2, [plans((0, 0, (1, 3)))], start=(0, stop), state=state)
        assert sorted(i for r in first + rest for _, _, own in r["seen"] for i in own) == list(range(11))


def test_shards_of_one_epoch_are_not_finished_in_the_next():
    first = passed("claim", [Sharded([5, 4, 9])] * 2, [plans((0, 0, (2, 2)))], epochs=2, steps=3)
    assert {i for r in first for epoch, _, own in r["seen"] if epoch == 0 for i in own}
    told = first[0]["shards"]["shards"][3]
    trained = {i for r in first for epoch, _, own in r["seen"] if epoch == 1 for i in own}
    counts = {0: range(5), 1: range(5, 9), 2: range(9, 18)}
    known = {i for shard, done in told.items() for i in list(counts[shard])[: None if done < 0 else done]}
    assert known == trained


@pytest.mark.parametrize("kind", ["mine", "whole"])
def test_bounds_of_a_rank_leave_the_length_open(kind):
    stream, peers = SampleStream(DataLoader(Numbered(range(20)), 3), kind), ThreadPeers(Board(1), 0)
    sampler = KINDS[kind](stream, lambda: plans((0, 0, (4,))), peers, StreamRules(2), num_samples=40)
    assert sampler.num_batches(0) == NO_LIMIT


def test_the_last_global_batch_of_a_whole_stream_leaves_no_rank_too_few_to_run():
    results = passed("whole", [Numbered(range(15))] * 2, [plans((0, 0, (8, 4)))], rules=StreamRules(2))
    assert [sizes for _, sizes, _ in results[0]["seen"]] == [(8, 4), (3, 0)]


def test_a_step_of_other_sizes_than_the_plans_is_not_timed():
    def run(peers):
        stream = SampleStream(DataLoader(Numbered(range(45)), 3), "whole")
        sampler = WholeStreamSampler(stream, lambda: plans((0, 0, (4, 2))), peers, StreamRules())
        return [sampler.step_at(0, step).regular for step, _ in enumerate(sampler)]

    assert on_threads(2, run) == [[False, False, *[True] * 5, False]] * 2


def test_a_pass_that_begins_anew_does_not_know_its_end():
    stream = SampleStream(DataLoader(Numbered(range(20)), 3), "whole")
    sampler = WholeStreamSampler(stream, lambda: plans((0, 0, (4,))), ThreadPeers(Board(1), 0), StreamRules())
    assert len(list(sampler)) == 5 == sampler.num_batches(0)
    next(iter(sampler))
    assert sampler.num_batches(0) == NO_LIMIT


def test_an_earlier_epoch_than_that_of_the_state_begins_at_its_start():
    stream, peers = SampleStream(DataLoader(Numbered(range(20)), 3), "whole"), ThreadPeers(Board(1), 0)
    sampler = WholeStreamSampler(stream, lambda: plans((0, 0, (4,))), peers, StreamRules(), start=(1, 3))
    assert len(list(sampler)) == 2
    sampler.set_epoch(0)
    assert len(list(sampler)) == 5


def test_another_kind_of_share_may_begin_between_epochs():
    stream, peers = SampleStream(DataLoader(Numbered(range(20)), 3), "whole"), ThreadPeers(Board(1), 0)
    sampler = WholeStreamSampler(stream, lambda: plans((0, 0, (4,))), peers, StreamRules(), start=(1, 0))
    sampler.resume_from({"shard": "mine", "epoch": 1})
    sampler = WholeStreamSampler(stream, lambda: plans((0, 0, (4,))), peers, StreamRules(), start=(1, 2))
    with pytest.raises(ValueError, match="Resume with shard='mine'"):
        sampler.resume_from({"shard": "mine", "epoch": 1})


def test_a_rank_without_a_share_runs_the_smallest_batch():
    """More of it would be computed for nothing."""
    history = [plans((0, 0, (4, 4)), (0, 3, (8, 0)))]

    def run(peers):
        loader = DataLoader(Numbered(range(40 * peers.rank, 40 * peers.rank + 40)), 4)
        sampler = OwnStreamSampler(SampleStream(loader, "mine"), lambda: history[0], peers, StreamRules(2))
        return [len(indices(batch)) for batch in itertools.islice(sampler, 5)]

    assert on_threads(2, run)[1] == [4, 4, 4, 2, 2]


def test_ranks_without_samples_are_not_named_as_reading_the_same(monkeypatch):
    said = []
    monkeypatch.setattr(own.log, "warning", lambda text, *args: said.append(text % args))
    passed("mine", [Numbered([]), Numbered(range(9)), Numbered([]), Numbered(range(9))], [plans((0, 0, (2, 2, 2, 2)))])
    assert "ranks 1, 3 begin" in said[0]
