"""Learning rate, bounds and reports that follow a moving total batch, the same for every front end.

:class:`~lightning_hetero.core.policies.goodput.GoodputPlanner` decides on the total itself, in sync rounds.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_hetero.core.batching.goodput import Candidate
from lightning_hetero.core.batching.lr_scaling import check_lr_scaling, lr_gain
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.validation import check_totals
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.optim import LearningRateMultiplier

__all__ = ["TABLE", "AdaptiveTotal"]

TABLE = "hetero_candidates.csv"


class AdaptiveTotal:
    """The learning rate, the bounds and the reports of a total batch that a planner moves.

    The scheduled learning rate is multiplied by a factor while the optimizer steps, see
    :mod:`lightning_hetero.core.batching.lr_scaling`; the scheduler does not see it.

    Args:
        max_total_batch_size: largest total, ``>= 1``.
        lr_scaling: a rule of :data:`~lightning_hetero.core.batching.lr_scaling.LR_RULES`, a function, or ``"auto"``:
            AdaScale for SGD, else the square root.
        min_total_batch_size: smallest total, ``>= 1``; by default what the workers' bounds allow.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> total = AdaptiveTotal(4096, "sqrt")
        >>> total.check("the initial total batch is", 64)
        >>> total.lr_gain, total.scale_invariant_steps
        (1.0, 0.0)
    """

    def __init__(
        self,
        max_total_batch_size: int,
        lr_scaling: str | Callable[[float, float, float, float], float] = "auto",
        *,
        min_total_batch_size: int | None = None,
    ) -> None:
        check_totals(max_total_batch_size, min_total_batch_size)
        self.lr_scaling = self.given_lr_scaling = check_lr_scaling(lr_scaling)  # the first is what "auto" chooses
        self._most, self._least = max_total_batch_size, min_total_batch_size or 1
        self._engine: HeteroEngine | None = None
        self._gains: dict[int, float] = {}
        self._lr: LearningRateMultiplier | None = None
        self._steps_before = 0.0

    @property
    def lr_gain(self) -> float:
        """Factor on the learning rate at the running step."""
        plan = None if self._engine is None else self._engine.plan
        return 1.0 if plan is None else self._gains.get(plan.total_batch_size, 1.0)

    @property
    def scale_invariant_steps(self) -> float:
        """Steps at the initial total to which all steps so far amount, the sum of their factors (AdaScale)."""
        return self._steps_before + (0.0 if self._lr is None else self._lr.steps)

    # a run

    def begin(
        self,
        planner: GoodputPlanner,
        engine: HeteroEngine,
        *,
        initial: int,
        accumulation: int,
        micro_batch_limit: int | None = None,
        fits: int | None = None,
    ) -> GoodputPlanner:
        """Return the planner with the bounds and totals that are known when a run begins, equal on all ranks.

        Args:
            planner: a new one, or one of an earlier run, whose initial total it keeps.
            engine: engine of the run, with sharded data.
            initial: samples of a micro-batch to begin with.
            accumulation: micro-batches of an optimizer step to begin with.
            micro_batch_limit: samples of a micro-batch if no bounds are known.
            fits: most samples of an optimizer step that can be run, ``None`` for no limit.

        Raises:
            ValueError: if the initial total, or that of the checkpoint, is outside the bounds.
        """
        assert engine.plan is not None
        assert engine.sampler is not None
        self._engine = engine
        if planner.initial_total is None:
            planner = replace(
                planner,
                initial_total=initial * accumulation,
                micro_batch_limit=micro_batch_limit,
                accumulation=accumulation,
            )
        self.check("the initial total batch is", planner.initial_total or 0)
        self.check("the checkpoint goes on with", engine.plan.total_batch_size * planner.accumulation)
        most = min(self._most, len(engine.sampler.stream))  # with a larger total no step would ever be full
        return replace(planner, max_total_batch_size=most if fits is None else min(most, fits))

    def check(self, what: str, total: int, *, at_least: bool = False) -> None:
        """Check that a total is within the bounds.

        Args:
            what: text of the error: which total it is.
            total: samples.
            at_least: whether the total may turn out to be larger, so that only the upper bound is checked.

        Raises:
            ValueError: if it is not.
        """
        low, high = 1 if at_least else self._least, self._most
        if not low <= total <= high:
            name = "min_total_batch_size" if total < low else "max_total_batch_size"
            raise ValueError(
                f"{what} {total} samples, outside {name}={low if total < low else high}. Change the bound, or the "
                "DataLoader's batch_size."
            )

    def follow(self, planner: GoodputPlanner) -> tuple[GoodputPlanner, Candidate | None]:
        """Give all ranks the learning rates and micro-batches of rank 0, after a sync round; a collective call.

        Args:
            planner: planner that has decided; only rank 0's counts.

        Returns:
            The planner, and the candidate of the total that holds from now on, with its predictions.
        """
        assert self._engine is not None
        self._gains, accumulation, running = self._engine.control.decide(lambda: self._decision(planner))
        if planner.accumulation != accumulation:
            planner = replace(planner, accumulation=accumulation)
        return planner, running

    def _decision(self, planner: GoodputPlanner) -> tuple[dict[int, float], int, Candidate | None]:
        engine = self._engine
        assert engine is not None
        assert engine.history is not None
        noise = engine.noise_scale()
        trace, grad_sq_norm = (float("nan"),) * 2 if noise is None else (noise.trace, noise.grad_sq_norm)
        initial = float(planner.initial_total or 0)
        totals = {entry.plan.total_batch_size for entry in engine.history.entries}

        def gain(total: int) -> float:
            if total == initial:
                return 1.0
            if self.lr_scaling == "adascale" and noise is not None and not math.isnan(noise.noise_scale):
                return float(total / initial * noise.efficiency(np.array([float(total)]), initial)[0])
            return lr_gain(self.lr_scaling, total, initial, trace, grad_sq_norm)

        gains = {total: gain(total * planner.accumulation) for total in totals}
        effective = engine.history.last.plan.total_batch_size * planner.accumulation
        return gains, planner.accumulation, planner.current(planner.table, effective)

    # the learning rate

    def hold(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Scale the learning rates of a run's optimizers from now on, in place of those held before."""
        self.let_go()
        if self.given_lr_scaling == "auto":
            plain = all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers)
            self.lr_scaling = "adascale" if plain else "sqrt"
        if optimizers:
            self._lr = LearningRateMultiplier(optimizers, lambda: self.lr_gain)

    @property
    def rates_follow(self) -> bool:
        """``True`` if the rates of optimizers are scaled, or the rule is to leave them as they are."""
        return self._lr is not None or self.given_lr_scaling == "none"

    def let_go(self) -> None:
        """Let go of the optimizers, and leave them their scheduled rates."""
        self._steps_before = self.scale_invariant_steps
        if self._lr is not None:
            self._lr.remove()
            self._lr = None

    # reports

    def metrics(self, running: Candidate | None) -> dict[str, float]:
        """Return the metrics of the total that holds from now on.

        Args:
            running: its candidate, with the predictions.
        """
        assert self._engine is not None
        assert self._engine.history is not None
        upcoming = self._engine.history.last.plan.total_batch_size  # as goodput and efficiency are of
        metrics = {"hetero/lr_gain": self._gains.get(upcoming, 1.0)}
        if running is not None:
            metrics |= {"hetero/goodput": running.goodput, "hetero/efficiency": running.efficiency}
        return metrics

    def write(self, table: Sequence[Candidate], running: Candidate | None, directory: Path, step: int) -> None:
        """Add all candidates of a sync round to the table in a directory, ``hetero_candidates.csv``.

        Args:
            table: candidates; if there are none, nothing is written.
            running: the candidate that holds from now on.
            directory: folder, made if it does not exist.
            step: optimizer step of the sync round.
        """
        if not table:
            return
        path = directory / TABLE
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, **asdict(c), "running": int(c == running)} for c in table]
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if fresh:
                writer.writeheader()
            writer.writerows(rows)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the factors of the learning rate and the scale-invariant steps."""
        return {"gains": dict(self._gains), "scale_invariant_steps": self.scale_invariant_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        self._gains = {int(total): float(gain) for total, gain in state.get("gains", {}).items()}
        self._steps_before = float(state.get("scale_invariant_steps", 0.0)) - (
            0.0 if self._lr is None else self._lr.steps
        )
