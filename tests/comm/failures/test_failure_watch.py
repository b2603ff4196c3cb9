"""The ranks that remain of a failed job end in time and name the one that failed first, in every front end."""

import gc
import os
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_hetero.comm.failures import failure_watch
from lightning_hetero.comm.failures import rank_monitor as monitor
from lightning_hetero.comm.failures.failure import Failure
from lightning_hetero.comm.failures.failure_watch import FailureWatch
from tests.comm.failures.programs import LOOPS, again, programs

PATIENT = monitor.MonitorSettings(period_s=0.1, poll_s=0.02, lost_s=40.0, answer_s=1.0)
"""Only errors end the ranks."""
SHORT = monitor.MonitorSettings(period_s=0.1, poll_s=0.02, quiet_s=30.0, lost_s=3.0, answer_s=1.0)


def struck(folder, loop, what, rank, settings):
    """Exit codes and standard error of the three ranks of a loop, one of which suffers something."""
    left = (rank,) if what == "freeze" else ()
    return programs(folder, LOOPS[loop], lambda one: (what if one == rank else "",), settings, left=left)


def without_frames(text):
    """What a process wrote without the frames of torch's C++ code."""
    return "\n".join(line for line in text.splitlines() if "frame #" not in line)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_error_of_another_rank_is_in_the_errors_that_follow_from_it(tmp_path, loop):
    codes, texts = struck(tmp_path, loop, "raise", 1, PATIENT)
    assert codes == [1, 1, 1]
    for rank in (0, 2):
        assert "rank 1 failed first: ZeroDivisionError: a bug of the user's.\n" in texts[rank], texts[rank]
    before, _, trace = texts[0].partition("rank 1 failed first: ZeroDivisionError: a bug of the user's\n")
    assert "Error" not in without_frames(before), "rank 0 says it as soon as it knows"
    assert 'raise ZeroDivisionError("a bug' in trace
    assert "failed first" not in texts[1]


@pytest.mark.alone
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "lightning"])
def test_a_frozen_rank_ends_the_others_which_name_it(tmp_path, loop):
    codes, texts = struck(tmp_path, loop, "freeze", 1, SHORT)
    assert codes == [1, None, 1]
    for rank in (0, 2):
        assert f"rank {rank} ends the training, which cannot go on: rank 1 is lost (it shows no sign" in texts[rank]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("odd", "first"),
    [(1, ("raise", 2)), (1, ("", 1)), (0, ("", 1))],
    ids=["in a pass", "between passes", "rank 0 between passes"],
)
def test_a_rank_that_begins_another_training_ends_the_others_which_name_it(tmp_path, odd, first):
    """It has caught its error, or made fewer passes; its connections stay, and so the others would wait for long.

    They do so in a backward pass, or in a sync round.
    """
    codes, texts = programs(tmp_path, again, lambda rank: first if rank == odd else ("", 2), SHORT, left=(odd,))
    for rank in {0, 1, 2} - {odd}:
        assert codes[rank] == 1
        ended = f"rank {odd} is lost (it takes no part any more, because its training has ended"
        assert f"rank {rank} ends the training, which cannot go on: {ended}" in texts[rank]


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("raise", 0, "rank 0 failed first: ZeroDivisionError: a bug of the user's."),
        ("kill", 0, "rank 0 failed first: its process is gone, and the job's store with it."),
        ("kill", 1, "rank 1 failed first: it does not answer, because its process has ended without a word"),
        ("leave", 1, "rank 1 failed first: it takes no part any more, because its training has ended."),
    ],
)
def test_who_failed_first_is_named(tmp_path, what, rank, said):
    codes, texts = struck(tmp_path, "own_loop", what, rank, PATIENT)
    assert codes[rank] == {"raise": 1, "kill": -9, "leave": 3}[what]
    for one in {0, 1, 2} - {rank}:
        assert codes[one] == 1
        assert said in without_frames(texts[one])


# in one process


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(monitor, "SETTINGS", monitor.MonitorSettings(period_s=0.02, poll_s=0.01, answer_s=0.3))


@pytest.fixture
def ended(monkeypatch):
    """What processes say that are ended."""
    said = []
    monkeypatch.setattr(failure_watch, "end_process", said.append)
    return said


class Owner:
    position = 0, 3, False


def watches(world_size=2, store=None, timeout=None):
    """Ranks in one process; the watches end with their owners."""
    store, owners = store or dist.HashStore(), [Owner() for _ in range(world_size)]
    found = [FailureWatch(rank, world_size, timeout) for rank in range(world_size)]
    for watch, owner in zip(found, owners, strict=True):
        watch.begin(lambda: store, owner, lambda own: own.position)
    return found, owners


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def connection_lost():
    return RuntimeError("Connection closed by peer")


def test_an_error_of_the_users_is_reported_as_it_is_and_those_of_connections_get_its_rank():
    (one, other), _owners = watches()
    first, second, third = ValueError("bad batch"), connection_lost(), KeyError("not of a connection")
    other.explain(first)
    one.explain(second)
    one.explain(third)
    assert str(first) == "bad batch"
    assert str(second) == "Connection closed by peer\nrank 1 failed first: ValueError: bad batch."
    assert third.args == ("not of a connection",)
    for watch in (one, other):
        watch.close()


def test_an_error_is_explained_once():
    (one, other), _owners = watches()
    other.explain(ValueError("bad batch"))
    error = connection_lost()
    for _ in range(3):
        one.explain(error)
    assert str(error).count("failed first") == 1
    for watch in (one, other):
        watch.close()


def test_an_error_of_a_connection_that_nobody_else_has_caused_is_the_first():
    (one, other), _owners = watches()
    error, later = connection_lost(), connection_lost()
    other.explain(error)
    one.explain(later)
    assert str(error) == "Connection closed by peer"
    assert str(later).endswith("rank 1 failed first: RuntimeError: Connection closed by peer.")
    for watch in (one, other):
        watch.close()


def test_a_backward_pass_explains_errors_of_connections_only():
    """Another error may be caught by the user, who goes on."""
    (one, other), _owners = watches()
    mine, lost, error = ValueError("mine"), connection_lost(), connection_lost()
    other.explain_connection(mine)
    one.explain_connection(lost)
    assert (str(mine), str(lost)) == ("mine", "Connection closed by peer")
    other.explain(error)
    assert "rank 0 failed first: RuntimeError" in str(error)
    for watch in (one, other):
        watch.close()


def test_a_loop_that_ends_inside_a_handler_has_failed():
    (one, other), _owners = watches()
    try:
        raise ValueError("bad batch")
    except ValueError:
        other.end()
    error = connection_lost()
    one.explain(error)
    assert "rank 1 failed first: ValueError" in str(error)
    one.close()


@pytest.mark.parametrize("error", [None, SystemExit(0), StopIteration()])
def test_a_loop_that_ends_otherwise_has_not_failed(error):
    (one, other), _owners = watches()
    other.end(error)
    later = connection_lost()
    one.explain(later)
    assert "rank 1 failed first: it takes no part any more" in str(later)
    one.close()


def test_a_rank_that_does_not_fail_by_itself_is_ended(ended, monkeypatch):
    monkeypatch.setattr(monitor, "SETTINGS", monitor.MonitorSettings(period_s=0.02, poll_s=0.01, lost_s=0.3))
    (one, other), _owners = watches()
    other.explain(ValueError("bad batch"))
    until(lambda: ended)
    text = "rank 0 ends the training, which cannot go on: rank 1 failed first: ValueError: bad batch. Look"
    assert ended[0].startswith(text)
    for watch in (one, other):
        watch.close()
    assert len(ended) == 1, "the rank that handles its own error is not"


def test_the_hook_of_uncaught_errors_is_chained_and_put_back(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: printed.append(given))
    before = sys.excepthook
    (one, other), _owners = watches()
    error, follows = ValueError("bad batch"), connection_lost()
    other_hook = other._uncaught
    other_hook(ValueError, error, None)
    one._uncaught(RuntimeError, follows, None)
    assert [value for _, value, _ in printed] == [error, follows]
    assert str(follows).endswith("rank 1 failed first: ValueError: bad batch.")
    for watch in (other, one):  # the one that has hooked last goes first
        watch.close()
    assert sys.excepthook is before


def test_a_hook_that_somebody_has_set_since_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (watch, _), _owners = watches()
    mine = sys.excepthook = lambda *given: None
    watch.close()
    assert sys.excepthook is mine


def test_an_error_that_another_hook_has_kept_to_itself_is_seen_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (one, other), owners = watches()
    monkeypatch.setattr(sys, "last_value", ValueError("bad batch"), raising=False)
    del owners[1]
    until(lambda: other._bulletin is None)
    error = connection_lost()
    one.explain(error)
    assert "rank 1 failed first: ValueError: bad batch" in str(error)
    for watch in (one, other):
        watch.close()


def test_an_error_of_before_is_none_of_this_run(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("of before"), raising=False)
    (one, other), owners = watches()
    bulletin = one._bulletin
    owners.clear()
    until(lambda: (one._bulletin, other._bulletin) == (None, None))
    assert bulletin.known() is None


def test_a_watch_keeps_neither_its_owner_nor_threads_nor_an_error():
    class KeptError(Exception):
        pass

    threads = set(threading.enumerate())
    found, owners = watches()
    assert len(set(threading.enumerate()) - threads) >= 4
    error = KeptError()
    gone = weakref.ref(error)
    found[0].explain(error)
    del error
    owners.clear()
    until(lambda: set(threading.enumerate()) <= threads)
    gc.collect()
    assert gone() is None


def test_whoever_frees_the_owner_of_a_watch_does_not_wait_for_its_end(monkeypatch):
    """Garbage may be collected in any call, also in one that the threads of the watch need to end."""
    ends, leave = [], FailureWatch.close

    def close(watch):
        ends.append(threading.current_thread())
        leave(watch)

    monkeypatch.setattr(FailureWatch, "close", close)
    found, owners = watches()
    owners.clear()
    assert threading.main_thread() not in ends
    until(lambda: all(watch._bulletin is None for watch in found))
    assert ends
    assert threading.main_thread() not in ends


def test_abandoned_watches_end_before_another_begins(monkeypatch):
    """Its rank 0 removes what they have in the store; the monitor's threads may be about to look."""
    found, owners = watches()
    for watch in found:
        monkeypatch.setattr(watch._monitor, "_progress", lambda: (0, 0, False))
    del owners[0]
    failure_watch.end_abandoned_watches()
    assert [watch._bulletin is None for watch in found] == [True, False]
    found[1].close()
    failure_watch.end_abandoned_watches()


def test_watches_whose_owners_wait_to_be_collected_end_before_another_begins(monkeypatch):
    found, owners = watches()
    for watch in found:
        monkeypatch.setattr(watch._monitor, "_progress", lambda: (0, 0, False))
    owners[0].itself = owners[0]
    gc.disable()
    try:
        del owners[0]
        assert found[0]._bulletin is not None
        failure_watch.end_abandoned_watches()
        assert [watch._bulletin is None for watch in found] == [True, False]
    finally:
        gc.enable()
    found[1].close()


def test_nothing_is_collected_where_no_watch_of_this_process_is_open(monkeypatch):
    collected = []
    monkeypatch.setattr(failure_watch.gc, "collect", lambda: collected.append("all"))
    monkeypatch.setattr(failure_watch, "_open", set())
    failure_watch.end_abandoned_watches()
    found, owners = watches()
    monkeypatch.setattr(failure_watch.os, "getpid", lambda: -1)
    owners.clear()
    failure_watch.end_abandoned_watches()
    monkeypatch.undo()
    assert collected == []
    for watch in found:
        watch.close()


@pytest.fixture
def _nothing_left(monkeypatch):
    """No watches but those of the test have ended."""
    monkeypatch.setattr(failure_watch, "_left", set())


@pytest.mark.usefixtures("_nothing_left")
def test_ranks_that_are_still_in_a_training_hear_that_another_has_begun():
    store, threads = dist.HashStore(), set(threading.enumerate())
    (one, other), _owners = watches(store=store)
    begun = other._bulletin.has_begun_another
    one.close()
    assert not begun(0)
    failure_watch.end_abandoned_watches()
    assert begun(0)
    assert not begun(1), "it has not ended"
    other.close()
    for name in set(store.list_keys()):
        store.delete_key(name)
    failure_watch.end_abandoned_watches()
    assert set(store.list_keys()) == set(), "notes that were deleted do not come back"
    assert failure_watch._left == set()
    until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.usefixtures("_nothing_left")
def test_a_watch_that_another_thread_ends_is_left_for_another_training(monkeypatch):
    """The thread of its monitor, which has just noticed that its owner is gone."""
    (one, other), _owners = watches()
    leave, goes_on = one._leave, threading.Event()
    monkeypatch.setattr(one, "_leave", lambda bulletin: (goes_on.wait(30), leave(bulletin)))
    thread = threading.Thread(target=one.close)
    thread.start()
    until(lambda: one._bulletin is None)
    failure_watch.end_abandoned_watches()
    goes_on.set()
    thread.join()
    assert other._bulletin.has_begun_another(0)
    other.close()


@pytest.mark.usefixtures("_nothing_left")
def test_a_training_that_goes_on_is_not_left_for_another():
    (one, other), _owners = watches()
    one.close()
    other.close()
    for watch in (one, other):
        watch.open()
    bulletin = one._bulletin
    failure_watch.end_abandoned_watches()
    assert not any(map(bulletin.has_begun_another, range(2)))
    for watch in (one, other):
        watch.close()


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("how", ["gone", "forked"])
def test_another_training_begins_although_nobody_can_be_told(monkeypatch, how):
    store = dist.HashStore()
    (one, other), _owners = watches(store=store)
    one.close()
    if how == "gone":
        one._last._store = Broken(store, "gone")
        one._last._store.broken.set()
    else:
        monkeypatch.setattr(failure_watch.os, "getpid", lambda: -1)
    failure_watch.end_abandoned_watches()
    assert not other._bulletin.has_begun_another(0)
    monkeypatch.undo()
    other.close()


def test_a_watch_may_end_by_itself_while_others_are_ended(monkeypatch):
    """Its own threads notice that its owner is gone."""
    found, _owners = watches(3)

    def ends(watch):
        failure_watch._open.discard(watch)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(FailureWatch, "of_this_process", property(ends))
        failure_watch.end_abandoned_watches()
    for watch in found:
        watch.close()


def test_notes_of_a_run_are_deleted_when_all_ranks_have_left_it(monkeypatch):
    """Another training may begin before that. A run is looked for until then, and not any more."""
    monkeypatch.setattr(failure_watch, "_noted", set())
    store = dist.HashStore()
    first, _owners = watches(store=store)
    second, _others = watches(store=store)
    first[1].close()
    second[0].close()
    kept = []
    for watch in (first[0], second[1]):
        third, _more = watches(store=store)
        kept.append(sorted({key.split("/")[2] for key in store.list_keys() if key.count("/") > 2}))
        for one in (*third, watch):
            one.close()
    last, _more = watches(store=store)
    kept.append(sorted({key.split("/")[2] for key in store.list_keys() if key.count("/") > 2}))
    for one in last:
        one.close()
    assert kept == [["1", "2", "3"], ["2", "4"], ["5"]]
    assert failure_watch._noted == {5}


def test_a_watch_ends_with_the_process(monkeypatch):
    handlers = []
    monkeypatch.setattr(failure_watch.atexit, "register", handlers.append)
    monkeypatch.setattr(failure_watch.atexit, "unregister", handlers.remove)
    (one, other), _owners = watches()
    bulletin = one._bulletin
    assert len(handlers) == 2
    handlers[1]()
    assert other._bulletin is None
    assert not bulletin.remains(1)
    one.close()
    assert handlers == []


def test_a_run_after_another_knows_nothing_of_its_failure():
    found, _owners = watches()
    found[0].explain(ValueError("bad batch"))
    for watch in found:
        watch.close()
    for watch in found:
        watch.open()
        watch.open()
    error = connection_lost()
    found[1].explain(error)
    assert str(error) == "Connection closed by peer"
    for watch in found:
        watch.close()


def test_what_a_run_has_noted_is_removed_before_another_begins():
    store = dist.HashStore()
    found, _owners = watches(store=store)
    prefix = "lightning_hetero/failures/1/"
    assert any(key.startswith(prefix) for key in store.list_keys())
    for watch in found:
        watch.close()
    for watch in found:
        watch.open()
    assert not [key for key in store.list_keys() if key.startswith(prefix)]
    for watch in found:
        watch.close()


def test_a_watch_that_is_open_is_not_opened_again():
    found, _owners = watches()
    before = [(watch._bulletin, watch._monitor) for watch in found]
    for watch in found:
        watch.open()
    assert [(watch._bulletin, watch._monitor) for watch in found] == before
    for watch in found:
        watch.close()


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_rank_0_says_that_its_training_is_over_only_if_nobody_has_failed(monkeypatch, fails):
    (one, other), _owners = watches()
    monkeypatch.setattr(one._bulletin, "poll", lambda: False)  # it has not read yet what the other has told
    if fails == 1:
        other.explain(ValueError("bad batch"))
    one.end(ValueError("bad batch") if fails == 0 else None)
    other._bulletin.poll()
    assert other._bulletin.over == (fails is None)
    other.close()


@pytest.mark.parametrize(("launcher", "waits"), [("", [failure_watch.SETTLE_SECONDS] * 2), ("True", [])])
def test_rank_0_waits_until_others_have_read_only_if_the_store_ends_with_it(monkeypatch, launcher, waits):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    found, _owners = watches()
    waited = []
    for watch in found:
        monkeypatch.setattr(watch._bulletin, "settle", waited.append)
    for watch in found:
        watch.explain(ValueError("bad batch"))
        watch.close()
    assert waited == waits


def test_rank_0_says_what_another_has_told_before_its_own_error_is_printed(monkeypatch):
    """Its monitor may not have come to it."""
    said = []
    monkeypatch.setattr(monitor.log, "error", lambda text, *given: said.append(text % given))
    (one, other), _owners = watches()
    one._monitor.stop()
    other.explain(ValueError("bad batch"))
    assert said == []
    one.explain(connection_lost())
    assert [text.splitlines()[0] for text in said] == ["rank 1 failed first: ValueError: bad batch"]
    for watch in (one, other):
        watch.close()


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_forked_process_is_no_rank(tmp_path, how):
    (one, other), _owners = watches(store=dist.FileStore(str(tmp_path / "store"), 2))
    pid = os.fork()
    if pid == 0:
        if how == "ends":
            one._at_end()
        else:
            one._earlier = lambda *given: None
            one._uncaught(ValueError, ValueError("of a child"), None)
        os._exit(0)
    os.waitpid(pid, 0)
    assert other._bulletin.known() is None
    assert other._bulletin.remains(0)
    for watch in (one, other):
        watch.close()


class Broken:
    """A store whose process is gone, or which does not answer."""

    def __init__(self, store, how):
        self._store, self.how, self.broken = store, how, threading.Event()

    def clone(self):
        return self

    def __getattr__(self, name):
        if self.broken.is_set():
            if self.how == "stopped":
                time.sleep(60.0)
            raise RuntimeError("Connection was reset by peer")
        return getattr(self._store, name)


def test_all_ranks_that_do_not_answer_are_named():
    found, _owners = watches(4)
    for watch in found[1:3]:
        watch._monitor.stop()
    error = connection_lost()
    found[0].explain(error)
    what = f"rank 1 failed first: {failure_watch.NO_ANSWER}, and neither do ranks [2]."
    assert str(error).endswith(what)
    for watch in found:
        watch.close()


@pytest.mark.parametrize(
    ("how", "launcher", "over", "said"),
    [
        ("gone", "", False, "rank 0 failed first: its process is gone, and the job's store with it."),
        ("gone", "", True, "rank 0 failed first: it takes no part any more, because its training has ended."),
        ("stopped", "", False, "rank 0 failed first: the job's store, which it holds, does not answer."),
        ("gone", "True", False, "the launcher failed first: its process is gone, and the job's store with it."),
    ],
)
def test_rank_0_is_named_if_the_store_is_gone_with_it(monkeypatch, how, launcher, over, said):
    assert said_without_store(monkeypatch, 1, how, launcher, over).endswith(said)


def test_rank_0_names_only_the_launcher_if_the_store_is_gone(monkeypatch):
    assert said_without_store(monkeypatch, 0, "gone", "") == "Connection closed by peer"
    said = "Connection closed by peer\nthe launcher failed first: its process is gone, and the job's store with it."
    assert said_without_store(monkeypatch, 0, "gone", "True") == said


def said_without_store(monkeypatch, rank, how, launcher, over=False):
    """The error of a lost connection, as it is explained without the store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    monkeypatch.setattr(failure_watch, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(failure_watch.dist, "PrefixStore", lambda _, store: store)
    store, owner = Broken(dist.HashStore(), how), Owner()
    watch = FailureWatch(rank, 2)
    watch.begin(lambda: store, owner, lambda own: own.position)
    watch._bulletin.over = over
    store.broken.set()
    error = connection_lost()
    watch.explain(error)
    watch.close()
    return str(error)


def test_a_lost_child_is_killed_and_others_are_told(ended, monkeypatch):
    """A frozen process that rank 0 has started itself would stay for ever."""
    (one, other), _owners = watches()
    pid = os.fork()
    if pid == 0:
        time.sleep(60.0)
        os._exit(0)
    one._bulletin._store.set("process/1", f"{pid} {os.uname().nodename}")
    one._end(Failure(1, "it shows no sign of life, for 60 s", lost=True))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    until(lambda: {text.split(" ends")[0] for text in ended} == {"rank 0", "rank 1"})
    assert ended[0].startswith("rank 0 ends the training, which cannot go on: rank 1 is lost (it shows no sign")
    for watch in (one, other):
        watch.close()


@pytest.mark.parametrize("launcher", ["True", ""])
def test_others_are_told_that_rank_0_is_lost_if_the_store_outlives_it(ended, monkeypatch, launcher):
    """Else the store does not answer either."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    (one, other), _owners = watches()
    failure = Failure(0, "it shows no sign of life, for 60 s", lost=True)
    other._end(failure)
    assert one._bulletin.known() == (failure if launcher else None)
    assert "rank 1 ends the training, which cannot go on: rank 0 is lost (it shows no sign" in "".join(ended)
    for watch in (one, other):
        watch.close()


def test_a_timeout_of_the_users_is_the_longest_silence():
    settings = monitor.MonitorSettings()
    assert settings.within(None) is settings
    assert settings.within(timedelta(minutes=30)) is settings
    short = settings.within(timedelta(seconds=9))
    assert (short.lost_s, short.period_s) == (12.0, 1.0)


def test_one_process_watches_nobody():
    watch = FailureWatch(0, 1)
    threads = threading.active_count()
    owner = Owner()
    watch.begin(dist.HashStore, owner, lambda own: own.position)
    assert threading.active_count() == threads
    watch.end(ValueError("mine"))
