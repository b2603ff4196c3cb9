"""The figures of an elastic run's summary, recomputed from random merges by loops."""

import numpy as np
import pytest

from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.run_summary import COLUMNS, summary_of_merges


def merges(rng, ranks, count):
    for number in range(count):
        updates = rng.integers(1, 9, ranks)
        sizes = rng.integers(1, 17, ranks)
        weights = tuple(np.full(ranks, 1 / ranks))
        busy = tuple(rng.uniform(0.1, 3.0, ranks))
        shares = tuple(map(int, updates * sizes))
        yield MergeRecord(0, number, tuple(map(int, sizes)), tuple(map(int, updates)), shares, weights, False, busy)


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_the_merges(seed):
    rng = np.random.default_rng(seed)
    ranks, count = int(rng.integers(2, 6)), int(rng.integers(1, 8))
    found = list(merges(rng, ranks, count))
    summary = summary_of_merges(found, (8,) * ranks)
    took = sum(max(one.busy) for one in found)
    samples = [sum(one.samples[rank] for one in found) for rank in range(ranks)]
    busy = [sum(one.busy[rank] for one in found) for rank in range(ranks)]
    equal = max(sum(samples) / ranks / (samples[rank] / busy[rank]) for rank in range(ranks))
    idle = np.mean([1 - busy[rank] / took for rank in range(ranks)])
    plural = "merges" if count > 1 else "merge"
    start = f"hetero_elastic: {equal / took:.2f}x over equal shares of the samples, by the measured speeds"
    assert summary.verdict == f"{start}; {100 * idle:.0f} % idle; {count} {plural}"
    for rank, row in enumerate(summary.rows):
        one = dict(zip(COLUMNS, row, strict=True))
        assert one["rank"] == str(rank)
        assert one["batch"] == "8"
        assert one["updates"] == str(sum(merge.updates[rank] for merge in found))
        assert one["samples"] == f"{samples[rank]} ({100 * samples[rank] / sum(samples):.0f} %)"
        assert one["samples/s"] == f"{samples[rank] / busy[rank]:.4g}"
        assert one["waits"] == f"{100 * (1 - busy[rank] / took):.0f} %"


def test_a_rank_that_got_nothing_leaves_the_gain_open():
    record = MergeRecord(0, 8, (8, 8), (1, 0), (8, 0), (1.0, 0.0), False, (1.0, 0.0))
    summary = summary_of_merges([record], (8, 8))
    assert summary.verdict == "hetero_elastic: speed unknown; 50 % idle; 1 merge"
    assert summary.rows[1] == ("1", "8", "0", "0 (0 %)", "unknown", "100 %")


def test_lost_replicas_are_named():
    record = MergeRecord(0, 8, (8, 8), (1, 1), (8, 8), (1.0, 0.0), False, (1.0, 1.0), lost=(1,))
    (line,) = summary_of_merges([record, record], (8, 8)).lines
    assert line.startswith("in 2 of 2 merges a replica was not finite")


def test_nothing_is_said_before_the_first_merge():
    assert summary_of_merges([], (8, 8)) is None
