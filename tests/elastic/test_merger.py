"""Merge of all ranks' replicas: what each rank is told about the others, and the batch sizes that follow."""

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.comm import ControlPlane
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data.mega_batch import MegaBatch
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.merger import ReplicaMerger
from lightning_hetero.elastic.progress import MegaBatchProgress

SETTINGS = AdaptiveSettings(2)


def merged(rank, norms):
    """Record of a merge of two ranks with two samples each, and what the replica of one of them was told."""
    mega, progress, told = MegaBatch.at(0, samples=4, size=4, batch_sizes=(2, 2)), MegaBatchProgress(), {}
    progress.begin(0, mega, first=range(2))
    progress.draw()
    progress.finish_batch()

    def gather(row):
        return np.array([[*row[:3], norm, *row[4:]] for norm in norms])

    control = SimpleNamespace(rank=rank, world_size=2, gather=gather, timeout=None)
    replica = SimpleNamespace(norm=lambda: norms[rank], merge=lambda weight, **given: told.update(given, weight=weight))
    dispatcher = SimpleNamespace(arrive=lambda: None, silent=lambda: [])
    merger = ReplicaMerger(control, MERGES["mean"])
    return merger.merge(replica, dispatcher, progress, (2, 2), SETTINGS, end=False), told


@pytest.mark.parametrize(("rank", "expected"), [(0, (1.0, False)), (1, (0.0, True))])
def test_a_replica_that_is_not_finite_is_told_that_it_has_diverged(rank, expected):
    record, told = merged(rank, (1.0, np.nan))
    assert (told["weight"], told["diverged"]) == expected
    assert record.lost == (1,)


@pytest.mark.parametrize(("rule", "sizes"), [("mean", (64, 64)), ("adaptive", (64, 40))])
def test_batch_sizes_follow_updates_only_by_a_rule_that_scales(rule, sizes):
    record = MergeRecord(0, 0, (64, 64), (18, 6), (1152, 384), (0.5, 0.5), False, (1.0, 1.0))
    assert ReplicaMerger(ControlPlane(0, 1), MERGES[rule]).next_batch_sizes(record, AdaptiveSettings(64)) == sizes
