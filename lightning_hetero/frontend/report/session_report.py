"""Record of a custom training loop, which need not say that it ends."""

import atexit
from pathlib import Path

from lightning_hetero.core.policies.base import Planner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.begin import begin_report
from lightning_hetero.frontend.report.finish import finish_report
from lightning_hetero.frontend.report.process_end import ProcessEnd

__all__ = ["SessionReport"]


class SessionReport:
    """Record of one session, from its first sync round until it is closed, or the process ends.

    A session that goes on after it has ended its record, as when a trainer trains twice, begins another one.

    Args:
        engine: engine of the session.
        front_end: what runs the loop.
        folder: folder of the file, ``None`` for none.
    """

    def __init__(self, engine: HeteroEngine, front_end: str, folder: Path | None) -> None:
        self.engine, self.front_end, self.folder = engine, front_end, folder
        self._begun = False
        self._process: ProcessEnd | None = None

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
        atexit.register(self.end)

    def end(self, error: BaseException | None = None) -> None:
        """End the record, and log the summary.

        Args:
            error: what ended the run; by default the error that is being handled or has ended the process, if any.
        """
        self._begun = False
        atexit.unregister(self.end)
        process, self._process = self._process, None
        if process is not None:
            error = process.error if error is None else error
            process.close()
        finish_report(self.engine, error)
