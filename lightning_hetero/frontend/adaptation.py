"""Noise scale and moving total batch in a custom training loop, as the settings ask for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.core.checkpoint_state import reading_state
from lightning_hetero.core.metrics import noise_metrics
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.adaptive_total import AdaptiveTotal
from lightning_hetero.optim import common_preconditioner

__all__ = ["Adaptation"]


class Adaptation:
    """Measured gradient noise of an engine, and what follows the total that a planner moves, if the settings say so.

    The loop itself decides on the number of micro-batches, so the total moves with that number as it is. It is known
    once a window of them is complete. With one worker there is nothing to measure.

    Args:
        engine: engine with the settings.

    Example:
        >>> from lightning_hetero.config import HeteroConfig
        >>> alone = HeteroEngine(HeteroConfig(noise_scale=True), rank=0, world_size=1, device=torch.device("cpu"))
        >>> Adaptation(alone).estimate is None
        True
    """

    def __init__(self, engine: HeteroEngine) -> None:
        config, self._engine = engine.config, engine
        most = config.max_total_batch_size if engine.world_size > 1 else None
        self._total = (
            None
            if most is None
            else AdaptiveTotal(most, config.lr_scaling, min_total_batch_size=config.min_total_batch_size)
        )
        self._noise: WorkersNoise | None = None
        self._reported = 0.0
        if engine.world_size > 1 and (config.noise_scale or self._total is not None):
            summed = config.loss_reduction == "sum"
            self._noise = WorkersNoise(engine.hook_state, engine.control, summed=summed)
            engine.measure_noise(self._noise.collector, lambda: self.estimate)

    @property
    def estimate(self) -> RunningNoiseScale | None:
        """The running estimate of the noise scale."""
        return None if self._noise is None else self._noise.running

    @property
    def lr_gain(self) -> float:
        """Factor on the learning rate at the running step."""
        return 1.0 if self._total is None else self._total.lr_gain

    @property
    def scale_invariant_steps(self) -> float:
        """Sum of the factors of all steps so far."""
        return 0.0 if self._total is None else self._total.scale_invariant_steps

    def lead(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        divisor: Callable[[], int | None],
    ) -> None:
        """Scale the learning rates of the run's optimizers from now on, in place of those given before.

        Args:
            optimizers: optimizers that step on the gradients.
            scaler: gradient scaler, ``None`` without one.
            divisor: returns the divisor of micro-batch losses; ``None`` if that is their number in a window.
        """
        held = list(optimizers)
        if self._noise is not None:
            self._noise.scaled_by(scaler)
            self._noise.precondition(common_preconditioner(held))
            self._noise.collector.accumulate(
                divisor, lambda: (p for one in held for group in one.param_groups for p in group["params"])
            )
        if self._total is not None:
            self._total.hold(held)

    def close(self) -> None:
        """Let go of the optimizers."""
        if self._total is not None:
            self._total.let_go()

    # a total that moves

    def starts(self, planner: Planner | None) -> Planner | None:
        """Return the planner with which a pass over the data begins; refuse a total that is certainly out of bounds.

        Args:
            planner: planner of the session, which knows the initial total if the run was resumed.

        Raises:
            ValueError: if the total is outside the bounds.
        """
        if self._total is None or not isinstance(planner, GoodputPlanner):
            return planner
        if planner.initial_total is not None:
            return self._begin(planner)
        self._total.check("the initial total batch is", self._initial, at_least=True)
        return planner

    def begun(self, planner: Planner | None) -> Planner | None:
        """Return the planner with the initial total, once the number of micro-batches is known.

        Raises:
            RuntimeError: if the learning rate of no optimizer would follow.
            ValueError: if the initial total is outside the bounds.
        """
        if self._total is not None and not self._total.rates_follow:
            raise RuntimeError(
                "max_total_batch_size moves the total batch, and no optimizer is known whose learning rate would "
                "follow. Set the optimizer up with Fabric, prepare it with Accelerate, give it to session.lead() in a "
                "loop of plain torch, or set lr_scaling='none'."
            )
        if self._total is None or not isinstance(planner, GoodputPlanner) or planner.initial_total is not None:
            return planner
        return self._begin(planner)

    @property
    def _initial(self) -> int:
        """Samples of a micro-batch of all ranks, by the batch size that the loader was given."""
        return self._engine.data.batch_size * self._engine.world_size

    def _begin(self, planner: GoodputPlanner) -> GoodputPlanner:
        assert self._total is not None
        engine = self._engine
        planner = self._total.begin(planner, engine, initial=self._initial, accumulation=engine.accumulation)
        engine.rounds.accumulate(planner.accumulation)
        return planner

    def follow(self, planner: Planner | None, directory: Path | None) -> tuple[Planner | None, dict[str, float]]:
        """Give all ranks the learning rates of rank 0, after a sync round; a collective call.

        Args:
            planner: planner that has decided.
            directory: folder for the table of candidates, ``None`` for no table.

        Returns:
            The planner, and the metrics that have changed.
        """
        metrics: dict[str, float] = {}
        noise = self._noise
        if noise is not None and noise.running.samples != self._reported:
            self._reported = noise.running.samples
            metrics |= noise_metrics(noise.running)
        if self._total is None or noise is None or not isinstance(planner, GoodputPlanner):
            return planner, metrics
        planner, running = self._total.follow(planner)
        if directory is not None and self._engine.rank == 0:
            self._total.write(planner.table, running, Path(directory), noise.collector.number)
        return planner, {**metrics, **self._total.metrics(running)}

    # state

    def interval(self) -> dict[str, Any]:
        """Return the noise of all ranks' steps since the last sync round, if it is measured; a collective call."""
        return {} if self._noise is None else {"noise": self._noise.interval()}

    def resume(self, interval: dict[str, Any]) -> None:
        """Continue in the middle of an interval.

        Args:
            interval: value of :meth:`interval`, empty if there is none.
        """
        if self._noise is not None and interval:
            with reading_state("the noise scale's steps since its last message"):
                self._noise.resume(interval["noise"])

    def state_dict(self) -> dict[str, Any]:
        """Return the noise scale, the factors of the learning rate and the scale-invariant steps."""
        noise = {} if self._noise is None else {"noise_scale": self._noise.running.state_dict()}
        return {**noise, **({} if self._total is None else {"total": self._total.state_dict()})}

    @reading_state("the noise scale, and learning rates of the total batch")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        if self._noise is not None and "noise_scale" in state:
            self._noise.take_over(RunningNoiseScale.from_state_dict(state["noise_scale"]))
        if self._total is not None:
            self._total.load_state_dict(state.get("total", {}))
