"""Joint work of the ranks: gradient averaging with timing, step observation, agreement on plans.

The names below are imported on first use: some modules here, such as the schedule, need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.comm.agreement.control_plane import ControlPlane as ControlPlane
    from lightning_hetero.comm.agreement.control_plane import PlanMismatchError as PlanMismatchError
    from lightning_hetero.comm.gradients.ddp_hook import HookState as HookState
    from lightning_hetero.comm.gradients.ddp_hook import gradient_hook as gradient_hook
    from lightning_hetero.comm.timing.step_timer import StepTimer as StepTimer

_EXPORTS = {
    "ControlPlane": "lightning_hetero.comm.agreement.control_plane",
    "HookState": "lightning_hetero.comm.gradients.ddp_hook",
    "PlanMismatchError": "lightning_hetero.comm.agreement.control_plane",
    "StepTimer": "lightning_hetero.comm.timing.step_timer",
    "gradient_hook": "lightning_hetero.comm.gradients.ddp_hook",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
