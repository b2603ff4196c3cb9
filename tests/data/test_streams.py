"""Ranks over streams: each sample once, equally many steps, whatever the lengths, plans, ends and errors.

Ranks are threads of one process here, with what a control plane gives each of them.
"""

import itertools
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.core import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.core.batching.stream_steps import StreamRules
from lightning_hetero.data.streams.fingerprint import fingerprint
from lightning_hetero.data.streams.loaders import with_batches
from lightning_hetero.data.streams.own import ClaimedStreamSampler, OwnStreamSampler
from lightning_hetero.data.streams.sampler import WholeStreamSampler
from lightning_hetero.data.streams.source import SampleStream
from tests.streams import Batches, Loader, Numbered, Sharded, Sized

KINDS = {"mine": OwnStreamSampler, "whole": WholeStreamSampler, "claim": ClaimedStreamSampler}
every_kind = pytest.mark.parametrize("shard", KINDS)
LENGTHS = [9, 0, 4, 17, 8, 1, 20, 14]


class Board:
    """What ranks have told, call by call."""

    def __init__(self, ranks):
        self.ranks, self.told, self.changed = ranks, {}, threading.Condition()


class Peer:
    """One rank among threads."""

    def __init__(self, board, rank):
        self.rank, self.world_size, self.board, self.calls = rank, board.ranks, board, 0

    def _tell(self, value):
        call, self.calls = self.calls, self.calls + 1
        with self.board.changed:
            self.board.told.setdefault(call, {})[self.rank] = value
            self.board.changed.notify_all()
        return lambda: self._read(call)

    def _read(self, call):
        told = self.board.told[call]
        with self.board.changed:
            if not self.board.changed.wait_for(lambda: len(told) == self.world_size, timeout=60):
                raise TimeoutError(f"call {call}: only ranks {sorted(told)} have come")
        return [told[rank] for rank in range(self.world_size)]

    def gather_objects(self, value):
        return self._tell(value)()

    def gather_later(self, values):
        wait = self._tell(np.array(values))
        return lambda: np.stack(wait())

    def gather(self, values):
        return self.gather_later(values)()


def on_threads(ranks, run):
    """``run(peer)`` on every rank at once: the results, and an exception in place of one that was raised."""
    board, results = Board(ranks), [None] * ranks

    def one(rank):
        try:
            results[rank] = run(Peer(board, rank))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def plans(*entries):
    return PlanHistory(tuple(PlanEntry(epoch, step, BatchPlan(sum(sizes), sizes)) for epoch, step, sizes in entries))


def indices(batch):
    return (batch["index"] if isinstance(batch, dict) else batch[2]).tolist()


def sampler_of(peer, shard, data, history, *, batch_size=3, rules=None, store=None, **given):
    stream = SampleStream(DataLoader(data, batch_size), shard)
    counted = {"counter": SharedCounter(store, "run")} if shard == "claim" else {}
    return KINDS[shard](stream, lambda: history, peer, rules or StreamRules(), **counted, **given)


def alone(shard, data, sizes, **given):
    return sampler_of(Peer(Board(1), 0), shard, data, plans((0, 0, sizes)), **given)


def passed(shard, datasets, history, *, epochs=1, steps=None, start=(0, 0), state=None, **given):
    """What each rank sees of each epoch: sizes of all ranks, and the samples that count, step by step."""
    store = dist.HashStore()

    def run(peer):
        sampler = sampler_of(peer, shard, datasets[peer.rank], history, store=store, start=start, **given)
        sampler.resume_from(state or {})
        seen, drawn, regular = [], [], []
        for epoch in range(start[0], epochs):
            sampler.set_epoch(epoch)
            first = start[1] if epoch == start[0] else 0
            for step, batch in enumerate(itertools.islice(sampler, steps), first):
                sizes = sampler.sizes_at(epoch, step)
                own = indices(batch) if sizes[peer.rank] else []
                assert len(own) == sizes[peer.rank]
                assert sampler.drawn > (epoch, step)
                seen.append((epoch, sizes, own))
                drawn.append(len(indices(batch)))
                regular.append(sampler.step_at(epoch, step).regular)
            assert steps is not None or sampler.num_batches(epoch) == step + 1
        shards = sampler.shards((epoch, step)) if shard == "claim" else {}
        return {"seen": seen, "drawn": drawn, "regular": regular, "state": {**sampler.taken((epoch, step)), **shards}}

    results = on_threads(len(datasets), run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def taken(*runs, epoch=0):
    return sorted(i for results in runs for r in results for e, _, own in r["seen"] if e == epoch for i in own)


def data_of(shard, ranks, everything=73, ends=()):
    """Streams of ranks that together have these samples."""
    if shard == "mine":
        ends = [0, *(ends or [everything * (rank + 1) // ranks - 7 * (rank + 1 < ranks) for rank in range(ranks)])]
        return [Numbered(range(a, b)) for a, b in itertools.pairwise([*ends[:-1], everything])]
    return [Numbered(range(everything)) if shard == "whole" else Sharded(LENGTHS)] * ranks


@every_kind
def test_each_sample_is_taken_once_by_any_number_of_ranks(shard, seed):
    draw = np.random.default_rng(seed)
    for _ in range(6):
        ranks, low = int(draw.integers(1, 5)), 1 if shard == "claim" else int(draw.choice([1, 1, 2]))
        sizes = [tuple(draw.integers(low, 10, ranks).tolist()) for _ in range(3)]
        history = plans((0, 0, sizes[0]), (0, int(draw.integers(1, 5)), sizes[1]), (1, 2, sizes[2]))
        borders = sorted((2 * draw.integers(0, 37, ranks - 1)).tolist())
        given = {"rules": StreamRules(low), "batch_size": int(draw.integers(1, 9))} if shard != "claim" else {}
        samples = 72 if shard != "claim" else 73
        results = passed(shard, data_of(shard, ranks, samples, [*borders, samples]), history, epochs=2, **given)
        for epoch in range(2):
            assert taken(results, epoch=epoch) == list(range(samples))
        assert len({tuple(sizes for _, sizes, _ in r["seen"]) for r in results}) == 1
        # unless all that is left at the end of a pass is less
        steps = [sizes for _, sizes, _ in results[0]["seen"]]
        assert all(size == 0 or size >= min(low, sum(sizes)) for sizes in steps for size in sizes)


def test_who_has_ended_leaves_its_share_to_others_and_runs_the_smallest_batch():
    results = passed(
        "mine", [Numbered(range(20)), Numbered(range(20, 73))], plans((0, 0, (4, 4))), rules=StreamRules(2)
    )
    sizes = [sizes for _, sizes, _ in results[0]["seen"]]
    assert sizes[:5] == [(4, 4)] * 5
    assert set(sizes[5:-1]) == {(0, 8)}
    assert set(results[0]["drawn"][5:]) == {2}, "more of it would be computed for nothing"


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_ragged_last_batches_may_be_dropped(shard):
    results = passed(shard, data_of(shard, 2), plans((0, 0, (5, 3))), rules=StreamRules(drop_last=True))
    assert {sum(sizes) for _, sizes, _ in results[0]["seen"]} == {8}
    assert len(taken(results)) == 72


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_steps_that_wait_for_others_or_are_ragged_are_not_timed(shard):
    data = [Numbered(range(20)), Numbered(range(20, 30))] if shard == "mine" else data_of("whole", 2, 45)
    (first, _) = passed(shard, data, plans((0, 0, (4, 2))))
    assert first["regular"] == [False, False, *[True] * (3 if shard == "mine" else 5), *[False] * (shard == "whole")]


# resumption


def test_without_a_state_of_the_step_it_is_what_the_plans_say():
    history = plans((0, 0, (3, 2)), (0, 2, (2, 3)))
    whole, rest = (passed("mine", data_of("mine", 2), history, start=start) for start in ((0, 0), (0, 4)))
    assert [r["seen"] for r in rest] == [r["seen"][4:] for r in whole]
    with pytest.raises(ValueError, match="shard='claim'"):
        passed("claim", data_of("claim", 1), plans((0, 0, (5,))), start=(0, 3))


def test_what_a_rank_has_finished_stays_finished():
    """What it runs with weight 0 afterwards is not trained on again, and the next epoch begins anew."""
    given = [Sharded([2, 9])] * 2, plans((0, 0, (1, 3)))
    for stop in range(1, len(passed("claim", *given)[0]["seen"])):
        first = passed("claim", *given, steps=stop)
        assert taken(first, passed("claim", *given, start=(0, stop), state=first[0]["state"])) == list(range(11))


# lengths, and how far ranks draw ahead


def test_lengths_are_known_once_a_pass_has_ended_or_where_the_data_say_so():
    sampler = alone("whole", Numbered(range(20)), (4,))
    assert sampler.num_batches(0) == NO_LIMIT
    with pytest.raises(TypeError, match="not known"):
        len(sampler)
    assert len(list(sampler)) == 5 == sampler.num_batches(0)
    next(iter(sampler))
    assert sampler.num_batches(0) == NO_LIMIT, "a pass that begins anew does not know its end"
    for shard in ("mine", "whole"):
        assert len(alone(shard, Sized(range(20)), (7,), num_samples=40)) == 6
        for rules in (StreamRules(2), StreamRules(multiple=2), StreamRules(max_local=(9,))):
            assert alone(shard, Sized(range(20)), (7,), num_samples=40, rules=rules).num_batches(0) == NO_LIMIT


# what cannot be


@every_kind
def test_an_error_of_one_stream_ends_every_rank(shard):
    store = dist.HashStore()

    def run(peer):
        data = Numbered(range(30), fails_at=0 if shard == "whole" else 11) if peer.rank else Numbered(range(30))
        if shard == "claim":
            data = Sharded([40, 33])
            data.open_shard = lambda index: Numbered(range(40), fails_at=11 if index else None)
        list(sampler_of(peer, shard, data, plans((0, 0, (2, 2))), store=store))

    results = on_threads(2, run)
    assert sorted(type(error).__name__ for error in results) == ["OSError", "RuntimeError"]
    (other,) = [error for error in results if isinstance(error, RuntimeError)]
    assert shard == "whole" or "OSError: the archive ends here" in str(other)


# loaders as streams


class Counting(DataLoader):
    """A loader of a class of its own, as streaming libraries have them."""

    mark = "kept"


def joined(samples):
    return [index for _, _, index in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_single_samples_and_stays_as_it_is(workers):
    loader = Counting(Numbered(range(7)), 3, num_workers=workers, collate_fn=joined, drop_last=True)
    stream = SampleStream(loader, "mine")
    buffer = stream.buffer()
    for chunk in stream.open(0):
        buffer.put(chunk)
    assert sorted(buffer.batch(buffer.take(7))) == list(range(7))
    assert (stream.batch_size, stream.drop_last, stream.num_samples()) == (3, True, None)
    assert workers or list(loader) == [[0, 1, 2], [3, 4, 5]]
    assert loader.collate_fn is joined
    with pytest.raises(TypeError, match="length"):
        len(stream)


class Epochs(Sized):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_a_stream_knows_its_batch_size_and_tells_the_dataset_its_epoch():
    for loader in (Loader(range(9)), DataLoader(Batches(range(9)), None)):
        stream = SampleStream(loader, "mine")
        assert (stream.batch_size, stream.drop_last, stream.num_samples()) == (3, False, None)
        assert sum(len(batch["index"]) for batch in stream.open(0)) == 9, "the first batch is not lost"
        assert SampleStream(loader, "mine", divided_by=3).batch_size == 1
    assert SampleStream(Loader([]), "mine").batch_size == 0
    data = Epochs(range(7))
    stream = SampleStream(DataLoader(data, 4), "mine", divided_by=2)
    stream.open(5)
    assert (stream.num_samples(), stream.batch_size, data.epoch) == (7, 2, 5)
    batches = type("Counted", (Batches,), {"__len__": lambda self: 3})(range(9))
    assert SampleStream(DataLoader(batches, None), "mine").num_samples() is None, "batches are no samples"


def test_loaders_with_other_batches_keep_their_class_and_attributes():
    loader = Counting(Numbered(range(4)), 2)
    other = with_batches(loader, [["a"], ["b"], ["c"]])
    assert (list(other), len(other), len(list(loader))) == ([["a"], ["b"], ["c"]], 3, 2)
    assert (other.mark, isinstance(other, Counting)) == ("kept", True)
    loader = Loader(range(4))
    other = with_batches(loader, [["a"], ["b"]])
    assert (list(other), len(other), other.batches) == ([["a"], ["b"]], 2, loader.batches)
    assert not hasattr(other, "__torch__")


# checksums by which ranks compare what they read


class Thing:
    pass


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (np.arange(3), np.arange(1, 4)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        ({"text": "a"}, {"text": "b"}),
        ({"text": "a"}, {"name": "a"}),
        (("a", b"ab"), ("a", b"ac")),
        (None, True),
        (Thing(), torch.zeros(0)),
    ],
)
def test_checksums_are_equal_for_equal_samples_only(sample, other):
    assert fingerprint([sample]) == fingerprint([sample]) != fingerprint([other])
    assert fingerprint([Thing()]) == fingerprint([Thing()])
