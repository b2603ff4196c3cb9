"""Agreement between one and three ranks."""

import atexit
import sys
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane, PlanMismatchError, before_another, check_digests
from lightning_hetero.comm.failures import rank_monitor
from tests.helpers import run_ranks

WORLDS = [1, 3]


def _with_plane(rank, world_size, use):
    dist.init_process_group("gloo")
    plane = ControlPlane(rank, world_size, timeout=timedelta(seconds=30))
    try:
        return use(plane)
    finally:
        plane.close()
        plane.close()
        dist.destroy_process_group()


def everywhere(world_size, use, **kwargs):
    return run_ranks(_with_plane, world_size, world_size, use, timeout=45, **kwargs)


def _gather_later(plane):
    values = np.array([plane.rank, plane.rank], dtype=float)
    wait = plane.gather_later(values)
    values[:] = 99.0  # what was sent stays as it was
    other = plane.gather(np.array([10.0 * plane.rank]))
    return [wait().tolist(), other.tolist()]


def _gather(plane):
    wide = np.asfortranarray(np.arange(12.0).reshape(3, 4).T + 100 * plane.rank)  # not contiguous
    wide[0, 0] = np.nan
    return plane.gather(wide), plane.gather(np.array([float(plane.rank)]))


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_stacks_the_arrays_of_all_ranks(world_size):
    expected = np.stack([np.arange(12.0).reshape(3, 4).T + 100 * rank for rank in range(world_size)])
    expected[:, 0, 0] = np.nan
    for wide, narrow in everywhere(world_size, _gather):
        np.testing.assert_array_equal(wide, expected)
        np.testing.assert_array_equal(narrow, np.arange(world_size)[:, None])


@pytest.mark.parametrize("world_size", WORLDS)
def test_arrays_are_gathered_while_others_are(world_size):
    for result in everywhere(world_size, _gather_later):
        assert result == [[[r, r] for r in range(world_size)], [[10.0 * r] for r in range(world_size)]]


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_objects(world_size):
    found = everywhere(world_size, lambda plane: plane.gather_objects((plane.rank, "x" * plane.rank, None)))
    assert found == [[(rank, "x" * rank, None) for rank in range(world_size)]] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast_is_rank_0s(world_size):
    assert (
        everywhere(world_size, lambda plane: plane.broadcast_object({"from": plane.rank})) == [{"from": 0}] * world_size
    )


def test_an_error_travels_as_a_value():
    found = everywhere(3, lambda plane: plane.broadcast_object(ValueError("no") if plane.rank == 0 else None))
    assert [(type(error), str(error)) for error in found] == [(ValueError, "no")] * 3


class TwoPartsError(Exception):
    """Can be sent and not be received: what is called anew is given its one text."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def _raise_two_parts():
    raise TwoPartsError("the policy", "no split")


def test_an_error_that_cannot_be_received_reaches_every_rank_by_its_text():
    errors = everywhere(3, lambda plane: plane.decide(_raise_two_parts), expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["TwoPartsError", "RuntimeError", "RuntimeError"]
    assert all("the policy: no split" in message for *_, message in errors)
    assert all("TwoPartsError: the policy" in message for rank, _, message in errors if rank)


def _raise_stop():
    next(iter(()))


def _exit():
    sys.exit(3)


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (_raise_stop, "rank 0 could not decide, because StopIteration() was raised"),
        (_exit, "rank 0 could not decide, because SystemExit(3) was raised"),
        (lambda: lambda: 1, "what rank 0 decided cannot be sent to the other ranks"),
    ],
    ids=["the end of a loop", "the end of the process", "a function"],
)
def test_what_would_end_one_rank_alone_is_an_error_of_all(decision, words):
    errors = everywhere(2, lambda plane: plane.decide(decision), expect_errors=True)
    assert {kind for _, kind, _ in errors} <= {"RuntimeError", "TypeError"}
    assert len(errors) == 2
    assert all(words in message for *_, message in errors)


def _greatest(plane):
    notes = torch.tensor([plane.rank, 2 - plane.rank, 1], dtype=torch.int64)
    plane.maximum_later()(notes).wait()
    return notes.tolist()


def test_the_greatest_of_all_ranks_numbers():
    assert everywhere(3, _greatest) == [[2, 2, 1]] * 3


@pytest.mark.parametrize("world_size", WORLDS)
def test_equal_values_pass(world_size):
    assert everywhere(world_size, lambda plane: plane.require_equal("the plan", (4, 2))) == [None] * world_size


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_values_are_named_on_every_rank(odd):
    errors = everywhere(3, lambda plane: plane.require_equal("the plan", int(plane.rank == odd)), expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(rank, "PlanMismatchError") for rank in range(3)]
    listing = ", ".join(f"rank {rank}: {int(rank == odd)}" for rank in range(3))
    assert all(f"the plan must be equal on all ranks; got {listing}" in message for *_, message in errors)


def test_digests():
    check_digests(np.array([7.0, 7.0]))
    with pytest.raises(PlanMismatchError, match="rank 0: 000000000007, rank 1: 000000000008"):
        check_digests(np.array([7.0, 8.0]))


def _exits(plane):
    waits, sleep = [], time.sleep
    ControlPlane(plane.rank, plane.world_size).close()  # a second plane does not make the exit slower
    time.sleep = waits.append
    try:
        atexit._run_exitfuncs()
    finally:
        time.sleep = sleep
    return waits


def test_a_process_lets_the_threads_of_gloo_free_their_tensors_before_the_interpreter_ends():
    assert everywhere(2, _exits) == [[0.1], [0.1]]
    assert everywhere(1, _exits) == [[]]


def _longest_waits(plane):
    seen = []
    for _ in range(2):
        seen.append(plane._group._get_backend(torch.device("cpu")).options._timeout)
        plane.close()
    return seen


def test_the_longest_wait_is_that_of_the_group_also_when_it_is_made_again():
    assert everywhere(2, _longest_waits) == [[timedelta(seconds=30)] * 2] * 2


class Owner:
    pass


def _another(plane):
    """An owner that is gone, with a monitor that looks once a minute, and another control plane."""
    rank_monitor.SETTINGS = replace(rank_monitor.SETTINGS, poll_s=60.0, period_s=60.0)
    store, owner = dist.distributed_c10d._get_default_store(), Owner()
    plane.failures.begin(lambda: store, owner, lambda own: (0, 0, False))
    runs = plane.failures._bulletin is not None
    dist.barrier()  # all have opened it
    del owner
    ControlPlane(plane.rank, plane.world_size, timeout=plane.timeout).close()
    return runs, plane.failures._bulletin is None


def test_an_abandoned_watch_has_ended_on_all_ranks_when_there_is_another():
    assert everywhere(2, _another) == [(True, True)] * 2


def _before(rank):
    """What is called before a control plane begins, and how many groups there are then."""
    dist.init_process_group("gloo")
    called = []
    for name in ("first", "second"):
        before_another(lambda name=name: called.append((name, len(dist.distributed_c10d._world.pg_map))))
    ControlPlane(rank, 2)
    dist.destroy_process_group()
    return called


def test_what_earlier_trainings_have_left_ends_before_another_begins_the_newest_first():
    """Records, which keep their engines, end before the watches that end with the engines."""
    assert run_ranks(_before, 2) == [[("second", 1), ("first", 1)]] * 2
