"""Recorder of rank 0: makes the records of a run from its sync rounds, in a bounded share of the time."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report.records import (
    ChangeRecord,
    EndRecord,
    GainRecord,
    RoundRecord,
    RunHeader,
    StragglerRecord,
)
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.stragglers.detector import Straggler
from lightning_hetero.core.stragglers.round_times import exposed_link
from lightning_hetero.engine.watch.gains import Gain
from lightning_hetero.engine.watch.run_file import RunFile
from lightning_hetero.engine.watch.time_budget import TimeBudget

__all__ = ["Recorder"]

log = logging.getLogger("lightning_hetero")

Array = npt.NDArray[np.float64]

SAMPLED_WORKERS = 64
"""Most workers of which single steps are kept."""
SAMPLED_STEPS = 2
PER_WORKER = 2000
"""Bytes by which each worker raises the budget of the file."""


class Recorder:
    """Records of one run.

    Args:
        world_size: number of workers.
        budget: time that recording may take, by default one of its own.
        counted: steps before its first round that an earlier run has counted.

    Attributes:
        file: the lines.
        folder: folder of the file, ``None`` for a run that has none.
        newest: newest round, ``None`` before the first.
        skipped: rounds that were left out to save time.
    """

    def __init__(self, world_size: int, budget: TimeBudget | None = None, counted: int = 0) -> None:
        self.budget = TimeBudget() if budget is None else budget
        self.file = RunFile(4_000_000 + PER_WORKER * world_size)
        self.folder: Path | None = None
        self.newest: RoundRecord | None = None
        self.skipped = 0
        self._late: Callable[[dict[str, Any]], None] | None = None  # writes the newest round, if it was left out
        self._uncounted = -counted  # steps of the rounds that were left out

    @property
    def time(self) -> float:
        """Seconds since the run began."""
        return self.budget.elapsed

    @property
    def run(self) -> RunRecord | None:
        """The run so far, ``None`` before it is described."""
        return self.file.run if self.file.has_header else None

    def describe(self, header: RunHeader) -> None:
        """Begin the record with what runs; a further call in the same run is ignored."""
        if not self.file.has_header:
            self.budget.begin()
            self.file.write(header)

    def open(self, folder: Path | None) -> None:
        """Write the file into a folder from now on."""
        self.folder = folder
        if folder is not None:
            self.file.open(folder)

    @property
    def may(self) -> bool:
        """``True`` if there is time for another round."""
        return self.file.has_header and self.budget.may

    def round(
        self,
        observations: StepObservations,
        plan: BatchPlan,
        at: tuple[int, int],
        elapsed: int,
        accumulation: int,
        **known: Any,
    ) -> None:
        """Record a sync round; one that is left out is written after all if the run ends with it.

        Args:
            observations: of all workers.
            plan: plan under which the newest steps ran.
            at: epoch and step of the running batch.
            elapsed: steps since the last round.
            accumulation: micro-batches of a step.
            known: further fields of the record.
        """
        elapsed += self._uncounted
        write = partial(self._write_round, self.time, observations, plan, at, elapsed, accumulation)
        if not self.may:
            self.skipped, self._uncounted = self.skipped + 1, elapsed
            self._late = lambda more: write({**known, **more})
            return
        self._late, self._uncounted = None, 0
        with self.budget.working():
            write(known)

    def _write_round(
        self,
        time: float,
        observations: StepObservations,
        plan: BatchPlan,
        at: tuple[int, int],
        elapsed: int,
        accumulation: int,
        known: Mapping[str, Any],
    ) -> None:
        earlier = max(observations.num_steps - elapsed, 0)  # steps of an earlier run of the same engine
        own = observations.rows(slice(earlier, None)) if earlier else observations
        record = RoundRecord(
            time=time,
            epoch=at[0],
            step=at[1],
            count=max(elapsed, 0),
            sizes=plan.local_batch_sizes,
            accumulation=accumulation,
            **{"timed": 0, **known, **times_of(own, plan.local_batch_sizes)},
        )
        self.newest = record
        self.file.write(record)

    def change(self, entry: PlanEntry) -> None:
        """Record that a plan was adopted."""
        if self.file.has_header:
            predicted = math.nan if entry.plan.step_time is None else float(entry.plan.step_time)
            sizes = entry.plan.local_batch_sizes
            self.file.write(ChangeRecord(self.time, entry.epoch, entry.step, sizes, entry.reason, predicted))

    def gain(self, gain: Gain) -> None:
        """Record the measured gain of a change."""
        if self.file.has_header:
            at = gain.entry.epoch, gain.entry.step
            self.file.write(GainRecord(self.time, *at, gain.before, gain.after, gain.predicted))

    def straggler(self, one: Straggler, at: tuple[int, int]) -> None:
        """Record that a straggler began or ended at an epoch and step."""
        if self.file.has_header:
            event = "end" if one.relieved else "begin"
            self.file.write(
                StragglerRecord(self.time, event, one.rank, one.phase, *at, one.cost, one.lost, one.relieved)
            )

    def end(self, at: tuple[int, int], steps: int, status: str, memory: tuple[float, ...], **known: Any) -> None:
        """Record how the run ended.

        Args:
            at: epoch and step that it reached.
            steps: synchronized steps of the run.
            status: ``"finished"``, or the error that ended it.
            memory: most bytes of each worker.
            known: fields of the newest round, if it was left out so far.
        """
        if self.file.has_header:
            late, self._late = self._late, None
            if late is not None:
                self.skipped -= 1
                late(known)
            dropped = self.skipped + self.file.dropped
            self.file.write(EndRecord(self.time, *at, steps, status, memory, self.budget.spent, dropped))


def times_of(observations: StepObservations, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the measured fields of a round's record, over the steps that ran with these sizes; else none.

    Example:
        >>> times_of(StepObservations.empty(2), (4, 4))
        {}
    """
    own = (observations.local_batch_sizes == np.array(sizes, dtype=float)).all(axis=1)
    if not own.any():
        return {}

    def median(values: Array) -> tuple[float, ...]:
        return tuple(map(float, np.median(values[own], axis=0)))

    compute = observations.compute[own]
    middle = np.median(compute, axis=0)
    deviation = 1.4826 * np.median(np.abs(compute - middle), axis=0) / np.maximum(middle, 1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step_time = float(np.nanmedian(observations.step_time[own]))
    return {
        "timed": int(own.sum()),
        "step_time": step_time,
        "data": median(observations.data_wait),
        "forward": median(observations.forward),
        "backward": median(observations.backward),
        "optimizer": median(observations.optimizer),
        "sync": median(observations.overlapped_sync + observations.last_sync),
        "link": float(np.median(exposed_link(observations)[own])),
        "jitter": tuple(map(float, deviation)),
        "sample": _sample(observations),
    }


def _sample(observations: StepObservations) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the newest steps in full."""
    if observations.forward.shape[1] > SAMPLED_WORKERS:
        return ()
    fields = [getattr(observations, name)[-SAMPLED_STEPS:, :, None] for name in StepObservations.FIELDS]
    rows = np.concatenate([*fields, observations.bucket_ends[-SAMPLED_STEPS:]], axis=2)
    return tuple(tuple(tuple(map(float, row)) for row in step) for step in rows)
