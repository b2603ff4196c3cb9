"""Averaging of gradients in 16 bits, by torch's own hooks."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.gradients.averager import Future, GradientAverager
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.core.compression.settings import HalfPrecision

__all__ = ["HalfPrecisionAverager", "ring_bytes"]

log = logging.getLogger("lightning_hetero")


def ring_bytes(world_size: int) -> float:
    """Return the bytes that a rank sends for each byte of a ring all-reduce."""
    return 2 * (world_size - 1) / world_size


class HalfPrecisionAverager(GradientAverager):
    """Averager in 16 bits: torch's ``fp16_compress_hook`` or ``bf16_compress_hook``.

    It keeps no residual, so a gradient that is not finite does no more than under DDP: it is not finite on all ranks.

    Args:
        settings: the 16-bit type.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
    """

    kind = "HalfExchange"
    waits = False

    def __init__(self, settings: HalfPrecision, parameters: Mapping[str, torch.Tensor], world_size: int) -> None:
        super().__init__(world_size)
        self._hook: Any = fp16_compress_hook if settings.dtype == "float16" else bf16_compress_hook
        self._bytes = 2 * sum(p.numel() for p in parameters.values())

    @classmethod
    def build(cls, settings: Any, context: AveragerContext) -> "HalfPrecisionAverager":
        """Build the averager for a run."""
        return cls(settings, context.parameters, context.control.world_size)

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Average one bucket."""
        if bucket.is_last():
            self.report.add(ring_bytes(self.world_size) * self._bytes, 1.0)
        future: Future = self._hook(None, bucket)
        return future

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Warn that residuals are lost, because 16-bit sums cannot send them."""
        if residuals:
            log.warning("the checkpoint has gradients that were not sent yet, which 16-bit sums cannot send")
