"""Gradient noise scale while training, as a Lightning callback (Cannikin, sec. 4.4, with corrected weights).

Three sources, by what there is: several workers of ``hetero_ddp`` (unequal batches), several workers of plain ``ddp``
(equal ones), and a single worker, by gradient accumulation or, flagged as biased, by successive steps.
"""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.callbacks.policy import Callback, MisconfigurationException
from lightning_hetero.comm.clock import HostClock
from lightning_hetero.comm.control import ControlPlane
from lightning_hetero.comm.gradient_hook import HookState, gradient_hook
from lightning_hetero.comm.noise import PRECONDITIONED_AFTER, NoiseCollector
from lightning_hetero.comm.observer import StepObserver
from lightning_hetero.core.noise_scale import METHODS, RunningNoiseScale, estimate_from_two_sizes
from lightning_hetero.core.validation import check_choice, check_int, check_number
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.optim import AdamPreconditioner, is_adam

__all__ = ["GNSCallback"]

INTERVAL = 50
"""Optimizer steps between two messages or readings of the device, where the engine does not set the pace."""


class _Source:
    """Where gradients come from: what there is to do at the seams of a step, nothing by default."""

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None: ...

    def start(self, trainer: Any) -> None: ...

    def begin(self, batch_size: int, step: int) -> None: ...

    def backward(self, trainer: Any, pl_module: Any) -> None: ...

    def before_step(self, trainer: Any, pl_module: Any) -> None: ...

    def end(self) -> None: ...

    def stop(self) -> None: ...


class _Engine(_Source):
    """Workers of ``hetero_ddp``: the engine collects and exchanges by itself."""

    def __init__(self, engine: HeteroEngine, **settings: Any) -> None:
        self.collector = engine.noise = NoiseCollector(engine.hook_state, engine.rank, **settings)

    def start(self, trainer: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # on the device: get_scale() would wait for it
        self.collector.hook.loss_scale = None if scaler is None else scaler._get_scale_async

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        self.collector.hook.preconditioner = preconditioner

    @property
    def running(self) -> RunningNoiseScale:
        return self.collector.running

    @running.setter
    def running(self, value: RunningNoiseScale) -> None:
        self.collector.running = value


class _PlainDDP(_Engine):
    """Workers of plain ``ddp``: equal batches, a hook of our own, a message every 50 optimizer steps."""

    def __init__(self, rank: int, world_size: int, **settings: Any) -> None:
        self.world_size = world_size
        self.hook = HookState(StepObserver(HostClock()), world_size)
        self.collector = NoiseCollector(self.hook, rank, **settings)
        self.control = ControlPlane(rank, world_size)
        self.steps = 0

    def start(self, trainer: Any) -> None:
        super().start(trainer)
        model = trainer.strategy.model
        if (
            not isinstance(model, DistributedDataParallel)
            or getattr(trainer.strategy, "_ddp_comm_hook", None) is not None
        ):
            raise MisconfigurationException(
                "GNSCallback needs DDP's communication hook, and the strategy has one of its own or no DDP module "
                f"({type(model).__name__}). Use strategy='hetero_ddp', which takes your hook inside its own."
            )
        model.register_comm_hook(self.hook, gradient_hook)

    def begin(self, batch_size: int, step: int) -> None:
        self.collector.begin_step(step, (batch_size,) * self.world_size)

    def end(self) -> None:
        if not self.hook.take_fired():
            return
        self.collector.end_step()
        self.steps += 1
        if self.steps % INTERVAL == 0:
            self.collector.absorb(self.control.gather(self.collector.take()))

    def stop(self) -> None:
        self.hook.settle()


class _Alone(_Source):
    """One worker: the first micro-batch of a window against the whole window, or successive steps (biased)."""

    def __init__(self, *, every_n_steps: int, horizon: float) -> None:
        self.every_n_steps = every_n_steps
        self.running = RunningNoiseScale(horizon=horizon)
        self.sizes: list[int] = []
        self.first: torch.Tensor | None = None
        self.previous: list[torch.Tensor] = []
        self.previous_size = 0
        self.pending: list[tuple[torch.Tensor, torch.Tensor, int, int, bool]] = []
        self.observed = self.kept = True
        self.preconditioner: AdamPreconditioner | None = None

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        self.preconditioner = preconditioner

    def _sq_norm(self, pl_module: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        if self.preconditioner is not None:
            parameters = [p for p in pl_module.parameters() if p.grad is not None]
            tensors = [self.preconditioner(p, t) for p, t in zip(parameters, tensors, strict=True)]
        norms = torch._foreach_norm(tensors)
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def begin(self, batch_size: int, step: int) -> None:
        known = self.preconditioner is None or step >= PRECONDITIONED_AFTER
        self.observed = known and step % self.every_n_steps == 0
        self.kept = (step + 1) % self.every_n_steps == 0  # without accumulation the step before is needed, too
        self.sizes.append(batch_size)

    def backward(self, trainer: Any, pl_module: Any) -> None:
        if self.observed and len(self.sizes) == 1 and trainer.accumulate_grad_batches > 1:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = trainer.accumulate_grad_batches / (scaler.get_scale() if scaler is not None else 1.0)
            self.first = self._sq_norm(pl_module, _gradients(pl_module)) * scale**2

    def before_step(self, trainer: Any, pl_module: Any) -> None:
        sizes, first, previous = self.sizes, self.first, self.previous
        self.sizes, self.first, self.previous = [], None, []
        gradients = _gradients(pl_module)
        if not gradients or len(set(sizes)) != 1:
            return  # a mean over micro-batches of different sizes is no mean over samples
        window = trainer.accumulate_grad_batches
        if window == 1 and self.kept:
            self.previous = [gradient.detach().clone() for gradient in gradients]
        if first is not None and len(sizes) == window:
            self.pending.append((first, self._sq_norm(pl_module, gradients), sizes[0], sum(sizes), False))
        elif window == 1 and self.observed and len(previous) == len(gradients) and self.previous_size == sizes[0]:
            # the mean gradient of a batch, and the mean of two of them, which stands for one batch of twice the size
            both = self._sq_norm(pl_module, [(a + b) / 2 for a, b in zip(gradients, previous, strict=True)])
            one = (self._sq_norm(pl_module, gradients) + self._sq_norm(pl_module, previous)) / 2
            self.pending.append((one, both, sizes[0], 2 * sizes[0], True))
        self.previous_size = sizes[0]
        if len(self.pending) >= INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Read what the device has computed, and take it into the running estimate."""
        for small, big, small_size, big_size, biased in self.pending:
            estimate = estimate_from_two_sizes(float(small), small_size, float(big), big_size, biased=biased)
            self.running = self.running.update(
                trace=estimate.trace,
                global_sq_norm=float(big),
                total_batch_size=big_size,
                steps=0.5 if biased and self.every_n_steps == 1 else 1,  # successive pairs overlap
                biased=biased,
            )
        self.pending = []


def _gradients(module: Any) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


class GNSCallback(Callback):
    """Estimates the gradient noise scale ``tr(Sigma) / |G|^2`` while training and logs it.

    Logs ``hetero/noise_scale`` (samples), ``hetero/grad_sq_norm`` (``|G|^2``) and ``hetero/grad_variance``
    (``tr(Sigma)``) whenever the estimate has news. Batches well below the noise scale waste communication, batches well
    above it waste samples.

    Args:
        every_n_steps: observe every n-th optimizer step only, ``>= 1``.
        method: weights of the workers' estimates: ``"pooled"`` (minimum variance), ``"cannikin"`` (as printed) or
            ``"mean"``.
        horizon: samples over which the estimate looks back, ``> 0``.
        preconditioner: ``"adam"`` takes the noise scale of the gradient as Adam scales it (Pollux, sec. 3.1; in whose
            units the three metrics then are); ``"auto"`` does so if all optimizers are of the Adam family; ``None``
            never does.

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
        horizon: float = 50_000.0,
        preconditioner: str | None = "auto",
    ) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, minimum=1)
        self.method = check_choice("method", method, tuple(METHODS))
        self.horizon = check_number("horizon", horizon, low=0.0, include_low=False)
        self.preconditioner = check_choice("preconditioner", preconditioner, (None, "adam", "auto"))
        self._source: _Engine | _Alone | None = None
        self._saved = RunningNoiseScale(horizon=self.horizon)
        self._logged = 0.0

    @property
    def estimate(self) -> RunningNoiseScale:
        """The running estimate, the same on all ranks."""
        return self._saved if self._source is None else self._source.running

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find where gradients come from.

        Raises:
            MisconfigurationException: if the strategy shards the model or gives no access to its gradients.
        """
        if stage != "fit":
            return
        settings: dict[str, Any] = {"every_n_steps": self.every_n_steps, "horizon": self.horizon}
        engine = getattr(trainer.strategy, "engine", None)
        saved = self.estimate
        if trainer.world_size == 1:
            self._source = _Alone(**settings)
        elif isinstance(engine, HeteroEngine):
            self._source = _Engine(engine, method=self.method, **settings)
        elif any(cls.__name__ == "DDPStrategy" for cls in type(trainer.strategy).__mro__):
            self._source = _PlainDDP(trainer.global_rank, trainer.world_size, method=self.method, **settings)
        else:
            raise MisconfigurationException(
                f"GNSCallback reads gradients from DDP's communication hook; {type(trainer.strategy).__name__} has "
                "none. Use strategy='hetero_ddp' or 'ddp'."
            )
        self._source.running = saved
        if isinstance(engine, HeteroEngine):
            engine.noise_scale = lambda: self.estimate

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to observe.

        Raises:
            MisconfigurationException: if Adam's scaling was asked for and an optimizer is none of that family.
        """
        assert self._source is not None
        others = [type(optimizer).__name__ for optimizer in trainer.optimizers if not is_adam(optimizer)]
        if self.preconditioner == "adam" and others:
            raise MisconfigurationException(
                f"GNSCallback(preconditioner='adam') reads Adam's second moments, which {', '.join(others)} has not. "
                "Use preconditioner='auto' or None."
            )
        by_adam = self.preconditioner is not None and trainer.optimizers and not others
        self._source.precondition(AdamPreconditioner(trainer.optimizers) if by_adam else None)
        self._source.start(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples of the batch, where the engine does not."""
        if isinstance(self._source, _PlainDDP | _Alone):
            loader = trainer.train_dataloader
            given = getattr(loader, "batch_size", None) or 1
            seen = _first_dimension(batch) or given
            most = getattr(loader, "batch_size", None) or seen  # more would be no samples: non-zeros, time steps
            self._source.begin(min(seen, most), trainer.global_step)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Take the norm of the first micro-batch of a window."""
        assert self._source is not None
        self._source.backward(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take the norm of the gradient before it is clipped."""
        assert self._source is not None
        self._source.before_step(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what is new."""
        assert self._source is not None
        self._source.end()
        self._log(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing running."""
        if self._source is not None:
            self._source.stop()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what is new."""
        if isinstance(self._source, _Alone):
            self._source.flush()
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        estimate = self.estimate
        if estimate.samples == self._logged:
            return
        self._logged = estimate.samples
        metrics = {
            "hetero/noise_scale": estimate.noise_scale,
            "hetero/grad_sq_norm": estimate.grad_sq_norm,
            "hetero/grad_variance": estimate.trace,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def state_dict(self) -> dict[str, Any]:
        """The running estimate."""
        return self.estimate.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the estimate of an earlier run."""
        running = RunningNoiseScale.from_state_dict(state_dict)
        self._saved = running
        if self._source is not None:
            self._source.running = running


def _first_dimension(batch: Any) -> int | None:
    """Samples of a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((size for size in map(_first_dimension, items) if size), None)
