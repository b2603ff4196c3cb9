"""What keepers tell of their slots, and signs of life."""

import time

import pytest
import torch.distributed as dist

from lightning_hetero.comm.membership import slots
from lightning_hetero.comm.membership.slots import GONE, OVER, RUNS, SILENT, Pulse, Slot, SlotBoard, job_board
from tests.helpers import free_port


@pytest.fixture
def board():
    return SlotBoard(dist.HashStore())


def test_a_slot_says_which_of_its_lives_runs(board):
    assert board.state_of(1) == (-1, RUNS)
    board.tell(1, 0, RUNS)
    assert board.lives(1, 0)
    board.tell(1, 0, GONE)
    assert not board.lives(1, 0)
    board.tell(1, 1, RUNS)
    assert board.lives(1, 1)
    assert not board.lives(1, 0)
    board.tell(1, 1, OVER)
    assert board.state_of(1) == (1, OVER)


def test_a_keeper_without_signs_is_silent_until_it_gives_one(board, monkeypatch):
    monkeypatch.setattr(slots, "SILENCE_S", 0.02)
    board.tell(0, 0, RUNS)
    assert board.state_of(0) == (0, RUNS), "the first look only begins to count"
    time.sleep(0.03)
    assert board.state_of(0) == (0, SILENT)
    board.beat(0, 1)
    assert board.state_of(0) == (0, RUNS)


def test_training_is_finished_by_one_life(board):
    assert not board.finished([0, 1])
    board.finish(1, 2)
    assert board.finished([0, 1])
    assert board.finished([1], 2)
    assert not board.finished([1], 3)
    board.begin(1)
    assert not board.finished([0, 1])


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pulse_is_of_its_life(board, monkeypatch):
    monkeypatch.setattr(slots, "BEAT_S", 0.01)
    assert board.pulse_of(0, 3) == ""
    pulse = Pulse(board, Slot(0, 2, 3)).start()
    wait_until(lambda: board.pulse_of(0, 3))
    first = board.pulse_of(0, 3)
    wait_until(lambda: board.pulse_of(0, 3) != first)
    assert board.pulse_of(0, 4) == "", "that of an earlier life says nothing of a later one"
    pulse.stop()
    assert board.pulse_of(0, 3) == f"3 {slots.ENDS}"


def test_a_process_under_a_debugger_gives_no_pulse(board, monkeypatch):
    """Its keeper kills what has fallen silent, and nobody knows how long a user looks at a line."""
    monkeypatch.setattr(slots, "BEAT_S", 0.01)
    monkeypatch.setattr(slots, "debugged", lambda: True)
    pulse = Pulse(board, Slot(0, 2, 0)).start()
    pulse._thread.join(timeout=20)
    assert not pulse._thread.is_alive()
    pulse.stop()
    assert board.pulse_of(0, 0) == ""


def test_a_pulse_that_was_given_is_taken_back_when_a_debugger_comes(board, monkeypatch):
    monkeypatch.setattr(slots, "BEAT_S", 0.01)
    monkeypatch.setattr(slots, "debugged", lambda: board.pulse_of(0, 0) != "")
    pulse = Pulse(board, Slot(0, 2, 0)).start()
    pulse._thread.join(timeout=20)
    assert board.store.check(["pulse/0"])
    assert board.pulse_of(0, 0) == ""


def test_another_thread_gets_a_connection_of_its_own():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    board = job_board(environment, host=True)
    other = board.clone()
    other.tell(0, 0, RUNS)
    wait_until(lambda: board.lives(0, 0))  # the store does not say when it has taken a value
    assert other.store is not board.store


def test_the_board_of_a_job_is_at_its_address_and_begins_anew_with_the_launcher():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    host = job_board(environment, host=True)
    guest = job_board(environment)
    host.tell(0, 0, RUNS)
    wait_until(lambda: guest.lives(0, 0))
    assert job_board({**environment, "TORCHELASTIC_RESTART_COUNT": "1"}).state_of(0) == (-1, RUNS)


def test_no_slot_without_a_keeper():
    assert Slot.of({"RANK": "0", "WORLD_SIZE": "2"}) is None
