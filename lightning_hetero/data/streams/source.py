"""A loader whose samples come as a stream: drawn one by one, and made into batches of other sizes afterwards."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.data.rows import BatchRows
from lightning_hetero.data.streams.buffers import RowBuffer, SampleBuffer, StreamBuffer
from lightning_hetero.data.streams.claims import ClaimedShards, claimable

__all__ = ["SHARDS", "Drawing", "SampleStream"]

SHARDS = ("mine", "whole", "claim")
"""Who has which samples: each rank its own, all ranks the same, or whole shards for whoever comes first."""


def _same(samples: list[Any]) -> list[Any]:
    return samples


@checked_keywords
class SampleStream:
    """Samples of a loader over an ``IterableDataset``, or rows of a loader that yields batches of its own.

    Where the loader has a ``batch_size``, its workers draw single samples, and ``collate_fn`` is called in the training
    process with as many as the plan gives this rank. Batches that a loader or its dataset makes itself are cut and
    joined along their first dimension.

    Args:
        loader: a ``DataLoader`` over an ``IterableDataset``, or any object whose iterator yields batches.
        shard: ``"mine"`` if ranks' streams are different, ``"whole"`` if all ranks read the same one, ``"claim"`` if
            the dataset has shards that ranks claim one after another.
        divided_by: ranks among which a batch of the loader is meant to be split; 1 if each gets one.
        rows: how the rows of batches that the loader makes itself are counted, cut and joined.

    Raises:
        ValueError: if ``shard`` is none of these, or ``"claim"`` and the dataset has no shards or no single samples.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> stream = SampleStream(DataLoader(Numbers(), batch_size=2), "mine")
        >>> list(stream.open(epoch=0)), stream.batch_size
        ([[0, 1], [2, 3], [4]], 2)
    """

    def __init__(self, loader: Any, shard: str, *, divided_by: int = 1, rows: BatchRows | None = None) -> None:
        if shard not in SHARDS:
            raise ValueError(f"shard={shard!r} is not one of {', '.join(map(repr, SHARDS))}. Give one of these.")
        self.loader, self.shard, self._divided_by = loader, shard, divided_by
        self._rows = rows or BatchRows()
        self._kept: Iterator[Any] | None = None
        self._size: int | None = None
        self.dataset = getattr(loader, "dataset", None)
        self._single = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        self._raw = self._drawn_singly(loader) if self._single else loader
        if shard == "claim":
            if not self._single or not claimable(self.dataset):
                raise ValueError(
                    f"shard='claim' is for a DataLoader with a batch_size over a dataset with shards, which has "
                    f"num_shards and either shard(num_shards=, index=), as datasets.IterableDataset, or "
                    f"open_shard(index); got {type(loader).__name__} over {type(self.dataset).__name__}. Give such a "
                    "dataset, or set shard='mine' or 'whole'."
                )
            if getattr(self.dataset, "_distributed", None) is not None:
                raise ValueError(
                    "shard='claim' hands out the shards of one stream, and split_dataset_by_node has given this rank "
                    "a part of them. Leave split_dataset_by_node out, or set shard='mine'."
                )
            # workers that stay would go on with the claims of the pass before
            self._raw = _replaced(self._raw, dataset=ClaimedShards(self.dataset), persistent_workers=False)

    @staticmethod
    def _drawn_singly(loader: DataLoader) -> DataLoader:
        batches = BatchSampler(loader.sampler, loader.batch_size or 1, False)
        return _replaced(
            loader, batch_sampler=batches, drop_last=False, collate_fn=_same, pin_memory=False, _iterator=None
        )

    def described(self) -> tuple[Any, ...]:
        """Return what has to be equal on all ranks: whose samples these are, and how the loader draws them."""
        workers = getattr(self.loader, "num_workers", None) if self.shard == "whole" else None
        shards = self.dataset.num_shards if self.shard == "claim" else None  # type: ignore[union-attr]
        return self.shard, self.drop_last, getattr(self.loader, "batch_size", None), workers, shards

    @property
    def batch_size(self) -> int:
        """Samples of a batch of the loader; where it yields batches of its own, the rows of the first one."""
        size = getattr(self.loader, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return max(1, size // self._divided_by)
        if self._size is None:
            batches = self.open(0)
            first = list(islice(batches, 1))
            self._kept = chain(first, batches)  # for the first pass: not every stream begins twice
            self._size = max(1, self._rows.count(first[0]) // self._divided_by) if first else 0
        return self._size

    @property
    def single(self) -> bool:
        """True if single samples are drawn, and not batches that the loader makes itself."""
        return self._single

    @property
    def drop_last(self) -> bool:
        """True if the ragged last batch is dropped."""
        return bool(getattr(self.loader, "drop_last", False)) and self._single

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known before it has ended. Give a map-style dataset.")

    def num_samples(self) -> int | None:
        """Return the samples of the dataset if it says how many it has, else ``None``."""
        try:
            return len(self.dataset) if self._single else None  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def claims(self) -> ClaimedShards:
        """The dataset whose shards are claimed.

        Raises:
            TypeError: if ``shard`` is not ``"claim"``.
        """
        dataset = getattr(self._raw, "dataset", None)
        if not isinstance(dataset, ClaimedShards):
            raise TypeError(f"shard={self.shard!r} claims no shards.")
        return dataset

    def open(self, epoch: int) -> Iterator[Any]:
        """Begin a pass; yield lists of samples, or batches where the loader makes them itself."""
        kept, self._kept = self._kept, None
        if kept is not None and epoch == 0:
            return kept
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._raw)

    def buffer(self) -> StreamBuffer:
        """Return an empty buffer for what :meth:`open` yields."""
        return SampleBuffer(self._collated) if self._single else RowBuffer(self._rows)

    def _collated(self, samples: list[Any]) -> Any:
        given = ClaimedShards.samples_of(samples) if self.shard == "claim" else samples
        batch = self.loader.collate_fn(given)
        if self.loader.pin_memory and torch.cuda.is_available():
            return torch.utils.data._utils.pin_memory.pin_memory(batch)
        return batch


def _replaced(loader: DataLoader, **attributes: Any) -> DataLoader:
    """Return a copy of a loader of any class with other attributes, which ``DataLoader`` itself refuses to set."""
    clone = copy.copy(loader)
    for name, value in attributes.items():
        object.__setattr__(clone, name, value)
    return clone


class Drawing:
    """Samples of one pass that were drawn and not yet taken.

    Args:
        open_stream: begins the pass; called at the first draw.
        buffer: empty buffer for the samples.

    Attributes:
        buffer: samples that were drawn.
        ended: whether the stream has no more samples.
        error: what the stream has raised, ``None`` if nothing.

    Example:
        >>> drawing = Drawing(lambda: iter([[1, 2], [3]]), SampleBuffer(list))
        >>> drawing.fill(1), drawing.buffer.take(2), drawing.fill(9), drawing.ended
        (None, [1, 2], None, True)
    """

    def __init__(self, open_stream: Callable[[], Iterator[Any]], buffer: StreamBuffer) -> None:
        self.buffer = buffer
        self.ended = False
        self.error: Exception | None = None
        self._open = open_stream
        self._chunks: Iterator[Any] = iter(())
        self._begun = False

    def fill(self, number: int) -> None:
        """Draw until ``number`` samples are there or the stream has ended; keep an error of the stream."""
        try:
            if not self._begun:
                self._begun, self._chunks = True, self._open()
            while len(self.buffer) < number and not self.ended and self.error is None:
                try:
                    chunk = next(self._chunks)
                except StopIteration:
                    self.ended = True
                else:
                    self.buffer.put(chunk)
        except Exception as error:  # noqa: BLE001 - every rank has to raise it
            self.error = error

    def skip(self, number: int, chunk: int = 1024) -> None:
        """Draw and drop the first ``number`` samples, as far as there are that many."""
        while number > 0 and not self.ended and self.error is None:
            self.fill(min(number, chunk))
            dropped = min(number, len(self.buffer))
            self.buffer.take(dropped)
            number -= dropped
