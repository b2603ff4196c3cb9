"""Total batch size, split and learning rate by goodput while training, as a Lightning callback (Cannikin, sec. 4)."""

import csv
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from lightning_hetero.callbacks.noise_scale import GNSCallback
from lightning_hetero.callbacks.policy import MisconfigurationException, PolicyCallback
from lightning_hetero.core.adaptive import GoodputPlanner
from lightning_hetero.core.goodput import Candidate
from lightning_hetero.core.lr_scaling import LR_RULES, lr_gain
from lightning_hetero.core.state import reading_state
from lightning_hetero.core.validation import check_choice, check_int, check_number
from lightning_hetero.optim import LearningRateGain

__all__ = ["AdaptiveBatchCallback"]

TABLE = "hetero_candidates.csv"


class AdaptiveBatchCallback(PolicyCallback):
    """Moves the total batch to where goodput is highest, together with the split and the learning rate.

    ``goodput(B) = B / T(B) * (phi + B_0) / (phi + B)``: samples per second at the optimal split, times the progress
    that a sample brings relative to one at the initial total ``B_0`` (Cannikin, sec. 4.1). ``phi`` is the gradient
    noise scale, for which a :class:`GNSCallback` is added unless there is one; ``B_0`` is the DataLoader's ``batch_size
    * world_size``, times ``accumulate_grad_batches``. Totals are reconsidered at each epoch and, with the plan, inside
    long ones. One decision changes the total by a factor of two at most.

    The scheduled learning rate is multiplied by a factor while the optimizer steps, see
    :mod:`lightning_hetero.core.lr_scaling`; the scheduler does not see it. Logs ``hetero/goodput`` (samples per
    second), ``hetero/efficiency``, ``hetero/lr_gain`` and, as ``hetero_candidates.csv`` in the logger's directory,
    every table of candidates.

    Args:
        max_total_batch_size: greatest total, ``>= 1``; it is never more than an epoch has samples.
        lr_scaling: ``"adascale"``, ``"sqrt"``, ``"linear"``, ``"none"``, a function
            ``(total, initial, trace, grad_sq_norm) -> factor``, or ``"auto"``: AdaScale for SGD, else the square root.
        min_total_batch_size: least total; by default what the workers' bounds allow.
        hysteresis: least predicted gain in goodput for which the total is changed, 0 to 1.
        min_steps: steps to observe between two changes of the total, ``>= 1``; of a long interval between two looks at
            the plan, the last 32 are observed.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> AdaptiveBatchCallback(max_total_batch_size=4096, lr_scaling="sqrt").scale_invariant_steps
        0.0
    """

    def __init__(
        self,
        max_total_batch_size: int,
        lr_scaling: str | Callable[[float, float, float, float], float] = "auto",
        *,
        min_total_batch_size: int | None = None,
        hysteresis: float = 0.05,
        min_steps: int = 30,
    ) -> None:
        check_int("max_total_batch_size", max_total_batch_size, minimum=1)
        if min_total_batch_size is not None:
            check_int("min_total_batch_size", min_total_batch_size, minimum=1)
            if min_total_batch_size > max_total_batch_size:
                raise ValueError(
                    f"min_total_batch_size={min_total_batch_size} is above max_total_batch_size="
                    f"{max_total_batch_size}. Raise the one or lower the other."
                )
        if not callable(lr_scaling):
            check_choice("lr_scaling", lr_scaling, ("auto", *LR_RULES))
        super().__init__(
            GoodputPlanner(
                max_total_batch_size,
                min_total_batch_size,
                check_number("hysteresis", hysteresis, low=0.0, high=1.0),
                check_int("min_steps", min_steps, minimum=1),
            )
        )
        self.lr_scaling = self.given_lr_scaling = lr_scaling  # the first is what "auto" chooses
        self._most = max_total_batch_size
        self._gains: dict[int, float] = {}
        self._lr: LearningRateGain | None = None
        self._steps_before = 0.0
        self._directory: Path | None = None

    @property
    def goodput_planner(self) -> GoodputPlanner:
        """The planner in its present state."""
        return cast(GoodputPlanner, self.planner)

    @property
    def lr_gain(self) -> float:
        """Factor on the learning rate at the running step."""
        plan = None if self._engine is None else self._engine.plan
        return 1.0 if plan is None else self._gains.get(plan.total_batch_size, 1.0)

    @property
    def scale_invariant_steps(self) -> float:
        """Steps at the initial total to which all steps so far amount: the sum of their factors (AdaScale).

        A schedule in these steps does not depend on the total:
        ``LambdaLR(optimizer, lambda _: 0.5 ** (callback.scale_invariant_steps / 1000))``.
        """
        return self._steps_before + (0.0 if self._lr is None else self._lr.steps)

    def companions(self, callbacks: list[Any]) -> list[Any]:
        """A noise scale callback, unless there is one."""
        return [] if any(isinstance(c, GNSCallback) for c in callbacks) else [GNSCallback()]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the engine of the strategy.

        Raises:
            MisconfigurationException: if the trainer has another strategy, or a schedule of accumulation of its own.
        """
        super().setup(trainer, pl_module, stage)
        if any(cls.__name__ == "GradientAccumulationScheduler" for c in trainer.callbacks for cls in type(c).__mro__):
            raise MisconfigurationException(
                "AdaptiveBatchCallback and GradientAccumulationScheduler would both set accumulate_grad_batches. "
                "Keep one of them."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the initial total, and take hold of the optimizers.

        Raises:
            MisconfigurationException: if the initial total, or that of the checkpoint, is outside the bounds.
        """
        super().on_train_start(trainer, pl_module)
        engine, planner = self._engine, self.goodput_planner
        assert engine is not None
        assert engine.plan is not None
        assert engine.roster is not None
        assert engine.sampler is not None
        if planner.initial_total is None:
            count = trainer.accumulate_grad_batches
            micro = engine.plan.total_batch_size
            known = count == 1 or engine.roster.max_local is not None
            planner = replace(
                planner,
                initial_total=micro * count,
                micro_batch_limit=None if known else micro,
                accumulation=count,
            )
        self._check_total("the initial total batch is", planner.initial_total or 0)
        self._check_total("the checkpoint goes on with", engine.plan.total_batch_size * planner.accumulation)
        most = min(self._most, len(engine.sampler.stream))  # of a larger one no step would ever be full
        if not pl_module.automatic_optimization and engine.roster.max_local is not None:
            # the module's own loop does not follow accumulate_grad_batches: what does not fit cannot be run
            most = min(most, sum(engine.roster.max_local))
        self.planner = replace(planner, max_total_batch_size=most)
        trainer.accumulate_grad_batches = engine.accumulation = planner.accumulation
        if self.lr_scaling == "auto":
            plain = all(isinstance(o, torch.optim.SGD) for o in trainer.optimizers)
            self.lr_scaling = "adascale" if plain else "sqrt"
        self._lr = LearningRateGain(trainer.optimizers, lambda: self.lr_gain)
        directory = trainer.log_dir if trainer.loggers else None  # collective
        self._directory = Path(directory) if directory and trainer.is_global_zero else None

    def _check_total(self, what: str, total: int) -> None:
        low, high = self.goodput_planner.min_total_batch_size or 1, self._most
        if not low <= total <= high:
            name = "min_total_batch_size" if total < low else "max_total_batch_size"
            raise MisconfigurationException(
                f"{what} {total} samples, outside {name}={low if total < low else high}. Change the bound, or the "
                "DataLoader's batch_size."
            )

    def _exchange(self, trainer: Any, not_before: tuple[int, int]) -> None:
        """Reconsider the plan; then all ranks take the learning rates and micro-batches of rank 0."""
        super()._exchange(trainer, not_before)
        assert self._engine is not None
        decision = self._engine.control.decide(lambda: self._decision(self.goodput_planner))
        self._gains, accumulation, running = decision
        if self.goodput_planner.accumulation != accumulation:
            self.planner = replace(self.goodput_planner, accumulation=accumulation)
        if trainer.accumulate_grad_batches != accumulation:
            trainer.accumulate_grad_batches = self._engine.accumulation = accumulation
        self._report(trainer, running)

    def _decision(self, planner: GoodputPlanner) -> tuple[dict[int, float], int, Candidate | None]:
        engine = self._engine
        assert engine is not None
        assert engine.history is not None
        noise = engine.noise_scale()
        trace, grad_sq_norm = (float("nan"),) * 2 if noise is None else (noise.trace, noise.grad_sq_norm)
        initial = float(planner.initial_total or 0)
        totals = {entry.plan.total_batch_size for entry in engine.history.entries}
        gains = {
            total: lr_gain(self.lr_scaling, total * planner.accumulation, initial, trace, grad_sq_norm)
            if total * planner.accumulation != initial
            else 1.0
            for total in totals
        }
        effective = engine.history.last.plan.total_batch_size * planner.accumulation
        return gains, planner.accumulation, planner.current(planner.table, effective)

    def _report(self, trainer: Any, running: Candidate | None) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        assert self._engine is not None
        assert self._engine.history is not None
        upcoming = self._engine.history.last.plan.total_batch_size  # as goodput and efficiency are of
        metrics = {"hetero/lr_gain": self._gains.get(upcoming, 1.0)}
        if running is not None:
            metrics |= {"hetero/goodput": running.goodput, "hetero/efficiency": running.efficiency}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        table = self.goodput_planner.table
        if self._directory is None or not table:
            return
        path = self._directory / TABLE
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, **asdict(c), "running": int(c == running)} for c in table]
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if fresh:
                writer.writeheader()
            writer.writerows(rows)

    def _let_go(self) -> None:
        self._steps_before = self.scale_invariant_steps
        if self._lr is not None:
            self._lr.remove()
            self._lr = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the optimizers, whose rates a checkpoint of the exception is to have as scheduled."""
        self._let_go()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the optimizers."""
        self._let_go()
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        """What was learned, the plan, and where learning rate and scale-invariant steps stand."""
        return {
            **super().state_dict(),
            "gains": dict(self._gains),
            "scale_invariant_steps": self.scale_invariant_steps,
        }

    @reading_state("learning rates and steps of the adaptive batch")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where an earlier run stood."""
        super().load_state_dict(state_dict)
        self._gains = {int(total): float(gain) for total, gain in state_dict.get("gains", {}).items()}
        self._steps_before = float(state_dict.get("scale_invariant_steps", 0.0))
