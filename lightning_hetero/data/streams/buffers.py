"""Samples that were drawn and not yet trained on: single ones, or rows of the batches that a loader yields."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

from lightning_hetero.data.rows import BatchRows

__all__ = ["RowBuffer", "SampleBuffer", "StreamBuffer"]


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

    Args:
        rows: how rows are counted, cut and joined.

    Example:
        >>> import torch
        >>> buffer = RowBuffer(BatchRows())
        >>> buffer.put(torch.arange(4))
        >>> buffer.put(torch.arange(4, 6))
        >>> buffer.batch(buffer.take(5)), len(buffer)
        (tensor([0, 1, 2, 3, 4]), 1)
    """

    def __init__(self, rows: BatchRows) -> None:
        self._of = rows
        self._batches: deque[tuple[Any, int, int]] = deque()  # batch, first row that is left, rows
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def put(self, chunk: Any) -> None:
        """Add a batch."""
        rows = self._of.count(chunk)
        if rows:
            self._batches.append((chunk, 0, rows))
            self._rows += rows

    def take(self, number: int) -> list[Any]:
        """Remove the first rows and return them, in one piece for each batch that they come from."""
        pieces = []
        while number > 0:
            batch, first, rows = self._batches.popleft()
            taken = min(number, rows - first)
            pieces.append(self._piece(batch, first, first + taken, rows))
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
            pieces.append(self._piece(batch, first, first + taken, rows))
            number -= taken
        return pieces

    def _piece(self, batch: Any, first: int, stop: int, rows: int) -> Any:
        return batch if stop - first == rows else self._of.cut(batch, first, stop)

    def batch(self, pieces: list[Any]) -> Any:
        """Join pieces to one batch."""
        return self._of.join(pieces)
