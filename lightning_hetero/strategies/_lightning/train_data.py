"""Uneven split of the Trainer's train loader, and Lightning's counters that have to follow it."""

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.callbacks._lightning import processed
from lightning_hetero.comm.timing.step_timer import TimedIterator
from lightning_hetero.data.step_share import StepSampler
from lightning_hetero.data.streams.loaders import LEFT_EVEN, is_stream, sample_stream, with_batches
from lightning_hetero.data.streams.sampler import StreamSampler
from lightning_hetero.data.units.own_shards import OwnBatches
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.loaders import (
    NOT_MET,
    balanced_evaluation_loader,
    batches_of,
    iterated_by,
    length_of,
    not_distributed,
    stream_of,
    timed_loader,
    unsupported_reason,
    with_batch_sampler,
)
from lightning_hetero.frontend.log import log
from lightning_hetero.frontend.units.loaders import is_made_of_units, unit_loader, unit_source, units_of, units_reason
from lightning_hetero.strategies._lightning.epoch_length import recount_batches
from lightning_hetero.strategies._lightning.loaders.requests import LoaderRequests
from lightning_hetero.strategies._lightning.policy import PolicyMixin

__all__ = ["TrainDataMixin"]


class TrainDataMixin(PolicyMixin):
    """A strategy that gives the train loader the engine's batch sampler, and by default leaves other loaders alone."""

    _requests: LoaderRequests | None = None
    _units: UnitSampler | None = None

    def setup_environment(self) -> None:
        """Join the process group, and see the train loaders before Lightning changes their samplers."""
        super().setup_environment()
        if self._trainer_if_any is not None and self._requests is None:
            self._requests = LoaderRequests(self._trainer, self._namespace, lambda: self.config.shard is not None)

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the batch sampler of the train loader by the uneven one; leave other loaders alone by default.

        Raises:
            MisconfigurationException: if the loader cannot be split unevenly and the policy asks for it.
        """
        dataloader = super().process_dataloader(dataloader)
        training = self._trainer.state.stage == "train"
        if self.engine is None:
            if training or self.config.balance_evaluation:
                log.warning(NOT_MET, "Trainer.fit()")
            return dataloader
        if not training:
            return balanced_evaluation_loader(dataloader, self.engine) if self.config.balance_evaluation else dataloader
        combined = None if self._requests is None else self._requests.combined
        stream = is_stream(dataloader) and combined is None
        if stream and self.config.policy != "even":
            return self._shard_stream(dataloader)
        if self.config.shard == "mine" and not stream:
            return self._leave_own(dataloader)
        if combined is not None or is_made_of_units(dataloader):
            return self._by_units(dataloader, combined)
        reason = LEFT_EVEN if stream else unsupported_reason(dataloader, self.engine.world_size, self.config.shard)
        if isinstance(dataloader, DataLoader) and reason is None:
            return self._shard(dataloader)
        if self.config.policy != "even":
            raise self._misconfiguration(f"{reason}, or set policy='even' to train as plain DDP does.")
        return self._left(dataloader, str(reason))

    def _left(self, dataloader: object, reason: str) -> object:
        """Leave a train loader as it is, and say why."""
        assert self.engine is not None
        self.engine.notices.say(f"{reason}. With policy='even' it is left as it is, as plain DDP does.")
        self.engine.data.leave_whole()
        return dataloader

    def _shard(self, loader: DataLoader) -> DataLoader:
        assert self.engine is not None
        assert self._callback is not None
        stream = stream_of(loader)
        assert stream is not None
        batches = batches_of(loader)
        sampler = self.engine.shard(
            stream,
            batches.batch_size,
            drop_last=batches.drop_last,
            planner=self._callback.planner,
            epoch=processed(self._trainer.fit_loop.epoch_progress),
            dataset=loader.dataset,
        )
        return self._resumable(timed_loader(with_batch_sampler(loader, sampler), self.engine), sampler)

    def _shard_stream(self, loader: Any) -> Any:
        assert self.engine is not None
        assert self._callback is not None
        try:
            sampler = self.engine.shard_stream(
                sample_stream(loader, self.config, default="mine"),
                planner=self._callback.planner,
                epoch=processed(self._trainer.fit_loop.epoch_progress),
            )
        except ValueError as error:
            raise self._misconfiguration(str(error)) from error
        return self._resumable(with_batches(loader, TimedBatches(sampler, self.engine)), sampler)

    def _resumable(self, clone: Any, sampler: StepSampler) -> Any:
        # These two tell Lightning that the loader can resume inside an epoch. The position itself is read in
        # load_checkpoint, because Lightning asks the loader too late if configure_optimizers has set it up before.
        clone.state_dict = lambda: sampler.state_dict(processed(self._trainer.fit_loop.epoch_loop.batch_progress))
        clone.load_state_dict = lambda state: None
        return clone

    def _leave_own(self, dataloader: object) -> object:
        """Let this rank train on its own loader; its losses are weighted, and ranks agree on the number of steps."""
        assert self.engine is not None
        if not isinstance(dataloader, DataLoader) or (
            self._requests is not None and self._requests.combined is not None
        ):
            raise self._misconfiguration(
                "shard='mine' is for one torch DataLoader on each rank. Combine the datasets in one DataLoader, or "
                "leave shard out."
            )
        epoch = processed(self._trainer.fit_loop.epoch_progress)
        data = self.engine.data
        own_loader, rows, counted = copy.copy(dataloader), None, dataloader
        if dataloader.batch_sampler is not None:
            batches = OwnBatches(units_of(dataloader), lambda: epoch if data.own is None else data.own.epoch)
            own_loader, counted = with_batch_sampler(dataloader, batches), batches  # type: ignore[assignment]
            rows = lambda batch: batches.rows_of_next()  # noqa: E731
        own = self.engine.leave_own(lambda: length_of(counted), epoch=epoch, rows=rows)
        clone: Any = iterated_by(own_loader, lambda open_loader: own.batches(open_loader()), length=lambda: own.steps)
        clone.state_dict = lambda: {"step": processed(self._trainer.fit_loop.epoch_loop.batch_progress)}
        clone.load_state_dict = lambda state: None
        return clone

    # loaders whose steps are made of units

    def _by_units(self, dataloader: object, combined: Any) -> object:
        """Split one loader by units, or all of several when the first is processed."""
        assert self.engine is not None
        assert self._callback is not None
        loaders = [dataloader] if combined is None else list(combined.flattened)
        number = next(i for i, loader in enumerate(loaders) if loader is dataloader)
        if number == 0:
            reason = next((found for loader in loaders if (found := self._units_reason(loader)) is not None), None)
            if reason is not None and (combined is not None or self.config.policy != "even"):
                raise self._misconfiguration(f"{reason}, or set policy='even' to train one loader as plain DDP does.")
            if reason is not None:
                return self._left(dataloader, reason)
            sources = [unit_source(loader, self.config) for loader in loaders]  # type: ignore[arg-type]
            self._units = self.engine.shard_units(
                LoaderSet(sources, "min_size" if combined is None else combined._mode),
                planner=self._callback.planner,
                epoch=processed(self._trainer.fit_loop.epoch_progress),
                dataset=None if combined is not None else loaders[0].dataset,  # type: ignore[union-attr]
            )
        units = self._units
        assert units is not None
        loader: Any = dataloader
        split = unit_loader(loader, units.members[number], lambda: units, self.config)
        return self._resumable(timed_loader(split, self.engine), units)

    def _units_reason(self, loader: object) -> str | None:
        """Return why a loader cannot be split by units, with advice; ``None`` if it can."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return unsupported_reason(loader, 1)
        reason = units_reason(loader)
        distributes = self._trainer._accelerator_connector.use_distributed_sampler or self.config.shard == "whole"
        if reason is None and not distributes and self._trainer.world_size > 1:
            return not_distributed(type(loader.batch_sampler or loader.sampler).__name__)
        return reason

    def refresh_epoch_length(self) -> None:
        """Make Lightning's counters follow an epoch of another length: batches, validation, progress bar."""
        if self.engine is None:
            return
        own, sampler = self.engine.data.own, self.engine.sampler
        if own is not None:
            own.agree(self._trainer.current_epoch)
        elif sampler is None or length_of(sampler) is None:  # a stream without a length, also where its end is near
            return
        recount_batches(self._trainer, self._namespace)


class TimedBatches:
    """Batches of a stream, which report to the engine when one is fetched.

    Args:
        sampler: makes the batches.
        engine: engine whose timer is told.
    """

    def __init__(self, sampler: StreamSampler, engine: HeteroEngine) -> None:
        self.sampler, self._engine = sampler, engine

    def __iter__(self) -> TimedIterator:
        return TimedIterator(iter(self.sampler), self._engine.observer)

    def __len__(self) -> int:
        return len(self.sampler)
