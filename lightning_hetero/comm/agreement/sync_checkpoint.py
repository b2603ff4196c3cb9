"""What all ranks have measured since they looked at the plan last, as it rides in a checkpoint.

A run that goes on from a checkpoint then looks at the plan after the same step as the run without a break, and sees the
same steps.
"""

from typing import Any

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.sync_schedule import ExchangeSchedule
from lightning_hetero.comm.timing.step_timer import StepObserver

__all__ = ["interval_state", "resume_interval"]


def interval_state(control: ControlPlane, observer: StepObserver, schedule: ExchangeSchedule) -> dict[str, Any]:
    """Rows of all ranks and where the schedule stands; a collective call.

    Args:
        control: gathers.
        observer: of this rank. It does not time the step after this, which begins behind a checkpoint that is written.
        schedule: of this rank.
    """
    ranks = control.gather_objects(observer.state_dict())
    observer.interrupt()
    return {"ranks": ranks, "schedule": schedule.state_dict(observer.synced_steps)}


def resume_interval(state: dict[str, Any], rank: int, observer: StepObserver, schedule: ExchangeSchedule) -> None:
    """Go on between two looks, on each rank, with the same workers.

    Args:
        state: of :func:`interval_state`.
        rank: this rank.
        observer: of this rank.
        schedule: of this rank.
    """
    observer.load_state_dict(state["ranks"][rank])
    schedule.load_state_dict(state["schedule"], observer.synced_steps)
