"""A rank for which all others wait is named, and a lost one ends the job, with processes under a wall limit."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lightning_hetero.comm.failures import rank_monitor as monitor
from lightning_hetero.comm.failures.bulletin import Bulletin
from lightning_hetero.comm.failures.failure import Failure
from tests.helpers import Points, Regressor, covered, fit, run_ranks

pytestmark = pytest.mark.alone

N, AT = 80, 4
WALL = 45.0


class Stands(Regressor):
    """Stands still in one batch: stopped, for some seconds or for ever, or busy with something else."""

    def __init__(self, rank, how, seconds):
        super().__init__()
        self.rank, self.how, self.seconds = rank, how, seconds

    def training_step(self, batch, batch_idx):
        if batch_idx == AT and self.trainer.global_rank == self.rank:
            if self.seconds and self.how == "stopped":
                subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(self.seconds)
        if batch_idx > AT:
            time.sleep(0.3)  # training does not end before the others have seen that the rank goes on
        return super().training_step(batch, batch_idx)


def _train(rank, stands, how, seconds, lost, timeout, folder):
    monitor.SETTINGS = monitor.MonitorSettings(period_s=0.2, quiet_s=1.0, lost_s=lost)
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    strategy = {"timeout": timedelta(seconds=timeout)} if timeout else {}
    return fit(rank, strategy, 3, 4, model=Stands(stands, how, seconds), dataset=Points(N), max_epochs=1)


def run(folder, stands, how="stopped", seconds=0.0, lost=60.0, timeout=None, **kwargs):
    return run_ranks(_train, 3, stands, how, seconds, lost, timeout, str(folder), timeout=WALL, **kwargs)


def said(folder, rank):
    lines = (folder / f"{rank}.log").read_text().splitlines()
    return [line for line in lines if "waits for rank" in line or "is lost" in line or "goes on" in line]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("stopped", "it shows no sign of life"),
        ("busy", f"it is in batch {AT} of epoch 0 and has not come to its backward"),
    ],
)
def test_a_rank_that_stands_still_for_a_while_is_named_and_loses_nothing(tmp_path, how, what):
    results = run(tmp_path, 1, how, 4.0)
    assert covered(results, 0) == sorted([*range(N)])
    lines = said(tmp_path, 0)
    assert f"rank 0 waits for rank 1: {what}" in lines[0]
    assert lines[-1] == "rank 1 goes on"
    assert not [line for line in lines if "rank 2" in line]
    assert said(tmp_path, 2) == []


def test_the_first_rank_is_watched_by_all_others(tmp_path):
    run(tmp_path, 0, "busy", 4.0)
    for rank in (1, 2):
        assert f"rank {rank} waits for rank 0: it is in batch {AT} of epoch 0" in said(tmp_path, rank)[0]


def _end_the_last(folder, stands, others):
    """Kill the rank that stands still when the others have ended; if they never do, the run is not done in time."""
    until(lambda: all(_has_ended(folder / f"{rank}.pid") for rank in others), WALL)
    os.kill(int((folder / f"{stands}.pid").read_text()), signal.SIGKILL)


def _has_ended(file):
    """Whether a rank is a zombie, as it is until ``run_ranks`` has heard of all of them."""
    pid = file.read_text() if file.exists() else ""
    return bool(pid) and psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stands", [0, 1])
def test_a_rank_that_is_stopped_for_ever_is_named_and_ends_the_job(tmp_path, stands):
    """Rank 0 holds the store, which then does not answer. The stopped process is for the launcher to end."""
    others = [rank for rank in range(3) if rank != stands]
    launcher = threading.Thread(target=_end_the_last, args=(tmp_path, stands, others), daemon=True)
    launcher.start()
    errors = {rank: kind for rank, kind, _ in run(tmp_path, stands, lost=3.0, expect_errors=True)}
    assert set(errors) == {0, 1, 2}
    assert errors[stands] == "Died"
    lines = sum((said(tmp_path, rank) for rank in others), [])
    assert any(f"waits for rank {stands}" in line for line in lines)
    assert any(f"which cannot go on: rank {stands} is lost" in line for line in lines)


def test_the_error_of_a_wait_that_is_too_long_names_the_rank(tmp_path):
    errors = run(tmp_path, 1, seconds=9.0, timeout=4, expect_errors=True)
    message = next(message for rank, _, message in errors if rank == 0)
    assert "imed out" in message
    assert "rank 1: it shows no sign of life" in message


def test_a_job_that_was_stopped_as_a_whole_accuses_nobody(tmp_path):
    """A scheduler may suspend all processes for longer than a rank may be silent."""
    results = run_ranks(_suspended, 3, str(tmp_path), timeout=WALL)
    assert covered(results, 0) == [*range(N)]
    assert [said(tmp_path, rank) for rank in range(3)] == [[], [], []]


class Suspended(Regressor):
    def training_step(self, batch, batch_idx):
        if batch_idx == AT:
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def _suspended(rank, folder):
    monitor.SETTINGS = monitor.MonitorSettings(period_s=0.2, quiet_s=2.0, lost_s=3.0)
    logging.getLogger("lightning_hetero").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    return fit(rank, {}, 3, 4, model=Suspended(), dataset=Points(N), max_epochs=1)


class LastsLonger(Regressor):
    """Rank 0 has something to do when training is over; the others are silent then, and wait for it."""

    def on_train_end(self):
        if self.trainer.global_rank == 0:
            time.sleep(4.0)

    def on_train_start(self):
        if self.trainer.global_rank == 1:
            time.sleep(4.0)


def _lasts_longer(rank, folder):
    monitor.SETTINGS = monitor.MonitorSettings(period_s=0.2, quiet_s=1.0, lost_s=2.0)
    logging.getLogger("lightning_hetero").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    return fit(rank, {}, 3, 4, model=LastsLonger(), dataset=Points(N), max_epochs=1)["steps"]


# in one process, with short periods


@pytest.fixture
def lines(monkeypatch):
    """What is said, while ranks are named and lost soon."""
    monkeypatch.setattr(
        monitor, "SETTINGS", monitor.MonitorSettings(period_s=0.1, poll_s=0.02, quiet_s=0.3, lost_s=1.5)
    )
    logger, lines = logging.getLogger("lightning_hetero"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(before)
    logger.removeHandler(handler)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def of(lines, words):
    return [line for line in list(lines) if words in line]


def watching(rank, world_size, store, progress, lost=lambda failure: None):
    return monitor.RankMonitor(Bulletin(rank, world_size, store), progress, lost)


def test_a_busy_rank_is_named_again_ever_later_until_it_goes_on_and_is_never_lost(lines):
    store, busy, lost = dist.HashStore(), [True], []
    progress = lambda: (0, 3, True), lambda: (0, 3, not busy[0])  # noqa: E731
    watch = [watching(rank, 2, store, progress[rank], lost.append).start() for rank in range(2)]
    began = time.monotonic()
    until(lambda: "rank 1: it is in batch 3 of epoch 0 and has not come" in watch[0].suspects)
    until(lambda: len(of(lines, "rank 0 waits for rank 1: it is in batch 3 of epoch 0")) >= 3)
    until(lambda: time.monotonic() > began + 2.0)
    assert len(of(lines, "rank 0 waits for rank 1: it is in batch")) < 40
    busy[0] = False
    until(lambda: of(lines, "rank 1 goes on"))
    until(lambda: not watch[0].suspects)
    time.sleep(0.3)
    assert len(of(lines, "rank 1 goes on")) < 10, "it is said when it goes on, and not from then on"
    assert lost == []
    for one in watch:
        one.stop()


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ("7 0 3 0 0 0", "it is in batch 3 of epoch 0 and has not come to its backward pass"),
        ("7 0 2 0 0 0", "it is in batch 2 of epoch 0, and rank 0 in batch 3 of epoch 0"),
        ("7 1 3 1 0 0", "it is in batch 3 of epoch 1, and rank 0 in batch 3 of epoch 0"),
        ("7 0 3 1 0 0", None),
    ],
)
def test_a_rank_that_is_elsewhere_is_named_with_where_both_are(lines, clock, sign, said):
    """Its own loop may have ended earlier, so that it waits for this one, too."""
    lost, begin = [], clock.now

    def progress():
        watch._answered = clock.now
        watch._note(1, sign + " " * round(4 * (clock.now - begin)))
        return 0, 3, True

    watch = watching(0, 2, dist.HashStore(), progress, lost.append)
    look(watch, clock, *[0.25] * 8)
    named = [line for line in lines if "waits for rank 1" in line]
    if said is None:
        assert named == []
    else:
        assert named[0].startswith(f"rank 0 waits for rank 1: {said}, for ")
    assert lost == []


def test_a_rank_is_not_waited_for_by_one_that_computes_itself(lines):
    store = dist.HashStore()
    watch = [watching(rank, 2, store, lambda: (0, 3, False)).start() for rank in range(2)]
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.5)
    assert not of(lines, "has not come to its backward pass")
    for one in watch:
        one.stop()


def test_a_silent_rank_is_named_and_then_lost_once_and_those_that_have_not_begun_or_are_over_are_not(lines):
    store, lost = dist.HashStore(), []
    watch = watching(0, 4, store, lambda: (0, 3, False), lost.append)
    store.set("sign/2", "over")
    store.set("sign/3", "7 0 3 1 0 0")
    watch.start()
    until(lambda: of(lines, "rank 0 waits for rank 3: it shows no sign of life"))
    assert lost == []
    until(lambda: lost)
    text = lost[0].farewell(0)
    assert "rank 0 ends the training, which cannot go on: rank 3 is lost (it shows no sign of life" in text
    time.sleep(0.2)
    assert len(lost) == 1
    assert not of(lines, "for rank 1") + of(lines, "for rank 2")
    watch.stop()


def _loses(path):
    logging.getLogger("lightning_hetero").addHandler(logging.FileHandler(path))
    monitor.SETTINGS = monitor.MonitorSettings(period_s=0.02, quiet_s=0.05, lost_s=0.1)
    store = dist.HashStore()
    store.set("sign/1", "7 0 3 1 0 0")
    end = lambda failure: monitor.end_process(failure.farewell(0))  # noqa: E731
    watching(0, 2, store, lambda: (0, 3, True), end).start()
    time.sleep(30.0)


def test_who_has_lost_another_rank_ends_with_an_error_that_its_launcher_sees(tmp_path):
    process = get_context("fork").Process(target=_loses, args=(str(tmp_path / "log"),))
    process.start()
    process.join(25.0)
    assert process.exitcode == 1
    assert "rank 1 is lost" in (tmp_path / "log").read_text()


def test_a_rank_that_ends_says_so_and_is_not_missed():
    """Its silence means nothing then."""
    store = dist.HashStore()
    watch = [watching(rank, 2, store, lambda: (0, 3, True)).start() for rank in range(2)]
    for one in watch:
        one.stop()
    assert [store.get(f"sign/{rank}") for rank in range(2)] == [b"over"] * 2
    assert [one.suspects for one in watch] == ["", ""]


def test_a_rank_under_a_debugger_is_named_and_never_lost(lines):
    store, lost = dist.HashStore(), []
    store.set("sign/1", "7 0 3 1 0 1")
    store.set("sign/2", "7 0 3 1 0 0")
    watch = watching(0, 3, store, lambda: (0, 3, True), lost.append).start()
    until(lambda: lost)
    assert lost[0].rank == 2
    assert of(lines, "rank 0 waits for rank 1: it shows no sign of life")
    watch.stop()


def test_a_debugger_is_told_before_the_process_falls_silent(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setitem(sys.modules, "pydevd", sys)
    watch = watching(1, 2, store, lambda: (0, 3, True)).start()
    until(lambda: store.check(["sign/1"]))
    assert store.get("sign/1").decode().endswith(" 1")
    watch.stop()


@pytest.mark.parametrize("failure", [Failure(2, "no sign of life", lost=True), Failure(2, "ValueError: bad")])
def test_a_rank_that_handles_an_error_of_its_own_is_not_ended(lines, failure):
    """It may save a checkpoint, which takes long."""
    store, lost = dist.HashStore(), []
    watch = [watching(rank, 3, store, lambda: (0, 3, True), lost.append) for rank in range(2)]
    watch[1].spare()
    for one in watch:
        one.start()
    Bulletin(2, 3, store).report(failure)
    until(lambda: lost)
    until(lambda: store.check(["read/1/1"]))
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 2.0)
    assert lost == [failure]
    for one in watch:
        one.stop()


def test_rank_0_says_what_another_has_told_and_no_other_rank_does(lines):
    store = dist.HashStore()
    watch = [watching(rank, 3, store, lambda: (0, 3, True)).start() for rank in range(2)]
    Bulletin(2, 3, store).report(Failure(2, "ValueError: bad", trace="in user code"))
    until(lambda: store.check(["read/1/0", "read/1/1"]))
    until(lambda: of(lines, "failed first"))
    for one in watch:
        one.stop()
    assert of(lines, "failed first") == ["rank 2 failed first: ValueError: bad\nin user code"]


def test_ranks_that_begin_later_or_end_earlier_are_not_lost(tmp_path):
    assert len(set(run_ranks(_lasts_longer, 3, str(tmp_path), timeout=WALL))) == 1
    assert [line for rank in range(3) for line in said(tmp_path, rank) if "no sign" in line or "lost" in line] == []


# in this thread, by a clock that stands still between two looks


class Clock:
    """Clock of this thread; a monitor that another test may have left goes on by the real one."""

    now = 1000.0

    def monotonic(self):
        return self.now if threading.current_thread() is threading.main_thread() else time.monotonic()


@pytest.fixture
def clock(monkeypatch):
    """The time of monitors that run in this thread."""
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    return clock


def look(watch, clock, *pauses):
    """Let a monitor that has not been started look after each of these seconds."""
    left = list(pauses)

    def wait(_seconds):
        if left:
            clock.now += left.pop(0)
            return False
        return True

    watch._over.wait = wait
    watch._judge()


def test_who_hears_nothing_from_the_store_accuses_only_the_rank_that_holds_it(lines, clock):
    """Nobody knows then whether the others still leave signs of life."""
    for rank, suspects in enumerate(["", "rank 0: the store that it holds does not answer, for 1 s"]):
        lost = []
        watch = watching(rank, 2, dist.HashStore(), lambda: (0, 3, True), lost.append)
        watch._note(1 - rank, "7 0 3 1 0 0")
        look(watch, clock, *[0.25] * 4)
        assert (watch.suspects, lost) == (suspects, [])
        look(watch, clock, *[0.25] * 4)
        assert bool(lost) == bool(suspects)


@pytest.fixture
def calls(monkeypatch):
    """Whether the main thread is in a collective call, for each look at it in turn."""
    calls = deque([False])
    monkeypatch.setattr(monitor, "in_collective", lambda: calls.rotate(-1) or calls[-1])
    return calls


def waiting_for_one_that_ends(clock, me, *, another=False, waits=True, hears=True, third=None):
    """A rank that waits for another, which ends after a second; and what is lost. There may be a third one."""
    lost, begin = [], clock.now

    def progress():
        if hears:
            watch._answered = clock.now
        if clock.now == begin + 1.0:
            watch._note(1 - me, monitor.AGAIN if another else monitor.OVER)
        if third is not None:
            watch._note(2, f"{round(4 * (clock.now - begin))} {third}")
        return 0, 3, waits

    watch = watching(me, 2 if third is None else 3, dist.HashStore(), progress, lost.append)
    watch._note(1 - me, "7 0 3 1 0 0")
    return watch, lost


@pytest.mark.parametrize("me", [0, 1])
def test_a_rank_that_has_ended_is_not_waited_for_forever(lines, clock, me):
    """It has caught its error and goes on with something else, so that no connection breaks."""
    watch, lost = waiting_for_one_that_ends(clock, me)
    look(watch, clock, *[0.25] * 10)
    assert lost == [], "1.5 s are not over since its end"
    ended = "it takes no part any more, because its training has ended"
    assert lines[-1] == f"rank {me} waits for rank {1 - me}: {ended}, for 1 s."
    watch, lost = waiting_for_one_that_ends(clock, me)
    look(watch, clock, *[0.25] * 11)
    (failure,) = lost
    assert (failure.rank, failure.lost) == (1 - me, True)
    assert failure.what.startswith(ended)


@pytest.mark.parametrize("me", [0, 1])
def test_a_rank_that_has_ended_is_not_waited_for_forever_in_any_collective_call(lines, clock, calls, me):
    """Such as a sync round, if it has begun another training: both are counted from then on."""
    calls[0] = True
    watch, lost = waiting_for_one_that_ends(clock, me, another=True, waits=False)
    look(watch, clock, *[0.25] * 10)
    assert lost == []
    watch, lost = waiting_for_one_that_ends(clock, me, another=True, waits=False)
    look(watch, clock, *[0.25] * 11)
    assert [(failure.rank, failure.lost) for failure in lost] == [(1 - me, True)]


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize(
    ("third", "comes"),
    [("0 3 0 0 0", True), ("0 2 0 0 1", True), ("0 3 0 1 0", False), ("0 3 1 0 0", False), ("over", False)],
)
def test_a_rank_that_has_ended_may_have_left_a_call_to_which_another_still_comes(lines, clock, calls, me, third, comes):
    """It has sent its part of a ``gather``, and the third one has not yet; else all wait for one that never comes."""
    calls[0] = True
    watch, lost = waiting_for_one_that_ends(clock, me, another=True, waits=False, third=third)
    if third == "over":
        watch._note(2, "over")
        watch._note = lambda rank, sign, note=watch._note: rank == 2 or note(rank, sign)
    look(watch, clock, *[0.25] * 16)
    assert bool(lost) != comes
    assert third == "over" or not of(lines, "waits for rank 2"), "nobody waits for it in a backward pass"


@pytest.mark.parametrize("me", [0, 1])
def test_a_rank_that_has_ended_may_come_to_a_call_after_its_training(lines, clock, calls, me):
    """It evaluates by itself, and then meets the others at a barrier."""
    calls[0] = True
    watch, lost = waiting_for_one_that_ends(clock, me, waits=False)
    look(watch, clock, *[0.25] * 16)
    assert (lost, of(lines, "training has ended")) == ([], [])


def test_a_rank_that_does_something_else_now_and_then_does_not_wait(lines, clock, calls):
    """An evaluation by this rank alone, in which some function of torch's is called."""
    calls.extend([True] * 5)
    watch, lost = waiting_for_one_that_ends(clock, 0, another=True, waits=False)
    look(watch, clock, *[0.25] * 30)
    assert lost == []


@pytest.mark.parametrize("how", [{"waits": False}, {"hears": False}])
def test_a_rank_that_has_ended_is_not_missed_by_one_that_does_not_wait_or_hears_nothing(lines, clock, calls, how):
    """Before its end, it was silent for a second."""
    watch, lost = waiting_for_one_that_ends(clock, 0, **how)
    look(watch, clock, *[0.25] * 4)
    del lines[:]
    look(watch, clock, *[0.25] * 12)
    assert (lost, [line for line in lines if "goes on" not in line]) == ([], [])


def test_a_process_that_was_stopped_itself_accuses_nobody(lines, clock):
    lost = []
    watch = watching(1, 2, dist.HashStore(), lambda: (0, 3, True), lost.append)
    watch._note(0, "7 0 3 1 0 0")
    look(watch, clock, 0.25, 100.0, 0.25)
    assert (watch.suspects, lost, lines) == ("", [], [])
    look(watch, clock, *[0.25] * 8)
    assert [failure.rank for failure in lost] == [0]


def test_rank_0_is_not_missed_after_its_end(lines, clock):
    """Its last sign, or the end of the training, may be all that another rank has read."""
    for end in ("of the monitor", "of the training", ""):
        store, lost = dist.HashStore(), []
        watch = watching(1, 2, store, lambda: (0, 3, False), lost.append)
        watch._note(0, "over" if end == "of the monitor" else "7 0 3 0 0 0")
        if end == "of the training":
            Bulletin(0, 2, store).end()
            watch._bulletin.poll()
        watch._speak(clock.now, 1.0, (0, 3, True))
        assert ("rank 0: it is in batch 3" in watch.suspects) == (not end)
        look(watch, clock, *[0.25] * 8)
        assert ("rank 0: the store that it holds does not answer" in watch.suspects) == (not end)
        assert bool(lost) == (not end)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Failure(2, "ValueError: bad"), ["rank 2 failed first: ValueError: bad"]),
        (Failure(2, "no sign of life", lost=True), []),
        (Failure(0, "ValueError: mine"), []),
    ],
    ids=["another's", "it ends the process", "its own"],
)
def test_rank_0_says_a_failure_that_nobody_else_says_there(lines, failure, said):
    """Its own error is printed in any case, and so are the last words of its process."""
    store, lost = dist.HashStore(), []
    watch = watching(0, 3, store, lambda: (0, 3, True), lost.append)
    Bulletin(2, 3, store).report(failure)
    watch._bulletin.poll()
    watch.learn()
    assert lines == said
    assert lost == [failure] * failure.lost


def test_a_rank_has_time_to_fail_by_itself_after_another(lines, clock):
    store, lost, failure = dist.HashStore(), [], Failure(2, "ValueError: bad")
    watch = watching(0, 3, store, lambda: (0, 3, True), lost.append)
    Bulletin(2, 3, store).report(failure)
    watch._bulletin.poll()
    watch.learn()
    look(watch, clock, *[0.25] * 6)
    assert lost == [], "1.5 s are not over"
    look(watch, clock, 0.25)
    assert lost == [failure]


def test_a_monitor_whose_store_is_gone_is_cut_off():
    class Gone:
        def add(self, *given):
            raise RuntimeError("Connection was reset by peer")

    watch = watching(1, 2, Gone(), lambda: (0, 3, True))
    assert not watch.cut_off
    watch._beat()
    assert watch.cut_off
