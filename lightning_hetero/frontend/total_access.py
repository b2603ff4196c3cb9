"""Access to the noise scale and the moving total of a run, and to the optimizers that follow it."""

from collections.abc import Callable, Iterable, Sequence

import torch

from lightning_hetero.core.batching.goodput import Candidate
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.frontend.adaptation import Adaptation

__all__ = ["TotalAccess"]


class TotalAccess:
    """Access to the total batch of a session, and to the noise scale that it follows."""

    planner: Planner | None
    _adaptation: Adaptation

    def lead(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scaler: torch.amp.GradScaler | None = None,
        divisor: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Name all optimizers of the run: their rates follow the total, and Adam's moments precondition the noise.

        Fabric and Accelerate do this for you.

        Args:
            optimizers: optimizers that step on the gradients, in place of those given before.
            scaler: gradient scaler, if there is one.
            divisor: returns the divisor of micro-batch losses; ``None`` if that is their number in a window.

        Raises:
            TypeError: if it is not a list of optimizers.
        """
        held = list(optimizers) if isinstance(optimizers, Iterable) else None
        others = sorted({type(one).__name__ for one in held or () if not isinstance(one, torch.optim.Optimizer)})
        if held is None or others:
            got = type(optimizers).__name__ if held is None else f"a list with {', '.join(others)}"
            raise TypeError(f"session.lead() takes a list of optimizers; got {got}.")
        self._adaptation.lead(held, scaler, divisor)

    @property
    def noise_scale(self) -> RunningNoiseScale | None:
        """The running estimate of the gradient noise scale, the same on all ranks; ``None`` if it is not measured."""
        return self._adaptation.estimate

    @property
    def lr_gain(self) -> float:
        """Factor on the learning rate at the running step."""
        return self._adaptation.lr_gain

    @property
    def scale_invariant_steps(self) -> float:
        """Steps at the initial total to which all steps so far amount, the sum of their factors (AdaScale)."""
        return self._adaptation.scale_invariant_steps

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates for the total in the latest sync round, on rank 0."""
        return self.planner.table if isinstance(self.planner, GoodputPlanner) else ()
