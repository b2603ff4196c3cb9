"""Joint work of the ranks: gradient averaging with timing, step observation, agreement on plans.

The names below are imported on first use: some modules here, such as the schedule, need no torch.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.comm.agreement.control_plane import ControlPlane as ControlPlane
    from lightning_hetero.comm.agreement.control_plane import PlanMismatchError as PlanMismatchError
    from lightning_hetero.comm.gradients.ddp_hook import HookState as HookState
    from lightning_hetero.comm.gradients.ddp_hook import gradient_hook as gradient_hook
    from lightning_hetero.comm.gradients.health import NonFiniteError as NonFiniteError
    from lightning_hetero.comm.membership.members import MembershipError as MembershipError
    from lightning_hetero.comm.timing.step_timer import StepTimer as StepTimer

_EXPORTS = {
    "ControlPlane": "lightning_hetero.comm.agreement.control_plane",
    "HookState": "lightning_hetero.comm.gradients.ddp_hook",
    "MembershipError": "lightning_hetero.comm.membership.members",
    "NonFiniteError": "lightning_hetero.comm.gradients.health",
    "PlanMismatchError": "lightning_hetero.comm.agreement.control_plane",
    "StepTimer": "lightning_hetero.comm.timing.step_timer",
    "gradient_hook": "lightning_hetero.comm.gradients.ddp_hook",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
