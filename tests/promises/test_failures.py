"""Ranks that fail, stand still, leave or begin something else: what the others say, and when they end.

All ranks are in one process, by a clock that is counted, and tell each other by a store in memory.
"""

import logging
import os
import re
import signal
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_hetero.comm.failures.failure import of_connection
from lightning_hetero.comm.failures.failure_watch import FailureWatch, end_abandoned_watches
from tests.promises.virtual import VirtualTime

COMPUTES, PASS = (0, 3, False), (0, 3, True)


def named(text):
    """Who is named in a text, in this order."""
    return re.findall(r"rank \d+|the launcher", text)


class Owner:
    """Of a watch: where its rank is, as epoch, batch and whether in a backward pass."""

    def __init__(self, place):
        self.place = place


def _asking(name):
    return lambda self, *args: getattr(self._asked(), name)(*args)


class JobStore(dist.Store):
    """A store in memory, which may be gone, or not answer."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.values, self.state = clock, dist.HashStore(), ""

    def _asked(self):
        self.clock.wait(lambda: self.state != "stopped")
        if self.state == "gone":
            raise RuntimeError("Connection was reset by peer")
        return self.values

    def clone(self):
        return self

    get, set, add, check, compare_set, delete_key, list_keys = map(
        _asking, ("get", "set", "add", "check", "compare_set", "delete_key", "list_keys")
    )


class Job:
    """Ranks of a job, each with its watch, as if in a process of its own."""

    def __init__(self, clock, world_size=3, place=COMPUTES, timeout=None):
        self.clock, self.store, self.lines = clock, JobStore(clock), []
        self.owners = [Owner(place) for _ in range(world_size)]
        timeout = timeout and timedelta(seconds=timeout)
        self.watches = [FailureWatch(rank, world_size, timeout) for rank in range(world_size)]
        for rank in range(world_size):
            self.begin(rank)

    def begin(self, rank):
        self.clock.owner = rank
        self.watches[rank].begin(lambda: self.store, self.owners[rank], lambda own: own.place)
        self.clock.owner = None

    def errors(self, rank, error):
        """The text of an error of a rank, as the rank explains it."""
        self.clock.owner = rank
        self.watches[rank].explain(error)
        self.clock.owner = None
        return str(error)

    def lost(self, rank):
        """What an error of this rank says that follows from another's."""
        return self.errors(rank, RuntimeError("Connection closed by peer")).partition("\n")[2]

    def close(self):
        for watch in self.watches:
            watch.close()

    def said(self, *ranks):
        """The lines in which these ranks are named first."""
        return [line for line in self.lines if named(line)[: len(ranks)] == [f"rank {rank}" for rank in ranks]]


@pytest.fixture
def clock():
    with VirtualTime() as clock:
        yield clock


@pytest.fixture
def job(clock, monkeypatch):
    """Makes a job; its watches end, and all that hangs on them."""
    made, logger, handler = [], logging.getLogger("lightning_hetero"), logging.Handler()
    handler.emit = lambda record: made[-1].lines.append(record.getMessage())
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def make(*args, **kwargs):
        made.append(Job(clock, *args, **kwargs))
        return made[-1]

    yield make
    clock.frozen.clear()
    for one in made:
        one.store.state = ""
        one.close()
    logger.removeHandler(handler)


# who failed first


def test_the_first_failure_is_in_the_errors_that_follow_from_it_and_in_no_other(job):
    ranks = job()
    assert ranks.errors(1, ValueError("bad batch")) == "bad batch"
    follows = RuntimeError("Connection closed by peer")
    for _ in range(3):
        first, cause = ranks.errors(0, follows).splitlines()
        assert first == "Connection closed by peer"
        assert named(cause) == ["rank 1"]
        assert "ValueError: bad batch" in cause
    assert ranks.errors(0, KeyError("not of a connection")) == "'not of a connection'"
    assert ranks.lost(2) == cause


def test_rank_0_says_the_failure_of_another_rank_with_its_traceback(job):
    """At the latest before its own error is printed."""
    ranks = job()
    try:
        raise ZeroDivisionError("a bug of the user's")
    except ZeroDivisionError as error:
        ranks.errors(1, error)
    ranks.lost(0)
    (line,) = ranks.said(1)
    assert "raise ZeroDivisionError" in line


def test_a_lost_connection_that_nobody_else_has_caused_is_the_first_failure(job):
    ranks = job()
    assert ranks.lost(1) == ""
    assert named(ranks.lost(2)) == ["rank 1"]


@pytest.mark.parametrize(("silent", "others"), [(set(), ""), ({1}, ""), ({1, 2}, "[2]")], ids=str)
def test_ranks_that_do_not_answer_are_named_after_three_seconds(job, silent, others):
    ranks = job(4)
    ranks.clock.pass_(1.0)
    ranks.clock.frozen = silent
    text = ranks.lost(3)
    assert named(text) == ["rank 1"] * bool(silent)
    assert ("[2]" in text) == bool(others)
    least, most = (4.0, 6.0) if silent else (1.0, 2.0)
    assert least <= ranks.clock.now - 1000.0 < most


@pytest.mark.parametrize("error", [None, SystemExit(0), StopIteration(), GeneratorExit(), SystemExit(3)], ids=repr)
def test_a_loop_that_ends_has_not_failed_and_its_rank_takes_no_part_any_more(job, error):
    ranks = job(2)
    ranks.watches[1].end(error)
    text = ranks.lost(0)
    assert named(text) == ["rank 1"]
    assert ("SystemExit: 3" in text) == (getattr(error, "code", 0) == 3)


def test_in_a_backward_pass_only_lost_connections_are_failures(job):
    """The user may catch another error, and go on."""
    ranks, lost = job(2), RuntimeError("Connection closed by peer")
    ranks.watches[1].explain_connection(ValueError("mine"))
    ranks.watches[0].explain_connection(lost)
    assert str(lost) == "Connection closed by peer"
    text = ranks.lost(1)
    assert named(text) == ["rank 0"]
    assert "RuntimeError" in text


@pytest.mark.parametrize(
    ("rank", "state", "launcher", "said"),
    [
        (1, "gone", "", ["rank 0"]),
        (1, "stopped", "", ["rank 0"]),
        (1, "gone", "True", ["the launcher"]),
        (0, "gone", "", []),
        (0, "gone", "True", ["the launcher"]),
    ],
)
def test_who_holds_the_store_is_named_when_it_is_gone(job, monkeypatch, rank, state, launcher, said):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    ranks = job(2)
    ranks.clock.pass_(1.0)
    ranks.store.state = state
    assert named(ranks.lost(rank)) == said
    assert ranks.clock.now < 1015.0, "nobody waits for ever"


# who stands still


@pytest.mark.parametrize(
    ("timeout", "warned", "ended", "place", "still"),
    [
        (None, 30.0, 60.0, COMPUTES, 0),
        (1800, 30.0, 60.0, PASS, 1),
        (9, 6.0, 12.0, PASS, 0),
        (9, 6.0, 12.0, COMPUTES, 1),
    ],
)
def test_a_rank_that_is_stopped_is_named_and_ends_the_others(job, still, timeout, warned, ended, place):
    ranks = job(timeout=timeout, place=place)
    ranks.clock.pass_(20.0)
    ranks.clock.frozen = {still}
    ranks.clock.pass_(warned - 1.0)
    assert ranks.lines == []
    ranks.clock.pass_(7.0)
    watchers = {0: [1, 2], 1: [0]}[still]
    assert sorted(map(named, ranks.lines)) == [[f"rank {one}", f"rank {still}"] for one in watchers]
    assert ranks.clock.ended == {}
    ranks.clock.pass_(ended - warned + 6.0)
    assert ranks.clock.ended == dict.fromkeys({0, 1, 2} - {still}, 1)
    for one in {0, 1, 2} - {still}:
        assert len(ranks.said(one, still)) == 1 + (one in watchers), "why it ends"


def test_a_rank_that_goes_on_is_said_to_and_nobody_ends(job):
    ranks = job()
    ranks.clock.pass_(20.0)
    ranks.clock.frozen = {1}
    ranks.clock.pass_(50.0)
    ranks.clock.frozen = set()
    ranks.clock.pass_(100.0)
    assert list(map(named, ranks.lines)) == [["rank 0", "rank 1"], ["rank 1"]]
    assert ranks.clock.ended == {}


def test_an_error_says_who_was_waited_for(job):
    ranks = job()
    ranks.clock.pass_(20.0)
    ranks.clock.frozen = {1}
    ranks.clock.pass_(40.0)
    assert set(named(ranks.errors(0, RuntimeError("Timed out waiting 4000ms for recv")))) == {"rank 1"}


def test_a_job_that_was_stopped_as_a_whole_accuses_nobody(job):
    """Nor does a single process that was stopped itself."""
    ranks = job(place=PASS)
    for frozen, seconds in (({0, 1, 2}, 100.0), ({0, 2}, 20.0), ({2}, 25.0)):
        ranks.clock.pass_(20.0)
        ranks.clock.frozen = frozen
        ranks.clock.pass_(seconds)
        ranks.clock.frozen = set()
    ranks.clock.pass_(20.0)
    assert (ranks.lines, ranks.clock.ended) == ([], {})


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ((0, 3, False), "batch 3 of epoch 0"),
        ((0, 2, False), "batch 2 of epoch 0"),
        ((1, 3, True), "batch 3 of epoch 1"),
        ((0, 3, True), None),
    ],
)
def test_a_rank_that_is_elsewhere_is_named_ever_more_seldom_and_never_lost(job, place, said):
    ranks = job(2, PASS)
    ranks.owners[1].place = place
    ranks.clock.pass_(50.0)
    assert ranks.lines == []
    ranks.clock.pass_(550.0)
    assert len(ranks.said(0, 1)) == (4 if said else 0), "after one, two, four and eight minutes"
    assert all(said in line for line in ranks.said(0, 1))
    ranks.owners[1].place = PASS
    ranks.clock.pass_(20.0)
    assert len(ranks.said(1)) - len(ranks.said(1, 0)) == (said is not None)
    assert ranks.clock.ended == {}


def test_a_rank_under_a_debugger_is_named_and_never_lost(job, monkeypatch):
    ranks = job()
    ranks.clock.frozen = {0, 2}
    monkeypatch.setitem(sys.modules, "pydevd", sys)
    ranks.clock.pass_(6.0)
    monkeypatch.delitem(sys.modules, "pydevd")
    ranks.clock.frozen = {1}
    ranks.clock.pass_(300.0)
    assert ranks.said(0, 1)
    assert ranks.clock.ended == {}


# who has ended, or has not begun


def test_ranks_that_begin_later_or_have_ended_are_not_missed_by_those_that_compute(job):
    ranks = job()
    for rank in (2, 0):
        ranks.clock.pass_(100.0)
        ranks.watches[rank].close()
    ranks.clock.pass_(200.0)
    assert (ranks.lines, ranks.clock.ended) == ([], {})


@pytest.mark.parametrize(("me", "other"), [(0, 1), (1, 0)])
def test_a_rank_that_has_ended_is_not_waited_for_for_ever_in_a_backward_pass(job, me, other):
    """It has caught its error, and goes on with something else, so that no connection breaks."""
    ranks = job(2)
    ranks.clock.pass_(20.0)
    ranks.owners[me].place = PASS
    ranks.watches[other].close()
    ranks.clock.pass_(50.0)
    assert ranks.lines == ranks.said(me, other)
    assert len(ranks.lines) == 1
    assert ranks.clock.ended == {}
    ranks.clock.pass_(20.0)
    assert ranks.clock.ended == {me: 1}
    assert len(ranks.said(me, other)) == 2


# how the others end


def test_a_rank_that_does_not_fail_by_itself_is_ended_after_a_minute_and_the_one_that_fails_is_not(job):
    """That one handles its error, and may save a checkpoint, which takes long."""
    ranks = job()
    ranks.errors(1, ValueError("bad batch"))
    ranks.clock.pass_(58.0)
    assert ranks.clock.ended == {}
    ranks.clock.pass_(10.0)
    assert ranks.clock.ended == {0: 1, 2: 1}
    assert any("ValueError: bad batch" in line for line in ranks.said(0, 1))


def test_a_stopped_process_is_killed_by_the_rank_that_has_started_it(job):
    """Nobody else would end it."""
    child = os.fork()
    if child == 0:
        signal.pause()
    with mock.patch.object(os, "getpid", return_value=child):
        ranks = job(2)
        ranks.clock.pass_(20.0)
        ranks.clock.frozen = {1}
        ranks.clock.pass_(80.0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert ranks.clock.ended == {0: 1}


# the end of a watch


def test_the_hook_of_uncaught_errors_is_chained_and_put_back(job, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", mine := lambda *given: printed.append(given[1]))
    ranks = job(2)
    error = ValueError("bad batch")
    sys.excepthook(ValueError, error, None)
    assert printed == [error]
    assert "ValueError: bad batch" in ranks.lost(0) + ranks.lost(1)
    for watch in reversed(ranks.watches):
        watch.close()
    assert sys.excepthook is mine


def test_a_forked_process_is_no_rank(tmp_path):
    """Neither how it ends nor a training of its own touches the ranks of its parent, or the stores that they hold."""
    ends, store = [], dist.FileStore(str(tmp_path / "store"), 2)
    with mock.patch("atexit.register", ends.append), mock.patch.object(sys, "excepthook"):
        owners = [Owner(COMPUTES) for _ in range(2)]
        watches = [FailureWatch(rank, 2) for rank in range(2)]
        for watch, owner in zip(watches, owners, strict=True):
            watch.begin(lambda: store, owner, lambda own: own.place)
        if (child := os.fork()) == 0:
            for end in ends:
                end()
            sys.excepthook(ValueError, ValueError("of a child"), None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        error = RuntimeError("Connection closed by peer")
        watches[0].explain(error)
        for watch in watches:
            watch.close()
    assert str(error) == "Connection closed by peer", "both ranks answer, and nobody has failed before"
    written = (tmp_path / "store").read_bytes()
    if (child := os.fork()) == 0:
        end_abandoned_watches()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "store").read_bytes() == written, "a store that is freed signs off"


def test_a_training_that_goes_on_knows_nothing_of_the_failure_before_and_of_no_other_training(job):
    ranks = job(2)
    ranks.errors(0, ValueError("bad batch"))
    ranks.close()
    for rank in range(2):
        ranks.clock.owner = rank
        for _ in range(2):
            ranks.watches[rank].open()
    ranks.clock.owner = None
    end_abandoned_watches()
    assert ranks.lost(1) == ""


# parts


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (ConnectionResetError("reset"), True),
        (ValueError("the connection of the user's own database"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (None, False),
    ],
)
def test_which_errors_may_follow_from_those_of_other_ranks(error, follows):
    assert of_connection(error) is follows
    led = ValueError("of the user")
    led.__cause__, late = error, KeyError("late")
    late.__context__ = led
    assert of_connection(late) is follows
