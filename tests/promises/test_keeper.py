"""A keeper starts its worker again when it is lost, tells the others, and ends when it is told to or gives up.

Its worker is a process of :class:`tests.promises.virtual.Lives`, and time is counted.
"""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.membership.members_watch import STUCK
from lightning_hetero.comm.membership.slots import GONE, OVER, RUNS, SlotBoard, job_board
from lightning_hetero.keeper import Keeper, main
from tests.promises.virtual import Lives, VirtualTime
from tests.ranks import free_port

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def clock(monkeypatch):
    before = [signal.getsignal(number) for number in SIGNALS]
    with VirtualTime() as clock:
        yield clock
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Told(SlotBoard):
    """Notes what keepers tell."""

    def __init__(self):
        super().__init__(dist.HashStore())
        self.told = []

    def tell(self, slot, life, state):
        self.told.append((slot, life, state))
        super().tell(slot, life, state)


class Kept:
    """The keeper of slot 1 of 2, whose other one is at its end unless the test says otherwise."""

    def __init__(self, clock, monkeypatch, *lives, other=OVER, **kwargs):
        self.clock, self.board = clock, Told()
        self.board.tell(0, 0, other)
        clock.run("other", self._beat)
        self.lives = Lives(clock, *(life if callable(life) else lambda *_, life=life: life for life in lives))
        monkeypatch.setattr(subprocess, "Popen", self.lives)
        self.keeper = Keeper(["python", "train.py"], self.board, slot=1, slots=2, **kwargs)

    def _beat(self):
        for count in range(10**6):
            self.board.beat(0, count)
            self.clock.sleep(1.0)

    def run(self):
        return self.keeper.run()

    def at(self, seconds, call, *args):
        """Call something so many seconds from now."""
        self.clock.run("test", lambda: (self.clock.sleep(seconds), call(*args)))

    def pulses(self, begin, end, sign=None):
        """Let the worker give signs of life from one moment to another, or one sign only."""

        def give():
            self.clock.sleep(begin)
            for second in range(int(end - begin)):
                self.board.store.set("pulse/1", f"0 {sign or second}")
                self.clock.sleep(1.0)

        self.clock.run("worker", give)


@pytest.fixture
def kept(clock, monkeypatch):
    return lambda *lives, **kwargs: Kept(clock, monkeypatch, *lives, **kwargs)


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "lives"),
    [
        ([0], 3, 0, 1),
        ([1, 0], 3, 0, 2),
        ([-9], 2, 137, 3),
        ([3], 0, 3, 1),
        ([STUCK, 1, STUCK, 1], 1, 1, 4),  # it ended so that another is started, which is no failure
    ],
)
def test_a_lost_worker_is_started_again_so_often_and_the_others_know_which_life_runs(
    kept, caplog, codes, restarts, code, lives
):
    job = kept(*((5.0, one) for one in codes), restarts=restarts)
    assert job.run() == code
    assert len(job.lives.started) == lives
    expected = sum(([(1, life, RUNS), (1, life, GONE)] for life in range(lives)), [])
    assert job.board.told[1:] == [*expected[:-1], (1, lives - 1, OVER)]
    assert [text for text in caplog.messages if "hetero_ddp" in text] == caplog.messages[1:2] * (lives > 1)


def test_a_worker_knows_its_place_and_that_it_does_not_hold_the_store(kept, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    job = kept((5.0, 1), (5.0, 0), least=2)
    job.run()
    names = ("SLOT", "SLOTS", "LIFE", "MIN_WORKERS")
    assert [[env[f"LIGHTNING_HETERO_{name}"] for name in names] for env in job.lives.environments] == [
        ["1", "2", str(life), "2"] for life in range(2)
    ]
    assert {env["TORCHELASTIC_USE_AGENT_STORE"] for env in job.lives.environments} == {"True"}


@pytest.mark.parametrize(
    ("other", "least", "go_on", "finish"),
    [(RUNS, 1, True, True), (GONE, 1, True, True), (RUNS, 2, False, True), (RUNS, 1, True, False)],
)
def test_a_keeper_that_has_given_up_waits_whether_the_others_finish(kept, caplog, other, least, go_on, finish):
    job = kept((5.0, 3), restarts=0, other=other, least=least)
    job.at(500.0, *((job.board.finish, 0, 0) if finish else (job.board.tell, 0, 0, OVER)))
    assert job.run() == (0 if finish else 3)
    assert 1500.0 <= job.clock.now < 1510.0
    assert job.board.state_of(1) == (0, OVER)
    assert ("go on" in caplog.messages[0]) == go_on


@pytest.mark.parametrize(("finished", "code"), [([0], 0), ([0, 1], 3)])
def test_a_worker_that_is_lost_after_the_others_have_finished_is_no_failure_unless_it_has_finished(
    kept, finished, code
):
    """It is not started again: nothing is left to do. One that fails after its own training fails."""
    job = kept((5.0, 3), restarts=5, other=RUNS)
    for slot in finished:
        job.board.finish(slot, 0)
    assert job.run() == code
    assert job.board.told[1:] == [(1, 0, RUNS), (1, 0, OVER)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_signal_is_passed_on_and_nothing_starts_again(kept, number, given_up, caplog):
    job = kept((5.0 if given_up else 500.0, 3), restarts=0 if given_up else 5, other=RUNS if given_up else OVER)
    job.at(50.0, os.kill, os.getpid(), number)
    assert job.run() == (3 if given_up else 128 + number)
    assert len(job.lives.started) == 1
    assert job.lives.started[0].signals == [] if given_up else [number]
    assert job.clock.now < 1060.0
    assert given_up or caplog.messages == [], "it was not lost"


def test_a_signal_of_the_users_reaches_the_worker_which_is_started_again_when_it_is_lost(kept):
    job = kept((100.0, 3), (5.0, 0))
    job.at(50.0, os.kill, os.getpid(), signal.SIGUSR1)
    assert job.run() == 0
    assert [process.signals for process in job.lives.started] == [[signal.SIGUSR1], []]


@pytest.mark.parametrize(
    ("lasts", "pulses", "finished", "silence", "code", "lives", "seconds"),
    [
        (700.0, [], False, 30.0, 0, 1, 700.0),  # its imports may take long
        (700.0, [(50, 100, "")], False, 30.0, 0, 2, 129.0 + 5.0),
        (700.0, [(50, 100, "")], False, 200.0, 0, 2, 299.0 + 5.0),
        (700.0, [(0, 100, ""), (120, 900, "")], False, 30.0, 0, 1, 700.0),
        (700.0, [(0, 1, "7")], True, 30.0, 128 + signal.SIGKILL, 1, 30.0),  # stopped after its training: it fails
        # an interpreter that ends gives no signs any more, and may have much to do
        (50.0, [(0, 1, "ends")], False, 30.0, 0, 1, 50.0),
        (700.0, [(0, 1, "ends")], False, 30.0, 0, 2, 60.0 + 5.0),
        (700.0, [(0, 1, "ends")], True, 30.0, 0, 1, 60.0),
    ],
)
def test_a_worker_that_falls_silent_is_killed_after_half_a_minute_and_started_again(
    kept, lasts, pulses, finished, silence, code, lives, seconds
):
    job = kept((lasts, 0), (5.0, 0), silence=silence)
    for begin, end, sign in pulses:
        job.pulses(begin, end, sign)
    if finished:
        job.board.finish(1, 0)
    assert job.run() == code
    assert len(job.lives.started) == lives
    assert seconds - 1.0 <= job.clock.now - 1000.0 <= seconds + 6.0


def test_a_lost_store_ends_the_worker_and_its_keeper(kept, monkeypatch, caplog):
    """Nobody could meet any more: the worker must not train alone, nor its end look like success."""
    job = kept((500.0, 0))

    def gone(*_):
        raise dist.DistNetworkError("failed to recv")

    job.at(50.0, monkeypatch.setattr, job.board, "read", gone)
    assert job.run() == 1
    assert job.lives.started[0].signals == [signal.SIGKILL]
    assert "failed to recv" in caplog.text


def test_a_keeper_beats_until_its_end_and_outlasts_the_others_if_it_holds_the_store(kept):
    job = kept((95.0, 0), other=RUNS)
    beats = []
    job.at(90.0, lambda: beats.append(int(job.board.read("beat/1"))))
    job.run()
    assert beats[0] in range(88, 93)
    last = job.board.read("beat/1")
    job.at(20.0, job.board.tell, 0, 0, GONE)
    job.at(40.0, job.board.tell, 0, 1, OVER)
    job.keeper.outlast()
    assert 1134.0 <= job.clock.now < 1138.0
    assert job.board.read("beat/1") == last
    job.board.tell(0, 0, RUNS)
    job.keeper.outlast(10.0)
    assert job.clock.now < 1150.0


def test_a_training_under_a_keeper_that_nothing_brings_together_is_refused(monkeypatch):
    monkeypatch.setenv("LIGHTNING_HETERO_SLOT", "0")
    monkeypatch.delenv("LIGHTNING_HETERO_GENERATION", raising=False)
    with pytest.raises(RuntimeError, match="hetero_ddp"):
        ControlPlane(0, 1)
    monkeypatch.setenv("LIGHTNING_HETERO_GENERATION", "2")
    ControlPlane(0, 1).close()


# the command

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-restarts", "-1"], "--max-restarts"),
        (["--min-workers", "0"], "--min-workers"),
        (["--min-workers", "3"], "--min-workers"),
        (["--silence", "nan"], "--silence"),
        (["--max", "1"], "--max"),
        (["nosuch.py"], "nosuch.py"),
        (None, "torchrun"),
    ],
)
def test_options_out_of_range_are_named(monkeypatch, capsys, given, said):
    for name, value in PLACE.items():
        monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([*(given or []), __file__])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "launcher"), [("0", "False"), ("0", "True"), ("1", "")])
def test_options_reach_the_keeper_and_the_first_one_holds_the_store_unless_the_launcher_does(
    clock, monkeypatch, rank, launcher
):
    """Arguments behind the script are its own; what was told before the launcher started all anew counts no more."""
    port, held = free_port(), None
    if (rank, launcher) != ("0", "False"):
        held = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    values = {**PLACE, "RANK": rank, "WORLD_SIZE": "1" if rank == "0" else "2", "MASTER_PORT": str(port)}
    for name, value in {**values, "TORCHELASTIC_USE_AGENT_STORE": launcher}.items():
        monkeypatch.setenv(name, value)
    if rank == "1":
        job_board(os.environ).tell(0, 0, RUNS)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        job_board(os.environ).tell(0, 0, OVER)
    lives = Lives(clock, lambda *_: (5.0, 3))
    monkeypatch.setattr(subprocess, "Popen", lives)
    own = ["--max-restarts", "7", "-m"]
    assert main(["--max-restarts", "2", "--min-workers", "1", "-m", "package.train", *own]) == 3
    assert lives.commands == [[sys.executable, "-m", "package.train", *own]] * 3
    assert lives.environments[0]["LIGHTNING_HETERO_MIN_WORKERS"] == "1"
    del held
