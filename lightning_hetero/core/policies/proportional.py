"""Policy of proportional control, without a time model (D sec. III-C)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from lightning_hetero.core.batching.control_settings import ControlSettings
from lightning_hetero.core.batching.optperf import static_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.batching.proportional_control import ControllerState, control, smooth
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.timing.step_times import StepTimes
from lightning_hetero.core.timing.winsorized_mean import winsorize_top

__all__ = ["ProportionalPlanner"]

BY_CAPACITY = "in proportion to cores or peak FLOPs"


def _in_proportion(capacities: Sequence[float], context: PlanContext, reason: str) -> Proposal:
    """Propose sizes in proportion to capacities, within the bounds."""
    sizes = static_sizes(
        context.total_batch_size,
        capacities,
        min_local=context.min_local,
        max_local=context.max_local,
        multiple=context.multiple,
    )
    return Proposal(BatchPlan(context.total_batch_size, sizes), reason)


@checked_keywords
@dataclass(frozen=True)
class ProportionalPlanner:
    """Equal compute times without a time model (D sec. III-C).

    The controller is that of :mod:`lightning_hetero.core.batching.proportional_control`.

    Args:
        dead_band: sizes change only if one of them would by more than this share.
        decay: weight of the past in the moving average of compute times.
        start: sizes of a first run, unless the user gave them: ``"open_loop"``, in proportion to peak FLOP/s, or
            ``"equal"``.
        state: controller state, ``None`` before the first observation.
        throughput: samples per second last seen of each piece of hardware.
        settings: of the controller.

    Example:
        >>> known = ProportionalPlanner(throughput={"a": 300.0, "b": 100.0})
        >>> known.initial(PlanContext(40, ("a", "b"), (1, 1))).plan.local_batch_sizes
        (30, 10)
    """

    dead_band: float = 0.05
    decay: float = 0.9
    moves_total: ClassVar[bool] = False
    start: str = "open_loop"
    state: ControllerState | None = None
    throughput: Mapping[str, float] = field(default_factory=dict)
    settings: ControlSettings = ControlSettings()

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose sizes by the throughput of an earlier run; if a rank is new, the starting sizes of a first run."""
        if all(identity in self.throughput for identity in context.identities):
            speeds = [self.throughput[identity] for identity in context.identities]
            return _in_proportion(speeds, context, "from the throughput of an earlier run")
        if context.given is not None:
            return Proposal(BatchPlan(context.total_batch_size, context.given), "given start")
        if self.start == "equal" or not context.capacities:
            return None
        return _in_proportion(context.capacities, context, BY_CAPACITY)

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Smooth the compute times of the steps at the current sizes, then let the controller decide once."""
        state = self.state
        if state is None or state.local_batch_sizes != current.local_batch_sizes:
            state = ControllerState(current.local_batch_sizes, StepTimes(settings=self.settings.times))
        expected = np.maximum(np.asarray(current.local_batch_sizes), np.asarray(context.min_local))
        rows = (observations.local_batch_sizes == expected).all(axis=1)
        for times in winsorize_top(observations.compute[rows]):
            state = smooth(state, times, decay=self.decay)
        if state.times.count < self.settings.min_steps:
            steps = f"{state.times.count} steps at these sizes, of {self.settings.min_steps} that it takes"
            few = f"too few observations: {steps}"
            return Decision(replace(self, state=state), kept=few)
        state = replace(state, times=state.times.current())
        mu = state.times.best
        speeds = {**self.throughput, **dict(zip(context.identities, state.throughput, strict=True))}
        state, sizes = control(
            state,
            context.total_batch_size,
            min_local=context.min_local,
            max_local=context.max_local,
            dead_band=self.dead_band,
            settings=self.settings,
            multiple=context.multiple,
        )
        planner = replace(self, state=state, throughput=speeds)
        if sizes is None:
            return Decision(planner, kept=state.kept)
        reason = f"compute times {mu.min() * 1e3:.1f} to {mu.max() * 1e3:.1f} ms differ: equalised in proportion"
        return Decision(planner, Proposal(BatchPlan(context.total_batch_size, sizes), reason))

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Return ``None``: the controller has no time model."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the throughput by hardware identity."""
        return {"throughput": {identity: float(speed) for identity, speed in self.throughput.items()}}

    def loaded(self, state: dict[str, Any]) -> "ProportionalPlanner":
        """Return the planner restored from :meth:`state_dict`."""
        return replace(self, throughput={identity: float(speed) for identity, speed in state["throughput"].items()})
