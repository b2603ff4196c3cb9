"""Broadcast of a model's buffers before each forward pass, as DDP does it, timed as waiting for others.

A worker that comes to its forward pass early waits there for those that still load. If that counted as its own time,
all workers of a model with buffers (batch normalization, for example) would look equally fast.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.timing.step_timer import StepTimer

__all__ = ["BufferSync", "time_buffers"]


class BufferSync:
    """State of the hook by which DDP broadcasts buffers; in a copy of the model, it times nothing.

    Args:
        model: model under DDP, ``None`` in a copy.
        timer: timer of its steps, ``None`` in a copy.
    """

    def __init__(self, model: DistributedDataParallel | None = None, timer: StepTimer | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._timed = None if timer is None else torch.compiler.disable(timer.excluded()(self._sync))
        given = getattr(model, "buffer_hook", None)
        self._given = None if given is None else (given.buffer_comm_hook, given.buffer_comm_hook_state)

    def __reduce__(self) -> tuple[type, tuple[()], dict[str, Any]]:
        """Keep this run out of a copy or a pickle of the model."""
        return BufferSync, (), {"_given": self._given}

    def sync(self, buffers: dict[str, torch.Tensor]) -> Any:
        """Make the buffers of all ranks equal; return what the user's own hook returns, if there is one."""
        return (self._timed or self._sync)(buffers)

    def _sync(self, buffers: dict[str, torch.Tensor]) -> Any:
        if self._given is not None:
            hook, state = self._given
            return hook(state, buffers)
        model: Any = None if self._model is None else self._model()
        if model is not None:
            return model._default_broadcast_coalesced()
        group: Any = dist.distributed_c10d._get_default_group()  # that of a copy, as torch makes it
        dist._broadcast_coalesced(group, list(buffers.values()), 250 * 2**20, 0)
        return None


def _sync_buffers(state: BufferSync, buffers: dict[str, torch.Tensor]) -> Any:
    return state.sync(buffers)


def time_buffers(model: DistributedDataParallel, timer: StepTimer) -> None:
    """Measure the broadcast of a model's buffers from now on, where DDP, or the user's own hook, does it."""
    location = torch.nn.parallel.distributed._BufferCommHookLocation
    given = getattr(model, "buffer_hook", None)
    where = location.PRE_FORWARD if given is None else given.buffer_comm_hook_location
    model._register_buffer_comm_hook(BufferSync(model, timer), _sync_buffers, where)
