"""Pieces of batches that a dataset yields whole: rows by share of each, cut and put together on the rank.

A step takes ``W`` items. On the line of these items, rank ``i`` has the interval from ``W c_i`` to ``W c_{i+1}``, where
``c`` are the cumulated shares of the plan. It loads the items that its interval touches. Of an item of ``n`` rows that
is cut at the fraction ``f``, the rows up to ``floor(f n)`` lie before the cut, on both ranks alike. Where that leaves a
rank a part that is too small to run, the largest part of the item takes it, which these ranks also find alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Piece", "PieceRequest", "PiecesDataset", "concat_batches", "pieces_of", "rows_of", "slice_batch"]


class Piece(NamedTuple):
    """Part of an item.

    Args:
        index: index of the item.
        cuts: where ranks' parts of the item begin and end, from 0 to the parts of the whole item.
        place: which part.
    """

    index: Any
    cuts: tuple[int, ...]
    place: int

    def rows(self, rows: int, min_local: int = 1) -> tuple[int, int]:
        """Return the first row of the part and the one behind its last, for an item of ``rows`` rows.

        Args:
            rows: rows of the item.
            min_local: smallest batch that a rank can run.

        Example:
            >>> [Piece(0, (0, 1, 4), place).rows(6) for place in (0, 1)]
            [(0, 1), (1, 6)]
            >>> [Piece(0, (0, 1, 4), place).rows(6, min_local=2) for place in (0, 1)]
            [(0, 0), (0, 6)]
        """
        sizes = np.diff([rows * cut // self.cuts[-1] for cut in self.cuts])
        small = sizes < min_local
        largest = int(sizes.argmax())
        small[largest] = False
        sizes[largest] += sizes[small].sum()
        sizes[small] = 0
        start = int(sizes[: self.place].sum())
        return start, start + int(sizes[self.place])


class PieceRequest(NamedTuple):
    """Request of a rank for the rows that it loads in a step.

    Args:
        pieces: its parts of items; empty if its share is 0.
        spare: item of which the rank runs rows with weight 0 if it has none of its own.
        min_local: how many of these.
    """

    pieces: tuple[Piece, ...]
    spare: Any
    min_local: int


def pieces_of(items: Sequence[Any], sizes: Sequence[int], rank: int, min_local: int = 1) -> PieceRequest:
    """Return a rank's pieces of the items of a step.

    Args:
        items: indices of the items.
        sizes: sizes of the plan, whose proportions count.
        rank: whose pieces.
        min_local: smallest batch that the rank can run.

    Example:
        >>> pieces_of([7, 8], (3, 1), rank=0).pieces
        (Piece(index=7, cuts=(0, 4), place=0), Piece(index=8, cuts=(0, 2, 4), place=0))
    """
    parts, borders = sum(sizes), [len(items) * sum(sizes[:i]) for i in range(len(sizes) + 1)]
    begin, end = borders[rank : rank + 2]
    pieces = []
    for number in range(begin // parts, -(-end // parts)):
        first, last = number * parts, (number + 1) * parts
        start = max(begin, first)
        if min(end, last) > start:
            cuts = sorted({first, last, *(border for border in borders if first < border < last)})
            pieces.append(Piece(items[number], tuple(cut - first for cut in cuts), cuts.index(start)))
    return PieceRequest(tuple(pieces), items[min(begin // parts, len(items) - 1)], min_local)


class PiecesDataset:
    """A dataset of batches under a sampler of :class:`PieceRequest`: yields the rank's rows, and how many count.

    Args:
        dataset: yields batches.
        collate: what the loader does with each item.
        slice_fn: returns rows of a batch: ``slice_fn(batch, start, stop)``.
        concat_fn: puts parts of batches together: ``concat_fn(parts)``.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        slice_fn: Callable[[Any, int, int], Any] | None = None,
        concat_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.slice_fn, self.concat_fn = slice_fn or slice_batch, concat_fn or concat_batches

    def __len__(self) -> int:
        return len(self.dataset)

    def item(self, index: Any) -> Any:
        """Return a whole item as the loader would give it."""
        return self.collate(self.dataset[index])

    def __getitem__(self, request: PieceRequest) -> tuple[int, Any]:
        """Return how many rows of the rank's batch count, and the batch.

        Raises:
            ValueError: if its items have too few rows for a batch that the rank can run.
        """
        parts, count = [], 0
        for piece in request.pieces:
            item = self.item(piece.index)
            rows = rows_of(item)
            start, stop = piece.rows(rows, request.min_local)
            if stop > start:
                parts.append(item if stop - start == rows else self.slice_fn(item, start, stop))
                count += stop - start
        if 0 < count < request.min_local:
            raise ValueError(
                f"this rank has {count} rows in a step, of batches {[piece.index for piece in request.pieces]} of the "
                f"dataset, and can run no fewer than min_local_batch_size={request.min_local}, which is 2 unless given "
                "if the model has batch normalisation. Let the dataset yield batches of more rows."
            )
        if not parts:
            item = self.item(request.spare)
            rows = max(1, rows_of(item))
            once = self.slice_fn(item, 0, min(request.min_local, rows))
            parts = [once] * -(-request.min_local // rows)  # rows of weight 0 may be there twice
        return count, parts[0] if len(parts) == 1 else self.concat_fn(parts)


def _is_namedtuple(batch: Any) -> bool:
    return isinstance(batch, tuple) and hasattr(batch, "_fields")


def rows_of(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch, or the length of a list or object of other things.

    Raises:
        TypeError: if it has neither.

    Example:
        >>> rows_of({"x": torch.zeros(3, 2)})
        3
    """
    found = _rows(batch)
    if found is None and hasattr(batch, "__len__") and not isinstance(batch, str | bytes | Mapping | tuple):
        found = len(batch)
    if found is None:
        raise TypeError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted. Let the batch have a tensor whose "
            "first dimension is that of the samples, or a length (__len__)."
        )
    return found


def _rows(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor) or hasattr(batch, "__array__"):
        return len(batch) if batch.ndim else None
    if isinstance(batch, Mapping):
        return next((rows for value in batch.values() if (rows := _rows(value)) is not None), None)
    if isinstance(batch, list | tuple):
        inner = next((rows for value in batch if (rows := _rows(value)) is not None), None)
        return len(batch) if inner is None and batch and not isinstance(batch, tuple) else inner
    return None


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return rows of a batch: of tensors, and of the mappings, lists, tuples and named tuples that hold them.

    Raises:
        TypeError: if a part of the batch cannot be sliced.
        ValueError: if a part has another number of rows.

    Example:
        >>> slice_batch({"x": torch.arange(4), "name": "train"}, 1, 3)
        {'x': tensor([1, 2]), 'name': 'train'}
    """
    return _sliced(batch, start, stop, rows_of(batch))


def _sliced(batch: Any, start: int, stop: int, rows: int) -> Any:
    if isinstance(batch, torch.Tensor) or hasattr(batch, "__array__"):
        if batch.ndim and len(batch) != rows:
            raise ValueError(
                f"a batch has parts of {rows} and {len(batch)} rows, so that it cannot be cut along the first "
                "dimension. Give slice_fn, a function slice_fn(batch, start, stop)."
            )
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: _sliced(value, start, stop, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if _rows(batch) is None or (isinstance(batch, list) and all(_rows(value) is None for value in batch)):
            return batch[start:stop] if len(batch) == rows else batch
        parts = [_sliced(value, start, stop, rows) for value in batch]
        return type(batch)(*parts) if _is_namedtuple(batch) else type(batch)(parts)
    if batch is None or isinstance(batch, str | bytes | int | float | bool):
        return batch
    raise TypeError(
        f"a batch holds a {type(batch).__name__}, which cannot be cut along the first dimension. Give slice_fn, a "
        "function slice_fn(batch, start, stop), and concat_fn, a function concat_fn(parts)."
    )


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return the values in a mapping of the batch's class, such as transformers' ``BatchEncoding``."""
    return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]


def concat_batches(parts: list[Any]) -> Any:
    """Put parts of batches together along the first dimension.

    Raises:
        ValueError: if their other dimensions differ, as those of batches padded to different lengths.
        TypeError: if they cannot be put together.

    Example:
        >>> concat_batches([[torch.zeros(2, 3)], [torch.zeros(1, 3)]])[0].shape
        torch.Size([3, 3])
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            return first
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError(
                f"rows of two batches with shapes {' and '.join(str(tuple(part.shape)) for part in parts)} make up "
                "one rank's batch, and cannot be put together without padding. Pad all batches of the dataset to one "
                "length, or give concat_fn, a function concat_fn(parts) that pads."
            )
        return torch.cat(parts)
    if hasattr(first, "__array__"):
        return torch.cat([torch.as_tensor(part) for part in parts]).numpy() if first.ndim else first
    if isinstance(first, Mapping):
        return _like(first, {key: concat_batches([part[key] for part in parts]) for key in first})
    if isinstance(first, list) and all(_rows(value) is None for value in first):
        return [value for part in parts for value in part]
    if isinstance(first, list | tuple):
        joined = [concat_batches(list(values)) for values in zip(*parts, strict=True)]
        return type(first)(*joined) if _is_namedtuple(first) else type(first)(joined)
    if first is None or isinstance(first, str | bytes | int | float | bool):
        return first
    raise TypeError(
        f"parts of batches that hold a {type(first).__name__} cannot be put together. Give concat_fn, a function "
        "concat_fn(parts)."
    )
