"""Training data of an engine: each kind of it, split over ranks by the engine's plans."""

from collections.abc import Callable
from typing import Any

from lightning_hetero.core.policies.base import Planner
from lightning_hetero.data.division import Division
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.streams.sampler import StreamSampler
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.data.units.own_shards import OwnShards
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine.parts import EngineParts

__all__ = ["EngineData"]


class EngineData(EngineParts):
    """Parts of an engine that is given training data of any kind."""

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool = False,
        planner: Planner | None = None,
        epoch: int = 0,
        division: Division | None = None,
        dataset: Any = None,
    ) -> UnevenBatchSampler:
        """Make this rank's sampler over a stream; a collective call.

        Args:
            stream: order of the samples, equal on all ranks.
            batch_size: samples per rank on average, as under DDP: the total is ``batch_size * world_size``.
            drop_last: whether the ragged last batch is dropped.
            planner: planner that may know a plan from an earlier run.
            epoch: next epoch, unless a resumed position is later.
            division: divides each global batch, equal on all ranks; by default it is cut by the number of samples, or
                by cost if the settings have a ``cost_fn``.
            dataset: dataset of the samples; only ``cost_fn`` needs it.

        Raises:
            PlanMismatchError: if ranks differ in dataset, order, batch size, ``drop_last`` or division.
            ValueError: if the bounds cannot give the total, or ``shard="claim"`` is set.
        """
        sampler = self.data.shard(
            stream, batch_size, drop_last=drop_last, planner=planner, epoch=epoch, division=division, dataset=dataset
        )
        self.observer.measure_work(0 if sampler.division is None else sampler.division.features)
        self.position = max(self.position, sampler.start)
        return sampler

    def shard_stream(self, stream: SampleStream, *, planner: Planner | None = None, epoch: int = 0) -> StreamSampler:
        """Make this rank's sampler over a loader whose samples come as a stream; a collective call.

        Args:
            stream: loader of this rank, and who has which samples.
            planner: planner that may know a plan from an earlier run.
            epoch: next epoch, unless a resumed position is later.

        Raises:
            PlanMismatchError: if ranks differ in ``shard`` or ``drop_last``.
            ValueError: if the planner moves the total, the bounds cannot give it, or a state saved inside an epoch
                cannot be resumed by this run.
        """
        sampler = self.data.shard_stream(stream, planner=planner, epoch=epoch)
        self.observer.measure_work(0)
        self.position = max(self.position, sampler.start)
        return sampler

    def shard_units(
        self,
        loaders: LoaderSet,
        *,
        planner: Planner | None = None,
        epoch: int = 0,
        division: Division | None = None,
        dataset: Any = None,
    ) -> UnitSampler:
        """Make this rank's samplers over loaders whose steps are made of units; a collective call.

        Args:
            loaders: training data of all loaders, equal on all ranks.
            planner: planner that may know a plan from an earlier run.
            epoch: next epoch, unless a resumed position is later.
            division: divides the samples of each step, equal on all ranks, where there is one loader of samples; by
                default by cost if the settings have a ``cost_fn``.
            dataset: dataset of the samples; only ``cost_fn`` needs it.

        Raises:
            PlanMismatchError: if ranks differ in their data.
            ValueError: if the total batch is to move, or the bounds cannot give the mean total.
        """
        sampler = self.data.shard_units(loaders, planner=planner, epoch=epoch, division=division, dataset=dataset)
        self.observer.measure_work(0 if sampler.division is None else sampler.division.features)
        self.position = max(self.position, sampler.start)
        return sampler

    def leave_own(
        self, length: Callable[[], int | None], *, epoch: int = 0, rows: Callable[[Any], int] | None = None
    ) -> OwnShards:
        """Let every rank train on its own data, weighted by the samples of each batch; a collective call.

        Args:
            length: returns the batches of this rank's coming epoch, ``None`` if that is not known.
            epoch: next epoch, unless a resumed position is later.
            rows: returns the samples of each batch, called once for each; by default its rows.

        Raises:
            ValueError: if ranks cannot agree on the number of steps.
        """
        own = self.data.leave_own(length, epoch, rows)
        self.notices.say(
            "shard='mine': every rank trains on what its own loader yields. Losses are weighted by the samples of each "
            "batch; the split does not move, because samples cannot go to another rank.",
        )
        return own
