"""Where every sum of gradients sets out: one function, so that a link can be made thin for tests and demonstrations."""

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["pending", "sum_over_ranks", "tensor_of"]


def sum_over_ranks(buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
    """Add a buffer up over all ranks, in place and while other things go on."""
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


def tensor_of(value: Any) -> torch.Tensor:
    """The tensor of a finished collective, which some backends give in a list."""
    result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return result


def pending(buffer: torch.Tensor) -> Any:
    """A future that is set by hand, for a tensor on this device."""
    return torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()
