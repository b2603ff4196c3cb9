"""A keeper starts its worker again when it is lost, tells the others, and ends when it is told to or gives up."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from lightning_hetero import keeper as module
from lightning_hetero.comm.membership import slots
from lightning_hetero.comm.membership.members import Generation, Member
from lightning_hetero.comm.membership.members_watch import STUCK
from lightning_hetero.comm.membership.slots import GONE, OVER, RUNS, SlotBoard
from lightning_hetero.keeper import Keeper, main


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for owner in (module, slots):
        monkeypatch.setattr(owner, "BEAT_S", 0.02)


@pytest.fixture(autouse=True)
def _handlers_stay():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def board():
    return SlotBoard(dist.HashStore())


def keeper(board, code, *arguments, **kwargs):
    """Keeper of slot 1 of 2; the other one is at its end unless a test says otherwise."""
    if board.state_of(0) == (-1, RUNS):
        board.tell(0, 0, OVER)
    return Keeper([sys.executable, "-c", code, *map(str, arguments)], board, slot=1, slots=2, **kwargs)


NOTE = """
import os, signal, sys
life = int(os.environ["LIGHTNING_HETERO_LIFE"])
with open(sys.argv[1], "a") as file:
    print(*(os.environ["LIGHTNING_HETERO_" + name] for name in ("SLOT", "SLOTS", "LIFE", "MIN_WORKERS")), file=file)
"""


def test_a_worker_that_ends_well_is_not_started_again(board, tmp_path):
    assert keeper(board, NOTE, tmp_path / "notes", least=2).run() == 0
    assert (tmp_path / "notes").read_text() == "1 2 0 2\n"
    assert board.state_of(1) == (0, OVER)


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_a_worker_that_is_lost_too_often_gives_its_exit_code(board, tmp_path, end, code):
    assert keeper(board, NOTE + end, tmp_path / "notes", restarts=2).run() == code
    assert (tmp_path / "notes").read_text() == "1 2 0 1\n1 2 1 1\n1 2 2 1\n"


def test_a_stuck_worker_counts_as_no_failure(board, tmp_path):
    assert keeper(board, NOTE + f"sys.exit({STUCK} if life < 4 else 0)", tmp_path / "notes", restarts=0).run() == 0
    assert len((tmp_path / "notes").read_text().splitlines()) == 5


def test_the_others_know_at_each_moment_which_life_runs(board, tmp_path):
    seen = []

    class Tells(SlotBoard):
        def tell(self, slot, life, state):
            seen.append((slot, life, state))
            super().tell(slot, life, state)

    kept = keeper(board, NOTE + "sys.exit(life == 0)", tmp_path / "notes")
    kept.board = Tells(board.store)
    assert kept.run() == 0
    assert seen == [(1, 0, RUNS), (1, 0, GONE), (1, 1, RUNS), (1, 1, OVER)]


def test_each_restart_is_counted_in_the_log(board, caplog, monkeypatch):
    monkeypatch.setattr(module.log, "propagate", True)
    assert keeper(board, "import sys; sys.exit(3)", restarts=2).run() == 3
    first, hint, second, last = caplog.messages
    said = "worker 1 was lost (exit code 3); its keeper starts it again (restart {})"
    assert (first, second) == (said.format(1), said.format(2))
    assert "no fit with strategy='hetero_ddp' has begun" in hint
    assert last == "worker 1 was lost (exit code 3), and is not started again", "nor does any other run"


def test_a_worker_that_is_lost_from_a_fit_is_told_nothing_of_strategies(board, caplog, monkeypatch):
    monkeypatch.setattr(module.log, "propagate", True)
    Generation(0, (Member(0, 0), Member(1, 0))).write(board)
    keeper(board, "import sys; sys.exit(3)", restarts=1).run()
    assert [message for message in caplog.messages if "hetero_ddp" in message] == []


@pytest.mark.parametrize(("least", "go_on"), [(1, True), (2, False)])
def test_fewer_than_the_fewest_workers_do_not_go_on(board, caplog, monkeypatch, least, go_on):
    monkeypatch.setattr(module.log, "propagate", True)
    board.tell(0, 0, RUNS)
    kept = keeper(board, "import sys; sys.exit(3)", restarts=0, least=least)
    monkeypatch.setattr(kept.board, "finished", lambda *_: bool(caplog.messages))
    kept.run()
    assert caplog.messages[0].endswith("the others go on without it") == go_on


def test_a_lost_worker_is_no_failure_if_the_others_finish_training(board):
    board.tell(0, 0, RUNS)
    board.finish(0, 0)
    assert keeper(board, "import sys; sys.exit(3)", restarts=5).run() == 0
    assert board.state_of(1) == (0, OVER), "it is not started again: there is nothing left to do"


def test_a_worker_that_fails_after_its_own_training_fails(board):
    board.finish(0, 0)
    board.finish(1, 0)
    assert keeper(board, "import sys; sys.exit(3)", restarts=5).run() == 3


def test_a_lost_store_ends_the_worker_and_its_keeper():
    """Nobody could meet any more: the worker must not train alone, nor its end look like success."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = keeper(SlotBoard(dist.TCPStore("127.0.0.1", host.port, is_master=False)), "import time; time.sleep(60)")
    del host
    assert kept.run() == 1
    assert kept._worker is None or kept._worker.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize("state", [RUNS, GONE])
def test_a_keeper_that_has_given_up_waits_for_the_others(board, state, caplog, monkeypatch):
    monkeypatch.setattr(module.log, "propagate", True)
    board.tell(0, 0, state)
    found = []
    thread = threading.Thread(target=lambda: found.append(kept._lives()), daemon=True)
    kept = keeper(board, "import sys; sys.exit(3)", restarts=0)
    thread.start()
    deadline = time.monotonic() + 30
    while board.state_of(1) != (0, OVER):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not found
    board.finish(0, 0)
    thread.join(timeout=30)
    assert found == [0]
    said = ["is not started again: the others go on without it", "the others have finished training without worker 1"]
    assert [message.endswith(end) for message, end in zip(caplog.messages, said, strict=True)] == [True, True]


def test_a_keeper_that_has_given_up_ends_when_it_is_told_to(board):
    asked = []

    class Tells(SlotBoard):
        def finished(self, slots, life=None):
            if list(slots) != [0]:
                return super().finished(slots, life)
            asked.append(slots)
            os.kill(os.getpid(), signal.SIGTERM)
            return len(asked) > 1

    board.tell(0, 0, RUNS)
    kept = keeper(board, "import sys; sys.exit(3)", restarts=0)
    kept.board = Tells(board.store)
    assert kept.run() == 3


def test_who_holds_the_store_stays_while_others_run_or_are_started_again(board, monkeypatch):
    kept = keeper(board, "")
    states = iter([RUNS, GONE, OVER])
    monkeypatch.setattr(board, "state_of", lambda slot: (0, next(states)))
    kept.outlast()
    assert list(states) == []
    kept.outlast(0.0)  # the others are given so many seconds


def test_a_keeper_shows_that_it_lives_until_its_end(board):
    kept = keeper(board, "")
    thread = threading.Thread(target=kept._beat, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while board.read("beat/1") in (None, "1", "2"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept._over.set()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_no_worker_holds_the_store(board, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    code = "import os, sys; sys.exit(os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True')"
    assert keeper(board, code, restarts=0).run() == 0


def test_a_worker_that_falls_silent_is_killed(board, tmp_path):
    """It gives a sign once, as a worker does that is stopped later; one that never gave any is left alone."""
    code = NOTE + "import time; time.sleep(60 if life == 0 else 0)"
    kept = keeper(board, code, tmp_path / "notes", silence=0.1)
    done = []
    thread = threading.Thread(target=lambda: done.append(kept._lives()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "notes").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert board.state_of(1) == (0, RUNS)
    board.store.set("pulse/1", "0 1")
    thread.join(timeout=30)
    assert done == [0]
    assert board.state_of(1) == (1, OVER)


def test_a_worker_that_is_stopped_before_its_first_sign_is_killed(board, tmp_path):
    """Its imports may take long, so that silence alone tells nothing then."""
    code = NOTE + "if life == 0: os.kill(os.getpid(), signal.SIGSTOP)"
    kept, done = keeper(board, code, tmp_path / "notes", silence=0.1), []
    thread = threading.Thread(target=lambda: done.append(kept._lives()), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert done == [0]
    assert board.state_of(1) == (1, OVER)


def test_a_worker_that_has_not_begun_when_training_is_over_is_killed(board, tmp_path, caplog):
    board.finish(0, 0)
    assert keeper(board, NOTE + "import time; time.sleep(60)", tmp_path / "notes", silence=0.1).run() == 0
    assert "the others have finished training without worker 1" in caplog.text


@pytest.mark.parametrize(("least", "lives"), [(60.0, 1), (0.1, 2)])
def test_an_interpreter_that_ends_gets_more_time(board, tmp_path, monkeypatch, least, lives):
    """It gives no signs any more, and may have much to do."""
    monkeypatch.setattr(module, "END_S", least)
    board.store.set("pulse/1", f"0 {slots.ENDS}")
    code = NOTE + "import time; time.sleep((0.5 if sys.argv[2] == '60.0' else 60) if life == 0 else 0)"
    assert keeper(board, code, tmp_path / "notes", least, silence=0.1).run() == 0
    assert board.state_of(1) == (lives - 1, OVER), "the one that is killed may have noted nothing yet"


@pytest.mark.parametrize(("sign", "code"), [(slots.ENDS, 0), ("7", 128 + signal.SIGKILL)])
def test_an_interpreter_that_does_not_end_after_training_fails_nothing(board, monkeypatch, sign, code):
    monkeypatch.setattr(module, "END_S", 0.1)
    board.store.set("pulse/1", f"0 {sign}")
    board.finish(1, 0)
    assert keeper(board, "import time; time.sleep(60)", silence=0.1).run() == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_nothing_starts_again(board, tmp_path, number, caplog, monkeypatch):
    monkeypatch.setattr(module.log, "propagate", True)
    code = NOTE + "import time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nopen(sys.argv[2], 'w')\ntime.sleep(60)"
    kept = keeper(board, code, tmp_path / "notes", tmp_path / "ready", restarts=5)

    def tell():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()
    assert kept.run() == 128 + number
    assert len((tmp_path / "notes").read_text().splitlines()) == 1
    assert caplog.messages == [], "it was not lost"


def test_a_signal_of_the_users_reaches_the_worker_which_is_started_again_when_it_is_lost(board, tmp_path):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    code = NOTE + (
        "import time\n"
        "signal.signal(signal.SIGUSR1, lambda *given: sys.exit(3))\n"
        "open(sys.argv[2], 'w')\n"
        "time.sleep(20 if life == 0 else 0)"
    )
    kept = keeper(board, code, tmp_path / "notes", tmp_path / "ready")

    def tell():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=tell, daemon=True).start()
    assert kept.run() == 0
    assert len((tmp_path / "notes").read_text().splitlines()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a worker with its keeper on Linux")
def test_a_worker_ends_with_its_keeper(tmp_path):
    code = f"""
import sys, torch.distributed as dist
from lightning_hetero.comm.membership.slots import SlotBoard
from lightning_hetero.keeper import Keeper
worker = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
Keeper([sys.executable, "-c", worker], SlotBoard(dist.HashStore()), slot=0, slots=1).run()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait(timeout=30)
    assert not psutil.pid_exists(worker)


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch, capsys):
    for name in module.NEEDED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        main(["train.py"])
    assert "torchrun --nproc-per-node=4 -m lightning_hetero.keeper train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-restarts", "-1"], "-1 is below 0"),
        (["--max-restarts", "many"], "'many' is not a whole number"),
        (["--min-workers", "0"], "0 is below 1"),
        (["--min-workers", "3"], "--min-workers 3: the job has 2 workers"),
        (["--silence", "nan"], "nan is below"),
        (["--max", "1"], "unrecognized arguments: --max"),
        (["nosuch.py"], "nosuch.py does not exist in "),
    ],
)
def test_options_out_of_range_are_named(monkeypatch, capsys, given, said):
    for name, value in zip(module.NEEDED, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([*given, __file__])
    assert said in capsys.readouterr().err


def test_arguments_of_the_script_are_its_own(monkeypatch, tmp_path):
    from tests.helpers import free_port

    script = tmp_path / "train.py"
    script.write_text(f"import sys; open({str(tmp_path / 'argv')!r}, 'w').write(repr(sys.argv[1:]))")
    values = ("0", "1", "127.0.0.1", str(free_port()))
    for name, value in zip(module.NEEDED, values, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert main(["--max-restarts", "0", str(script), "--max-restarts", "7", "-m"]) == 0
    assert (tmp_path / "argv").read_text() == "['--max-restarts', '7', '-m']"


@pytest.fixture
def started(monkeypatch):
    """What ``main`` does with its keeper, which runs nothing."""
    seen = []
    monkeypatch.setattr(module, "job_board", lambda environment, host: seen.append(("holds the store", host)))
    monkeypatch.setattr(Keeper, "run", lambda kept: seen.append(kept) or 7)
    monkeypatch.setattr(Keeper, "outlast", lambda kept: seen.append("outlasts the others"))
    for name, value in zip(module.NEEDED, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return seen


def test_options_reach_the_keeper(started):
    given = ["--max-restarts", "5", "--min-workers", "2", "--silence", "7.5", "-m", "package.train", "--lr", "1"]
    assert main(given) == 7
    kept = started[1]
    assert kept.command == [sys.executable, "-m", "package.train", "--lr", "1"]
    assert (kept.slot, kept.slots, kept.restarts, kept.least, kept.silence) == (0, 2, 5, 2, 7.5)


@pytest.mark.parametrize(("rank", "launcher", "host"), [("0", "False", True), ("0", "True", False), ("1", "", False)])
def test_the_first_keeper_holds_the_store_to_the_end_unless_the_launcher_does(
    started, monkeypatch, rank, launcher, host
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    assert main([__file__]) == 7
    assert started[0] == ("holds the store", host)
    assert started[2:] == ["outlasts the others"] * host
