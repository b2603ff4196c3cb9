"""Torch's own compression hooks behind the same argument: 16-bit sums and PowerSGD."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_hetero.comm.dropped import DroppedSteps, all_finite, clear
from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.comm.sending import StepReport
from lightning_hetero.comm.sums import pending
from lightning_hetero.core.compressors import HalfPrecision, LowRank

__all__ = ["HalfExchange", "LowRankExchange"]


def _ring(world_size: int) -> float:
    """Bytes that a rank sends for each byte of a ring all-reduce."""
    return 2 * (world_size - 1) / world_size


class HalfExchange:
    """Sums in 16 bits: torch's ``fp16_compress_hook`` or ``bf16_compress_hook``.

    It keeps no residual, so that a gradient which is not finite is only what it is under DDP: not finite on all ranks.
    """

    def __init__(self, settings: HalfPrecision, parameters: Mapping[str, torch.Tensor], hook: HookState) -> None:
        self.hook, self.world_size, self.report = hook, hook.world_size, StepReport()
        self.inner: Any = fp16_compress_hook if settings.dtype == "float16" else bf16_compress_hook
        self._bytes = 2 * sum(p.numel() for p in parameters.values())

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket."""
        self.hook.exact_sum, self.hook.one_message = True, False
        if bucket.is_last():
            self.report.add(_ring(self.world_size) * self._bytes, 1.0)
        future: torch.futures.Future[torch.Tensor] = self.inner(None, bucket)
        return future

    def hand_over(self) -> None:
        """Nothing to do after backward."""

    def residuals(self) -> dict[str, torch.Tensor]:
        """None: what rounding loses is lost."""
        return {}

    def load_residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        """Nothing to go on with."""

    def extra_state(self) -> dict[str, Any]:
        """None."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing to go on with."""


class LowRankExchange:
    """PowerSGD by torch's ``powerSGD_hook``, with residuals that survive a resume and no non-finite value in them.

    Args:
        settings: rank and dense steps.
        parameters: the module's parameters that need gradients, by name.
        hook: state of the gradient hook.
        grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
    """

    def __init__(
        self,
        settings: LowRank,
        parameters: Mapping[str, torch.Tensor],
        hook: HookState,
        *,
        grad_scale: Callable[[], float] | None = None,
    ) -> None:
        self.settings, self.hook, self.world_size, self.grad_scale = settings, hook, hook.world_size, grad_scale
        self.names = {p: name for name, p in parameters.items()}
        self.state = PowerSGDState(None, settings.rank, settings.start)
        self.state.compression_stats_logging_frequency = 2**62
        self.report = StepReport()
        self._elements = sum(p.numel() for p in parameters.values())
        self._element_size = next(iter(parameters.values())).element_size()
        self._places: dict[int, list[tuple[str, int, int]]] = {}
        self._restored: dict[str, torch.Tensor] = {}
        self._scale = 1.0
        self._step, self.dropped = 0, DroppedSteps()
        self._left_out, self._arrived = False, False

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket; on CPU, wait for it: its later collectives would come in another order on each rank."""
        compressing = self.state.iter >= self.settings.start
        if bucket.index() == 0:
            self._left_out = self.hook.step_dropped = False
        if bucket.is_last():
            self._step, self._arrived = self._step + 1, True
        self.hook.exact_sum, self.hook.one_message = not compressing, False
        buffer = bucket.buffer()
        if compressing:
            finite = torch.isfinite(buffer.sum(dtype=torch.float32)).to(torch.float32)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            if float(finite) == 0.0:
                return self._leave_out(bucket)
            self._prepare(bucket)
        future = powerSGD_hook(self.state, bucket)
        if bucket.is_last():
            self._count(compressing)
        if not buffer.is_cuda:
            future.wait()
        return future

    def _leave_out(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A gradient is not finite: it is that on all ranks, and no residual takes part in it."""
        buffer = bucket.buffer().fill_(float("nan"))
        self._left_out = True
        self.state.maybe_increase_iter(bucket)
        future = pending(buffer)
        future.set_result(buffer)
        result: torch.futures.Future[torch.Tensor] = future
        return result

    def hand_over(self) -> None:
        """After backward: leave a sum that is not finite out, all of it; a loss scaler sees it and does so itself."""
        arrived, self._arrived = self._arrived, False
        dense = self._step <= self.settings.start
        if arrived and (self._left_out or (dense and self.grad_scale is None and not all_finite(self.names))):
            self.hook.step_dropped = True
            if self.grad_scale is None:
                clear(self.names)
                self.dropped.add(self._step - 1, "on some rank")

    def _prepare(self, bucket: dist.GradBucket) -> None:
        """Know where parameters lie in the bucket; give it restored residuals; follow a change of the loss scale."""
        index, buffer = bucket.index(), bucket.buffer()
        first = index not in self._places
        if first:
            self._places[index] = [
                (self.names[p], int(g.storage_offset() - buffer.storage_offset()), g.numel())
                for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True)
            ]
        scale = 1.0 if self.grad_scale is None else self.grad_scale()
        if index == 0 and scale != self._scale:
            for error in self.state.error_dict.values():
                error.mul_(scale / self._scale)
            self._scale = scale
        if first and self._restored:
            error = torch.zeros_like(buffer)
            for name, offset, numel in self._places[index]:
                if name in self._restored:
                    error[offset : offset + numel].copy_(self._restored.pop(name))
            self.state.error_dict[index] = error.mul_(scale * self.world_size)

    def _count(self, compressing: bool) -> None:
        sent, density = self._elements, 1.0
        if compressing:
            _, before, after = self.state.compression_stats()
            sent = round(self._elements * after / before)
            density = sent / self._elements
        self.report.add(_ring(self.world_size) * sent * self._element_size, density)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter: a part of the weighted sum over ranks."""
        found = dict(self._restored)
        for index, error in self.state.error_dict.items():
            for name, offset, numel in self._places.get(index, ()):
                found[name] = error[offset : offset + numel].cpu() / (self._scale * self.world_size)
        return found

    def load_residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        """Go on with these residuals once the dense steps are over; those of before are gone."""
        self._restored = dict(residuals)
        self.state.error_dict.clear()
        self._places.clear()

    def extra_state(self) -> dict[str, Any]:
        """None: DDP's buckets change after the first step, so that dense steps begin a resumed run."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing to go on with."""
