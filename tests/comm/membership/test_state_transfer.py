"""Workers go on from the newest state that one of them has."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.membership.state_transfer import WorkerState, newest_state
from tests.helpers import run_ranks


def _state(progress, rank, name):
    checkpoint = {"name": name, "weights": torch.full((2,), float(rank))}
    return WorkerState(progress, rank, checkpoint, {"from": name}, lambda again: {"of": name, "again": again})


def _go_on(rank, brought):
    dist.init_process_group("gloo")
    mine = brought[rank]
    found = newest_state(None if mine is None else _state(*mine))
    if found is None:
        return None
    return found.progress, found.checkpoint["name"], found.checkpoint["weights"].tolist(), found.shared, found.own(True)


NEW, OLD = (8, 0, 8), (7, 0, 7)


@pytest.mark.parametrize(
    ("brought", "names", "shared", "own"),
    [
        # all have the same: each keeps its own
        ([(NEW, 0, "a"), (NEW, 2, "b")], ["a", "b"], "a", [("a", True), ("b", True)]),
        # a newcomer with the lowest rank now: it gets the state of the lowest rank before, and has nothing of its own
        ([None, (NEW, 2, "b"), (NEW, 1, "c")], ["c", "b", "c"], "c", [None, ("b", True), ("c", True)]),
        # one is behind: another has completed the step, with what this one has sent
        ([(OLD, 0, "a"), (NEW, 1, "b")], ["b", "b"], "b", [("a", False), ("b", True)]),
    ],
    ids=["alike", "newcomer", "behind"],
)
def test_state_of_the_newest(brought, names, shared, own):
    found = run_ranks(_go_on, len(brought), brought, timeout=60)
    assert [one[1] for one in found] == names
    assert all(one[0] == NEW for one in found)
    assert all(one[3] == {"from": shared} for one in found)
    before = {name: rank for given in brought if given for _, rank, name in [given]}
    assert [one[2] for one in found] == [[float(before[name])] * 2 for name in names]
    assert [one[4] for one in found] == [{} if one is None else {"of": one[0], "again": one[1]} for one in own]


def test_nobody_has_a_state():
    assert run_ranks(_go_on, 2, [None, None], timeout=60) == [None, None]
