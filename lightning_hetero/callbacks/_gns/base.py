"""Where :class:`~lightning_hetero.callbacks.GNSCallback` gets its norms from, by what runs the training.

Three sources: several workers of ``hetero_ddp`` (unequal batches), several workers of plain ``ddp`` (equal ones), and a
single worker, by gradient accumulation or, flagged as biased, by successive steps.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.callbacks.base import MisconfigurationException
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.gradients.squared_norms import GradientNorms
from lightning_hetero.comm.noise.collector import PRECONDITIONED_AFTER, NoiseSums, merge_parts, own_part
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepObserver
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.estimators import RunningNoiseScale
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.optim import AdamPreconditioner

__all__ = ["Source", "source_of"]

log = logging.getLogger("lightning_hetero")

INTERVAL = 50
"""Observed steps between two messages or readings of the device, where the engine does not set the pace."""


class Source:
    """Where gradients come from: what there is to do at the seams of a step, nothing by default."""

    running: RunningNoiseScale
    each_step = True
    """Whether there is something to do at the seams of a step, beside the gradient hook."""

    def listen(self, news: Callable[[], None]) -> None:
        """Tell when workers have put their estimates together, if that is not at a seam of a step."""

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as Adam scales them."""

    def start(self, trainer: Any) -> None:
        """Training begins."""

    def begin(self, trainer: Any, batch_size: int) -> None:
        """A batch begins."""

    def backward(self, trainer: Any) -> None:
        """A backward pass is over."""

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def end(self, trainer: Any) -> None:
        """The batch is over."""

    def flush(self) -> None:
        """Take what is known on this rank alone into the running estimate."""

    def finish(self) -> None:
        """Training went to its end: a training too short for a message has an estimate all the same; collective."""

    def stop(self) -> None:
        """Training is over."""

    def interval(self) -> dict[str, Any]:
        """What was seen since the last message, for a checkpoint; a collective call."""
        return {}

    def resume(self, interval: dict[str, Any]) -> None:
        """Go on in the middle of an interval."""


class _Workers(WorkersNoise, Source):
    """Several workers, who put their sums together."""

    def listen(self, news: Callable[[], None]) -> None:
        self.collector.news = news

    def start(self, trainer: Any) -> None:
        self.scaled_by(_scaler(trainer))
        module = trainer.lightning_module
        if module.automatic_optimization:
            self.collector.accumulate(lambda: trainer.accumulate_grad_batches, module.parameters)

    def finish(self) -> None:
        if self.running.samples == 0:
            self.exchange()

    def stop(self) -> None:
        self.collector.news = lambda: None


class _Engine(_Workers):
    """Workers of ``hetero_ddp``: the engine collects and exchanges by itself."""

    each_step = False

    def __init__(self, engine: HeteroEngine, **settings: Any) -> None:
        summed = engine.config.loss_reduction == "sum"
        super().__init__(engine.hook_state, engine.control, summed=summed, **settings)
        engine.noise = self.collector


class _PlainDDP(_Workers):
    """Workers of plain ``ddp``: equal batches, a hook of our own, a message every 50 steps that were observed."""

    def __init__(self, rank: int, world_size: int, **settings: Any) -> None:
        self.world_size = world_size
        self.hook = HookState(StepObserver(HostClock()), world_size)
        super().__init__(self.hook, ControlPlane(rank, world_size), **settings)
        self.warned = False

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

    def begin(self, trainer: Any, batch_size: int) -> None:
        self.collector.begin_step((batch_size,) * self.world_size)

    def backward(self, trainer: Any) -> None:
        self.collector.after_backward()

    def end(self, trainer: Any) -> None:
        if not self.hook.take_fired():
            return
        self.collector.end_step()
        if self.collector.sums.steps >= INTERVAL:
            self.exchange()

    def exchange(self) -> None:
        parts, collector = self.control.gather(self.collector.sums.peek()), self.collector
        parts = collector.sums.agreed(parts, self.control)
        collector.sums.clear()
        if len(set(parts[:, 3])) == 1:
            collector.running = merge_parts(collector.running, parts)
            return
        if not self.warned and self.control.rank == 0:
            log.warning(
                "plain DDP averages workers alike, and their batches differ (%s samples in %d steps): such steps are "
                "left out of the noise scale. Give every worker batches of one size, or use strategy='hetero_ddp'.",
                ", ".join(f"{samples / self.world_size:g}" for samples in parts[:, 3]),
                int(parts[0, 4]),
            )
        self.warned = True

    def stop(self) -> None:
        super().stop()
        self.hook.settle()


class _Alone(Source):
    """One worker: the first micro-batch of a window against the whole window, or successive steps (biased)."""

    def __init__(self, *, every_n_steps: int, horizon: float) -> None:
        self.every_n_steps = every_n_steps
        self.running = RunningNoiseScale(horizon=horizon)
        self.norms = GradientNorms()
        self.windows, self.pairs = NoiseSums(), NoiseSums()
        self.number = 0
        self.sizes: list[tuple[int, ...]] = []
        self.window = 1
        self.warned = False
        self.first: list[torch.Tensor] = []
        self.whole: dict[int, list[torch.Tensor]] = {}
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.previous: dict[int, tuple[int, list[torch.Tensor]]] = {}

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        self.norms.preconditioner = preconditioner

    @property
    def known(self) -> bool:
        return self.norms.preconditioner is None or self.number >= PRECONDITIONED_AFTER

    @property
    def observed(self) -> bool:
        return self.known and self.number % self.every_n_steps == 0

    def begin(self, trainer: Any, batch_size: int) -> None:
        self.sizes.append((batch_size,))
        if trainer.lightning_module.automatic_optimization:
            self.window = trainer.accumulate_grad_batches  # else, the module's own loop: as many as the last time

    def backward(self, trainer: Any) -> None:
        if self.observed and len(self.sizes) == 1 and self.window > 1 and len(trainer.optimizers) == 1:
            scaler = _scaler(trainer)
            self.norms.loss_scale = None if scaler is None else scaler._get_scale_async
            self.first = self.norms.of_parameters(_parameters(trainer.optimizers[0]))
            self.norms.loss_scale = None  # gradients are unscaled before a step

    def before_step(self, optimizer: Any) -> None:
        """Take the norms of the gradients of one optimizer; there may be several that step on a batch."""
        parameters = [p for p in _parameters(optimizer) if p.grad is not None]
        if id(optimizer) in self.whole or not parameters:
            return  # a closure is evaluated again
        self.whole[id(optimizer)] = self.norms.of_parameters(parameters) if self.observed and self.first else []
        if len(self.sizes) == self.window == 1:
            self._compare(optimizer, parameters)

    def _compare(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """The gradient of this step with that of the step before, which belongs to other parameters."""
        ((size,),) = self.sizes
        before = self.previous.pop(id(optimizer), None)
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if self.observed and before is not None and before[0] == size and len(before[1]) == len(gradients):
            # the mean gradient of a batch, and the mean of two of them, which stands for one batch of twice the size
            seen = self.norms.preconditioner or (lambda p, gradient: gradient)
            pairs = ((seen(p, a), seen(p, b)) for p, a, b in zip(parameters, gradients, before[1], strict=True))
            sums = torch.stack([torch.stack(_products(a, b)) for a, b in pairs]).sum(dim=0)
            one, both = sums[:2].sum() / 8, sums.sum() / 4  # of the share that half the window has, see WindowEstimator
            self.products.append((one, both))
        if (self.number + 1) % self.every_n_steps == 0:
            self.previous[id(optimizer)] = size, [gradient.clone() for gradient in gradients]

    def end(self, trainer: Any) -> None:
        automatic = trainer.lightning_module.automatic_optimization
        if not self.whole:
            if automatic and len(self.sizes) >= trainer.accumulate_grad_batches:
                self.sizes, self.first = [], []  # training_step gave no loss
            return
        sizes, first, products = tuple(self.sizes), self.first, self.products
        whole = [value for squares in self.whole.values() for value in squares]
        self.sizes, self.first, self.products, self.whole = [], [], [], {}
        self.number += 1
        if not automatic:
            self.window = len(sizes)
        if products:
            pair = window_estimator(sizes * 2, nested=True)
            assert pair is not None
            ones, both = zip(*products, strict=True)
            self.pairs.add(pair.parts[0], pair.samples, (ones, both, both))
        elif first and len(sizes) > 1:
            divisor = trainer.accumulate_grad_batches if automatic else None
            estimator = window_estimator(sizes, divisor=divisor, nested=True)
            if estimator is not None:
                self.windows.add(estimator.parts[0], estimator.samples, (first, whole, whole))
        elif len(sizes) > 1 and len(trainer.optimizers) > 1 and not self.warned:
            self.warned = True
            log.warning(
                "the noise scale of one worker cannot be seen where several optimizers accumulate gradients over %d "
                "batches. Step on every batch, or use more workers.",
                len(sizes),
            )
        if self.windows.steps + self.pairs.steps >= INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Read what the device has computed, and take it into the running estimate."""
        self.running = merge_parts(self.running, self.windows.take()[None])
        weight = 0.5 if self.every_n_steps == 1 else 1.0  # successive pairs overlap
        self.running = merge_parts(self.running, self.pairs.take()[None], biased=True, weight=weight)

    def interval(self) -> dict[str, Any]:
        for sums in (self.windows, self.pairs):
            sums.load(sums.take().tolist())
        return {
            "steps": self.number,
            "parts": [self.windows.peek()[:5].tolist()],
            "pairs": self.pairs.peek()[:5].tolist(),
        }

    def resume(self, interval: dict[str, Any]) -> None:
        self.number = int(interval["steps"])
        self.windows.load(own_part(interval["parts"], 0, 1))
        if "pairs" in interval:
            self.pairs.load(interval["pairs"])


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """``a . a``, ``b . b`` and ``2 a . b``."""
    a, b = a.reshape(-1), b.reshape(-1)
    return [torch.dot(a, a).double(), torch.dot(b, b).double(), 2 * torch.dot(a, b).double()]


def source_of(trainer: Any, *, method: str, every_n_steps: int, horizon: float) -> Source:
    """The source of this trainer's gradients.

    Raises:
        MisconfigurationException: if the strategy shards the model or gives no access to its gradients.
    """
    settings: dict[str, Any] = {"every_n_steps": every_n_steps, "horizon": horizon}
    engine = getattr(trainer.strategy, "engine", None)
    if trainer.world_size == 1:
        return _Alone(**settings)
    if isinstance(engine, HeteroEngine):
        return _Engine(engine, method=method, **settings)
    if any(cls.__name__ == "DDPStrategy" for cls in type(trainer.strategy).__mro__):
        return _PlainDDP(trainer.global_rank, trainer.world_size, method=method, **settings)
    raise MisconfigurationException(
        f"GNSCallback reads gradients from DDP's communication hook; {type(trainer.strategy).__name__} has "
        "none. Use strategy='hetero_ddp' or 'ddp'."
    )
