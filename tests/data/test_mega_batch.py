"""Claims: whatever the order in which ranks ask, each sample of an epoch is in one batch of an allowed size."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.data.index_stream import PermutationStream
from lightning_hetero.data.mega_batch import ClaimedBatchSampler, MegaBatch


def take_all(mega, sizes, choose):
    """Spans of a mega-batch, in an order of claims chosen at each turn."""
    spans, counter = [mega.first(rank) for rank in range(len(sizes))], 0
    while True:
        size = sizes[choose(len(sizes))]
        span = mega.claimed(counter, size)
        counter += size
        if span is None:
            return spans
        spans.append(span)


@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    samples=st.integers(8, 120),
    size=st.integers(36, 60),
    least=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_an_epoch_is_covered_once_in_any_order_of_claims(sizes, samples, size, least, seed):
    choose, position, seen = random.Random(seed).randrange, 0, []
    while position < samples:
        mega = MegaBatch.at(position, samples=samples, size=size, batch_sizes=sizes, least=least)
        spans = take_all(mega, sizes, choose)
        for span in spans:
            assert least <= len(span) <= max(sizes) + least - 1
        assert all(len(mega.first(rank)) >= least for rank in range(len(sizes)))
        seen += [i for span in spans for i in span]
        position = mega.stop
    assert sorted(seen) == list(range(samples))


def test_every_rank_gets_a_share_of_what_is_left_at_the_end():
    mega = MegaBatch.at(40, samples=50, size=40, batch_sizes=(8, 8, 4))
    assert [len(mega.first(rank)) for rank in range(3)] == [4, 4, 2]
    assert mega.claimed(0, 8) is None


def test_too_little_for_all_ranks_joins_the_mega_batch_before():
    assert MegaBatch.at(0, samples=42, size=40, batch_sizes=(8, 8, 4)).stop == 42
    assert MegaBatch.at(0, samples=43, size=40, batch_sizes=(8, 8, 4)).stop == 40


def test_less_than_a_sample_each_is_an_error():
    with pytest.raises(ValueError, match="total=2 is outside"):
        MegaBatch.at(0, samples=2, size=40, batch_sizes=(8, 8, 4))


def test_the_sampler_asks_when_it_is_drawn_from_and_takes_the_order_of_its_epoch():
    asked = []
    spans = iter([range(0, 2), range(3, 4), None])

    def take(epoch, first):
        asked.append((epoch, first))
        return next(spans)

    stream = PermutationStream(4, shuffle=True, seed=0)
    sampler = ClaimedBatchSampler(stream, take, expected=2)
    batches = iter(sampler)
    sampler.sampler.set_epoch(3)
    assert not asked
    order = stream.indices(3)
    assert [*batches] == [[order[0], order[1]], [order[3]]]
    assert asked == [(3, True), (3, False), (3, False)]
    assert len(sampler) == 2
