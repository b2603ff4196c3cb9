"""Optimal splits of all candidate totals: solved together, kept from one decision to the next, and solved anew."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from lightning_hetero.core.batching import optperf_cache
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times
from lightning_hetero.core.batching.optperf_cache import SolvedTotals
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from tests.core.batching.test_goodput import CLUSTER, FAST, SLOW, TOTALS, table


def test_goodput_is_throughput_times_efficiency():
    times = solve_step_times(CLUSTER, TOTALS).tolist()
    for row, total, seconds in zip(table(300.0), TOTALS, times, strict=True):
        assert (row.total_batch_size, row.accumulation, row.step_time) == (total, 1, seconds)
        assert row.throughput == pytest.approx(total / seconds)
        assert row.efficiency == pytest.approx(364 / (300 + total))
        assert row.goodput == pytest.approx(row.throughput * row.efficiency)


def window_time(cluster, sizes, count):
    """Seconds of ``count`` micro-batches in a row, of which the last one is synchronised (Cannikin, eq. 7)."""
    ends = []
    for node, b in zip(cluster.nodes, sizes, strict=True):
        before, forward, backward = (count - 1) * node.compute_time(b), node.forward_time(b), node.backward_time(b)
        ends.append(before + forward + max(backward, cluster.gamma * backward + cluster.t_o) + cluster.t_u)
    return max(ends)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("t_o", [0.0, 0.05])
def test_totals_beyond_memory_run_as_micro_batches(gamma, t_o):
    cluster = ClusterTimeModel((FAST, SLOW, FAST), gamma, t_o, 0.005)
    low, high = (1, 1, 1), (6, 8, 4)
    for row in table(300.0, range(3, 73), cluster, min_local=low, max_local=high):
        total, count = row.total_batch_size, row.accumulation
        assert (count - 1) * 18 < total <= count * 18
        splits = list(itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))))
        least, most = (
            min(window_time(cluster, sizes, count) for sizes in splits if sum(sizes) == micro)
            for micro in (total // count, -(-total // count))
        )
        sample = count * max(node.q + node.k for node in cluster.nodes)
        assert least - sample <= row.step_time <= most + 1e-9  # sizes are real numbers here, whole ones there
        assert row.throughput == pytest.approx(total / row.step_time)


def test_one_worker_beyond_its_memory():
    alone = ClusterTimeModel((FAST,), t_u=0.005)
    for row in table(300.0, range(1, 40), alone, max_local=(8,)):
        count = -(-row.total_batch_size // 8)
        assert row.accumulation == count
        assert row.step_time == pytest.approx(window_time(alone, (row.total_batch_size / count,), count))


def test_step_time_grows_with_the_total_within_a_number_of_micro_batches():
    rows = table(300.0, range(2, 60), max_local=(9, 6))
    for one, following in itertools.pairwise(rows):
        if one.accumulation == following.accumulation:
            assert one.step_time <= following.step_time + 1e-12


def test_totals_out_of_bounds_are_left_out():
    rows = table(300.0, range(10, 40), min_local=(7, 7), max_local=(8, 8))
    assert [row.total_batch_size for row in rows] == [14, 15, 16, *range(28, 33)]
    assert {row.total_batch_size: row.accumulation for row in rows}[30] == 2


def test_table_is_sorted_by_total():
    assert [row.total_batch_size for row in table(1.0, [64, 8, 32], max_local=(9, 6))] == [8, 32, 64]


WINDOWS = tuple((total, 1) for total in TOTALS)


BOUNDS = (1, 1), None


@pytest.fixture
def asked(monkeypatch):
    """Totals of every call of the solver."""
    calls = []

    def solve(cluster, totals, **bounds):
        calls.append([round(total) for total in totals][:-1])  # the last one stands for the bounds
        return solve_step_times(cluster, totals, **bounds)

    monkeypatch.setattr(optperf_cache, "solve_step_times", solve)
    return calls


def test_all_candidates_are_solved_once_and_then_the_chosen_alone(asked):
    known = SolvedTotals.solve(CLUSTER, WINDOWS, *BOUNDS)
    newest = ClusterTimeModel((FAST, NodeTimeModel(0.003, 0.02002, 0.005, 0.006)), gamma=0.3, t_o=0.02, t_u=0.005)
    chosen = WINDOWS[20]
    after = known.renewed(newest, [chosen])
    assert asked == [list(TOTALS), [chosen[0]]]
    fresh = SolvedTotals.solve(newest, WINDOWS, *BOUNDS).times(WINDOWS)
    for window, seconds in after.times(WINDOWS).items():
        assert seconds == pytest.approx(fresh[window] if window == chosen else known.times([window])[window], rel=1e-14)
    assert fresh[chosen] != known.times([chosen])[chosen]


def test_a_changed_overlap_state_leaves_nothing_known():
    """Although the time is nearly what it was: the second worker's communication bounds it by a little more."""
    total = (60, 1)
    before = ClusterTimeModel((FAST, SLOW), gamma=0.3, t_o=0.0, t_u=0.005)
    known = SolvedTotals.solve(before, [total], *BOUNDS)
    (seconds,) = known.times([total]).values()
    sizes = solve_optperf(before, 60).local_batch_sizes
    touching = 0.7 * SLOW.backward_time(sizes[1]) * 1.02  # t_o at which its buckets take longer than its computing
    after = replace(before, t_o=touching)
    assert solve_step_times(after, [60])[0] == pytest.approx(seconds, rel=0.009)
    assert known.renewed(after, [total]) is None
    assert known.renewed(replace(before, t_o=0.5 * touching), [total]) is not None


def test_slow_changes_add_up():
    """Each is below 1 %, and all together are not: what counts is the time when all candidates were solved."""
    known, chosen, looks = SolvedTotals.solve(CLUSTER, WINDOWS, *BOUNDS), WINDOWS[-1:], 0
    while known is not None:
        looks += 1
        nodes = (FAST, NodeTimeModel(0.003, 0.02, 0.005 * 1.01**looks, 0.006))
        known = known.renewed(replace(CLUSTER, nodes=nodes), chosen)
    assert 3 <= looks <= 8


def test_what_is_kept_holds_for_its_bounds_and_candidates_only():
    known = SolvedTotals.solve(CLUSTER, WINDOWS[:20], (1, 1), (900, 900))
    assert known.holds(WINDOWS[3:9], (1, 1), (900, 900))
    assert not known.holds(WINDOWS[3:21], (1, 1), (900, 900))
    assert not known.holds([(WINDOWS[0][0], 2)], (1, 1), (900, 900))
    assert not known.holds(WINDOWS[:20], (1, 2), (900, 900))
    assert not known.holds(WINDOWS[:20], (1, 1), (900, 800))
    assert not known.holds(WINDOWS[:20], (1, 1, 1), None)


def test_what_is_kept_goes_through_a_checkpoint(tmp_path):
    known = SolvedTotals.solve(CLUSTER, [(8, 1), (16, 2), (64, 3)], (1, 1), (20, 30)).renewed(CLUSTER, [(16, 2)])
    torch.save(known.state_dict(), tmp_path / "state")
    stored = torch.load(tmp_path / "state", weights_only=True), json.loads(json.dumps(known.state_dict()))
    assert [SolvedTotals.from_state_dict(state) for state in stored] == [known, known]
    assert SolvedTotals.from_state_dict(SolvedTotals().state_dict()) == SolvedTotals()


def test_solved_alone_and_together_is_the_same():
    """Bottlenecks differ between candidates, and the solver does not begin with those of another one."""
    rows = table(300.0)
    kinds = {solve_optperf(CLUSTER, total).bottlenecks for total in TOTALS}
    assert len(kinds) > 1
    for total, row in reversed(list(zip(TOTALS, rows, strict=True))):
        (alone,) = table(300.0, [total])
        assert alone.step_time == pytest.approx(row.step_time, rel=1e-14)
