"""Collectives outside the backward pass, as every adapter runs them under unequal batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.row_gather import gather_rows
from lightning_hetero.engine import HeteroEngine

__all__ = ["exact_mean", "gather_unequal", "not_computing"]


def not_computing(engine: HeteroEngine | None) -> AbstractContextManager[None]:
    """Return a context around collectives in which waiting does not count as computing.

    Example:
        >>> with not_computing(None):
        ...     "no engine counts anything yet"
        'no engine counts anything yet'
    """
    context: AbstractContextManager[None] = nullcontext() if engine is None else engine.excluded()
    return context


def exact_mean(tensor: torch.Tensor, reduce_op: object) -> torch.Tensor:
    """Return the tensor to reduce in place of the given one, so that a mean of integers is exact and not floored.

    The size counters of logged means are integers.

    Example:
        >>> exact_mean(torch.tensor([3]), "mean").dtype, exact_mean(torch.tensor([3]), "sum").dtype
        (torch.float64, torch.int64)
    """
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    integers = isinstance(tensor, torch.Tensor) and not torch.is_floating_point(tensor)
    return tensor.double() if is_mean and integers else tensor


def gather_unequal(
    engine: HeteroEngine | None,
    tensor: torch.Tensor,
    stacked: Callable[[torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Gather tensors whose rows may differ in number between ranks, see :func:`gather_rows`; a collective call.

    Args:
        engine: engine of the run, ``None`` before there is one.
        tensor: tensor of this rank.
        stacked: the framework's own gather, for tensors of equal shape.
        group: ranks that take part; all of them by default.
    """
    if engine is None:
        return stacked(tensor)
    with engine.excluded():
        return gather_rows(tensor, stacked, engine.control, group)
