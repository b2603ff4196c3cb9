"""Watch over the ranks of a job, one for each engine, whatever runs its training loop.

It owns the monitor of the ranks, tells the others of an exception that ends this rank, and says in the errors of lost
connections which rank failed first.
"""

import atexit
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.failures import rank_monitor
from lightning_hetero.comm.failures.bulletin import Bulletin, launcher_holds_store
from lightning_hetero.comm.failures.failure import Failure, is_ordinary, of_connection
from lightning_hetero.comm.failures.rank_monitor import ENDED, RankMonitor, end_process
from lightning_hetero.comm.failures.store_calls import StoreCalls
from lightning_hetero.comm.failures.store_keys import forget_keys

__all__ = ["FailureWatch", "end_abandoned_watches"]

SYSTEM: Any = sys
"""The module, of which a hook is replaced for a while."""
SETTLE_SECONDS = 1.0
"""Longest time for which the process with the job's store stays, so that the others read why it ends."""

NO_STORE = (RuntimeError, ValueError, TimeoutError)
"""Errors of a store that is gone or does not answer."""
NO_ANSWER = "it does not answer, because its process has ended without a word, or is stopped"
GONE = "its process is gone, and the job's store with it"

Progress = tuple[int, int, bool]

_open: "set[FailureWatch]" = set()
_left: "set[FailureWatch]" = set()
"""Watches that have ended since the newest training began."""
_noted: set[int] = set()
"""Runs whose notes rank 0 has to delete when all ranks have left them."""


def end_abandoned_watches() -> None:
    """End the watches whose owners are gone, or only wait to be collected; say in all that have ended what comes next.

    To be called before another watch begins, which deletes what all ranks have left in the store.
    """
    own = [watch for watch in tuple(_open) if watch.of_this_process]  # their own threads may end them, too
    if own:
        gc.collect()
    for watch in own:
        watch.end_if_abandoned()
    for watch in [watch for watch in _left if watch.of_this_process]:  # a fork cannot even end its parent's stores
        _left.discard(watch)
        watch.begin_another()


def _bulletin_of(store: dist.Store, run: int, rank: int, world_size: int) -> Bulletin:
    """Return the notes of a run, the first of which has number 1."""
    return Bulletin(rank, world_size, dist.PrefixStore(_notes_of(run), store))


def _notes_of(run: int) -> str:
    """Return where the notes of a run are in the store."""
    return f"lightning_hetero/failures/{run}"


def _forget_ended(store: dist.Store, world_size: int) -> None:
    """Delete the notes of the runs that all ranks have left."""
    for run in sorted(_noted):
        bulletin = _bulletin_of(store, run, 0, world_size)
        if not any(map(bulletin.remains, range(world_size))):
            forget_keys(store, f"{_notes_of(run)}/")
            _noted.discard(run)


class FailureWatch:
    """Watch from :meth:`open` to :meth:`close`, or to the end of the process.

    Exceptions are noticed where a front end says so (:meth:`explain`), in backward passes
    (:meth:`explain_connection`), and by ``sys.excepthook`` if they end the process.

    Args:
        rank: this rank.
        world_size: number of ranks; with one, there is nothing to watch.
        timeout: longest silence of a rank, if that is shorter than the one of the settings.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store: Callable[[], dist.Store] | None = None
        self._place: Callable[[], Progress | None] = lambda: (0, 0, False)
        self._bulletin: Bulletin | None = None
        self._monitor: RankMonitor | None = None
        self._last: Bulletin | None = None
        self._calls = StoreCalls(0.0, 0.0)
        self._hook = self._earlier = sys.excepthook
        self._process = os.getpid()

    def begin(self, store: Callable[[], dist.Store], owner: Any, progress: Callable[[Any], Progress]) -> None:
        """Watch from now on; a collective call.

        Args:
            store: returns the job's store.
            owner: object whose end is also that of the watch.
            progress: returns where the owner is: epoch, batch, and whether it is in a backward pass.
        """
        reference = weakref.ref(owner)

        def here() -> Progress | None:
            found = reference()
            return None if found is None else progress(found)

        self._store, self._place = store, here
        self.open()

    @property
    def of_this_process(self) -> bool:
        """``True`` but in a process that was forked from the one that watches: it is no rank."""
        return self._process == os.getpid()

    def end_if_abandoned(self) -> None:
        """End the watch if its owner is gone."""
        if self._place() is None:
            self._at_end()

    def _progress(self) -> Progress:
        """Return where the owner is, for the monitor's threads."""
        self.end_if_abandoned()
        return self._place() or (0, 0, False)

    def open(self) -> None:
        """Watch again after :meth:`close`; a collective call."""
        if self._store is None or self._bulletin is not None or self.world_size == 1:
            return
        settings = rank_monitor.SETTINGS.within(self.timeout)
        store = self._store()
        run = store.add(f"lightning_hetero/failures/{self.rank}", 1)  # all ranks open equally often
        own = store.clone() if hasattr(store, "clone") else store  # a connection that no other thread blocks
        if self.rank == 0:
            _forget_ended(own, self.world_size)
            _noted.add(run)
        self._bulletin = _bulletin_of(own, run, self.rank, self.world_size)
        _is_new(getattr(sys, "last_value", None), self)
        self._bulletin.sign_in()
        longest = settings.answer_s + 2 * SETTLE_SECONDS
        self._calls = StoreCalls(longest, longest)
        self._monitor = RankMonitor(self._bulletin, self._progress, self._end, settings).start()
        self._earlier, self._hook, self._process = sys.excepthook, self._uncaught, os.getpid()
        SYSTEM.excepthook = self._hook
        atexit.register(self._at_end)
        _open.add(self)

    def end(self, error: BaseException | None = None) -> None:
        """End the watch with a loop of the user's.

        Args:
            error: what ends the loop; by default the exception that is being handled, if any.
        """
        error = error or sys.exc_info()[1]
        if error is not None:
            self.explain(error)
        self.close()

    def _at_end(self) -> None:
        """End the watch with its owner, or with the process; others may have replaced ``sys.excepthook``.

        The monitor's threads notice that the owner is gone. A finalizer would run inside whatever call has just made
        the interpreter collect garbage, and wait there for threads which may need that very call to end.
        """
        if self.of_this_process:
            self.end(getattr(sys, "last_value", None))

    def close(self) -> None:
        """End the watch."""
        if self._bulletin is not None:  # before it looks as if it has ended to another thread, which begins another
            self._last = self._bulletin
            _left.add(self)
        bulletin, self._bulletin = self._bulletin, None
        monitor, self._monitor = self._monitor, None
        if bulletin is None or monitor is None:
            return
        atexit.unregister(self._at_end)
        _open.discard(self)
        if sys.excepthook == self._hook:
            SYSTEM.excepthook = self._earlier
        monitor.stop()
        if not monitor.cut_off:
            with suppress(*NO_STORE):
                self._calls(lambda: self._leave(bulletin))
        self._calls.close()

    def begin_another(self) -> None:
        """Tell ranks that are still in the training that has ended here that this rank begins another one."""
        bulletin, self._last = self._last, None
        if bulletin is not None:
            calls = StoreCalls(self._calls.timeout, self._calls.notice)  # the others may be in use by another thread
            with suppress(*NO_STORE):
                calls(bulletin.begin_another)
            calls.close()

    def _leave(self, bulletin: Bulletin) -> None:
        bulletin.leave()
        if self.rank == 0 and bulletin.known() is None:
            bulletin.end()
        self._settle(bulletin)

    def _settle(self, bulletin: Bulletin) -> None:
        """Let the others read before the process ends that holds the store."""
        if self.rank == 0 and not launcher_holds_store():
            bulletin.settle(SETTLE_SECONDS)

    # a rank that is lost

    def _end(self, failure: Failure) -> None:
        """End this process, from a thread of the monitor, and let the other ranks know why."""
        bulletin = self._bulletin
        if bulletin is not None and (failure.rank != 0 or launcher_holds_store()):
            with suppress(*NO_STORE):
                self._calls(lambda: self._give_up(bulletin, failure))
        end_process(failure.farewell(self.rank))

    def _give_up(self, bulletin: Bulletin, failure: Failure) -> None:
        bulletin.report(failure)
        child = None if failure.rank in (None, self.rank) else bulletin.child(failure.rank)
        if child is not None:
            os.kill(child, signal.SIGKILL)  # it is stopped, and nobody else would end it
        self._settle(bulletin)

    # errors

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that ends this one; if it follows from another failure, add that."""
        bulletin, monitor = self._bulletin, self._monitor
        if bulletin is None or monitor is None or is_ordinary(error) or not _is_new(error, self):
            return
        monitor.spare()
        follows = of_connection(error)
        if follows and monitor.suspects:
            _add(error, f"Ranks were waiting for others. {monitor.suspects}.")
        try:
            first = self._calls(lambda: self._first(bulletin, error, monitor.settings.answer_s if follows else 0.0))
        except NO_STORE as problem:
            first = self._without_store(bulletin, problem) or Failure.of(self.rank, error)
        monitor.learn()
        if follows and first.rank != self.rank:
            _add(error, f"{first}.")

    def explain_connection(self, error: BaseException) -> None:
        """Explain an error of a lost connection; any other may be caught by the caller, and the training go on."""
        if of_connection(error):
            self.explain(error)

    def _first(self, bulletin: Bulletin, error: BaseException, answer_s: float) -> Failure:
        """Return the first failure: another rank's, the silent end of one, or else this one."""
        if bulletin.known() is None and answer_s:
            silent = bulletin.roll_call(answer_s)
            if silent:
                others = f", and neither do ranks {silent[1:]}" if silent[1:] else ""
                bulletin.report(Failure(silent[0], (NO_ANSWER if bulletin.remains(silent[0]) else ENDED) + others))
        first = bulletin.first or bulletin.report(Failure.of(self.rank, error))
        self._settle(bulletin)
        return first

    def _without_store(self, bulletin: Bulletin, problem: Exception) -> Failure | None:
        """Return the first failure as far as it is known when the store does not answer."""
        if bulletin.first is not None or (self.rank == 0 and not launcher_holds_store()):
            return bulletin.first
        if bulletin.over:
            return Failure(0, ENDED)
        what = "the job's store, which it holds, does not answer" if isinstance(problem, TimeoutError) else GONE
        return Failure(None if launcher_holds_store() else 0, what)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Explain an exception that ends the process, before it is printed."""
        if self.of_this_process:
            self.explain(error)
        self._earlier(kind, error, trace)


def _is_new(error: BaseException | None, watch: FailureWatch) -> bool:
    """Return whether a watch sees an exception for the first time; a reference to it would keep all its frames."""
    if error is None:
        return False
    seen: set[int] = vars(error).setdefault("_lightning_hetero_seen", set())
    new = id(watch) not in seen
    seen.add(id(watch))
    return new


def _add(error: BaseException, text: str) -> None:
    """Add a line to the message of an exception, unless it has the line."""
    if text not in str(error):
        error.args = (f"{error}\n{text}",)
