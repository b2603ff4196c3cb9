"""Record of a custom training loop, which need not say that it ends."""

import atexit
from pathlib import Path

from lightning_hetero.core.policies.base import Planner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.begin import begin_report
from lightning_hetero.frontend.report.finish import finish_report

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

    def begin(self, planner: Planner | None) -> None:
        """Begin the record, unless it has begun."""
        if self._begun:
            return
        self._begun = True
        strategy = "hetero_ddp"
        begin_report(self.engine, planner, front_end=self.front_end, strategy=strategy, folder=self.folder)
        atexit.register(self.end)

    def end(self) -> None:
        """End the record, and log the summary."""
        self._begun = False
        atexit.unregister(self.end)
        finish_report(self.engine)
