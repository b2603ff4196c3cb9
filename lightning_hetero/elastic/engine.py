"""The mechanism of elastic averaging, free of any trainer (Adaptive SGD).

:class:`ElasticEngine` hands out the batches of a mega-batch one by one, and at its end scales the batch sizes and
merges the replicas. Between two merges no rank waits for another: ranks do unequal numbers of updates, and nothing may
be called that needs all of them. What is decided is in :mod:`lightning_hetero.core.merging.rules`.
"""

import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.timing.clock import HostClock, clock_for
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.mega_batch import ClaimedBatchSampler, MegaBatch
from lightning_hetero.elastic.batch_queue import BatchDispatcher, ElasticWorkerError, job_store
from lightning_hetero.elastic.config import ElasticConfig
from lightning_hetero.elastic.device_pace import DevicePace
from lightning_hetero.elastic.merge_record import MergeRecord
from lightning_hetero.elastic.optimizers import outer_momentum, why_not_merged
from lightning_hetero.elastic.replica import Replica
from lightning_hetero.elastic.same_model import require_same_model
from lightning_hetero.elastic.without_effect import elastic_without_effect

__all__ = ["ElasticEngine", "MergeRecord"]

log = logging.getLogger("lightning_hetero")

NOTABLE = 0.1
"""Share by which a batch size has to change to be told in the log."""


class ElasticEngine:
    """Claims, batch sizes, learning-rate factor and merges of one rank.

    The order of calls: :meth:`attach` and :meth:`shard` once, then for each epoch iterate the sampler, and around each
    batch :meth:`begin_batch` and :meth:`end_batch`, which claims the next batch or, at the end of the mega-batch, waits
    for all ranks and merges. The sampler must not be drawn from ahead of training (no loader workers).

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
        self.config, self.rank, self.world_size, self.timeout = config, rank, world_size, timeout
        self.control = ControlPlane(rank, world_size, timeout=timeout)
        self.control.require_equal("the settings of the strategy", repr(config))
        self.dispatcher = BatchDispatcher(job_store(), rank, world_size, timeout=timeout)
        self.merges, self.notices = list[MergeRecord](), Notices(rank == 0)
        self.inside, self.epoch_over, self.diverged = False, False, False
        self.batch_sizes: tuple[int, ...] = ()
        self.position = (0, 0)
        self._settings = AdaptiveSettings(1)
        self.steps_per_epoch = 0
        self._start = (0, 0)
        self._start_step: tuple[int, int] | None = None
        self._replica: Replica | None = None
        self._replica_state: dict[str, Any] | None = None
        self._samples = self._mega_samples = self._least = 1
        self._mega: MegaBatch | None = None
        self._span: range | None = None
        self._drawn = self._end = False
        self._opened = self._updates = self._trained = 0
        self._began = 0.0
        self.pace = DevicePace(HostClock())

    # set-up

    def attach(self, module: nn.Module, optimizers: Iterable[Any] | None = None) -> None:
        """Take the model whose replicas are merged, and give all ranks rank 0's; collective.

        Args:
            module: on its device.
            optimizers: all that train it, for the momentum of the global model; those of :meth:`follow` by default.

        Raises:
            PlanMismatchError: if ranks have different models.
            ValueError: as :meth:`follow`.
        """
        self.inside = self._end = False
        require_same_model(module, self.control)
        self.pace = DevicePace(clock_for(next(module.parameters(), torch.empty(0)).device))
        self._replica = Replica(module, self.config.rule, momentum=self.config.momentum, world_size=self.world_size)
        if self._replica_state is not None:
            self._replica.load_state_dict(self._replica_state)
            self._replica_state = None
        self._replica.synchronize()
        if optimizers is not None:
            self.follow(optimizers)

    def follow(self, optimizers: Iterable[Any]) -> None:
        """Choose the momentum of the global model by the local optimizers, unless one is given; collective.

        Raises:
            PlanMismatchError: if ranks have optimizers that need different ones.
            RuntimeError: if there is no model yet.
            ValueError: if replicas that an optimizer trains cannot be merged.
        """
        if self._replica is None:
            raise RuntimeError("follow() was called with no model; call attach(module) before.")
        given = list(optimizers)
        reason = next(filter(None, map(why_not_merged, given)), None)
        if reason is not None:
            raise ValueError(f"{reason}.")
        if self.config.momentum is not None or not self.config.rule.momentum:
            return
        momentum, why = outer_momentum(given)
        self.control.require_equal("the momentum of the global model", momentum)
        self._replica.use_momentum(momentum)
        if self.rank == 0 and self.world_size > 1:
            log.info("momentum=%g of the global model: %s; momentum= chooses another", momentum, why)

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool = False,
        least: int = 1,
        limit: int | float | None = None,
    ) -> ClaimedBatchSampler:
        """Sampler of this rank over the stream; collective.

        Args:
            stream: order of the samples, equal on all ranks.
            batch_size: ``b_max``, with which every rank begins.
            drop_last: whether what does not fill a batch on every rank is dropped.
            least: fewest samples of a batch.
            limit: go through so many batches per rank of each epoch only (a share of them, if a float); ``None``: all.

        Raises:
            PlanMismatchError: if ranks differ in the data.
            ValueError: if the data or the mega-batch cannot give every rank a batch.
        """
        self.control.require_equal(
            "the training data",
            f"{len(stream)} samples, order {stream.fingerprint():08x}, batch_size={batch_size}, drop_last={drop_last}",
        )
        total = batch_size * self.world_size
        self._samples = len(stream) // total * total if drop_last else len(stream)
        if limit is not None:
            batches = limit if isinstance(limit, int) else int(math.ceil(self._samples / total) * limit)
            self._samples = min(self._samples, batches * total)
        if self._samples < least * self.world_size:
            raise ValueError(
                f"{len(stream)} samples (drop_last={drop_last}) cannot give each of {self.world_size} workers a batch. "
                "Use fewer workers, more data or a smaller batch_size."
            )
        self._mega_samples, self._least = self.config.samples(batch_size, self.world_size), least
        found = elastic_without_effect(self.config, self.world_size, self._samples, self._mega_samples)
        self.notices.tell(found)
        self._settings = self.config.adaptive(batch_size)
        given = self._settings.min_batch_size
        assert given is not None
        low = min(max(given, least), batch_size)
        self._settings = replace(self._settings, min_batch_size=low)
        known = self.batch_sizes if len(self.batch_sizes) == self.world_size else (batch_size,) * self.world_size
        self.batch_sizes = tuple(min(max(size, low), batch_size) for size in known)
        self.steps_per_epoch = math.ceil(self._samples / total)
        if self._start_step is not None:
            epoch, step = self._start_step
            self._start = self.position = (epoch, min(step * total, self._samples))
            self._start_step = None
        return ClaimedBatchSampler(stream, self._take, self.steps_per_epoch)

    def resume_at(self, epoch: int, step: int) -> None:
        """Go on behind a step of a synchronous run, whose checkpoint has no state of this engine; before shard()."""
        self._start_step = (epoch, step)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self._samples

    def steps_done(self) -> int:
        """Steps that a synchronous run with equal batches would have done with the samples up to here.

        Schedules follow it, because ranks do unequal numbers of updates. It counts the samples handed out up to this
        rank's last batch, so it is the same on all ranks at a merge.
        """
        epoch, done = self.position
        total = self._settings.max_batch_size * self.world_size
        return epoch * self.steps_per_epoch + (self.steps_per_epoch if done >= self._samples else done // total)

    @property
    def lr_factor(self) -> float:
        """Factor of the user's learning rate on this rank: ``b_i / b_max`` (the linear rule of Algorithm 1)."""
        return self.batch_sizes[self.rank] / self._settings.max_batch_size if self.config.rule.scales else 1.0

    # one batch

    def _take(self, epoch: int, first: bool) -> range | None:
        """What the sampler draws: the batch that was claimed for this rank."""
        if first:
            self.epoch_over = False
            self._begin(epoch, self._start[1] if epoch == self._start[0] else 0)
        if self._drawn and self._span is not None:
            raise RuntimeError(
                "a batch was drawn before the one before it was trained on, so that batches would be claimed ahead of "
                "their training. Set num_workers=0 on the train DataLoader, and call end_batch() after each batch."
            )
        self._drawn = True
        return self._span

    def _begin(self, epoch: int, position: int) -> None:
        """Turn to the mega-batch at a position of an epoch, or to the end of the epoch."""
        self.position, self._drawn, self._span = (epoch, position), False, None
        self.epoch_over = position >= self._samples
        if self.epoch_over:
            return
        self._mega = MegaBatch.at(
            position,
            samples=self._samples,
            size=self._mega_samples,
            batch_sizes=self.batch_sizes,
            least=self._least,
        )
        self._opened += 1
        self.dispatcher.open(str(self._opened))
        self._span = self._mega.first(self.rank)
        self._updates = self._trained = 0
        self._began = time.perf_counter()

    def begin_batch(self) -> None:
        """This rank begins to train on the batch that was drawn."""
        if self._replica is None:
            raise RuntimeError("begin_batch() was called with no model; call attach(module) before.")
        if not self.inside:  # since the merge the module has held the global model
            self._replica.resume()
        self.inside, self.diverged = True, False

    def end_batch(self) -> MergeRecord | None:
        """The batch is trained on: claim the next one; if there is none, merge with all ranks.

        Returns:
            What was merged, ``None`` inside a mega-batch.

        Raises:
            ElasticWorkerError: if another rank does not come to the end of the mega-batch.
            ValueError: if all replicas have diverged.
        """
        if self._mega is None or self._span is None or not self._drawn:
            raise RuntimeError("end_batch() was called with no batch drawn; iterate the loader that shard() is for.")
        self._updates, self._trained = self._updates + 1, self._trained + len(self._span)
        self.position, self._drawn = (self.position[0], self._span.stop), False
        size = self.batch_sizes[self.rank]
        self.pace.end_batch()
        self._span = self._mega.claimed(self.dispatcher.claim(size), size)
        if self._span is not None:
            return None
        record = self._merge(self._mega)
        self.inside = False
        self._begin(record.epoch, record.position)
        return record

    def request_end(self) -> None:
        """Ask to end the training at the next merge, which tells all ranks (``MergeRecord.end``)."""
        self._end = True

    # merge

    def _merge(self, mega: MegaBatch) -> MergeRecord:
        epoch, busy = self.position[0], time.perf_counter() - self._began
        digest = zlib.crc32(repr((epoch, mega, self.batch_sizes)).encode())
        assert self._replica is not None
        norm = self._replica.norm()
        self.dispatcher.arrive()
        with self._together():
            header = [digest, self._updates, self._trained, norm, busy, self._end]
            rows = self.control.gather(np.array(header, dtype=float))
        self._check(rows, mega)
        updates, samples = (tuple(int(v) for v in rows[:, column]) for column in (1, 2))
        found = self.config.rule.weights(self.batch_sizes, updates, rows[:, 3].tolist(), self._settings)
        lost = [rank for rank in range(self.world_size) if not math.isfinite(rows[rank, 3])]
        if lost and self.rank == 0:
            log.warning("replicas of rank %s are not finite: left out of the merge and replaced", lost)
        self.diverged = self.rank in lost
        alpha = found.weights[self.rank]
        with self._together():
            self._replica.merge(alpha, share=alpha / sum(found.weights), diverged=self.diverged)
        record = MergeRecord(
            epoch,
            mega.stop,
            self.batch_sizes,
            updates,
            samples,
            found.weights,
            found.perturbed,
            busy=tuple(float(seconds) for seconds in rows[:, 4]),
            end=bool(rows[:, 5].any()),
        )
        self.merges.append(record)
        if self.config.rule.scales and self.world_size > 1:
            self.batch_sizes = scale_batch_sizes(self.batch_sizes, updates, self._settings)
        if self.rank == 0 and self.world_size > 1:
            changes = (abs(new - old) / old for new, old in zip(self.batch_sizes, record.batch_sizes, strict=True))
            level = logging.INFO if max(changes) > NOTABLE else logging.DEBUG
            log.log(level, "merge at epoch %d sample %d: %s", epoch, mega.stop, record.describe())
        return record

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks do in a merge, the only place where they wait for each other."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            silent = ", ".join(map(str, self.dispatcher.silent())) or "none"
            waited = "torch's default timeout" if self.timeout is None else str(self.timeout)
            raise ElasticWorkerError(
                f"the merge at the end of a mega-batch failed; ranks of which nothing is heard: {silent}. All other "
                f"batches are done, but a worker that has ended, or is stuck for longer than the timeout ({waited}), "
                "still holds one. Look at that worker's log; resume from the last checkpoint, or give a longer timeout."
            ) from error

    def _check(self, rows: np.ndarray, mega: MegaBatch) -> None:
        total = mega.stop - mega.start
        if len(set(rows[:, 0])) > 1 or rows[:, 2].sum() != total:
            raise ElasticWorkerError(
                f"ranks disagree at the end of a mega-batch of {total} samples: they trained on "
                f"{rows[:, 2].astype(int).tolist()} samples, fingerprints {rows[:, 0].astype(int).tolist()}. All ranks "
                "have to iterate the same epochs to their end."
            )

    # state

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks at a merge, in plain values and tensors; the model itself is not in it; collective.

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
        """Go on behind the merge of a state; before :meth:`attach` and :meth:`shard`.

        With another number of ranks the sizes start anew, and each rank's replica is the global model.
        """
        epoch, done = state["position"]
        self._start = self.position = (epoch, done)
        same = len(state["replicas"]) == self.world_size
        own = state["replicas"][self.rank] if same else {}
        self._replica_state = {"previous": state["previous"], "own": own}
        if same and self.config.rule.scales:
            self.batch_sizes = tuple(state["batch_sizes"])
        elif same:
            log.debug("resumed with merge=%r, which keeps batches equal", self.config.merge)
        else:
            log.info("resumed with %d workers instead of %d: equal batches", self.world_size, len(state["replicas"]))

    def require_merged(self, what: str) -> None:
        """Refuse what needs all ranks while they are inside a mega-batch.

        Raises:
            RuntimeError: inside a mega-batch.
        """
        if self.inside and self.world_size > 1:
            raise RuntimeError(
                f"{what} needs all ranks, but inside a mega-batch each is at a batch of its own and would wait for "
                "ever. Do it at the end of an epoch, or right after a merge (engine.merges tells); for logging use "
                "self.log(..., on_step=False, on_epoch=True, sync_dist=True)."
            )
