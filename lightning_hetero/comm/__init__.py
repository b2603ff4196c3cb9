"""What ranks do together: gradient averaging with timing, step observation, agreement on plans."""

from lightning_hetero.comm.control import ControlPlane, PlanMismatchError
from lightning_hetero.comm.gradient_hook import HookState, gradient_hook
from lightning_hetero.comm.observer import StepObserver

__all__ = ["ControlPlane", "HookState", "PlanMismatchError", "StepObserver", "gradient_hook"]
