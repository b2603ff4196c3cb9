"""What rides in a checkpoint between two looks at the plan."""

import pytest
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.sync_checkpoint import interval_state, resume_interval
from lightning_hetero.comm.agreement.sync_schedule import ExchangeSchedule
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepObserver


def observed(steps):
    observer = StepObserver(HostClock())
    for _ in range(steps):
        observer.begin_step(4, regular=True)
        observer.begin_backward()
        observer.bucket_done(observer.bucket_ready())
        observer.end_backward()
        observer.end_step()
    return observer


def saved(tmp_path, replan):
    """After 20 steps, of which the last 6 were not looked at; in a process that had taken them all by itself."""
    observer, schedule = observed(20), ExchangeSchedule(replan)
    schedule.done(14, 24)
    state = interval_state(ControlPlane(0, 1), observer, schedule)
    torch.save(state, tmp_path / "state")
    return torch.load(tmp_path / "state", weights_only=True)


@pytest.mark.parametrize("already", [0, 3])
def test_the_next_look_comes_after_the_same_step(tmp_path, already):
    """Also in a process that has run some steps before."""
    observer, schedule = observed(already), ExchangeSchedule("auto")
    resume_interval(saved(tmp_path, "auto"), 0, observer, schedule)
    assert next(step for step in range(12) if schedule.due(already + step)) == 4
    assert next(step for step in range(12) if schedule.due_at_epoch(already + step)) == 2
    assert len(observer.rows) == 17  # three to warm up
    assert observer.rows[-1][0] == already


@pytest.mark.parametrize(("before", "now", "first"), [(10, 10, 4), ("auto", 10, 10), ("auto", "epoch", None)])
def test_another_schedule_begins_anew(tmp_path, before, now, first):
    observer, schedule = observed(0), ExchangeSchedule(now)
    resume_interval(saved(tmp_path, before), 0, observer, schedule)
    assert next((step for step in range(100) if schedule.due(step)), None) == first
    assert len(observer.rows) == 17
