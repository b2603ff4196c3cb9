"""Trace of a loss to the batch that it came from, for loops that hold several batches at once.

A loop that fetches one batch, runs it backward and fetches the next needs no trace. Loops that fetch all micro-batches
of an accumulation window first, prefetch one ahead, keep losses for later, or draw from two loaders need it: their
batches may have different weights. Forward passes tell the batches apart: the model's input is looked up among the
batches handed out, and its output is marked in the autograd graph with its batch, where a loss finds it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

__all__ = ["BatchTrace", "ForwardMark", "HandedOut", "LoaderPass"]

MARK = "lightning_hetero.batch"
MOST_OPEN = 1024  # remembered batches without a backward pass, as when a loop only inspects its data


@dataclass(eq=False)
class LoaderPass:
    """One iteration of a loader that is not split; ``left`` once nobody iterates it any more."""

    left: bool = False

    def leave(self) -> None:
        """Note that nobody iterates it any more."""
        self.left = True


@dataclass(eq=False)
class HandedOut:
    """A batch that was handed to the loop.

    Args:
        weight: weight of its losses; opaque here.
        key: equal for batches whose losses have equal weights on all ranks.
        rows: samples of each rank.
        beside: for a batch of a loader that is not split, its iteration.
        idle: whether a rank with share 0 runs it, so that it does not count.
    """

    weight: Any
    key: Hashable = None
    rows: tuple[int, ...] = ()
    beside: LoaderPass | None = None
    idle: bool = False
    used: bool = False
    shapes: frozenset[tuple[int, ...]] = frozenset()
    storages: list[tuple["weakref.ref[torch.Tensor]", int]] = field(default_factory=list)

    def remember(self, batch: Any) -> None:
        """Remember the tensors of the batch to recognize them later, without keeping them alive."""
        tensors = [tensor for tensor in tensors_in(batch) if tensor.layout is torch.strided]
        self.shapes = frozenset(tuple(tensor.shape) for tensor in tensors)
        self.storages = [(weakref.ref(tensor), _address(tensor)) for tensor in tensors if tensor.numel()]

    def use(self) -> "HandedOut":
        """Note that a loss of the batch was run backward."""
        self.used = True
        return self

    def holds(self, addresses: set[int]) -> bool:
        """Return whether the batch has one of these storages; freed tensors do not count, as addresses are reused."""
        return any(address in addresses and tensor() is not None for tensor, address in self.storages)


class BatchTrace:
    """Batches handed out that were not run backward yet, and the assignment of losses to them.

    Args:
        several: whether the loop may hold several batches at once; with ``False`` the newest counts.
        check: called with the keyword arguments of every watched forward pass.

    Example:
        >>> trace = BatchTrace(several=True)
        >>> model, batches = torch.nn.Linear(2, 1), [torch.ones(3, 2), torch.ones(1, 2)]
        >>> handle = trace.watch(model)
        >>> for batch, weight in zip(batches, (1.5, 1.0)):
        ...     trace.hand_out(batch, HandedOut(weight, key=weight))
        >>> [trace.of(model(batch).mean()).weight for batch in batches]
        [1.5, 1.0]
    """

    def __init__(self, several: bool = False, check: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.several, self.check = several, check
        self._open: deque[HandedOut] = deque(maxlen=MOST_OPEN)
        self._selected: HandedOut | None = None

    def hold_several(self) -> None:
        """Tell losses apart by their batches from now on."""
        self.several = True

    def check_nothing(self) -> None:
        """Let forward passes have any arguments."""
        self.check = None

    @property
    def open(self) -> tuple[HandedOut, ...]:
        """Batches that a loss may belong to, the newest last."""
        return tuple(self._open)

    def hand_out(self, batch: Any, handed: HandedOut) -> None:
        """Hand another batch to the loop, and forget those that were run backward."""
        kept = [earlier for earlier in self._open if not earlier.used] if self.several else []
        if self.several:
            handed.remember(batch)
        self._open = deque([*kept, handed], maxlen=MOST_OPEN)
        self._selected = None

    def forget(self, beside: LoaderPass | None = None) -> None:
        """Forget the batches that were never run backward, because a pass of their loader ends or begins.

        Args:
            beside: the iteration that has ended; ``None`` for the loader that is split.
        """
        over = (beside, *(handed.beside for handed in self._open if handed.beside is not None and handed.beside.left))
        self._open = deque((handed for handed in self._open if handed.beside not in over), maxlen=MOST_OPEN)

    def select(self, batch: Any) -> HandedOut:
        """Assign all losses up to the next batch to this one, and return it.

        Raises:
            ValueError: if it is none of the batches that were not run backward yet, or may be several of them.
        """
        found = self._matching(list(tensors_in(batch)))
        if len({handed.key for handed in found}) != 1:
            raise ValueError(
                "select() was given something that is not one of the batches handed out since the last backward pass, "
                "or that looks like several of them. Give it a batch as the loader gave it."
            )
        self._selected = found[-1]
        return self._selected

    def find(self, batch: Any) -> HandedOut | None:
        """Return which of the batches handed out this is, by the memory of its tensors; ``None`` if it is none."""
        addresses = {_address(tensor) for tensor in tensors_in(batch) if tensor.layout is torch.strided}
        return next((handed for handed in self._open if handed.holds(addresses)), None)

    # forward

    def watch(self, model: torch.nn.Module) -> Any:
        """Trace the batches through the forward passes of a model; return the handle of the hook."""
        return model.register_forward_hook(ForwardMark(self), with_kwargs=True)

    def mark(self, given: Any, output: Any) -> None:
        """Note that a forward pass made ``output`` from ``given``."""
        if not self._open or not torch.is_grad_enabled():
            return
        found = [self._open[-1]] if len(self._open) == 1 else self._matching(list(tensors_in(given)))
        for tensor in tensors_in(output) if found else ():
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[MARK] = found

    def _matching(self, tensors: Sequence[torch.Tensor]) -> list[HandedOut]:
        """Find the batches that these tensors come from: by storage, through the graph, or (for copies) by shape."""
        addresses = {_address(tensor) for tensor in tensors if tensor.layout is torch.strided and tensor.numel()}
        found = [handed for handed in self._open if handed.holds(addresses)]
        for tensor in tensors:
            found += _marks(tensor)
        return found or self._shaped_like({tuple(tensor.shape) for tensor in tensors if tensor.ndim})

    def _shaped_like(self, shapes: set[tuple[int, ...]]) -> list[HandedOut]:
        """Find batches with a tensor of such a shape, if numbers of samples tell different weights apart.

        They have to differ on all ranks, because an error on one rank alone would leave the others waiting.
        """
        kinds = {handed.key: handed.rows for handed in self._open}
        columns = zip(*kinds.values(), strict=True)
        if any(len({max(rows, 1) for rows in column}) < len(kinds) for column in columns):
            return []
        found = [handed for handed in self._open if handed.shapes & shapes]
        return found if len({handed.key for handed in found}) == 1 else []

    # backward

    def of(self, loss: torch.Tensor) -> HandedOut | None:
        """Return the batch that a loss belongs to, or another one of the same weight; ``None`` before the first batch.

        Raises:
            RuntimeError: if the batches that the loss may belong to, or was made of, have different weights.
        """
        if self._selected is not None:
            return self._selected.use()
        if len(self._open) < 2:
            return self._open[-1].use() if self._open else None
        found = _marks(loss)
        candidates = found or list(self._open)
        if len({handed.key for handed in candidates}) > 1:
            raise RuntimeError(_why_not(candidates, traced=bool(found)))
        if len(found) == 1:
            found[0].use()
        return candidates[-1]


class ForwardMark:
    """Forward hook of :class:`BatchTrace`; in a copy of the model it does nothing."""

    def __init__(self, trace: BatchTrace | None = None) -> None:
        self.trace = trace

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Mark the output, except while the model is being compiled: its graph must not break."""
        if self.trace is None or torch.compiler.is_compiling():
            return
        if self.trace.check is not None:
            self.trace.check(kwargs)
        self.trace.mark((args, kwargs), output)

    def __deepcopy__(self, memo: Any) -> "ForwardMark":
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, of a model's arguments or of its output."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(value)
    elif is_dataclass(data) and not isinstance(data, type):
        for part in fields(data):
            yield from tensors_in(getattr(data, part.name))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _metadata(node: Any) -> dict[str, list[HandedOut]]:
    """Return the metadata of a node of the graph: a property, although torch's stubs say method."""
    attached: dict[str, list[HandedOut]] = node.metadata
    return attached


def _marks(made: torch.Tensor) -> list[HandedOut]:
    """Find the batches from whose outputs a tensor was made, following its graph down to the marked outputs."""
    found: list[HandedOut] = []
    waiting, seen = [made.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marked = _metadata(node).get(MARK)
        if marked is None:
            waiting.extend(following for following, _ in node.next_functions)
        else:
            found.extend(handed for handed in marked if handed not in found)
    return found


def _why_not(candidates: Sequence[HandedOut], traced: bool) -> str:
    if any(handed.beside is not None for handed in candidates):
        what = "is made of batches of two loaders" if traced else "may be of either of two loaders"
        return (
            f"a loss {what}, of which only the first one is split by speed: their samples have different weights. Call "
            "backward() for the loss of each loader by itself, with inputs of the model that are tensors of the "
            "batch, or call session.select(batch) before; or combine the datasets in one DataLoader. Evaluate with "
            "gradients off or the model in eval()."
        )
    if traced:
        return (
            "a loss is made of several batches that are split in different proportions, as the last one of an epoch "
            "is: their parts have different weights. Call backward() for each batch, or set drop_last=True."
        )
    return (
        f"{len(candidates)} batches were fetched before the backward pass of this loss, their weights differ, and the "
        "inputs of the model do not say which of them it belongs to. Give the model tensors of the batch, or call "
        "session.select(batch) before its backward(); a loop without a trainer calls session.watch(model) once."
    )
