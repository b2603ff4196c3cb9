"""Accelerate's DataLoader under a session, and the choice of the one to split among a script's loaders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.data import BroadcastStream
from lightning_hetero.data.streams.loaders import LEFT_EVEN, is_stream, sample_stream, with_batches
from lightning_hetero.data.units.orders import BroadcastUnits
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.frontend.loaders import evaluates, stream_of, with_batch_sampler
from lightning_hetero.frontend.loaders import unsupported_reason as reason_anywhere
from lightning_hetero.frontend.units.loaders import (
    is_made_of_units,
    ordered,
    samples_of,
    unit_loader,
    unit_source,
    units_reason,
)
from lightning_hetero.session import HeteroSession

__all__ = [
    "HeteroDataLoader",
    "SkippedLoader",
    "announced_loader",
    "not_dispatched",
    "refuse_local_sgd",
    "training_loader",
    "uneven_loader",
    "uneven_stream",
    "unsupported_reason",
]


def training_loader(objects: Sequence[object]) -> DataLoader | None:
    """Return the loader among the arguments of ``prepare`` that is split by speed: the one that shuffles.

    Without one, the first loader beside an optimizer; ``None`` if there is no optimizer, as in an evaluation.
    """
    loaders = [
        obj for obj in objects if isinstance(obj, DataLoader) and not getattr(obj, "_is_accelerate_prepared", False)
    ]
    shuffled = [loader for loader in loaders if _shuffles(loader)]
    beside_optimizer = loaders if any(isinstance(obj, torch.optim.Optimizer) for obj in objects) else []
    return next(iter([*shuffled, *beside_optimizer]), None)


def _shuffles(loader: DataLoader) -> bool:
    if is_made_of_units(loader):
        return not ordered(loader)
    sampler = None if is_stream(loader) else getattr(loader.batch_sampler, "sampler", None)
    return sampler is not None and not isinstance(sampler, SequentialSampler)


class HeteroDataLoader(DataLoaderShard):
    """Accelerate's loader, iterated as the passes of a session; made by :func:`uneven_loader`."""

    session: HeteroSession
    iteration: int

    def go_on(self, iteration: int) -> None:
        """Count passes from here."""
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        return self.session.steps(self._opened)

    def _opened(self) -> Iterator[Any]:
        before = self.iteration
        batches = DataLoaderShard.__iter__(self)
        sampler = self.session.engine.sampler
        assert sampler is not None
        if self.session.position[1] < sampler.num_batches(self.session.position[0]):
            yield from batches
        elif next(batches, self) is None:  # Accelerate 1.0 ends a pass without batches like this, and then fails
            self.end()
        self.iteration = before + 1  # also after a pass without batches, resumed from a state of its last step

    @property
    def total_batch_size(self) -> int:
        """Total batch size of the running plan."""
        plan = self.session.engine.plan
        return 0 if plan is None else plan.total_batch_size


def unsupported_reason(
    loader: object, *, dispatch: bool | None, stateful: bool, policy: str | None = None
) -> str | None:
    """Return why a loader cannot be split unevenly under Accelerate, with advice; ``None`` if it can."""
    if dispatch and not is_stream(loader):
        return "dispatch_batches=True hands out equal slices of each batch. Leave dispatch_batches out"
    if stateful:
        return (
            "use_stateful_dataloader=True keeps a position of its own. Leave it out; load_state and "
            "skip_first_batches(loader) go on at the exact batch"
        )
    if is_stream(loader):
        return LEFT_EVEN if policy == "even" else None
    if isinstance(loader, DataLoader) and is_made_of_units(loader):
        return units_reason(loader)
    return reason_anywhere(loader, world_size=1)


def uneven_loader(
    prepared: DataLoaderShard, session: HeteroSession, world_size: int, *, split: bool, given: DataLoader
) -> HeteroDataLoader:
    """Return the loader that Accelerate has prepared, with the session's batches in place of its equal ones.

    Args:
        prepared: loader that Accelerate has prepared.
        session: splits the data; a collective call.
        world_size: number of ranks.
        split: whether the loader's batch size is the total (``split_batches=True``) and not each rank's.
        given: loader as the user gave it.

    Raises:
        ValueError: if a total batch cannot be shared by the ranks.
    """
    if is_made_of_units(given):
        return _from_session(prepared, _by_units(prepared.base_dataloader, given, session, split=split), session)
    inner: Any = prepared.base_dataloader.batch_sampler
    while hasattr(inner, "batch_sampler"):  # Accelerate's wrappers around the user's
        inner = inner.batch_sampler
    sampler = prepared.get_sampler() or inner.sampler
    control, rank = session.engine.control, session.engine.rank
    known = stream_of(given) if isinstance(getattr(given.batch_sampler, "sampler", None), DistributedSampler) else None
    stream = known or BroadcastStream(sampler, control.broadcast_object, rank)
    size = inner.batch_size // world_size if split else inner.batch_size
    batches = session.shard(stream, size, drop_last=inner.drop_last, dataset=prepared.dataset)
    return _from_session(prepared, with_batch_sampler(prepared.base_dataloader, batches), session)


def _by_units(base: DataLoader, given: DataLoader, session: HeteroSession, *, split: bool) -> DataLoader:
    """Return a loader with the session's batches in place of those of the user's batch sampler or dataset."""
    control, config = session.engine.control, session.engine.config
    order = None
    if given.batch_sampler is not None:
        order = BroadcastUnits(given.batch_sampler, control.broadcast_object, control.rank, samples_of(given))
    stream = None if order else BroadcastStream(given.sampler, control.broadcast_object, control.rank)  # type: ignore[arg-type]
    batches = session.shard(
        LoaderSet([unit_source(given, config, order, stream, for_all=split)]), dataset=given.dataset
    )
    loader: DataLoader = unit_loader(base, batches, lambda: session.engine.sampler, config, given)
    return loader


def _from_session(prepared: DataLoaderShard, base: DataLoader, session: HeteroSession) -> HeteroDataLoader:
    loader = HeteroDataLoader.__new__(HeteroDataLoader)
    loader.__dict__.update({**prepared.__dict__, "base_dataloader": base, "session": session})
    return loader


@contextmanager
def not_dispatched(config: Any) -> Iterator[None]:
    """Let Accelerate prepare loaders that each rank iterates, whatever its ``dispatch_batches`` says."""
    before, config.dispatch_batches = config.dispatch_batches, False
    try:
        yield
    finally:
        config.dispatch_batches = before


def uneven_stream(
    prepared: DataLoaderShard, loader: DataLoader, session: HeteroSession, world_size: int, *, split: bool
) -> HeteroDataLoader:
    """Return a prepared loader over a stream, with batches of the plan's sizes in place of its equal ones.

    Args:
        prepared: loader that Accelerate has prepared.
        loader: the loader that it was given.
        session: splits the data; a collective call.
        world_size: number of ranks.
        split: whether the loader's batch size is the total (``split_batches=True``) and not each rank's.

    Raises:
        ValueError: if the stream cannot be shared in the way that the settings say.
    """
    stream = sample_stream(loader, session.engine.config, default="whole", world_size=world_size if split else 1)
    base = with_batches(loader, session.shard(stream))
    given = HeteroDataLoader.__new__(HeteroDataLoader)
    given.__dict__.update({**prepared.__dict__, "base_dataloader": base, "session": session})
    return given


def announced_loader(prepared: Any, session: HeteroSession, models: Callable[[], Sequence[torch.nn.Module]]) -> Any:
    """Return a prepared loader that tells the session when it begins, and whether the models evaluate on it."""
    cls = type(prepared)

    def iterate(self: Any) -> Iterator[Any]:
        return session.beside(cls.__iter__(self), lambda: evaluates(models()))

    kind: Any = type(cls.__name__, (cls,), {"__iter__": iterate, "__module__": cls.__module__})
    loader = kind.__new__(kind)
    loader.__dict__.update(prepared.__dict__)
    return loader


class SkippedLoader:
    """A loader whose next pass leaves out its first batches; all else is the loader's.

    Args:
        loader: made by :func:`uneven_loader`.
        steps: batches to leave out; by default those that the loaded state has done.
    """

    def __init__(self, loader: HeteroDataLoader, steps: int | None) -> None:
        self._loader = loader
        self._steps = loader.session.restored_step if steps is None else steps

    def __iter__(self) -> Iterator[Any]:
        self._loader.session.skip(self._steps)
        return iter(self._loader)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def refuse_local_sgd(models: Iterable[torch.nn.Module], tensor: torch.Tensor) -> None:
    """Check that a tensor to be averaged over ranks is not a parameter of a model that each rank trains by itself.

    Raises:
        RuntimeError: if it is.
    """
    apart = [model for model in models if getattr(model, "require_backward_grad_sync", True) is False]
    if any(tensor.data_ptr() == p.data_ptr() for model in apart for p in model.parameters()):
        raise RuntimeError(
            "LocalSGD averages the models of all workers alike, which is wrong where workers train on unequal batches. "
            "Use Accelerator, or HeteroPlugin(policy='even'), for local SGD with equal batches; for unequal workers, "
            "leave LocalSGD out, or use Lightning's Trainer(strategy='hetero_elastic'), which weights the models."
        )
