"""Gradient norms of a single worker, from two batch sizes."""

from typing import Any

import torch

from lightning_hetero.callbacks._gns.base import INTERVAL, Source, log
from lightning_hetero.callbacks._lightning import Trainer
from lightning_hetero.comm.gradients.squared_norms import GradientNorms
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.noise.window_sums import WindowSums, merge_parts, own_part
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.frontend.model_setup import loss_scaler
from lightning_hetero.optim import AdamPreconditioner

__all__ = ["SingleWorkerSource"]


class SingleWorkerSource(Source):
    """One worker: the first micro-batch of a window against the whole window, or successive steps (biased)."""

    def __init__(self, *, every_n_steps: int, horizon: float) -> None:
        self.every_n_steps = every_n_steps
        self._running = RunningNoiseScale(horizon=horizon)
        self.norms = GradientNorms()
        self.windows, self.pairs = WindowSums(), WindowSums()
        self.number = 0
        self.sizes: list[tuple[int, ...]] = []
        self.window = 1
        self.warned = False
        self.first: list[torch.Tensor] = []
        self.whole: dict[int, list[torch.Tensor]] = {}
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.previous: dict[int, tuple[int, list[torch.Tensor]]] = {}

    @property
    def running(self) -> RunningNoiseScale:
        return self._running

    def take_over(self, running: RunningNoiseScale) -> None:
        self._running = running

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        self.norms.precondition(preconditioner)

    @property
    def known(self) -> bool:
        return self.norms.preconditioner is None or self.number >= NoiseCollector.preconditioned_after_steps

    @property
    def observed(self) -> bool:
        return self.known and self.number % self.every_n_steps == 0

    def begin(self, trainer: Trainer, batch_size: int) -> None:
        self.sizes.append((batch_size,))
        if trainer.lightning_module.automatic_optimization:
            self.window = trainer.accumulate_grad_batches  # manual optimization: as many as the last time

    def backward(self, trainer: Trainer) -> None:
        if self.observed and len(self.sizes) == 1 and self.window > 1 and len(trainer.optimizers) == 1:
            scaler: Any = loss_scaler(trainer.precision_plugin)
            self.norms.scaled_by(None if scaler is None else scaler._get_scale_async)  # as get_scale(), on the device
            self.first = self.norms.of_parameters(_parameters(trainer.optimizers[0]))
            self.norms.scaled_by(None)  # gradients are unscaled before a step

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the norms of the gradients of one optimizer; several may step on the same batch."""
        parameters = [p for p in _parameters(optimizer) if p.grad is not None]
        if id(optimizer) in self.whole or not parameters:
            return  # a closure is evaluated again
        self.whole[id(optimizer)] = self.norms.of_parameters(parameters) if self.observed and self.first else []
        if len(self.sizes) == self.window == 1:
            self._compare(optimizer, parameters)

    def _compare(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Compare the gradient of this step with that of the step before, which was computed at other weights."""
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

    def end(self, trainer: Trainer) -> None:
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
        """Read what the device has computed, and add it to the running estimate."""
        self._running = merge_parts(self._running, self.windows.take()[None])
        weight = 0.5 if self.every_n_steps == 1 else 1.0  # successive pairs overlap
        self._running = merge_parts(self._running, self.pairs.take()[None], biased=True, weight=weight)

    def interval(self) -> dict[str, Any]:
        for sums in (self.windows, self.pairs):
            sums.load(sums.take().tolist())
        return {
            "steps": self.number,
            "parts": [self.windows.pack()[:5].tolist()],
            "pairs": self.pairs.pack()[:5].tolist(),
        }

    def resume(self, interval: dict[str, Any]) -> None:
        self.number = int(interval["steps"])
        self.windows.load(own_part(interval["parts"], 0, 1))
        if "pairs" in interval:
            self.pairs.load(interval["pairs"])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Return ``a . a``, ``b . b`` and ``2 a . b``."""
    a, b = a.reshape(-1), b.reshape(-1)
    return [torch.dot(a, a).double(), torch.dot(b, b).double(), 2 * torch.dot(a, b).double()]
