"""Merge at the end of a mega-batch, the only place where ranks wait for each other."""

import logging
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MergeRule
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data.mega_batch import MegaBatch
from lightning_hetero.elastic.batch_queue import BatchDispatcher, ElasticWorkerError
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.replica import Replica
from lightning_hetero.elastic.progress import MegaBatchProgress

__all__ = ["ReplicaMerger"]

log = logging.getLogger("lightning_hetero")


class ReplicaMerger:
    """Merge of all ranks' replicas by the updates of each, and the batch sizes that follow.

    Args:
        control: control plane of the ranks.
        rule: rule of the merge.
    """

    min_logged_change = 0.1
    """Share of its old value by which a batch size has to change for a log entry at level INFO."""

    def __init__(self, control: ControlPlane, rule: MergeRule) -> None:
        self.control, self.rule = control, rule

    def merge(
        self,
        replica: Replica,
        dispatcher: BatchDispatcher,
        progress: MegaBatchProgress,
        batch_sizes: tuple[int, ...],
        settings: AdaptiveSettings,
        *,
        end: bool,
    ) -> MergeRecord:
        """Merge the replicas of all ranks; collective.

        Args:
            replica: replica of this rank.
            dispatcher: notes which ranks have arrived.
            progress: progress of this rank.
            batch_sizes: batch size of each rank in the mega-batch.
            settings: settings of Adaptive SGD.
            end: whether this rank asks to end the training.

        Raises:
            ElasticWorkerError: if another rank does not reach the merge, or has done another mega-batch.
            ValueError: if no replica is finite.
        """
        (epoch, _), mega, busy = progress.position, progress.mega, progress.busy_seconds
        assert mega is not None
        digest = zlib.crc32(repr((epoch, mega, batch_sizes)).encode())
        norm = replica.norm()
        dispatcher.arrive()
        with self._together(dispatcher):
            header = [digest, progress.updates, progress.samples, norm, busy, end]
            rows = self.control.gather(np.array(header, dtype=float))
        _check(rows, mega)
        updates, samples = (tuple(int(v) for v in rows[:, column]) for column in (1, 2))
        found = self.rule.weights(batch_sizes, updates, rows[:, 3].tolist(), settings)
        lost = tuple(rank for rank in range(self.control.world_size) if not math.isfinite(rows[rank, 3]))
        if lost and self.control.rank == 0:
            log.warning("replicas of rank %s are not finite: left out of the merge and replaced", list(lost))
        alpha = found.weights[self.control.rank]
        with self._together(dispatcher):
            replica.merge(alpha, share=alpha / sum(found.weights), diverged=self.control.rank in lost)
        return MergeRecord(
            epoch,
            mega.stop,
            batch_sizes,
            updates,
            samples,
            found.weights,
            found.perturbed,
            busy=tuple(float(seconds) for seconds in rows[:, 4]),
            end=bool(rows[:, 5].any()),
            lost=lost,
        )

    def next_batch_sizes(self, record: MergeRecord, settings: AdaptiveSettings) -> tuple[int, ...]:
        """Return the batch sizes that follow a merge; rank 0 logs the merge.

        Args:
            record: record of the merge.
            settings: settings of Adaptive SGD.
        """
        before = record.batch_sizes
        if len(before) == 1:
            return before
        sizes = scale_batch_sizes(before, record.updates, settings) if self.rule.scales else before
        if self.control.rank == 0:
            changes = (abs(new - old) / old for new, old in zip(sizes, before, strict=True))
            level = logging.INFO if max(changes) > self.min_logged_change else logging.DEBUG
            log.log(level, "merge at epoch %d sample %d: %s", record.epoch, record.position, record.describe())
        return sizes

    @contextmanager
    def _together(self, dispatcher: BatchDispatcher) -> Iterator[None]:
        """Name the missing ranks if a collective call inside fails."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            silent = ", ".join(map(str, dispatcher.silent())) or "none"
            timeout = self.control.timeout
            waited = "torch's default timeout" if timeout is None else str(timeout)
            raise ElasticWorkerError(
                f"the merge at the end of a mega-batch failed; ranks of which nothing is heard: {silent}. All other "
                f"batches are done, but a worker that has ended, or is stuck for longer than the timeout ({waited}), "
                "still holds one. Look at that worker's log; resume from the last checkpoint, or give a longer timeout."
            ) from error


def _check(rows: np.ndarray, mega: MegaBatch) -> None:
    """Check that all ranks have done the same mega-batch, and together all of its samples."""
    total = mega.stop - mega.start
    if len(set(rows[:, 0])) > 1 or rows[:, 2].sum() != total:
        raise ElasticWorkerError(
            f"ranks disagree at the end of a mega-batch of {total} samples: they trained on "
            f"{rows[:, 2].astype(int).tolist()} samples, fingerprints {rows[:, 0].astype(int).tolist()}. All ranks "
            "have to iterate the same epochs to their end."
        )
