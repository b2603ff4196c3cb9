"""Choice of the training loader among those of a Fabric script, and its split by speed."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.data.streams.loaders import LEFT_EVEN, is_stream, sample_stream, with_batches
from lightning_hetero.frontend.loaders import (
    balanced_evaluation_loader,
    batches_of,
    evaluates,
    iterated_by,
    stream_of,
    unsupported_reason,
    with_batch_sampler,
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

    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Split the training loader by speed; leave the others as they are.

        Raises:
            ValueError: if the training loader cannot be split unevenly and the policy asks for it.
        """
        dataloader = super().process_dataloader(dataloader)
        if self._met() is None:
            return dataloader
        shuffles, taken = _shuffles(dataloader), self._train_loader is not None
        engine = self._running().engine
        say, stream = engine.notices.say, is_stream(dataloader)
        reason = unsupported_reason(dataloader, engine.world_size)
        if stream:
            reason = LEFT_EVEN if self.config.policy == "even" else None
        if not shuffles and (taken or reason is not None):
            if not taken:
                say(f"{reason}. It is left as it is, as the loader of an evaluation.", loses=True)
            elif self._assumed:
                say("a further loader that does not shuffle is taken for an evaluation's and left even.")
            return self._even(dataloader)
        if taken and not (self._assumed and self._running().position == (0, 0)):
            say("a second training loader is split evenly; only the first one is split by speed.", loses=True)
            return self._announced(dataloader)
        if reason is None:
            return self._shard(dataloader, assumed=not shuffles)
        if self.config.policy not in (None, "even") or self.config.local_batch_sizes is not None:
            raise ValueError(f"{reason}, or leave the policy and the sizes out to train as plain DDP does.")
        tell_left(engine, self._running().planner, f"{reason}. It is split evenly, as plain DDP does.")
        return self._announced(dataloader)

    def _shard(self, loader: DataLoader, assumed: bool) -> DataLoader:
        """Split the training loader; if it is only ``assumed`` to be one, a loader that shuffles may replace it."""
        session = self._running()
        if assumed:
            session.engine.notices.say(
                "the first loader is taken for the training loader and split by speed, since none shuffles so far. A "
                "pass over it with gradients off, or with all models in eval(), is an evaluation and even."
            )
        clone: Any = self._split(loader)
        even = self._even(loader) if assumed else None

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
        stream, batches = stream_of(loader), batches_of(loader)
        assert stream is not None
        given = session.shard(stream, batches.batch_size, drop_last=batches.drop_last, dataset=loader.dataset)
        return with_batch_sampler(loader, given)

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
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    return inner is not None and not isinstance(inner, SequentialSampler)
