"""Shards that are claimed: their order, their tags, how far each was read."""

import itertools

import pytest

from lightning_hetero.data.streams.claims import FINISHED, ClaimedShards, ClaimLedger, claim_order, claimable
from tests.streams import Numbered, Sharded


class Counting:
    def numbers(self, key, worker, workers):
        return itertools.count(worker, workers)


def read(lengths, order):
    shards = ClaimedShards(Sharded(lengths))
    shards.begin(Counting(), "key", 0, order)
    return [(one.shard, one.place, one.last, one.sample[2]) for one in shards]


def test_samples_know_their_shard_and_their_place():
    assert read([2, 0, 1], [(2, 0), (1, 0), (0, 0)]) == [(2, 0, True, 2), (0, 0, False, 0), (0, 1, True, 1)]
    assert read([3], [(0, 1)]) == [(0, 1, False, 1), (0, 2, True, 2)]
    assert read([3], [(0, 3)]) == []


def test_the_order_changes_from_epoch_to_epoch_and_leaves_out_what_is_finished():
    orders = [claim_order(20, epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == [(shard, 0) for shard in range(20)] for order in orders)
    order = claim_order(4, 0, {0: FINISHED, 3: 7})
    assert (order[0], sorted(order[1:])) == ((3, 7), [(1, 0), (2, 0)])


def test_a_ledger_tells_the_state_of_each_of_the_last_steps():
    ledger, shards = ClaimLedger(kept=2), ClaimedShards(Sharded([4, 2]))
    shards.begin(Counting(), "key", 0, [(0, 0), (1, 0)])
    samples = list(shards)
    for step in range(3):
        ledger.note(step, samples[2 * step : 2 * step + 2])
    assert [ledger.before(step) for step in (1, 2, 3)] == [
        {0: 2},
        {0: FINISHED},
        {0: FINISHED, 1: FINISHED},
    ]
    ledger.begin({5: 1})
    assert ledger.before(9) == {5: 1}


def test_datasets_that_can_be_claimed():
    class Empty(Sharded):
        num_shards = 0

    assert [claimable(data) for data in (Sharded([1]), Numbered([1]), Empty([]), None)] == [True, False, False, False]


def test_a_pass_has_to_begin():
    with pytest.raises(RuntimeError, match="call begin"):
        next(iter(ClaimedShards(Sharded([1]))))


def test_shards_are_shuffled_anew_in_each_epoch():
    """As those of ``datasets`` are, whose order follows from their epoch."""

    class Part(list):
        def set_epoch(self, epoch):
            self[:] = [f"epoch {epoch}"]

    class Shuffled:
        num_shards = 1

        def shard(self, num_shards, index):
            return Part()

    shards = ClaimedShards(Shuffled())
    for epoch in (0, 2):
        shards.begin(Counting(), "key", epoch, [(0, 0)])
        assert [one.sample for one in shards] == [f"epoch {epoch}"]
