"""Plans of a run: past, running and upcoming ones."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.plan_log import SplitLog
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.policies.base import Planner, moves_total

__all__ = ["PlanStore"]

Position = tuple[int, int]
"""Epoch, and step of the epoch."""


@dataclass(frozen=True)
class _Restored:
    """Plans of a checkpoint.

    Args:
        history: plans from the epoch of the checkpoint on.
        workers: hardware identities for which they were made.
        at: position at which the checkpoint was written; empty if it is not recorded.
    """

    history: PlanHistory
    workers: tuple[str, ...]
    at: tuple[int, ...]


class PlanStore:
    """Plan history of a run, the same on all ranks.

    Args:
        speaks: whether this rank logs which plan runs.

    Attributes:
        history: plans from the running epoch on, ``None`` before there is one.
        log: all plans since training began or resumed.
        sayings: log of plans for the user.
    """

    def __init__(self, speaks: bool) -> None:
        self.history: PlanHistory | None = None
        self.log: list[PlanEntry] = []
        self.sayings = SplitLog(speaks)
        self._start: Position = (0, 0)
        self._cost: CostWeights | None = None
        self._restored: _Restored | None = None

    def plan_at(self, position: Position) -> BatchPlan | None:
        """Return the plan of a step, ``None`` before there is one."""
        return None if self.history is None else self.history.at(*position).plan

    def resume_at(self, epoch: int, step: int) -> None:
        """Resume at this step; call it before the data is sharded."""
        self._start = (epoch, step)

    def start_of(self, epoch: int) -> Position:
        """Return the first position of sharded data: the start of an epoch, or that of a resumed run if later."""
        return max(self._start, (epoch, 0))

    def forget(self) -> None:
        """Forget all plans: they belong to other weights, or to data that is no longer trained on."""
        self.history = None
        self.log.clear()

    def forget_running(self) -> None:
        """Forget the running and upcoming plans, but keep the log of those that ran."""
        self.history = None

    # how a run begins or goes on

    def begin(
        self,
        control: ControlPlane,
        workers: Workers,
        config: HeteroConfig,
        total: int,
        planner: Planner | None,
        start: Position,
        cost: CostWeights | None = None,
    ) -> None:
        """Adopt the plan to begin with, decided by rank 0; a collective call.

        Args:
            control: control plane by which ranks agree.
            workers: workers of this run.
            config: settings, which may fix the split.
            total: total batch size; a resumed one counts instead if the planner moves it.
            planner: planner that may know a plan from an earlier run.
            start: first position that is trained on.
            cost: weights of plans that have none, ``None`` if batches are divided by number.
        """
        self._cost = cost
        restored, self._restored = self._restored, None
        known = self.history if restored is None else restored.history
        entries = () if known is None else known.entries
        before = [self._divided(entry) for entry in entries if (entry.epoch, entry.step) <= start]
        self.history = PlanHistory(tuple(before)) if before else None
        running = self.plan_at(start)
        if running is not None and moves_total(planner) and running.total_batch_size % workers.multiple == 0:
            total = running.total_batch_size
        same_workers = restored is None or restored.workers == workers.identities
        first = start if self.history is not None else (0, 0)

        def decision() -> PlanEntry | None:
            even = "equal sizes" if cost is None else "equal work"
            proposal = workers.initial_plan(config, total, planner, running if same_workers else None, even)
            if proposal is None:
                return None
            learned = None if running is None or running.cost is None else CostWeights(running.cost.theta)
            return PlanEntry(*first, replace(proposal.plan, cost=learned), proposal.reason)

        entry = control.decide(decision)
        if entry is not None:
            self.append(entry)
        if restored is not None and self.history is not None:
            self._go_on(restored, start, workers if same_workers else None)

    def _go_on(self, restored: _Restored, start: Position, workers: Workers | None) -> None:
        """Log which plan of the checkpoint runs, and take over plans that were already agreed on for later steps."""
        assert self.history is not None
        if self.history.last not in self.log:
            self.log = [self.history.last]
            self.sayings.adopted(self.history.last, "plan of the checkpoint")
        if workers is not None and start >= restored.at > ():
            for entry in restored.history.entries:
                if (entry.epoch, entry.step) > start and workers.in_multiples(entry.plan):
                    self.append(entry)

    def _divided(self, entry: PlanEntry) -> PlanEntry:
        """Return the entry with cost weights if, and only if, batches are divided by cost."""
        cost = None if self._cost is None else entry.plan.cost or self._cost
        return replace(entry, plan=replace(entry.plan, cost=cost))

    def append(self, entry: PlanEntry) -> None:
        """Adopt a plan."""
        entry = self._divided(entry)
        self.history = PlanHistory((entry,)) if self.history is None else self.history.extended(entry)
        self.log.append(entry)
        self.sayings.adopted(entry)

    def note_rows(self, position: Position, rows: tuple[float, ...]) -> None:
        """Note in the log which samples each worker has run under the plan of a position."""
        if self.history is not None and (entry := self.history.at(*position)) in self.log:
            self.log[self.log.index(entry)] = replace(entry, rows=rows)

    def drop_before(self, epoch: int) -> None:
        """Drop plans of earlier epochs."""
        if self.history is not None:
            self.history = self.history.since(epoch)

    # state

    def state_dict(self, workers: Workers, position: Position) -> dict[str, Any]:
        """Return the plans of the running epoch, their workers, and the position of training, in plain values."""
        assert self.history is not None
        history = self.history.since(position[0]).state_dict()
        return {"history": history, "workers": list(workers.identities), "at": list(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these plans when data is sharded; a state without plans keeps the present ones."""
        if "history" in state:
            history = PlanHistory.from_state_dict(state["history"])
            self._restored = _Restored(history, tuple(state["workers"]), tuple(state.get("at", ())))
