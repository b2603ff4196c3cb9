"""DataLoaders whose steps are made of units: which they are, their training data, and the loaders that are iterated."""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.rows import BatchRows
from lightning_hetero.data.units.orders import SeededUnits
from lightning_hetero.data.units.pieces import PiecesDataset
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import BatchSource, ItemSource, SampleSource, Source, UnitOrder
from lightning_hetero.frontend.loaders import batches_of, iterated_by, stream_of, with_batch_sampler
from lightning_hetero.frontend.log import log

__all__ = [
    "OWN_ONLY_IN_LIGHTNING",
    "is_made_of_units",
    "ordered",
    "samples_of",
    "stand_in",
    "unit_loader",
    "unit_source",
    "units_of",
    "units_reason",
]

OWN_ONLY_IN_LIGHTNING = (
    "shard='mine' lets ranks train on their own map-style data under Lightning's Trainer; here the training loader is "
    "distributed over ranks. Leave shard out (one argument), or set policy='even' without sizes and give each rank's "
    "loader to plain Accelerate or Fabric"
)
"""Why a loop of one's own does not leave data to its ranks."""


def is_made_of_units(loader: object) -> bool:
    """Return whether a loader has a batch sampler of the user, or a map-style dataset that yields batches.

    Example:
        >>> is_made_of_units(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])), is_made_of_units(DataLoader([0]))
        (True, False)
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader.batch_sampler) is not BatchSampler


def ordered(loader: DataLoader) -> bool:
    """Return whether a loader of units goes through the dataset in its own order, as an evaluation does.

    Example:
        >>> ordered(DataLoader(range(4), batch_size=None)), ordered(DataLoader(range(4), batch_sampler=[[0]]))
        (True, False)
    """
    return loader.batch_sampler is None and isinstance(loader.sampler, SequentialSampler)


def samples_of(loader: DataLoader) -> int:
    """Return the samples of a loader's dataset; 0 if it does not say, as it need not with a batch sampler.

    Example:
        >>> samples_of(DataLoader([1, 2, 3]))
        3
    """
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 0


def units_reason(loader: DataLoader) -> str | None:
    """Return why the units of a loader cannot be shared by ranks, with advice; ``None`` if they can."""
    batches: Any = loader.batch_sampler
    parts = [part for part in (batches, getattr(batches, "sampler", loader.sampler)) if part is not None]
    split = [part for part in parts if isinstance(part, DistributedSampler) or _ranks(part) > 1]
    if split:
        return (
            f"the train DataLoader's {type(split[0]).__name__} splits its data over ranks by itself. Let it yield all "
            "batches on every rank and leave the split to the strategy (one line changes), or set shard='mine', with "
            "which every rank trains on what its own loader yields"
        )
    return None


def _ranks(part: Any) -> int:
    """Return over how many ranks a sampler splits its data, as far as it says so."""
    found = getattr(part, "num_replicas", 1)
    return found if isinstance(found, int) else 1


def stand_in(loader: DataLoader, world_size: int) -> DataLoader:
    """Return a copy of a loader with a plain batch sampler, for a framework that splits no others; it is not iterated.

    Example:
        >>> stand_in(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), world_size=2).batch_sampler.batch_size
        2
    """
    return with_batch_sampler(loader, BatchSampler(SequentialSampler(range(world_size)), world_size, drop_last=False))


def units_of(loader: DataLoader) -> SeededUnits:
    """Return the batches of a loader's batch sampler, drawn an epoch at a time on every rank alike."""
    batches: Any = loader.batch_sampler
    return SeededUnits(batches, seed=int(os.environ.get("PL_GLOBAL_SEED") or 0), samples=samples_of(loader))


def unit_source(
    loader: DataLoader,
    config: HeteroConfig,
    order: UnitOrder | None = None,
    stream: IndexStream | None = None,
    *,
    for_all: bool = False,
) -> Source:
    """Return the training data of a loader.

    Args:
        loader: loader with a map-style dataset, as the user gave it.
        config: settings, which say what a batch of the user's batch sampler is.
        order: batches of its batch sampler; by default drawn on every rank alike.
        stream: order of its samples or items; by default drawn on every rank alike.
        for_all: whether a batch is that of all ranks whatever the settings say (``split_batches=True``).
    """
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return BatchSource(
            order or units_of(loader),
            for_all=for_all or config.batch_sampler == "global",
        )
    stream = stream_of(loader) if stream is None else stream
    assert stream is not None
    if batches is not None:
        plain = batches_of(loader)
        return SampleSource(stream, plain.batch_size, drop_last=plain.drop_last)
    pieces = _pieces(loader, config)
    return ItemSource(stream, lambda index: pieces.rows.count(pieces.item(index)))


def _pieces(loader: DataLoader, config: HeteroConfig) -> PiecesDataset:
    return PiecesDataset(loader.dataset, loader.collate_fn, BatchRows(config.slice_fn, config.concat_fn))


def unit_loader(
    loader: DataLoader, batches: Any, steps: Callable[[], Any], config: HeteroConfig, given: DataLoader | None = None
) -> Any:
    """Return a copy of a loader with the batches of this rank; it stays of its class.

    Args:
        loader: loader to copy.
        batches: this rank's batch sampler of the loader.
        steps: returns the sampler of the steps, which is told how many rows of a batch count.
        config: settings, with the functions that cut batches and put them together.
        given: loader as the user gave it; by default the one that is copied.
    """
    given = loader if given is None else given
    if given.batch_sampler is not None:
        return with_batch_sampler(loader, batches)
    clone = copy.copy(loader)
    replaced = {"sampler": batches, "dataset": _pieces(given, config), "collate_fn": _as_it_is, "_iterator": None}
    for name, value in {**replaced, "batch_sampler": None}.items():
        object.__setattr__(clone, name, value)
    return iterated_by(clone, lambda open_loader: _noted(open_loader(), steps()))


def _as_it_is(batch: Any) -> Any:
    return batch


def _noted(counted: Iterator[Any], steps: UnitSampler) -> Iterator[Any]:
    """Yield batches, and note how many of the rows of each count; warn if they are more than the rank is to have."""
    epoch, warned = steps.epoch, False
    most = NO_LIMIT if steps.max_local is None else steps.max_local[steps.rank]
    for step, (rows, batch) in enumerate(counted, start=steps.first_step(epoch)):
        if rows > most and not warned:
            log.warning(
                "rank %d has %d rows of the batches that the dataset yields, and max_local_batch_sizes gives it %d: "
                "shares are given out before rows are known. Let the dataset yield batches of equal numbers of rows.",
                *(steps.rank, rows, most),
            )
            warned = True
        steps.note_rows(epoch, step, int(rows))
        yield batch
