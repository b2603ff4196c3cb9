"""Gradient noise scale while training, as a Lightning callback (Cannikin, sec. 4.4, with corrected weights)."""

from typing import Any

import torch

from lightning_hetero.callbacks._gns.base import Source
from lightning_hetero.callbacks._gns.sources import source_of
from lightning_hetero.callbacks._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    engine_if_any,
    log_metrics,
)
from lightning_hetero.core.checkpoint_state import reading_state
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.metrics import noise_metrics
from lightning_hetero.core.noise.estimators import METHODS
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.validation import check_choice, check_int, check_number
from lightning_hetero.optim import common_preconditioner, is_adam

__all__ = ["GNSCallback"]


@checked_keywords
class GNSCallback(Callback):
    """Estimate of the gradient noise scale ``tr(Sigma) / |G|^2``, measured and logged while training.

    Logs ``hetero/noise_scale`` (samples), ``hetero/grad_sq_norm`` (``|G|^2``) and ``hetero/grad_variance``
    (``tr(Sigma)``) whenever the estimate changes. Batches well below the noise scale waste communication, batches well
    above it waste samples.

    Args:
        every_n_steps: observe every n-th optimizer step only, ``>= 1``.
        method: weights of the workers' estimates: ``"pooled"`` (minimum variance), ``"cannikin"`` (as printed) or
            ``"mean"``.
        horizon: steps over which the estimate looks back, ``> 0``.
        preconditioner: ``"adam"`` measures the noise scale of the gradient as Adam scales it (Pollux, sec. 3.1), and
            the three metrics are in the units of that gradient; ``"auto"`` does so if all optimizers are of the Adam
            family; ``None`` never does.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> GNSCallback(every_n_steps=4).estimate.samples
        0.0
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        method: str = "pooled",
        horizon: float = RunningNoiseScale().horizon,
        preconditioner: str | None = "auto",
    ) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, minimum=1)
        self.method = check_choice("method", method, tuple(METHODS))
        self.horizon = check_number("horizon", horizon, low=0.0, include_low=False)
        self.preconditioner = check_choice("preconditioner", preconditioner, (None, "adam", "auto"))
        self._source: Source | None = None
        self._saved = RunningNoiseScale(horizon=self.horizon)
        self._interval: dict[str, Any] = {}
        self._logged = 0.0

    @property
    def estimate(self) -> RunningNoiseScale:
        """The running estimate, the same on all ranks."""
        return self._saved if self._source is None else self._source.running

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the source of gradient norms.

        Raises:
            MisconfigurationException: if the strategy shards the model or gives no access to its gradients.
        """
        if stage != "fit":
            return
        saved = self.estimate
        self._source = source_of(trainer, method=self.method, every_n_steps=self.every_n_steps, horizon=self.horizon)
        self._source.take_over(saved)
        self._resume()
        self._source.listen(lambda: self._log(trainer))
        engine = engine_if_any(trainer)
        if engine is not None:
            engine.measure_noise(engine.noise, lambda: self.estimate)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to observe.

        Raises:
            MisconfigurationException: if ``preconditioner="adam"`` and an optimizer is not of the Adam family.
        """
        assert self._source is not None
        others = [type(optimizer).__name__ for optimizer in trainer.optimizers if not is_adam(optimizer)]
        if self.preconditioner == "adam" and others:
            raise MisconfigurationException(
                f"GNSCallback(preconditioner='adam') reads Adam's second moments, which {', '.join(others)} has not. "
                "Use preconditioner='auto' or None."
            )
        self._source.precondition(None if self.preconditioner is None else common_preconditioner(trainer.optimizers))
        self._source.start(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Count the samples of the batch."""
        assert self._source is not None
        given = getattr(trainer.train_dataloader, "batch_size", None)
        seen = _first_dimension(batch) or given or 1
        self._source.begin(trainer, min(seen, given or seen))  # more are not samples but, say, non-zeros

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the norm of the first micro-batch of a window."""
        assert self._source is not None
        self._source.backward(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the norm of the gradient before it is clipped."""
        assert self._source is not None
        self._source.before_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log what is new."""
        assert self._source is not None
        self._source.end(trainer)
        self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is new."""
        assert self._source is not None
        self._source.finish()
        self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the source of gradient norms."""
        if self._source is not None:
            self._source.stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is new."""
        assert self._source is not None
        self._source.flush()
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        estimate = self.estimate
        if estimate.samples == self._logged:
            return
        self._logged = estimate.samples
        log_metrics(trainer, noise_metrics(estimate))

    def state_dict(self) -> dict[str, Any]:
        """Return the running estimate."""
        return self.estimate.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what all ranks have seen since their last message; a collective call, except after an exception."""
        if self._source is not None and not trainer.interrupted:
            interval, state = self._source.interval(), checkpoint["callbacks"].get(self.state_key)
            if state is not None:  # else a subclass saves nothing
                state["interval"] = interval

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Start from scratch if the checkpoint has no estimate: that of an earlier fit belongs to other weights."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            self.load_state_dict(RunningNoiseScale(horizon=self.horizon).state_dict())

    @reading_state("the noise scale")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the estimate of an earlier run, possibly in the middle of an interval."""
        state = dict(state_dict)
        self._interval = state.pop("interval", {})
        self._saved = RunningNoiseScale.from_state_dict(state)
        if self._source is not None:
            self._source.take_over(self._saved)
            self._resume()

    @reading_state("the noise scale's steps since its last message")
    def _resume(self) -> None:
        if self._source is not None and self._interval:
            self._source.resume(self._interval)
            self._interval = {}


def _first_dimension(batch: object) -> int | None:
    """Count the samples of a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((size for size in map(_first_dimension, items) if size), None)
