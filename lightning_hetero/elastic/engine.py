"""Engine of elastic averaging (Adaptive SGD), independent of any trainer.

:class:`ElasticEngine` hands out the batches of a mega-batch one by one, and at its end merges the replicas and scales
the batch sizes. Between two merges no rank waits for another: ranks do unequal numbers of updates, and collective calls
are not allowed. The rules are in :mod:`lightning_hetero.core.merging.rules`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.timing.clock import HostClock, clock_for
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.mega_batch import ClaimedBatchSampler
from lightning_hetero.elastic.batch_queue import BatchDispatcher, job_store
from lightning_hetero.elastic.config import ElasticConfig
from lightning_hetero.elastic.device_pace import DevicePace
from lightning_hetero.elastic.epoch_layout import EpochLayout
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.merger import ReplicaMerger
from lightning_hetero.elastic.merging.replica import Replica
from lightning_hetero.elastic.merging.same_model import require_same_model
from lightning_hetero.elastic.optimizers import agree_on_momentum, require_mergeable
from lightning_hetero.elastic.progress import MegaBatchProgress
from lightning_hetero.elastic.resume import ResumePoint
from lightning_hetero.elastic.without_effect import elastic_without_effect

__all__ = ["ElasticEngine"]


@checked_keywords
class ElasticEngine:
    """Claims, batch sizes, learning-rate factor and merges of one rank.

    Call :meth:`attach` and :meth:`shard` once. Then iterate the sampler in each epoch, with :meth:`begin_batch` and
    :meth:`end_batch` around each batch; the latter claims the next batch or, at the end of the mega-batch, waits for
    all ranks and merges. The sampler must not run ahead of training (no loader workers).

    Args:
        config: settings, equal on all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout: longest wait for the other ranks at the end of a mega-batch; torch's own by default.

    Raises:
        PlanMismatchError: if the settings differ between ranks.

    Example:
        >>> from lightning_hetero.data import PermutationStream
        >>> engine = ElasticEngine(ElasticConfig(mega_batch_size=4), rank=0, world_size=1)
        >>> engine.attach(nn.Linear(1, 1))
        >>> sampler = engine.shard(PermutationStream(6, shuffle=False, seed=0), batch_size=2)
        >>> for batch in sampler:
        ...     engine.begin_batch()
        ...     record = engine.end_batch()
        >>> [record.position for record in engine.merges], engine.epoch_over
        ([4, 6], True)
    """

    def __init__(self, config: ElasticConfig, *, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
        self.config = config
        self.control = ControlPlane(rank, world_size, timeout=timeout)
        self.control.require_equal("the settings of the strategy", repr(config))
        self.dispatcher = BatchDispatcher(job_store(), rank, world_size, timeout=timeout)
        self.pace, self._resume = DevicePace(HostClock()), ResumePoint()
        self.merges, self.notices = list[MergeRecord](), Notices(rank == 0)
        self.inside = self.diverged = self._ends = False
        self.batch_sizes: tuple[int, ...] = ()
        self._merger, self._progress = ReplicaMerger(self.control, config.rule), MegaBatchProgress()
        self._layout: EpochLayout | None = None
        self._replica: Replica | None = None
        self.control.failures.begin(job_store, self, lambda own: (*own.position, False))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.control.world_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and samples of it that were handed out up to this rank's last batch."""
        return self._progress.position

    @property
    def epoch_over(self) -> bool:
        """True when the current epoch is done."""
        return self._progress.epoch_over

    def attach(self, module: nn.Module, optimizers: Iterable[Any] | None = None) -> None:
        """Set the model whose replicas are merged, and copy rank 0's to all ranks; collective.

        Args:
            module: model, already on its device.
            optimizers: all optimizers of the model, as for :meth:`follow`, which can also be called later.

        Raises:
            PlanMismatchError: if ranks have different models.
            ValueError: as :meth:`follow`.
        """
        self.inside = self._ends = False
        require_same_model(module, self.control)
        self.pace = DevicePace(clock_for(next(module.parameters(), torch.empty(0)).device))
        self._replica = Replica(module, self.config.rule, momentum=self.config.momentum, world_size=self.world_size)
        if self._resume.replica is not None:
            self._replica.load_state_dict(self._resume.replica)
            self._resume = replace(self._resume, replica=None)
        self._replica.synchronize()
        if optimizers is not None:
            self.follow(optimizers)

    def follow(self, optimizers: Iterable[Any]) -> None:
        """Choose the momentum of the global model by the local optimizers, unless it is given; collective.

        Raises:
            PlanMismatchError: if the optimizers of different ranks need different momenta.
            RuntimeError: if no model is attached.
            ValueError: if an optimizer trains replicas that cannot be merged.
        """
        if self._replica is None:
            raise RuntimeError("follow() was called with no model; call attach(module) before.")
        given = list(optimizers)
        require_mergeable(given)
        if self.config.momentum is not None or not self.config.rule.momentum:
            return
        self._replica.use_momentum(agree_on_momentum(given, self.control))

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool = False,
        least: int = 1,
        limit: int | float | None = None,
    ) -> ClaimedBatchSampler:
        """Return the sampler of this rank over the stream; collective.

        Args:
            stream: order of the samples, equal on all ranks.
            batch_size: ``b_max``, with which every rank begins.
            drop_last: whether to drop the samples that do not fill a batch on every rank.
            least: fewest samples of a batch.
            limit: batches per rank in each epoch (a share of them, if a float); ``None`` for all.

        Raises:
            PlanMismatchError: if ranks differ in the data.
            ValueError: if the data or the mega-batch cannot give every rank a batch.
        """
        self.control.require_equal(
            "the training data",
            f"{len(stream)} samples, order {stream.fingerprint():08x}, batch_size={batch_size}, drop_last={drop_last}",
        )
        self._layout = EpochLayout.of(
            self.config, len(stream), batch_size, self.world_size, drop_last=drop_last, least=least, limit=limit
        )
        samples, mega_samples = self._layout.samples, self._layout.mega_samples
        self.notices.tell(elastic_without_effect(self.config, self.world_size, samples, mega_samples))
        self.batch_sizes = self._layout.bounded(self.batch_sizes)
        if self._resume.step is not None:
            self._resume = replace(self._resume, position=self._layout.position_of(*self._resume.step), step=None)
            self._progress.move_to(self._resume.position)
        return ClaimedBatchSampler(stream, self._take, self._layout.steps_per_epoch)

    def resume_at(self, epoch: int, step: int) -> None:
        """Resume after a step of a synchronous run, whose checkpoint has no state of this engine; before shard()."""
        self._resume = replace(self._resume, step=(epoch, step))

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self._sharded().samples

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch in a synchronous run with equal batches."""
        return self._sharded().steps_per_epoch

    def steps_done(self) -> int:
        """Count the steps that a synchronous run with equal batches would have done with the samples up to here.

        Schedules follow it, because ranks do unequal numbers of updates. It counts the samples handed out up to this
        rank's last batch, so it is the same on all ranks at a merge.
        """
        return 0 if self._layout is None else self._layout.steps_done(self.position)

    @property
    def lr_factor(self) -> float:
        """Factor ``b_i / b_max`` of the user's learning rate on this rank (the linear rule of Algorithm 1)."""
        return self.batch_sizes[self.rank] / self._sharded().settings.max_batch_size if self.config.rule.scales else 1.0

    def _sharded(self) -> EpochLayout:
        if self._layout is None:
            raise RuntimeError("the data of this training are not known yet; call shard(stream, batch_size) before.")
        return self._layout

    def _take(self, epoch: int, first: bool) -> range | None:
        """Return the batch that was claimed for this rank, for the sampler to draw."""
        if first:
            self._begin(epoch, self._resume.position[1] if epoch == self._resume.position[0] else 0)
        return self._progress.draw()

    def _begin(self, epoch: int, position: int) -> None:
        """Begin the mega-batch at a position of an epoch, or end the epoch."""
        mega = self._sharded().mega_batch(position, self.batch_sizes)
        if mega is None:
            self._progress.end_epoch(epoch, position)
            return
        self.dispatcher.open(self._progress.next_name())
        self._progress.begin(epoch, mega, first=mega.first(self.rank))

    def begin_batch(self) -> None:
        """Begin to train on the batch that was drawn.

        Raises:
            RuntimeError: if no model is attached.
        """
        if self._replica is None:
            raise RuntimeError("begin_batch() was called with no model; call attach(module) before.")
        if not self.inside:  # since the merge the module has held the global model
            self._replica.resume()
        self.inside, self.diverged = True, False

    def end_batch(self) -> MergeRecord | None:
        """End a trained batch: claim the next one or, if there is none, merge with all ranks.

        Returns:
            Record of the merge, ``None`` inside a mega-batch.

        Raises:
            ElasticWorkerError: if another rank does not reach the end of the mega-batch.
            ValueError: if all replicas have diverged.
        """
        mega, sizes = self._progress.finish_batch(), self.batch_sizes
        assert self._replica is not None
        self.pace.end_batch()
        size = sizes[self.rank]
        self._progress.claimed(mega.claimed(self.dispatcher.claim(size), size))
        if self._progress.span is not None:
            return None
        settings = self._sharded().settings
        record = self._merger.merge(self._replica, self.dispatcher, self._progress, sizes, settings, end=self._ends)
        self.diverged = self.rank in record.lost
        self.merges.append(record)
        self.inside, self.batch_sizes = False, self._merger.next_batch_sizes(record, settings)
        self._begin(record.epoch, record.position)
        return record

    def request_end(self) -> None:
        """Ask to end the training at the next merge, which tells all ranks (``MergeRecord.end``)."""
        self._ends = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks at a merge, in plain values and tensors, without the model itself; collective.

        Raises:
            RuntimeError: inside a mega-batch, where ranks are at different batches and replicas differ.
        """
        self.require_merged("a checkpoint")
        epoch, done = self.position
        replica = {"previous": {}, "own": {}} if self._replica is None else self._replica.state_dict()
        return {
            "position": [epoch + 1, 0] if self.epoch_over else [epoch, done],
            "batch_sizes": list(self.batch_sizes),
            "previous": replica["previous"],
            "replicas": self.control.gather_objects(replica["own"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the merge of a state; call it before :meth:`attach` and :meth:`shard`.

        With another number of ranks, batch sizes start anew, and each rank's replica is the global model.
        """
        self._resume = ResumePoint.of(state, self.config, rank=self.rank, world_size=self.world_size)
        self._progress.move_to(self._resume.position)
        self.batch_sizes = self._resume.batch_sizes or self.batch_sizes

    def require_merged(self, what: str) -> None:
        """Refuse ``what``, which needs all ranks, inside a mega-batch.

        Raises:
            RuntimeError: inside a mega-batch.
        """
        if self.inside and self.world_size > 1:
            raise RuntimeError(
                f"{what} needs all ranks, but inside a mega-batch each is at a batch of its own and would wait for "
                "ever. Do it at the end of an epoch, or right after a merge (engine.merges tells); for logging use "
                "self.log(..., on_step=False, on_epoch=True, sync_dist=True)."
            )
