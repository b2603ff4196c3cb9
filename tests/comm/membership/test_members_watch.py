"""A process that is stuck after the loss of a member ends, and says where it was."""

import os
import subprocess
import sys
import time

import torch.distributed as dist

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
members_watch.MembersWatch(board, generation, Member(0, 0), stuck_s=0.05).start()

def waits_for_the_lost_one():
    threading.Event().wait(60)

waits_for_the_lost_one()
"""


COMPUTES = STUCK_IN_A_STEP.replace(
    "threading.Event().wait(60)",
    "begin = time.monotonic()\n    while time.monotonic() - begin < 2:\n        pass",
)


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
    """It is 40 times as long in its step as a stuck one may be."""
    done = subprocess.run([sys.executable, "-c", COMPUTES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_leaves_in_time_goes_on():
    board = SlotBoard(dist.HashStore())
    board.tell(0, 0, RUNS)
    board.tell(1, 0, GONE)
    generation = Generation(0, (Member(0, 0), Member(1, 0)))
    watch = MembersWatch(board, generation, Member(0, 0), stuck_s=60.0).start()
    board.store.add("1/first", 1)
    deadline = time.monotonic() + 20
    while not watch.next_is_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch.stop()
