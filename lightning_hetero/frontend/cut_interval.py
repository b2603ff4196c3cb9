"""Save and resume a run that is cut between two sync rounds.

The run that goes on then has its round after the same step, and sees the same steps, as the run without a break.
"""

from typing import Any

from lightning_hetero.comm.agreement.sync_checkpoint import interval_state, resume_interval
from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.checkpoint_state import reading_state
from lightning_hetero.engine import HeteroEngine

__all__ = ["cut_interval", "of_same_workers", "resume_looks", "resume_plans"]


def cut_interval(engine: HeteroEngine, at: tuple[int, int]) -> dict[str, Any]:
    """Return all ranks' steps since the last sync round, the step of the next, and plans to come; a collective call.

    Args:
        engine: of the run, whose data is sharded.
        at: epoch, and batches of it that were trained on.
    """
    assert engine.roster is not None
    plans = [] if engine.history is None else engine.history.entries
    return {
        **interval_state(engine.control, engine.observer, engine.schedule),
        "workers": list(engine.roster.identities),
        "at": list(at),
        "to_come": [entry.state_dict() for entry in plans if (entry.epoch, entry.step) > at],
    }


def of_same_workers(engine: HeteroEngine | None, interval: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of an interval, if it is of the workers at hand."""
    roster = None if engine is None else engine.roster
    same = roster is not None and interval.get("workers") == list(roster.identities)
    return interval if same else {}


@reading_state("steps since the ranks last compared their times")
def resume_looks(engine: HeteroEngine, interval: dict[str, Any]) -> None:
    """Go on between two sync rounds, if the interval has anything."""
    if interval:
        resume_interval(interval, engine.rank, engine.observer, engine.schedule)


@reading_state("plans of the policy that were yet to come")
def resume_plans(engine: HeteroEngine, interval: dict[str, Any]) -> None:
    """Go on with a plan that was yet to come; before a batch is drawn, on all ranks alike."""
    if not interval or engine.history is None or engine.sampler is None:
        return
    if engine.sampler.start >= tuple(interval["at"]):
        for state in interval.pop("to_come", ()):
            entry = PlanEntry.from_state_dict(state)
            engine.history = engine.history.extended(entry)
            engine.log.append(entry)
