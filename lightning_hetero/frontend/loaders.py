"""DataLoaders under the engine: which ones can be split unevenly, and how their batch sampler is replaced."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.comm.timing.step_timer import TimedIterator
from lightning_hetero.data import EvaluationBatchSampler, IndexStream, PermutationStream, SamplerStream
from lightning_hetero.engine import HeteroEngine

__all__ = [
    "NOT_MET",
    "as_given",
    "balanced_evaluation_loader",
    "batches_of",
    "evaluates",
    "iterated_by",
    "length_of",
    "not_distributed",
    "sample_count",
    "stream_of",
    "timed_loader",
    "unsupported_reason",
    "with_batch_sampler",
    "with_batch_size",
]

NOT_MET = (
    "a model or a loader was set up before the processes have met (in the strategy's setup_environment()), so that "
    "batches are split evenly, as plain DDP does. %s does it in the right order."
)


def not_distributed(name: str) -> str:
    """Return why a loader is refused whose sampler nobody distributes over ranks."""
    return (
        f"the train DataLoader's {name} is not distributed, because of use_distributed_sampler=False: each rank would "
        "go through all samples of a dataset that may be its own. Leave use_distributed_sampler at True, or give the "
        "strategy one argument: shard='whole' if every rank's loader yields all data, to split it, or shard='mine' if "
        "it yields the rank's own data, to weight losses and move nothing"
    )


def unsupported_reason(loader: object, world_size: int, shard: str | None = None) -> str | None:
    """Return why a loader cannot be split unevenly over ``world_size`` ranks, with advice; ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"the train loader is a {type(loader).__name__}, not a torch DataLoader. Return a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            "the train dataset is an IterableDataset, whose samples cannot be assigned to ranks by index, so that "
            "equal numbers of steps cannot be promised. Use a map-style dataset"
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if world_size > 1 and not isinstance(sampler, DistributedSampler) and shard is None:
        return not_distributed(type(sampler).__name__)
    if isinstance(sampler, DistributedSampler) and stream_of(loader) is None:
        return (
            f"the train DataLoader has a distributed sampler of its own ({type(sampler).__name__}), whose order is not "
            "known. Give the DataLoader a sampler that is not distributed, which is distributed for you; or give the "
            "strategy one argument, shard='mine', with which every rank trains on what its own loader yields"
        )
    return None


def sample_count(loader: DataLoader) -> int:
    """Return the number of samples of a loader over a map-style dataset."""
    dataset: Any = loader.dataset
    return len(dataset)


def length_of(loader: object) -> int | None:
    """Return the batches of a loader, ``None`` if it has no length.

    Example:
        >>> length_of([0, 1]), length_of(iter([0, 1]))
        (2, None)
    """
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def batches_of(loader: DataLoader) -> BatchSampler:
    """Return the batch sampler of a loader that can be split, see :func:`unsupported_reason`.

    Raises:
        TypeError: if its batches are not torch's own.
    """
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        raise TypeError(f"the loader has a {type(batches).__name__}; give a DataLoader with a batch_size.")
    return batches


def stream_of(loader: DataLoader) -> IndexStream | None:
    """Return the order of a loader's samples before they are distributed over ranks; ``None`` if it cannot be told."""
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches.sampler
    seed = int(getattr(sampler, "seed", None) or os.environ.get("PL_GLOBAL_SEED") or 0)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # Lightning's wrapper of a user's sampler
    if isinstance(sampler, DistributedSampler) and inner is not None:
        return SamplerStream(inner.given if isinstance(inner, _AsGiven) else inner, seed=seed)
    if type(sampler) is DistributedSampler:
        return PermutationStream(sample_count(loader), shuffle=sampler.shuffle, seed=seed)
    if isinstance(sampler, DistributedSampler):
        return None
    if _plain(sampler):
        shuffle = isinstance(sampler, RandomSampler)
        return PermutationStream(sample_count(loader), shuffle=shuffle, seed=seed)
    return SamplerStream(sampler, seed=seed)


def _plain(sampler: Any) -> bool:
    """Return whether a sampler goes through all samples once, in order or at random."""
    number = getattr(sampler, "_num_samples", None)
    once = number is None and not getattr(sampler, "replacement", False)
    return type(sampler) in (RandomSampler, SequentialSampler) and once


class _AsGiven(Sampler[int]):
    """A sampler of the user under another class."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[int]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def with_batch_size(loader: Any) -> Any:
    """Return a loader that was given torch's own ``BatchSampler`` as one that was given its sampler and batch size.

    Example:
        >>> loader = DataLoader([0, 1], batch_sampler=BatchSampler(SequentialSampler([0, 1]), 2, drop_last=False))
        >>> loader.batch_size, with_batch_size(loader).batch_size
        (None, 2)
    """
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or loader.batch_size is not None or type(batches) is not BatchSampler:
        return loader
    clone = copy.copy(loader)
    for name, value in {"sampler": batches.sampler, "batch_size": batches.batch_size, "_iterator": None}.items():
        object.__setattr__(clone, name, value)
    object.__setattr__(clone, "drop_last", batches.drop_last)
    return clone


def as_given(loader: Any) -> Any:
    """Return a loader whose sampler Lightning distributes rather than replaces.

    Lightning takes a sampler of a class derived from torch's random or sequential one for that one, so that it forgets
    replacement, a number of samples, and what a subclass does.

    Example:
        >>> loader = DataLoader([0, 1], sampler=RandomSampler([0, 1], replacement=True, num_samples=5))
        >>> isinstance(as_given(loader).sampler, RandomSampler), len(as_given(loader).sampler)
        (False, 5)
    """
    loader = with_batch_size(loader)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, RandomSampler | SequentialSampler):
        return loader
    if _plain(sampler):
        return loader
    batches, given = batches_of(loader), _AsGiven(sampler)
    clone = with_batch_sampler(loader, BatchSampler(given, batches.batch_size, batches.drop_last))
    object.__setattr__(clone, "sampler", given)
    return clone


def with_batch_sampler(loader: DataLoader, batch_sampler: Iterable[list[int]]) -> DataLoader:
    """Return a copy of a loader of any class with another batch sampler; the loader itself stays as it is.

    ``DataLoader`` refuses to set the attribute after construction, because its existing iterators would not notice; a
    copy has no iterator yet. Unlike a new call of the constructor, a copy keeps subclasses and all their attributes.
    """
    clone = copy.copy(loader)
    object.__setattr__(clone, "batch_sampler", batch_sampler)
    object.__setattr__(clone, "_iterator", None)
    return clone


def timed_loader(loader: DataLoader, engine: HeteroEngine) -> DataLoader:
    """Make a loader report to the engine when a batch is fetched; it stays an instance of its class."""
    cls: Any = type(loader)

    def iterate(self: Any) -> TimedIterator:
        return TimedIterator(cls.__iter__(self), engine.observer)

    loader.__class__ = type(cls.__name__, (cls,), {"__iter__": iterate, "__module__": cls.__module__})
    return loader


def iterated_by(
    loader: DataLoader,
    iterate: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]],
    length: Callable[[], int | None] = lambda: None,
) -> Any:
    """Give a loader, still of its class, ``iterate(open_loader)`` as its iterator and, if known, another length."""
    cls: Any = type(loader)

    def own_length(self: Any) -> int:
        known = length()
        return int(cls.__len__(self)) if known is None else known

    methods = {
        "__iter__": lambda self: iterate(lambda: cls.__iter__(self)),
        "__len__": own_length,
        "__module__": cls.__module__,
    }
    loader.__class__ = type(cls.__name__, (cls,), methods)
    return loader


def evaluates(models: Sequence[torch.nn.Module]) -> bool:
    """Return whether this cannot be training: gradients are off, or all models are in ``eval()``."""
    return not torch.is_grad_enabled() or (len(models) > 0 and not any(model.training for model in models))


def _inner(loader: DataLoader) -> Any:
    """Return an evaluation loader's batch sampler; Lightning wraps that of predictions to record batch indices."""
    return getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)


def unbalanced_reason(loader: object, world_size: int) -> str | None:
    """Return why an evaluation loader cannot be split by speed over several ranks; ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return "samples of an IterableDataset, or without a batch_size, cannot be assigned to workers"
    batches = _inner(loader)
    if type(batches) is not BatchSampler:
        return f"it has a batch sampler of its own ({type(batches).__name__})"
    sampler = batches.sampler
    if not isinstance(sampler, DistributedSampler):
        return f"its sampler ({type(sampler).__name__}) is not distributed"
    own = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # inside Lightning's wrapper
    if type(own) is not DistributedSampler and not isinstance(own, SequentialSampler):
        return f"its samples come by a {type(own).__name__}"
    if getattr(sampler, "shuffle", False):
        return "it shuffles"
    size = sample_count(loader)
    return f"it has {size} samples for {world_size} workers" if size < world_size else None


def balanced_evaluation_loader(loader: Any, engine: HeteroEngine) -> Any:
    """Split an evaluation loader by the shares of the current plan; leave it unchanged where that is not possible."""
    reason = unbalanced_reason(loader, engine.world_size)
    if reason is not None:
        if engine.world_size > 1:
            text = f"balance_evaluation=True leaves an evaluation loader as it is under ddp: {reason}"
            engine.notices.say(f"{text}. Samples may be repeated to make shards equal.", loses=True)
        return loader
    captured: Any = loader.batch_sampler
    inner = _inner(loader)

    batches = EvaluationBatchSampler(
        sample_count(loader),
        inner.batch_size,
        engine.current_shares,
        engine.rank,
        engine.world_size,
        max_local=engine.workers.max_local if engine.workers else None,
    )
    return with_batch_sampler(loader, batches if inner is captured else type(captured)(batches))
