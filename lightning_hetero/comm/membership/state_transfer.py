"""State that a generation of workers goes on from: the newest that one of them has."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

__all__ = ["WorkerState", "newest_state"]


def _nothing(again: bool) -> dict[str, Any]:
    return {}


@dataclass
class WorkerState:
    """State that a worker brings along from the generation before.

    Args:
        progress: optimizer steps, epoch and batch; greater is newer.
        rank: rank of the worker there.
        checkpoint: all that a newcomer needs.
        shared: the part of it that must be equal on all workers even if they were in the same step.
        own: returns what this worker alone has, such as what compression has not sent yet; its argument says whether
            the step that has failed is done again.
    """

    progress: tuple[int, ...]
    rank: int
    checkpoint: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)
    own: Callable[[bool], dict[str, Any]] = _nothing


def newest_state(brought: WorkerState | None) -> WorkerState | None:
    """Return the newest state of all workers; a collective call on the default group.

    Of those with the newest state, the one with the lowest rank before is the source. A worker whose state is as new
    keeps its checkpoint, and the others get the source's. All get what is shared from it, and keep what is their own.

    Args:
        brought: state of this worker, ``None`` for a newcomer.

    Returns:
        The state, ``None`` if no worker has brought one.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if brought is None else (brought.progress, brought.rank))
    known = [(one[0], -one[1], rank) for rank, one in enumerate(everyone) if one is not None]
    if not known:
        return None
    progress, _, source = max(known)
    behind = [one is None or one[0] != progress for one in everyone]
    box: list[Any] = [None]
    if brought is not None and dist.get_rank() == source:
        box = [(brought.shared, brought.checkpoint if any(behind) else None)]
    dist.broadcast_object_list(box, src=source)
    shared, checkpoint = box[0]
    if brought is None:
        return WorkerState(progress, -1, checkpoint, shared)
    if behind[dist.get_rank()]:
        return replace(brought, progress=progress, checkpoint=checkpoint, shared=shared, own=_as_sent(brought.own))
    return replace(brought, shared=shared)


def _as_sent(own: Callable[[bool], dict[str, Any]]) -> Callable[[bool], dict[str, Any]]:
    """Return what a worker has whose failed step was completed by another: it is not done again."""
    return lambda again: own(False)
