"""Choice of the training loader among those of a Fabric script, and its split by speed."""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.data.streams.loaders import LEFT_EVEN, is_stream, sample_stream, with_batches
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.frontend.loaders import (
    as_given,
    balanced_evaluation_loader,
    batches_of,
    evaluates,
    iterated_by,
    not_distributed,
    stream_of,
    unsupported_reason,
    with_batch_sampler,
    with_batch_size,
)
from lightning_hetero.frontend.units.loaders import (
    OWN_ONLY_IN_LIGHTNING,
    is_made_of_units,
    ordered,
    unit_loader,
    unit_source,
    units_reason,
)
from lightning_hetero.frontend.without_effect import tell_left
from lightning_hetero.strategies._fabric.base import FabricMixin

__all__ = ["FabricDataMixin"]


class FabricDataMixin(FabricMixin):
    """A strategy that splits the first loader that shuffles, or else the first one, and leaves all others alone."""

    _models: list[torch.nn.Module]
    _train_loader: DataLoader | None = None
    _assumed = False
    _wanted_step: int | None = None
    _to_distribute = False

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Tell Fabric to leave samplers alone: it asks just before :meth:`process_dataloader`, which distributes them.

        Fabric cannot distribute a batch sampler of the user, and would fail before it asks for anything else.
        """
        self._to_distribute = True
        return None

    def _distributed(self, loader: DataLoader) -> DataLoader:
        """Return the loader with the sampler that Fabric's DDP would give it, if it asked to."""
        asked, self._to_distribute = self._to_distribute, False
        if not asked or isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
            return loader
        fabric = importlib.import_module(f"{self._namespace}.fabric").Fabric
        update = importlib.import_module(f"{self._namespace}.utilities.data")._update_dataloader
        sampler = fabric._get_distributed_sampler(loader, **super().distributed_sampler_kwargs)
        distributed: DataLoader = update(loader, sampler)
        return distributed

    @property
    def _namespace(self) -> str:
        """``lightning.fabric`` or ``lightning_fabric``, whichever package the class extends."""
        module = next(c.__module__ for c in type(self).__mro__ if c.__name__ == "DDPStrategy")
        return module.rpartition(".strategies")[0]

    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Split the training loader by speed; leave the others as they are.

        Raises:
            ValueError: if the training loader cannot be split unevenly and the policy asks for it.
        """
        dataloader = super().process_dataloader(dataloader)
        dataloader = with_batch_size(dataloader)
        takes = self.session is not None and self._takes(dataloader)
        by_units = takes and is_made_of_units(dataloader)
        asked = self._to_distribute
        given = as_given(dataloader) if takes and not by_units else dataloader
        even = dataloader if by_units and _shuffles(dataloader) else self._distributed(given)
        dataloader = dataloader if by_units else even
        self._to_distribute = False
        if self._met() is None:
            return dataloader
        shuffles, taken = _shuffles(dataloader), self._train_loader is not None
        engine = self._running().engine
        say, reason = engine.notices.say, self._reason(dataloader, by_units, distributed=asked)
        if not shuffles and (taken or reason is not None):
            if not taken:
                say(f"{reason}. It is left as it is, as the loader of an evaluation.", loses=True)
            elif self._assumed:
                say("a further loader that does not shuffle is taken for an evaluation's and left even.")
            return self._even(even)
        if taken and not (self._assumed and self._running().position == (0, 0)):
            say("a second training loader is split evenly; only the first one is split by speed.", loses=True)
            return self._announced(dataloader)
        if reason is None:
            return self._shard(dataloader, None if shuffles else even)
        if self.config.policy not in (None, "even") or self.config.local_batch_sizes is not None:
            raise ValueError(f"{reason}, or leave the policy and the sizes out to train as plain DDP does.")
        tell_left(engine, self._running().planner, f"{reason}. It is split evenly, as plain DDP does.")
        return self._announced(dataloader)

    def _reason(self, loader: DataLoader, by_units: bool, *, distributed: bool) -> str | None:
        """Return why a loader cannot be split, ``None`` if it can.

        Args:
            loader: the loader.
            by_units: whether its steps are made of units.
            distributed: whether Fabric was asked to distribute it.

        Raises:
            ValueError: if its samples cannot be weighted as the settings ask for.
        """
        world_size, shard = self._running().engine.world_size, self.config.shard
        if is_stream(loader):
            return LEFT_EVEN if self.config.policy == "even" else None
        if shard == "mine" and (by_units or isinstance(loader, DataLoader)):
            raise ValueError(f"{OWN_ONLY_IN_LIGHTNING}.")
        if not by_units:
            return unsupported_reason(loader, world_size, shard)
        if world_size > 1 and not distributed and shard is None:
            return not_distributed(type(loader).__name__)
        return units_reason(loader)

    def _shard(self, loader: DataLoader, in_even: DataLoader | None) -> DataLoader:
        """Split the training loader; one that is only assumed to be one is also given in even shares."""
        session, assumed = self._running(), in_even is not None
        if assumed:
            session.engine.notices.say(
                "the first loader is taken for the training loader and split by speed, since none shuffles so far. A "
                "pass over it with gradients off, or with all models in eval(), is an evaluation and even."
            )
        clone: Any = self._split(loader)
        even = None if in_even is None else self._even(in_even)

        def replaced() -> bool:
            return even is not None and self._train_loader is not clone

        def iterate(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            if even is not None and (replaced() or self._evaluating):
                return iter(even)
            return session.steps(open_loader)

        clone = iterated_by(clone, iterate, length=lambda: len(even) if even is not None and replaced() else None)
        clone.state_dict = lambda: {"step": None if replaced() else session.position[1]}
        clone.load_state_dict = self._want_position
        self._train_loader, self._assumed = clone, assumed
        return clone

    def _split(self, loader: DataLoader) -> DataLoader:
        session = self._running()
        if is_stream(loader):
            own = session.shard(sample_stream(loader, self.config, default="mine"))
            split: DataLoader = with_batches(loader, own)
            return split
        if is_made_of_units(loader):
            shared = session.shard(LoaderSet([unit_source(loader, self.config)]), dataset=loader.dataset)
            split = unit_loader(loader, shared, lambda: session.engine.sampler, self.config)
            return split  # noqa: RET504 - typed above
        stream, batches = stream_of(loader), batches_of(loader)
        assert stream is not None
        given = session.shard(stream, batches.batch_size, drop_last=batches.drop_last, dataset=loader.dataset)
        return with_batch_sampler(loader, given)

    def _takes(self, loader: DataLoader) -> bool:
        """Return whether this becomes the training loader."""
        if self._train_loader is None:
            return isinstance(loader, DataLoader)
        return _shuffles(loader) and self._assumed and self._running().position == (0, 0)

    @property
    def _evaluating(self) -> bool:
        """``True`` if this cannot be training: gradients are off, or all models are in ``eval()``."""
        return evaluates(self._models)

    def _even(self, loader: DataLoader) -> DataLoader:
        """Return an evaluation loader: split as in DDP, or balanced by speed without repeated samples."""
        balanced = self.config.balance_evaluation
        return self._announced(balanced_evaluation_loader(loader, self._running().engine) if balanced else loader)

    def _announced(self, loader: DataLoader) -> DataLoader:
        """Return the loader, which tells the session when it begins."""
        session = self._running()

        def begin(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            return session.beside(open_loader(), lambda: self._evaluating)

        return iterated_by(copy.copy(loader), begin) if type(loader).__iter__ is DataLoader.__iter__ else loader

    def _want_position(self, state: dict[str, Any]) -> None:
        if state["step"] is not None:
            self._wanted_step = int(state["step"])


def _shuffles(loader: object) -> bool:
    """Return whether a loader looks like a training loader: it shuffles, or has a sampler of the user."""
    if not isinstance(loader, DataLoader) or is_stream(loader):
        return False
    if is_made_of_units(loader):
        return not ordered(loader)
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    return inner is not None and not isinstance(inner, SequentialSampler)
