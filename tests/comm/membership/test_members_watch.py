"""A process that is stuck after the loss of a member ends, and says where it was."""

import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_hetero.comm.membership import members_watch
from lightning_hetero.comm.membership.members import Generation, Member
from lightning_hetero.comm.membership.members_watch import STUCK, MembersWatch
from lightning_hetero.comm.membership.slots import GONE, RUNS, SlotBoard

STUCK_IN_A_STEP = """
import threading, time
import torch.distributed as dist
from lightning_hetero.comm.membership import members_watch
from lightning_hetero.comm.membership.members import Generation, Member
from lightning_hetero.comm.membership.slots import GONE, RUNS, SlotBoard
members_watch.LOOK_S = 0.01
board = SlotBoard(dist.HashStore())
board.tell(0, 0, RUNS)
board.tell(1, 0, GONE)
generation = Generation(0, (Member(0, 0), Member(1, 0)))
watch = members_watch.MembersWatch(board, generation, Member(0, 0), stuck_s=0.05, let_go=int).start()

def waits_for_the_lost_one():
    threading.Event().wait(60)

waits_for_the_lost_one()
watch.stop()
"""


COMPUTES = STUCK_IN_A_STEP.replace(
    "threading.Event().wait(60)",
    "begin = time.monotonic()\n    while time.monotonic() - begin < 2:\n        pass",
).replace("stuck_s=0.05", "stuck_s=0.5")  # on a machine with other work, it computes for a part of the time


def test_a_worker_that_waits_for_one_that_has_left_ends_as_well():
    """Nobody is lost: the other one has lost a connection, and has come for the next generation."""
    code = STUCK_IN_A_STEP.replace(
        "board.tell(1, 0, GONE)",
        "board.tell(1, 0, RUNS); board.store.set('1/in/1', '0'); board.store.add('1/first', 1)",
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == STUCK


def test_a_newcomer_that_waits_ends_nobody():
    code = COMPUTES.replace(
        "board.tell(1, 0, GONE)",
        "board.tell(1, 0, RUNS); board.store.set('1/in/2', '1'); board.store.add('1/first', 1)",
    ).replace("        pass", "        time.sleep(0.1)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_stuck_worker_ends_with_its_traceback():
    done = subprocess.run(
        [sys.executable, "-c", STUCK_IN_A_STEP], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == STUCK
    assert (
        "worker 0 ends, and its keeper starts another: worker 1 was lost or has left, and this one waits" in done.stderr
    )
    assert "in waits_for_the_lost_one" in done.stderr


def test_a_worker_that_computes_is_not_stuck():
    """It is four times as long in its step as a stuck one may be."""
    done = subprocess.run([sys.executable, "-c", COMPUTES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_leaves_in_time_goes_on():
    board = SlotBoard(dist.HashStore())
    board.tell(0, 0, RUNS)
    board.tell(1, 0, GONE)
    generation = Generation(0, (Member(0, 0), Member(1, 0)))
    watch = MembersWatch(board, generation, Member(0, 0), stuck_s=60.0, let_go=int).start()
    board.store.set("1/led by", "1 0")
    deadline = time.monotonic() + 20
    while not watch.next_is_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch.stop()
    assert not watch._thread.is_alive(), "else it might end this process later"


@pytest.mark.parametrize(("looks", "ends"), [("xxx", []), ("xxxx", [18]), ("xx-x", [])])
def test_only_a_worker_that_waits_for_long_without_a_break_is_stuck(monkeypatch, looks, ends):
    """A look each 6 s, and one member that is lost, or comes back: its host was silent for a while."""
    left, clock, found, freed = list(looks), itertools.count(0, 6), [], []

    def lost(board, me):
        if not left:
            watch._over.set()
        return [Member(1, 0)] if left and left.pop(0) == "x" else []

    monkeypatch.setattr(members_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(members_watch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(members_watch, "main_thread_seconds", lambda: 0.0)
    generation = SimpleNamespace(number=0, lost=lost)
    watch = MembersWatch(SlotBoard(dist.HashStore()), generation, Member(0, 0), 15, lambda: freed.append(True))
    watch._end = lambda lost, waited: found.append(waited)
    watch._run()
    assert found == ends
    assert len(freed) == 1, "before it ends, and once"


@pytest.mark.parametrize(("spent", "looked", "lets_go"), [(0.0, 5, True), (1.0, 5, False), (0.0, 2, False)])
def test_only_a_worker_that_waits_for_a_while_lets_go_of_its_calls(monkeypatch, spent, looked, lets_go):
    """A look each second; the second one computes, so that its next call fails, and the last soon waits no more."""
    clock, cpu, freed = itertools.count(), itertools.count(0, spent), []

    def lost(board, me):
        if next(looks) == looked:
            watch._over.set()
        return [Member(1, 0)]

    looks = itertools.count()
    monkeypatch.setattr(members_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(members_watch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(members_watch, "main_thread_seconds", lambda: next(cpu))
    generation = SimpleNamespace(number=0, lost=lost)
    watch = MembersWatch(SlotBoard(dist.HashStore()), generation, Member(0, 0), 15, lambda: freed.append(True))
    watch._run()
    assert bool(freed) == lets_go
