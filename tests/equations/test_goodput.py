"""Goodput of a total batch (C sec. 4.1 and 4.5): its formula and brute force over splits."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.goodput import (
    Candidate,
    candidate_totals,
    choose_total,
    efficiency,
    goodput_table,
    windows_of,
)
from lightning_hetero.core.batching.optperf import solve_step_times
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

FAST, SLOW = NodeTimeModel(0.001, 0.01, 0.002, 0.004), NodeTimeModel(0.003, 0.02, 0.005, 0.006)
CLUSTER = ClusterTimeModel((FAST, SLOW), gamma=0.3, t_o=0.02, t_u=0.005)
TOTALS = candidate_totals(8, 4096)


def table(noise_scale, totals=TOTALS, cluster=CLUSTER, **bounds):
    bounds = {"min_local": (1,) * len(cluster.nodes), **bounds}
    return goodput_table(cluster, totals, noise_scale=noise_scale, initial_total=64, **bounds)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1e9))
def test_efficiency_is_the_formula(total, initial, phi):
    assert efficiency(total, phi, initial) == pytest.approx((phi + initial) / (phi + total))
    assert efficiency(total, math.inf, initial) == 1.0
    assert math.isnan(efficiency(total, math.nan, initial))
    with pytest.raises(ValueError, match="noise_scale"):
        efficiency(total, -3.0, initial)


@given(st.integers(1, 500), st.integers(0, 5000), st.floats(1.02, 3))
def test_candidates_are_a_geometric_grid_with_both_ends(smallest, more, ratio):
    grid = candidate_totals(smallest, smallest + more, ratio=ratio)
    assert (grid[0], grid[-1]) == (smallest, smallest + more)
    assert all(type(total) is int for total in grid)
    assert all(a < b <= max(a + 1, a * ratio + 1.5) for a, b in itertools.pairwise(grid))
    assert len(grid) <= math.log((smallest + more) / smallest) / math.log(ratio) + 2
    assert candidate_totals(1, 125, ratio=5) == (1, 5, 25, 125)
    with pytest.raises(ValueError, match="max_total_batch_size"):
        candidate_totals(64, 32)


def window_time(cluster, sizes, count):
    """Seconds of ``count`` micro-batches in a row, of which the last one is synchronized (C eq. 7)."""
    ends = []
    for node, b in zip(cluster.nodes, sizes, strict=True):
        before, a, p = (count - 1) * node.compute_time(b), node.forward_time(b), node.backward_time(b)
        ends.append(before + a + max(p, cluster.gamma * p + cluster.t_o) + cluster.t_u)
    return max(ends)


@pytest.mark.parametrize(("gamma", "t_o"), [(0.0, 0.0), (0.3, 0.05), (1.0, 0.05)])
def test_goodput_is_throughput_times_efficiency_at_the_best_split_of_every_total(gamma, t_o):
    """Totals beyond the memory of all workers run as equal micro-batches; brute force tries every split of one."""
    cluster, low, high = ClusterTimeModel((FAST, SLOW, FAST), gamma, t_o, 0.005), (1, 1, 1), (6, 8, 4)
    splits = list(itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))))
    rows = table(300.0, [72, *range(3, 72)], cluster, min_local=low, max_local=high)
    assert [row.total_batch_size for row in rows] == list(range(3, 73))
    for row in rows:
        total, count = row.total_batch_size, row.accumulation
        assert (count - 1) * 18 < total <= count * 18
        least, most = (
            min(window_time(cluster, sizes, count) for sizes in splits if sum(sizes) == micro)
            for micro in (total // count, -(-total // count))
        )
        sample = count * max(node.q + node.k for node in cluster.nodes)
        assert least - sample <= row.step_time <= most + 1e-9  # sizes are real numbers here, whole ones there
        assert row.throughput == pytest.approx(total / row.step_time)
        assert row.efficiency == pytest.approx(364 / (300 + total))
        assert row.goodput == pytest.approx(row.throughput * row.efficiency)
    alone = solve_step_times(CLUSTER, TOTALS)
    assert [row.step_time for row in table(300.0)] == pytest.approx(alone.tolist(), rel=1e-12)


def test_totals_that_the_bounds_do_not_allow_are_left_out():
    rows = table(300.0, range(10, 40), min_local=(7, 7), max_local=(8, 8))
    assert [row.total_batch_size for row in rows] == [14, 15, 16, *range(28, 33)]
    assert windows_of([8, 8, 1, 21], min_local=(1, 1), max_local=(5, 5)) == ((8, 1), (21, 3))
    assert windows_of([1, 8, 9, 10], min_local=(2, 2), micro_batch_limit=4, accumulation=2) == ((8, 2),)


# the choice


def candidate(total, value):
    return Candidate(total, 1, 1.0, value, 1.0, value)


def test_the_best_total_is_chosen_if_it_gains_enough():
    rows = [candidate(8, 100.0), candidate(16, 101.5), candidate(32, 90.0)]
    assert choose_total(rows, 8).total_batch_size == 8
    assert choose_total(rows, 8, hysteresis=0.015).total_batch_size == 16
    assert choose_total(rows, 32).total_batch_size == 16
    with pytest.raises(ValueError, match="9"):
        choose_total(rows, 9)


def test_noise_alone_picks_the_highest_throughput_none_the_shortest_step_and_unknown_noise_keeps_the_total():
    rows = table(math.inf)
    assert choose_total(rows, 8).throughput == max(row.throughput for row in rows)
    assert choose_total(table(0.0), 4096).step_time == min(row.step_time for row in rows)
    for current in (8, TOTALS[10], 4096):
        assert choose_total(table(math.nan), current, hysteresis=0.0).total_batch_size == current
        chosen = choose_total(table(500.0), current)
        assert choose_total(table(500.0), chosen.total_batch_size) == chosen
