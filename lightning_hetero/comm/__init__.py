"""Joint work of the ranks: gradient averaging with timing, step observation, agreement on plans."""

from lightning_hetero.comm.agreement.control_plane import ControlPlane, PlanMismatchError
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.timing.step_timer import StepTimer

__all__ = ["ControlPlane", "HookState", "PlanMismatchError", "StepTimer", "gradient_hook"]
