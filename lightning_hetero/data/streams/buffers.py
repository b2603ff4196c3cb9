"""Samples that were drawn and not yet trained on: single ones, or rows of the batches that a loader yields."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["RowBuffer", "SampleBuffer", "StreamBuffer", "join_rows", "row_count", "rows_of"]


class StreamBuffer(Protocol):
    """Queue of samples, first in, first out."""

    def __len__(self) -> int:
        """Return the samples in the queue."""

    def put(self, chunk: Any) -> None:
        """Add what the loader has yielded at once."""

    def take(self, number: int) -> list[Any]:
        """Remove the first samples and return them."""

    def peek(self, number: int) -> list[Any]:
        """Return the first samples, which stay in the queue."""

    def batch(self, pieces: list[Any]) -> Any:
        """Make a batch of what :meth:`take` has returned."""


class SampleBuffer:
    """Single samples, made into batches by the loader's own ``collate_fn``.

    Args:
        collate: makes a batch of a list of samples.

    Example:
        >>> buffer = SampleBuffer(tuple)
        >>> buffer.put([1, 2, 3])
        >>> buffer.peek(1), buffer.batch(buffer.take(2)), len(buffer)
        ([1], (1, 2), 1)
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._samples: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def put(self, chunk: Iterable[Any]) -> None:
        """Add a list of samples."""
        self._samples.extend(chunk)

    def take(self, number: int) -> list[Any]:
        """Remove the first samples and return them."""
        return [self._samples.popleft() for _ in range(number)]

    def peek(self, number: int) -> list[Any]:
        """Return the first samples, which stay in the queue."""
        return list(islice(self._samples, number))

    def batch(self, pieces: list[Any]) -> Any:
        """Make a batch of samples."""
        return self._collate(pieces)


class RowBuffer:
    """Rows of batches that the loader or its dataset has made; batches of other sizes are cut from them and joined.

    Example:
        >>> buffer = RowBuffer()
        >>> buffer.put(torch.arange(4))
        >>> buffer.put(torch.arange(4, 6))
        >>> buffer.batch(buffer.take(5)), len(buffer)
        (tensor([0, 1, 2, 3, 4]), 1)
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[Any, int, int]] = deque()  # batch, first row that is left, rows
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def put(self, chunk: Any) -> None:
        """Add a batch."""
        rows = row_count(chunk)
        if rows:
            self._batches.append((chunk, 0, rows))
            self._rows += rows

    def take(self, number: int) -> list[Any]:
        """Remove the first rows and return them, in one piece for each batch that they come from."""
        pieces = []
        while number > 0:
            batch, first, rows = self._batches.popleft()
            taken = min(number, rows - first)
            pieces.append(rows_of(batch, first, first + taken))
            if first + taken < rows:
                self._batches.appendleft((batch, first + taken, rows))
            number, self._rows = number - taken, self._rows - taken
        return pieces

    def peek(self, number: int) -> list[Any]:
        """Return the first rows, which stay in the queue."""
        pieces = []
        for batch, first, rows in self._batches:
            taken = min(number, rows - first)
            if taken <= 0:
                break
            pieces.append(rows_of(batch, first, first + taken))
            number -= taken
        return pieces

    def batch(self, pieces: list[Any]) -> Any:
        """Join pieces to one batch."""
        return join_rows(pieces)


def row_count(batch: Any) -> int:
    """Return the rows of a batch: the first dimension of its tensors and arrays, and the length of its lists of values.

    Raises:
        ValueError: if it has no rows, or parts with different numbers of them.

    Example:
        >>> row_count({"x": torch.zeros(3, 2), "name": ["a", "b", "c"]})
        3
    """
    counts = set(_leaf_rows(batch))
    if len(counts) != 1:
        raise ValueError(
            f"the loader yields a {type(batch).__name__} whose parts have {sorted(counts) or 'no'} rows, so that it "
            "cannot be cut into batches of other sizes. Yield batches whose tensors have one first dimension, or "
            "give a DataLoader a batch_size, so that it yields single samples."
        )
    return counts.pop()


def _leaf_rows(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [len(batch)] if batch.ndim else []
    if isinstance(batch, dict):
        return [rows for value in batch.values() for rows in _leaf_rows(value)]
    if isinstance(batch, list | tuple):
        return [rows for value in batch for rows in _leaf_rows(value)] if _nested(batch) else [len(batch)]
    return []


def _nested(batch: Any) -> bool:
    """Return whether a list is a structure of parts, and not one value for each row."""
    return any(isinstance(value, torch.Tensor | np.ndarray | dict | list | tuple) for value in batch)


def rows_of(batch: Any, first: int, stop: int) -> Any:
    """Return some rows of a batch, as views where tensors allow it.

    Example:
        >>> rows_of((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
        (tensor([1, 2]), ['b', 'c'])
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[first:stop] if batch.ndim else batch
    if isinstance(batch, dict):
        return type(batch)({key: rows_of(value, first, stop) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if not _nested(batch):
            return batch[first:stop]
        return _like(batch, [rows_of(value, first, stop) for value in batch])
    return batch


def join_rows(pieces: list[Any]) -> Any:
    """Join batches of the same structure along their rows; a part without rows is that of the first one.

    Example:
        >>> join_rows([{"x": torch.ones(1)}, {"x": torch.zeros(2)}])
        {'x': tensor([1., 0., 0.])}
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces) if first.ndim else first
    if isinstance(first, np.ndarray):
        return np.concatenate(pieces) if first.ndim else first
    if isinstance(first, dict):
        return type(first)({key: join_rows([piece[key] for piece in pieces]) for key in first})
    if isinstance(first, list | tuple):
        if not any(_nested(piece) for piece in pieces):
            return _like(first, [value for piece in pieces for value in piece])
        return _like(first, [join_rows(list(parts)) for parts in zip(*pieces, strict=True)])
    return first


def _like(batch: Any, values: list[Any]) -> Any:
    """Return values in a list, tuple or named tuple as that of a batch."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
