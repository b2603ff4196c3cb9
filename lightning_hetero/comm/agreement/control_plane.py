"""Agreement between ranks over a separate host-side group: gathering, broadcasting, finding disagreement."""

import atexit
import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.backends import new_group
from lightning_hetero.comm.agreement.group_lifetime import ended, leave, leave_ended, on_end, run
from lightning_hetero.comm.failures.failure_watch import FailureWatch, end_abandoned_watches
from lightning_hetero.comm.membership.slots import refuse_lone_keeper
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["ControlPlane", "PlanMismatchError", "before_another", "check_digests"]

_before_another: list[Callable[[], Any]] = [end_abandoned_watches]


def before_another(call: Callable[[], Any]) -> None:
    """Call a function each time before another control plane begins in this process; the newest one first.

    Another training begins then: what those before it have left can end.
    """
    _before_another.append(call)


class PlanMismatchError(RuntimeError):
    """Raised if ranks hold different plans, or different settings that must be equal."""


def check_digests(digests: npt.NDArray[np.float64]) -> None:
    """Check that the plans of all ranks have one fingerprint.

    Raises:
        PlanMismatchError: naming the fingerprint of each rank.
    """
    if len(set(digests.tolist())) > 1:
        listing = ", ".join(f"rank {rank}: {int(digest):012x}" for rank, digest in enumerate(digests))
        raise PlanMismatchError(
            f"ranks hold different plans ({listing}). Change plans by adopt() on all ranks together only."
        )


def let_threads_go(seconds: float = 0.1) -> None:
    """Yield the interpreter lock to gloo's threads for ``seconds``; they need it to free their tensors.

    A gloo thread frees the tensor of a finished collective shortly after the caller has gone on, and needs the lock for
    that. If the interpreter ends in between, it aborts the process ("terminate called without an active exception",
    after a successful training; plain DDP has the same problem with torch 2.13). Every process with a control plane
    therefore waits this long at exit.
    """
    time.sleep(seconds)


def _portable(error: Exception) -> Exception:
    """Return the exception, or a ``RuntimeError`` of the same text if it cannot be pickled: every rank must get one."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling calls the exception's own code
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@checked_keywords
class ControlPlane:
    """Small host-side collectives on a gloo group, separate from the group of the gradients.

    Args:
        rank: this rank.
        world_size: number of ranks; with one, nothing is sent.
        timeout: longest wait for another rank.

    Attributes:
        failures: watch over the other ranks, which the owner of this control plane begins.
    """

    def __init__(self, rank: int, world_size: int, *, timeout: timedelta | None = None) -> None:
        refuse_lone_keeper(os.environ)
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._joined: Any = None
        self._closers = on_end(self)
        self.failures = FailureWatch(rank, world_size, timeout)
        if world_size > 1:
            for call in reversed(_before_another):
                call()
            self.open()
            self._group.barrier().wait()  # no rank is busy any more with making or using what is left now
            leave_ended()
            atexit.unregister(let_threads_go)
            atexit.register(let_threads_go)

    def open(self) -> None:
        """Make the group, also again after :meth:`close`; a collective call."""
        if self._joined is None and self.world_size > 1:
            self._joined = new_group(backend="gloo", timeout=self.timeout)
            self._closers.append(partial(leave, self._joined))

    @property
    def _group(self) -> Any:
        """Group of all ranks, ``None`` for a single one; made again after :meth:`close`, as for a late checkpoint."""
        if self._joined is None and self.world_size > 1:
            self.open()
            ended(self)
        return self._joined

    def gather(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Gather and stack the arrays of all ranks, which must have the same shape."""
        if self._group is None:
            return values[None]
        mine = torch.from_numpy(np.ascontiguousarray(values))
        everyone = torch.empty((self.world_size, *mine.shape), dtype=mine.dtype)
        dist.all_gather(list(everyone), mine, group=self._group)
        return everyone.numpy()

    def gather_later(self, values: npt.NDArray[np.float64]) -> Callable[[], npt.NDArray[np.float64]]:
        """Begin to gather arrays as :meth:`gather` does; return a function that waits for them and stacks them."""
        own = np.array(values)
        if self._group is None:
            return lambda: own[None]
        mine = torch.from_numpy(own)
        everyone = torch.empty((self.world_size, *mine.shape), dtype=mine.dtype)
        work = dist.all_gather(list(everyone), mine, group=self._group, async_op=True)

        def wait() -> npt.NDArray[np.float64]:
            work.wait()
            return everyone.numpy()

        return wait

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def gather_objects_at_zero(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks on rank 0; return an empty list on the others."""
        if self._group is None:
            return [value]
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, everyone, dst=0, group=self._group)
        return everyone or []

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's object; an exception that cannot be sent becomes a ``RuntimeError`` of its name and text."""
        if self._group is None:
            return value
        box = [_portable(value) if self.rank == 0 and isinstance(value, Exception) else value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return value if self.rank == 0 else box[0]

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Decide on rank 0 for all ranks; if the decision raises, every rank raises, and none is left waiting."""
        value = self.broadcast_object(self._decided(decision) if self.rank == 0 else None)
        if isinstance(value, Exception):
            raise value
        return value

    def _decided(self, decision: Callable[[], Any]) -> Any:
        """Return the decision, or the exception that every rank has to raise: a value that can be sent."""
        try:
            value = decision()
        except (StopIteration, SystemExit) as error:  # they would end loops and processes without a word
            value = RuntimeError(f"rank 0 could not decide, because {type(error).__name__}({error}) was raised.")
            value.__cause__ = error
        except Exception as error:  # noqa: BLE001 - travels as a value, because every rank has to raise it
            value = error
        if self.world_size > 1 and not isinstance(value, Exception):
            try:
                pickle.dumps(value)
            except Exception as error:  # noqa: BLE001 - pickling calls the value's own code
                return TypeError(f"what rank 0 decided cannot be sent to the other ranks: {error}. Use plain values.")
        return value

    def maximum_later(self) -> Callable[[torch.Tensor], Any]:
        """Return a function that starts an in-place maximum of a host tensor over all ranks, and returns its work."""
        return partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor on the host to one rank, which has to :meth:`receive` it."""
        dist.send(tensor, to, group=self._group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor on the host with the one that rank ``source`` sends."""
        dist.recv(tensor, source, group=self._group)

    def require_equal(self, what: str, value: Any) -> None:
        """Raise on every rank if one rank's value differs from the others'.

        Raises:
            PlanMismatchError: naming the value of each rank.
        """
        everyone = self.gather_objects(value)
        if any(other != everyone[0] for other in everyone):
            listing = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(everyone))
            raise PlanMismatchError(f"{what} must be equal on all ranks; got {listing}. Give every rank the same.")

    def close(self) -> None:
        """Leave the group; it is made again if ranks have to agree on something later."""
        self._joined = None
        run(self._closers)
