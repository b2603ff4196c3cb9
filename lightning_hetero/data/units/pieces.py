"""Pieces of batches that a dataset yields whole: rows by share of each, cut and put together on the rank.

A step takes ``W`` items. On the line of these items, rank ``i`` has the interval from ``W c_i`` to ``W c_{i+1}``, where
``c`` are the cumulated shares of the plan. It loads the items that its interval touches. Of an item of ``n`` rows that
is cut at the fraction ``f``, the rows up to ``floor(f n)`` lie before the cut, on both ranks alike. Where that leaves a
rank a part that is too small to run, the largest part of the item takes it, which these ranks also find alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_hetero.data.rows import BatchRows

__all__ = ["Piece", "PieceRequest", "PiecesDataset", "pieces_of"]


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
    return PieceRequest(tuple(pieces), items[0], min_local)


class PiecesDataset:
    """A dataset of batches under a sampler of :class:`PieceRequest`: yields the rank's rows, and how many count.

    Args:
        dataset: yields batches.
        collate: what the loader does with each item.
        rows: how rows are counted, cut and joined.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], rows: BatchRows) -> None:
        self.dataset, self.collate, self.rows = dataset, collate, rows

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
            rows = self.rows.count(item)
            start, stop = piece.rows(rows, request.min_local)
            if stop > start:
                parts.append(item if stop - start == rows else self.rows.cut(item, start, stop))
                count += stop - start
        if 0 < count < request.min_local:
            raise ValueError(
                f"this rank has {count} rows in a step, of batches {[piece.index for piece in request.pieces]} of the "
                f"dataset, and can run no fewer than min_local_batch_size={request.min_local}, which is 2 unless given "
                "if the model has batch normalisation. Let the dataset yield batches of more rows."
            )
        if not parts:
            item = self.item(request.spare)
            rows = max(1, self.rows.count(item))
            once = self.rows.cut(item, 0, min(request.min_local, rows))
            parts = [once] * -(-request.min_local // rows)  # rows of weight 0 may be there twice
        return count, self.rows.join(parts)
