"""Record of a custom training loop, which need not say that it ends."""

import atexit
import gc
import os
import weakref
from pathlib import Path
from typing import Protocol

from lightning_hetero.comm.agreement.control_plane import before_another
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.begin import begin_report
from lightning_hetero.frontend.report.finish import finish_report
from lightning_hetero.frontend.report.process_end import ProcessEnd

__all__ = ["SessionReport", "end_idle_reports"]

_begun: "set[SessionReport]" = set()


def end_idle_reports() -> None:
    """End the records of sessions that are gone, or between two passes over their data.

    A record that waits for the end of the process keeps the engine of its session, with its groups and threads. When
    another training begins, a session that only goes on later can begin another record.
    """
    own = [report for report in _begun if report.process == os.getpid()]
    if own:
        gc.collect()  # of a session that was dropped in a pass, the generator of its batches ends
    for report in own:
        if report.idle:
            report.end()


before_another(end_idle_reports)


class Session(Protocol):
    """The part of a session that its record needs."""

    @property
    def running(self) -> bool:
        """``True`` while a pass over the data runs."""


class SessionReport:
    """Record of one session, from its first sync round until it is closed, or the process ends.

    A session that goes on after it has ended its record, as when a trainer trains twice, begins another one. If another
    training begins in the process, the records of sessions that do not run end.

    Args:
        engine: engine of the session.
        front_end: what runs the loop.
        folder: folder of the file, ``None`` for none.
        session: the session, which is not kept alive.

    Attributes:
        process: number of the process whose record it is, and not that of one forked from it.
    """

    def __init__(self, engine: HeteroEngine, front_end: str, folder: Path | None, session: Session) -> None:
        self.engine, self.front_end, self.folder = engine, front_end, folder
        self._session, self.process = weakref.ref(session), os.getpid()
        self._begun = False
        self._process: ProcessEnd | None = None

    @property
    def idle(self) -> bool:
        """``True`` if the session is gone, or between two passes over its data."""
        session = self._session()
        return session is None or not session.running

    def begin(self, planner: Planner | None) -> None:
        """Begin the record, unless it has begun; call it at each sync round."""
        if self._begun:
            if self._process is not None:
                self._process.go_on()
            return
        self._begun = True
        strategy = "hetero_ddp"
        begin_report(self.engine, planner, front_end=self.front_end, strategy=strategy, folder=self.folder)
        if self.engine.rounds.watch.run is not None:
            self._process = ProcessEnd()
        _begun.add(self)
        atexit.register(self.end)

    def end(self, error: BaseException | None = None) -> None:
        """End the record, and log the summary.

        Args:
            error: what ended the run; by default the error that is being handled or has ended the process, if any.
        """
        self._begun = False
        _begun.discard(self)
        atexit.unregister(self.end)
        process, self._process = self._process, None
        if process is not None:
            error = process.error if error is None else error
            process.close()
        finish_report(self.engine, error)
