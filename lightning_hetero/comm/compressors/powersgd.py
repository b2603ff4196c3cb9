"""PowerSGD by torch's own hook, with state by parameter that survives a resume."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_hetero.comm.agreement.backends import backend_of
from lightning_hetero.comm.collectives.async_ops import make_future
from lightning_hetero.comm.compressors.half import ring_bytes
from lightning_hetero.comm.compressors.powersgd_state import BucketState, Matrices
from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.gradients.averager import Future, GradientAverager
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, all_finite, clear
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.compression.settings import LowRank

__all__ = ["PowerSGDAverager"]


class _DeviceVerdicts:
    """Numbers on the device, 0 for a step that was left out; the host reads them once the device has computed them.

    Args:
        clock: marks moments on this rank's device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[int, torch.Tensor, Any]] = deque()

    def add(self, step: int, finite: torch.Tensor) -> None:
        """Copy the number of a step to the host, without waiting for it."""
        there = torch.empty_like(finite, device="cpu", pin_memory=finite.is_cuda).copy_(finite, non_blocking=True)
        self._waiting.append((step, there, self._clock.mark()))

    def pop_left_out(self) -> list[int]:
        """Return the left-out steps among those whose number has arrived."""
        steps = []
        while self._waiting and self._clock.ready(self._waiting[0][2]):
            step, finite, _ = self._waiting.popleft()
            steps += [step] if float(finite) == 0.0 else []
        return steps


class PowerSGDAverager(GradientAverager):
    """PowerSGD by torch's ``powerSGD_hook``, with state that survives a resume and no non-finite value in it.

    Torch keeps residuals and matrices by DDP's buckets, which change after the first step, in a resumed run, and when
    other parameters are trained. Here they are kept by parameter, and each bucket gets those of its parameters.

    Args:
        settings: rank and dense steps.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        clock: marks moments on this rank's device.
        grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
    """

    kind = "LowRankExchange"
    skips_nonfinite = True

    def __init__(
        self,
        settings: LowRank,
        parameters: Mapping[str, torch.Tensor],
        world_size: int,
        clock: Clock,
        *,
        grad_scale: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(world_size)
        self.settings, self.grad_scale = settings, grad_scale
        self.names = {p: name for name, p in parameters.items()}
        self.state = PowerSGDState(None, settings.rank, settings.start)
        self.state.compression_stats_logging_frequency = 2**62
        self.kept = BucketState(self.state, self.names, world_size)
        device = next(iter(parameters.values())).device
        self.deferred = device.type != "cpu"  # whether the device decides on a step, and the host learns of it later
        self._in_order = backend_of(device) == "nccl"
        self._elements = sum(p.numel() for p in parameters.values())
        self._element_size = next(iter(parameters.values())).element_size()
        self._step, self._dense, self.dropped = 0, False, DroppedSteps()
        self._finite: list[torch.Tensor] = []
        self._verdicts = _DeviceVerdicts(clock)
        self._arrived = False

    @classmethod
    def build(cls, settings: Any, context: AveragerContext) -> "PowerSGDAverager":
        """Build the averager for a run."""
        world_size, clock = context.control.world_size, context.observer.clock
        return cls(settings, context.parameters, world_size, clock, grad_scale=context.grad_scale)

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Average one bucket; wait for it without NCCL, as gloo's threads would mix up the order of collectives."""
        compressing = self.state.iter >= self.settings.start
        if bucket.index() == 0:
            self._finite, self._dense = [], not compressing
            self.flags.begin(exact=not compressing)
            for step in self._verdicts.pop_left_out():
                self.dropped.add(step, "on some rank")
        if bucket.is_last():
            self._step, self._arrived = self._step + 1, True
        buffer = bucket.buffer()
        if compressing:
            finite = torch.isfinite(buffer.sum(dtype=torch.float32)).to(torch.float32)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            self._finite.append(finite)
            if not self.deferred and float(finite) == 0.0:
                return self._leave_out(bucket)
            if bucket.index() == 0:
                self.kept.scale_by(1.0 if self.grad_scale is None else self.grad_scale())
            self.kept.lay_out(bucket, finite if self.deferred else None)
        future: Future = powerSGD_hook(self.state, Matrices(bucket))  # type: ignore[arg-type]
        if bucket.is_last():
            self._count(compressing)
        if not self._in_order:
            future.wait()
        return future

    def _leave_out(self, bucket: dist.GradBucket) -> Future:
        """Fill a gradient that is not finite with NaN on all ranks; residuals stay as they are."""
        buffer = bucket.buffer().fill_(float("nan"))
        self.state.maybe_increase_iter(bucket)
        future: Future = make_future(buffer)
        future.set_result(buffer)
        return future

    def after_backward(self) -> None:
        """Leave out the whole sum if it is not finite; under a loss scaler, leave that to the scaler."""
        arrived, self._arrived = self._arrived, False
        if not arrived:
            return
        if self._finite and self.deferred:
            self._drop_on_device(torch.stack(self._finite).amin())
            return
        left_out = any(float(flag) == 0.0 for flag in self._finite)
        if left_out or (self._dense and self.grad_scale is None and not all_finite(self.names)):
            self.flags.skip()
            if self.grad_scale is None:
                clear(self.names)
                self.dropped.add(self._step - 1, "on some rank")

    def _drop_on_device(self, finite: torch.Tensor) -> None:
        """Let the device leave the step out if it is not finite; the host learns of it when the number has arrived."""
        self.flags.skip(1.0 - finite)
        if self.grad_scale is not None:
            return
        for p in self.names:
            if p.grad is not None:
                p.grad.masked_fill_(finite == 0.0, 0.0)
        self._verdicts.add(self._step - 1, finite)

    def _count(self, compressing: bool) -> None:
        sent, density = self._elements, 1.0
        if compressing:
            _, before, after = self.state.compression_stats()
            sent = round(self._elements * after / max(before, 1))
            density = sent / max(self._elements, 1)
        self.report.add(ring_bytes(self.world_size) * sent * self._element_size, density)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals (not sent yet) of this rank by parameter: parts of the weighted sum over ranks."""
        return self.kept.residuals()

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals; they take part once the dense steps are over."""
        self.kept.load_residuals(residuals)

    def extra_state(self) -> dict[str, Any]:
        """Return the steps so far, and the matrices with which the next step begins."""
        drawn: Any = self.state.rng.get_state(legacy=False)
        seeds = {"words": torch.from_numpy(drawn["state"]["key"].astype("int64")), "place": drawn["state"]["pos"]}
        return {"iter": self.state.iter, "step": self._step, "seeds": seeds, "matrices": self.kept.matrices()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`extra_state` returned."""
        self.state.iter, self._step = int(state["iter"]), int(state["step"])
        seeds = state["seeds"]
        self.state.rng.set_state(("MT19937", seeds["words"].numpy().astype("uint32"), int(seeds["place"]), 0, 0.0))
        self.kept.load_matrices(state["matrices"])
