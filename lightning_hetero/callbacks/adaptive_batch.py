"""Total batch size, split and learning rate by goodput while training, as a Lightning callback (Cannikin, sec. 4)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lightning_hetero.callbacks._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    callbacks_of,
    is_named,
    log_metrics,
    logger_folder,
)
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.callbacks.noise_scale import GNSCallback
from lightning_hetero.core.checkpoint_state import reading_state
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.frontend.adaptive_total import AdaptiveTotal

__all__ = ["AdaptiveBatchCallback"]


@checked_keywords
class AdaptiveBatchCallback(PolicyCallback):
    """Policy that moves the total batch to where goodput is highest, with the split and the learning rate.

    ``goodput(B) = B / T(B) * (phi + B_0) / (phi + B)``: samples per second at the optimal split, times the progress
    that a sample brings relative to one at the initial total ``B_0`` (Cannikin, sec. 4.1). ``phi`` is the gradient
    noise scale, for which a :class:`GNSCallback` is added unless there is one; ``B_0`` is the DataLoader's ``batch_size
    * world_size``, times ``accumulate_grad_batches``. Totals are reconsidered at each epoch and, with the plan, inside
    long ones. A total jumps as far as the measured noise scale supports: efficiency is a mean over those that may be.

    The scheduled learning rate is multiplied by a factor while the optimizer steps, see
    :mod:`lightning_hetero.core.batching.lr_scaling`; the scheduler does not see it. Logs ``hetero/goodput`` (samples
    per second), ``hetero/efficiency``, ``hetero/lr_gain`` and, as ``hetero_candidates.csv`` in the logger's directory,
    every table of candidates.

    Args:
        max_total_batch_size: largest total, ``>= 1``, and at most the samples of an epoch.
        lr_scaling: ``"adascale"``, ``"sqrt"``, ``"linear"``, ``"none"``, a function
            ``(total, initial, trace, grad_sq_norm) -> factor``, or ``"auto"``: AdaScale for SGD, else the square root.
        min_total_batch_size: smallest total, ``>= 1``; by default what the workers' bounds allow.
        hysteresis: least predicted gain in goodput, as a share, for which the total changes, 0 to 1.
        min_steps: steps to observe between two changes of the total, ``>= 1``; of a long interval between two sync
            rounds, only the last 32 are observed.

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
        hysteresis: float = 0.02,
        min_steps: int = 4,
    ) -> None:
        self._total = AdaptiveTotal(max_total_batch_size, lr_scaling, min_total_batch_size=min_total_batch_size)
        planner = GoodputPlanner(
            max_total_batch_size,
            min_total_batch_size,
            check_number("hysteresis", hysteresis, low=0.0, high=1.0),
            check_int("min_steps", min_steps, minimum=1),
        )
        super().__init__(planner)
        self._directory: Path | None = None

    @property
    def lr_scaling(self) -> str | Callable[[float, float, float, float], float]:
        """The rule; once training has begun, the one that ``"auto"`` has chosen."""
        return self._total.lr_scaling

    @property
    def given_lr_scaling(self) -> str | Callable[[float, float, float, float], float]:
        """The rule as it was given."""
        return self._total.given_lr_scaling

    @property
    def goodput_planner(self) -> GoodputPlanner:
        """The planner in its present state."""
        return cast(GoodputPlanner, self.planner)

    @property
    def lr_gain(self) -> float:
        """Factor on the learning rate at the running step."""
        return self._total.lr_gain

    @property
    def scale_invariant_steps(self) -> float:
        """Steps at the initial total to which all steps so far amount, the sum of their factors (AdaScale).

        A schedule in these steps does not depend on the total:
        ``LambdaLR(optimizer, lambda _: 0.5 ** (callback.scale_invariant_steps / 1000))``.
        """
        return self._total.scale_invariant_steps

    def companions(self, callbacks: list[Callback]) -> list[Callback]:
        """Return a noise scale callback, unless there is one."""
        return [] if any(isinstance(c, GNSCallback) for c in callbacks) else [GNSCallback()]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the engine of the strategy.

        Raises:
            MisconfigurationException: if the trainer has another strategy, or a schedule of accumulation of its own.
        """
        super().setup(trainer, pl_module, stage)
        if any(is_named(callback, "GradientAccumulationScheduler") for callback in callbacks_of(trainer)):
            raise MisconfigurationException(
                "AdaptiveBatchCallback and GradientAccumulationScheduler would both set accumulate_grad_batches. "
                "Keep one of them."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the initial total, and begin to scale the optimizers' learning rates.

        Raises:
            MisconfigurationException: if the initial total, or that of the checkpoint, is outside the bounds.
        """
        super().on_train_start(trainer, pl_module)
        engine, planner = self._engine, self.goodput_planner
        assert engine is not None
        assert engine.plan is not None
        assert engine.workers is not None
        assert engine.sampler is not None
        count, micro, bounds = trainer.accumulate_grad_batches, engine.plan.total_batch_size, engine.workers.max_local
        # manual optimization does not follow accumulate_grad_batches: a total that does not fit cannot be run
        fits = None if bounds is None or pl_module.automatic_optimization else sum(bounds)
        try:
            planner = self.planner = self._total.begin(
                planner,
                engine,
                initial=micro,
                accumulation=count,
                micro_batch_limit=None if count == 1 or bounds is not None else micro,
                fits=fits,
            )
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        trainer.accumulate_grad_batches = planner.accumulation
        engine.rounds.accumulate(planner.accumulation)
        self._total.hold(trainer.optimizers)
        self._directory = logger_folder(trainer)

    def _exchange(self, trainer: Trainer, not_before: tuple[int, int]) -> None:
        """Reconsider the plan; then all ranks take the learning rates and micro-batches of rank 0."""
        super()._exchange(trainer, not_before)
        assert self._engine is not None
        planner, running = self._total.follow(self.goodput_planner)
        self.planner = planner
        if trainer.accumulate_grad_batches != planner.accumulation:
            trainer.accumulate_grad_batches = planner.accumulation
            self._engine.rounds.accumulate(planner.accumulation)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        log_metrics(trainer, self._total.metrics(running))
        if self._directory is not None:
            self._total.write(planner.table, running, self._directory, step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizers, so that a checkpoint of the exception has the scheduled learning rates."""
        self._total.let_go()
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers."""
        self._total.let_go()
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, the plan, the factors of the learning rate and the scale-invariant steps."""
        return {**super().state_dict(), **self._total.state_dict()}

    @reading_state("learning rates and steps of the adaptive batch")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        super().load_state_dict(state_dict)
        self._total.load_state_dict(state_dict)
