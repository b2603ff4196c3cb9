"""Uneven split of the Trainer's train loader, and Lightning's counters that have to follow it."""

from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.callbacks._lightning import processed
from lightning_hetero.comm.timing.step_timer import TimedIterator
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.data.streams.loaders import LEFT_EVEN, is_stream, sample_stream, with_batches
from lightning_hetero.data.streams.sampler import StreamSampler
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.loaders import (
    NOT_MET,
    balanced_evaluation_loader,
    batches_of,
    stream_of,
    timed_loader,
    unsupported_reason,
    with_batch_sampler,
)
from lightning_hetero.frontend.log import log
from lightning_hetero.strategies._lightning.epoch_length import recount_batches
from lightning_hetero.strategies._lightning.policy import PolicyMixin

__all__ = ["TrainDataMixin"]


class TrainDataMixin(PolicyMixin):
    """A strategy that gives the train loader the engine's batch sampler, and by default leaves other loaders alone."""

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
        stream = is_stream(dataloader)
        if stream and self.config.policy != "even":
            return self._shard_stream(dataloader)
        reason = LEFT_EVEN if stream else unsupported_reason(dataloader, self.engine.world_size)
        if isinstance(dataloader, DataLoader) and reason is None:
            return self._shard(dataloader)
        if self.config.policy != "even":
            raise self._misconfiguration(f"{reason}, or set policy='even' to train as plain DDP does.")
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
        return self._resumable(timed_loader(with_batch_sampler(loader, sampler), self.engine))

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
        return self._resumable(with_batches(loader, TimedBatches(sampler, self.engine)))

    def _resumable(self, clone: Any) -> Any:
        assert self.engine is not None
        sampler = self.engine.sampler
        assert sampler is not None
        # These two tell Lightning that the loader can resume inside an epoch. The position itself is read in
        # load_checkpoint, because Lightning asks the loader too late if configure_optimizers has set it up before.
        clone.state_dict = lambda: sampler.state_dict(processed(self._trainer.fit_loop.epoch_loop.batch_progress))
        clone.load_state_dict = lambda state: None
        return clone

    def _require_one_loader(self) -> None:
        """Refuse several train loaders, now that all of them are known."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1:
            raise self._misconfiguration(
                f"there are {len(combined.flattened)} train loaders, whose batches would need a split each. Combine "
                "the datasets in one DataLoader, or use strategy='ddp'."
            )

    def refresh_epoch_length(self) -> None:
        """Make Lightning's counters follow an epoch of another length: batches, validation, progress bar."""
        sampler = None if self.engine is None else self.engine.sampler
        if sampler is not None and sampler.num_batches(self._trainer.current_epoch) < NO_LIMIT:
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
