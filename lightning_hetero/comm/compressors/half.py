"""Average gradients in 16 bits with torch's own hooks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from lightning_hetero.comm.compressors.in_flight import StepReport
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.core.compression.settings import HalfPrecision

__all__ = ["HalfExchange"]


def ring_bytes(world_size: int) -> float:
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
            self.report.add(ring_bytes(self.world_size) * self._bytes, 1.0)
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
