"""Watch over a run: at each sync round it names stragglers and measures gains, on rank 0 with a record and a log."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext, Planner
from lightning_hetero.core.report.records import RoundRecord, RunHeader
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.stragglers.detector import LINK, Straggler, StragglerDetector
from lightning_hetero.engine.watch.gains import GainMeter
from lightning_hetero.engine.watch.memory import MemoryUse
from lightning_hetero.engine.watch.predictions import Predictions
from lightning_hetero.engine.watch.recorder import Recorder
from lightning_hetero.engine.watch.time_budget import TimeBudget
from lightning_hetero.engine.watch.time_model import KnownTimes, TimeModelWatch
from lightning_hetero.engine.watch.wording import describe_straggler

__all__ = ["RunWatch"]

log = logging.getLogger("lightning_hetero")

UNKNOWN = KnownTimes(math.nan, {})


class RunWatch:
    """Watch over the runs of an engine, one after another.

    Args:
        rank: this rank; only rank 0 records and logs.
        world_size: number of ranks.
        device: device of this rank.
        records: whether runs are recorded and summarised; metrics do not depend on it.

    Attributes:
        detector: stragglers, the same on all ranks.
        memory: most memory of each rank.
        recorder: records of the run, or of the next one; ``None`` where nothing is recorded.
        predictions: of steps, beside what they took; the same on all ranks.
        devices: names of the devices, for the log.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        records: bool = True,
    ) -> None:
        self.speaks = rank == 0 and world_size > 1
        self.detector, self.memory = StragglerDetector(world_size), MemoryUse(device)
        self._budget = TimeBudget()
        self.recorder = Recorder(world_size, self._budget) if records and self.speaks else None
        self.predictions = Predictions()
        self.devices: Sequence[str] = ()
        self._times, self._gains, self._steps, self._at = TimeModelWatch(), GainMeter(), 0, (0, 0)
        self._known = UNKNOWN  # of the coming round
        self._learn: Callable[[], KnownTimes] | None = None  # of the coming round, if there was no time for it
        self._late: Callable[[], KnownTimes] | None = None  # that of the newest round
        self._earlier = 0  # steps of earlier runs

    # at the begin

    def describe(self, header: RunHeader, folder: Path | None) -> None:
        """Begin a run, and its record in the file of a folder, as far as there is one; the file may have others."""
        self.devices = [worker.device for worker in header.workers]
        if self.recorder is None:
            self._budget.begin()
        else:
            self.recorder.describe(header)
            self.recorder.open(folder)

    @property
    def run(self) -> RunRecord | None:
        """The record so far, ``None`` if nothing is recorded."""
        return None if self.recorder is None else self.recorder.run

    @property
    def newest(self) -> RoundRecord | None:
        """Newest sync round that was recorded."""
        return None if self.recorder is None else self.recorder.newest

    # at a sync round

    def even_step(
        self, planner: Planner | None, observations: StepObservations, running: BatchPlan | None, context: PlanContext
    ) -> float:
        """Return the predicted seconds of a step of equal sizes, on rank 0; NaN if unknown, or for want of time.

        Args:
            planner: planner that has seen the observations.
            observations: of all workers.
            running: plan under which the newest steps ran.
            context: conditions of the run.
        """
        if not self.speaks or running is None or not observations.num_steps:
            return math.nan
        learn = partial(self._times.observe, planner, observations, running, context)
        if not self._budget.may:
            self._learn = learn
            return math.nan
        with self._budget.working():
            self._known = learn()
        return self._known.even

    def observe(
        self, done: RoundResult, plan: BatchPlan | None, at: tuple[int, int], steps: int, accumulation: int, **more: Any
    ) -> None:
        """Take in a sync round, on all ranks.

        Args:
            done: its outcome.
            plan: plan under which the newest steps ran.
            at: epoch and step of the running batch.
            steps: synchronized steps of the run so far.
            accumulation: micro-batches of a step.
            more: further fields of the round's record, for rank 0.
        """
        elapsed, self._steps, self._at = steps - self._steps, steps, at
        known, self._late, self._known, self._learn = self._known, self._learn, UNKNOWN, None
        observations = done.observations
        events = self.detector.observe(observations, elapsed, accumulation)
        predicted, error = self.predictions.compare(done, plan, accumulation, (known.running, known.error))
        for one in events:
            self._tell_straggler(one, at, accumulation)
        gain = self._gains.observe(observations)
        if gain is not None and self.speaks:
            log.info("the change of the split at %s", gain.describe())
            if self.recorder is not None:
                self.recorder.gain(gain)
        if self.recorder is not None and plan is not None:
            fields = {"predicted": predicted, "error": error, "even": done.even, "kept": done.kept or ""}
            fields |= {**known.model, **more, "rows": () if done.rows == plan.local_batch_sizes else done.rows}
            self.recorder.round(observations, plan, at, elapsed, accumulation, **fields)
        if done.entry is not None and plan is not None:
            self.changed(done.entry, plan)

    def changed(self, entry: PlanEntry, old: BatchPlan) -> None:
        """Note a plan that was adopted, and await its steps."""
        if entry.plan.local_batch_sizes != old.local_batch_sizes:
            self._gains.changed(entry, old.local_batch_sizes)
        if self.recorder is not None:
            self.recorder.change(entry)

    def _tell_straggler(self, one: Straggler, at: tuple[int, int], accumulation: int) -> None:
        if not self.speaks:
            return
        since = at if one.relieved else (at[0], max(at[1] + 1 - one.ago * accumulation, 0))
        device = self.devices[one.rank] if 0 <= one.rank < len(self.devices) else ""
        level = logging.INFO if one.relieved or one.rank == LINK else logging.WARNING  # of links, others warn
        log.log(level, "%s", describe_straggler(one, since, device))
        if self.recorder is not None:
            self.recorder.straggler(one, since)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of stragglers, and the speed over equal sizes; the same on all ranks."""
        metrics = {"hetero/straggler": float(self.detector.worst), "hetero/lost_seconds": self.detector.lost}
        if math.isfinite(self.predictions.speed_up):
            metrics["hetero/speed_up"] = self.predictions.speed_up
        return metrics

    # at the end

    def finish(
        self, status: str = "finished", at: tuple[int, int] | None = None, steps: int | None = None
    ) -> RunRecord | None:
        """End the run; return its record, once: ``None`` if there is none. What is described next is another run.

        Args:
            status: ``"finished"``, or the error that ended it.
            at: epoch and step that it reached; by default those of the newest sync round.
            steps: synchronized steps so far, those of earlier runs included; by default up to the newest sync round.
        """
        stragglers = list(self.detector.active.values())
        self.detector.active.clear()
        at, steps = self._at if at is None else at, self._steps if steps is None else steps
        earlier, self._earlier, learn, self._late = self._earlier, steps, self._late, None
        recorder = self.recorder
        if recorder is None:
            return None
        self.recorder = Recorder(self.detector.workers, self._budget, counted=steps - self._steps)
        if recorder.run is None:
            return None
        for one in stragglers:
            one.end("run ended")
            recorder.straggler(one, at)
        known = UNKNOWN if learn is None else learn()
        recorder.end(at, steps - earlier, status, self.memory.everyone, even=known.even, **known.model)
        return recorder.run

    @property
    def path(self) -> Path | None:
        """File of the record, ``None`` if there is none."""
        return None if self.recorder is None else self.recorder.file.path
