"""Training loaders whose samples come as a stream: which they are, and how their batches are replaced."""

import copy
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.config import HeteroConfig
from lightning_hetero.data.rows import BatchRows
from lightning_hetero.data.streams.source import SampleStream

__all__ = ["LEFT_EVEN", "is_stream", "sample_stream", "with_batches"]

LEFT_EVEN = "the training data is a stream (an IterableDataset, or a loader that makes its batches itself)"
"""What the notice on a stream says that stays as it is."""


def is_stream(loader: object) -> bool:
    """Return whether a loader's samples come as a stream: not by index, but in the order of an iterator.

    Example:
        >>> is_stream(DataLoader(range(3))), is_stream([[1.0], [2.0]]), is_stream(None)
        (False, True, False)
    """
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, Iterable)


def sample_stream(loader: Any, config: HeteroConfig, *, default: str, world_size: int = 1) -> SampleStream:
    """Return the stream of a loader under the setting ``shard``.

    Args:
        loader: a loader for which :func:`is_stream` holds.
        config: settings of the run.
        default: value of ``shard`` if it is not set.
        world_size: number of ranks among which the loader's own batches are meant to be split; 1 if each gets one.

    Raises:
        ValueError: if the stream cannot be shared in that way.
    """
    rows = BatchRows(config.slice_fn, config.concat_fn)
    return SampleStream(loader, config.shard or default, divided_by=world_size, rows=rows)


def with_batches(loader: Any, batches: Any) -> Any:
    """Return a loader that yields other batches; all else, its class included, is the given one's.

    Args:
        loader: a ``DataLoader``, or any object that yields batches.
        batches: iterable of batches, with a length if that is known, and perhaps a ``sampler`` that counts epochs.
    """
    if not isinstance(loader, DataLoader):
        return _Rebatched(loader, batches)
    cls: Any = type(loader)
    methods = {
        "__iter__": lambda self: iter(batches),
        "__len__": lambda self: len(batches),
        "__module__": cls.__module__,
    }
    clone = copy.copy(loader)
    object.__setattr__(clone, "batch_sampler", batches)
    object.__setattr__(clone, "_iterator", None)
    clone.__class__ = type(cls.__name__, (cls,), methods)
    return clone


class _Rebatched:
    """A loader of any kind with other batches.

    Args:
        loader: the loader, whose attributes stay.
        batches: batches that are yielded.
    """

    def __init__(self, loader: Any, batches: Sized) -> None:
        self._loader, self.batch_sampler = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)
