"""All-gather with gradients for unequal numbers of rows per rank, for which torch's own aborts the process.

Before any tensor is sent, every rank tells the others its shape. Shapes that do not fit together are then an error on
all ranks; an error on one alone would leave the others waiting.
"""

import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.timing.step_timer import StepTimer

__all__ = ["ForeignCollectives", "gather_rows"]

MOST_DIMENSIONS = 64  # torch's limit
DTYPES = {zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def gather_rows(
    tensor: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], control: ControlPlane, group: Any = None
) -> torch.Tensor:
    """Gather the tensors of all ranks; a collective call.

    Tensors of equal shape are stacked: ``(W, b, ...)``. If their first dimensions differ, the rows are concatenated in
    the order of the ranks, behind a first dimension of 1: ``(1, b_0 + b_1 + ..., ...)``. The number of dimensions is
    the same in both cases, and joining the first two, as by ``flatten(0, 1)``, gives the rows of all ranks.

    Args:
        tensor: this rank's tensor.
        gather: stacks tensors that have one shape on all ranks.
        control: control plane that exchanges the shapes.
        group: ranks that take part; all of them by default.

    Raises:
        ValueError: on every rank, if tensors differ in anything but their first dimension.
    """
    shapes = _shapes(tensor, control, group)
    if all(shape == shapes[0] for shape in shapes):
        return gather(tensor)
    if min(map(len, shapes)) == 1 or len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
        listing = ", ".join(
            f"rank {rank}: {str(dtype).removeprefix('torch.')}{list(shape)}"
            for rank, (dtype, *shape) in enumerate(shapes)
        )
        raise ValueError(
            f"all_gather() was given tensors that do not fit together ({listing}). They may differ in their first "
            "dimension only: pad the others to one size before."
        )
    rows = [shape[1] for shape in shapes]
    missing = tensor.new_zeros((max(rows) - len(tensor), *tensor.shape[1:]))
    everyone = gather(torch.cat([tensor, missing]))
    return torch.cat([padded[:count] for padded, count in zip(everyone, rows, strict=True)])[None]


def _shapes(tensor: torch.Tensor, control: ControlPlane, group: Any) -> list[tuple[Any, ...]]:
    """Gather type and dimensions of each rank's tensor."""
    own: npt.NDArray[np.float64] = np.zeros(2 + MOST_DIMENSIONS)
    own[: 2 + tensor.ndim] = zlib.crc32(str(tensor.dtype).encode()), tensor.ndim, *tensor.shape
    everyone: Any
    if group is None or group is dist.group.WORLD:
        everyone = control.gather(own)
    else:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
    return [(DTYPES[int(each[0])], *(int(size) for size in each[2 : 2 + int(each[1])])) for each in everyone]


# collectives that a model or a loss calls by itself

GATHERS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",  # its name since torch 2.13
    "gather": "gather",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
}
REDUCTIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
OTHERS = ("alltoall", "barrier", "broadcast", "recv", "scatter", "send")
"""Methods of which only a rank that is alone has to know."""
OPERATORS = {
    "all_gather_into_tensor": "all_gather_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
}
TORCH, OURS = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"


def _files(call: Any) -> Iterator[str]:
    """Yield the files of a function and of its decorators."""
    while call is not None:
        yield call.__code__.co_filename
        call = getattr(call, "__wrapped__", None)


ENTRANCES = {  # files between a user's call and a wrapped method
    *(f"{TORCH}distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")),
    *(f"{TORCH}{name}.py" for name in ("distributed/nn/functional", "autograd/function", "_ops")),
    *_files(dist.all_gather_into_tensor),
}

CURE = (
    "Gather rows by self.all_gather(..., sync_grads=True) (Lightning), fabric.all_gather() or accelerator.gather(); or "
    "turn off the gather of the library that calls it (gather_across_devices=False, gather_distributed=False); or set "
    "policy='even' and drop_last=True."
)

_watching: "weakref.ref[ForeignCollectives] | None" = None


class ForeignCollectives:
    """Watch over the collectives that a model or a loss calls by itself, while ranks run batches of unequal size.

    A gather of torch takes the tensors of all ranks to have one shape. If they have not, gloo ends the process and NCCL
    returns anything; so ranks compare shapes first. A reduction of means gives all ranks equal weights, which may be
    meant; it is named once. Calls by this package and by torch itself (synchronized batch normalization, sharded
    models) know what they do. While sizes are equal, nothing is looked at, except in the first batch of a split that
    may move.

    Args:
        control: control plane that exchanges the shapes.
        notices: notices to the user.
        observer: timer of the steps, which knows the calls of this package's front ends.
        in_backward: returns whether a backward pass runs, whose collectives mirror those of its forward pass.
        moves: whether the split may change.
    """

    def __init__(
        self,
        control: ControlPlane,
        notices: Notices,
        observer: StepTimer,
        in_backward: Callable[[], bool],
        *,
        moves: bool,
    ) -> None:
        self._control, self._notices, self._observer, self._in_backward = control, notices, observer, in_backward
        self._itself, self._thread = weakref.ref(self), 0
        self._noticed: set[str] = set()
        self._unequal, self._first, self._rows = False, moves, 0
        self._refusal: Exception | None = None
        if control.world_size > 1:
            _wrap_collectives()

    def begin(self, sizes: Sequence[int], *, held: bool = False) -> None:
        """Begin a batch; every rank has to say the same of it.

        Args:
            sizes: samples of each rank; none if nobody knows.
            held: whether the loop may still hold batches from before.
        """
        global _watching
        self._unequal = len(set(sizes)) != 1 or (held and self._unequal)
        first = self._first and not self._unequal
        self._first = self._first and not first
        if self._control.world_size > 1 and (first or self._unequal):
            _watching, self._thread, self._rows = self._itself, threading.get_ident(), sizes[0] if first else 0
        else:
            self.end()

    def end(self) -> None:
        """Look at nothing any more."""
        global _watching
        if _watching is self._itself:
            _watching = None

    @contextmanager
    def refused(self, error: Exception) -> Iterator[None]:
        """Raise an error in the place of each collective inside, which the other ranks do not call."""
        global _watching
        before = _watching, self._thread
        _watching, self._thread, self._refusal = self._itself, threading.get_ident(), error
        try:
            yield
        finally:
            (_watching, self._thread), self._refusal = before, None

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the call of a collective.

        Raises:
            ValueError: on every rank, if it gathers tensors of different shapes.
        """
        if threading.get_ident() != self._thread:
            return
        if self._refusal is not None:
            raise self._refusal
        if kwargs or name in OTHERS or self._observer.excluding or self._in_backward():
            return
        place = _place_outside()
        if place is None or any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):  # torch only traces
            return
        group, *given = args if isinstance(args[0], dist.ProcessGroup) else (args[-1], (), args[0])
        if "reduce" in name:
            means = any(map(torch.is_floating_point, _tensors(given))) and not _is_extreme(args)
            if self._unequal and self._observer.in_forward and means:
                self._notice(
                    name,
                    f"{name}() at {place} runs in a step whose batches differ in size between ranks, and gives all "
                    "ranks equal weights: of means over a batch it makes no mean over all samples. Reduce sums and "
                    "numbers of rows and divide them, or set policy='even' and drop_last=True, unless it is meant.",
                )
        elif name == "all_to_all_single" and any(given[2:4]):
            return  # it says how many rows go where
        elif self._unequal:
            self._compare(f"{name}() at {place}", group, given)
        elif any(tensor.ndim and len(tensor) == self._rows for tensor in _tensors(given[1])):
            self._notice(
                name,
                f"{name}() at {place} seems to gather the samples of a batch, and takes the batches of all ranks to be "
                f"equal in size. As soon as they differ, it ends training. {CURE}",
            )

    def _notice(self, name: str, text: str) -> None:
        if name not in self._noticed:
            self._noticed.add(name)
            self._notices.say(text, loses=True)

    def _compare(self, call: str, group: Any, given: list[Any]) -> None:
        if not isinstance(group, dist.ProcessGroup):  # an operator has its name
            group = dist.distributed_c10d._resolve_process_group(group)
        room, own = ([tuple(tensor.shape) for tensor in _tensors(part)] for part in given[:2])
        everyone: list[Any] = [None] * group.size()
        with self._observer.excluded():
            if len(everyone) == self._control.world_size:
                everyone = self._control.gather_objects((own, room))
            else:
                dist.all_gather_object(everyone, (own, room), group=group)
        shapes = [shape for shape, _ in everyone]
        if all(shape == shapes[0] for shape in shapes):
            return
        if next(_tensors(given[1])).is_cuda and all(room == sum(shapes, []) for _, room in everyone):
            return  # NCCL sends unequal tensors where there is room for each
        listing = ", ".join(f"rank {i}: {', '.join(map(str, map(list, shape)))}" for i, shape in enumerate(shapes))
        raise ValueError(
            f"{call} was given tensors of different shapes ({listing}), because the batches of the ranks differ in "
            f"size. {CURE}"
        )


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for part in data:
            yield from _tensors(part)


def _is_extreme(args: tuple[Any, ...]) -> bool:
    """Return whether a reduction is a maximum or minimum, which needs no weights."""
    for one in args:
        if hasattr(one, "reduceOp"):  # which equals a constant of torch, but not the other way round
            return one.reduceOp == dist.ReduceOp.MAX or one.reduceOp == dist.ReduceOp.MIN
    return "max" in args[1:2] or "min" in args[1:2]  # an operator's


def _place_outside() -> str | None:
    """Return where a collective is called; ``None`` if torch or this package calls it for a purpose of its own."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename in ENTRANCES:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith((TORCH, OURS)):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


@cache
def _wrap_collectives() -> None:
    """Let torch's collectives ask the watch first: those of a process group, and those that are operators.

    ``torch.distributed`` calls the methods, however its functions were imported; DDP's reducer, in C++, does not.
    """
    for method, name in (GATHERS | REDUCTIONS | dict(zip(OTHERS, OTHERS, strict=True))).items():
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, _asking(name, getattr(dist.ProcessGroup, method)))
    for space in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for operator, name in OPERATORS.items():
            if hasattr(space, operator):
                packet = getattr(space, operator)
                packet._op = _Operator(_asking(name, packet._op))


class _Operator(partial[Any]):
    """A wrapped operator, which torch still finds by the hash of what it calls."""

    def __hash__(self) -> int:
        return hash(self.func.__wrapped__)  # type: ignore[attr-defined]


def _asking(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def asking(*args: Any, **kwargs: Any) -> Any:
        watch = None if _watching is None else _watching()
        if watch is not None:
            watch.see(name, args, kwargs)
        return call(*args, **kwargs)

    return asking
