"""Goodput against its formula, brute force over splits, and what the choice of a total has to keep to."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.goodput import Candidate, TotalSettings, candidate_totals, choose_total, efficiency
from lightning_hetero.core.batching.optperf_cache import goodput_table
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

moderate = settings(max_examples=60, deadline=None, derandomize=True)
FAST, SLOW = NodeTimeModel(0.001, 0.01, 0.002, 0.004), NodeTimeModel(0.003, 0.02, 0.005, 0.006)
CLUSTER = ClusterTimeModel((FAST, SLOW), gamma=0.3, t_o=0.02, t_u=0.005)
TOTALS = candidate_totals(8, 4096)


def table(noise_scale, totals=TOTALS, cluster=CLUSTER, **bounds):
    bounds = {"min_local": (1,) * len(cluster.nodes), **bounds}
    return goodput_table(cluster, totals, noise_scale=noise_scale, initial_total=64, **bounds)


def candidate(total, value):
    return Candidate(total, 1, 1.0, value, 1.0, value)


# efficiency


@moderate
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1e9))
def test_efficiency_is_the_formula(total, initial, noise_scale):
    assert efficiency(total, noise_scale, initial) == pytest.approx((noise_scale + initial) / (noise_scale + total))
    assert efficiency(initial, noise_scale, initial) == 1


def test_efficiency_at_the_ends():
    assert efficiency(256, 0.0, 64) == 0.25  # no noise: a step is a step, whatever its samples
    assert efficiency(256, math.inf, 64) == 1.0  # noise alone: every sample counts
    assert efficiency(256, 1e18, 64) == pytest.approx(1.0)
    assert math.isnan(efficiency(256, math.nan, 64))


def test_negative_noise_scale_is_refused():
    with pytest.raises(ValueError, match=r"noise_scale=-3.0 is negative.*RunningNoiseScale"):
        efficiency(256, -3.0, 64)


# candidates


@moderate
@given(st.integers(1, 500), st.integers(0, 5000), st.floats(1.02, 3))
def test_candidates_are_a_geometric_grid(smallest, more, ratio):
    largest = smallest + more
    grid = candidate_totals(smallest, largest, ratio=ratio)
    assert (grid[0], grid[-1]) == (smallest, largest)
    assert all(type(total) is int for total in grid)
    for one, following in itertools.pairwise(grid):
        assert one < following <= max(one + 1, one * ratio + 1.5)


@pytest.mark.parametrize(("largest", "ratio"), [(125, 5), (64, 2), (1000, 10), (243, 3)])
def test_whole_ratios_give_whole_powers(largest, ratio):
    powers = [ratio**k for k in range(10) if ratio**k <= largest]
    assert candidate_totals(1, largest, ratio=ratio) == tuple(powers)


def test_one_candidate():
    assert candidate_totals(7, 7) == (7,)


@pytest.mark.parametrize(
    ("arguments", "ratio", "says"),
    [((64, 32), 1.1, "Raise max_total_batch_size"), ((0, 32), 1.1, "smallest=0"), ((8, 32), 1.0, "ratio=1.0")],
)
def test_bad_grids_are_refused(arguments, ratio, says):
    with pytest.raises(ValueError, match=says):
        candidate_totals(*arguments, ratio=ratio)


# choice


def test_hysteresis():
    rows = [candidate(8, 100.0), candidate(16, 101.5), candidate(32, 90.0)]
    assert choose_total(rows, 8).total_batch_size == 8
    assert choose_total(rows, 8, hysteresis=0.01).total_batch_size == 16
    assert choose_total(rows, 32).total_batch_size == 16
    assert choose_total(rows, 16, hysteresis=0.0).total_batch_size == 16


def test_after_a_change_the_choice_stays():
    rows = table(500.0)
    chosen = choose_total(rows, 8)
    assert chosen.total_batch_size > 8
    assert choose_total(rows, chosen.total_batch_size) == chosen


def test_current_total_has_to_be_a_candidate():
    with pytest.raises(ValueError, match=r"total 9 is not among the candidates \[8, 16\]. Add it"):
        choose_total([candidate(8, 1.0), candidate(16, 1.0)], 9)


@moderate
@given(
    st.lists(st.tuples(st.floats(1e-4, 0.01), st.floats(0, 0.1)), min_size=1, max_size=4),
    st.floats(0, 0.1),
    st.floats(0, 1e4),
    st.floats(1, 100),
    st.sampled_from(TOTALS),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.booleans(),
)
def test_a_larger_noise_scale_never_picks_a_smaller_total(nodes, t_u, noise, factor, current, hysteresis, bounded):
    cluster = ClusterTimeModel(tuple(NodeTimeModel(q, s, q, s) for q, s in nodes), t_u=t_u)
    max_local = (300,) * len(nodes) if bounded else None
    chosen = [
        choose_total(table(phi, cluster=cluster, max_local=max_local), current, hysteresis=hysteresis)
        for phi in (noise, noise * factor + 1.0, math.inf)
    ]
    for one, following in itertools.pairwise(chosen):
        tie = math.isclose(one.throughput, following.throughput, rel_tol=1e-9)  # without fixed time all totals are one
        assert one.total_batch_size <= following.total_batch_size or tie


def test_noise_alone_picks_the_highest_throughput():
    rows = table(math.inf)
    assert choose_total(rows, 8).throughput == max(row.throughput for row in rows)


def test_no_noise_picks_the_shortest_step():
    rows = table(0.0)
    assert choose_total(rows, 4096).step_time == min(row.step_time for row in rows)


@pytest.mark.parametrize("current", [8, TOTALS[10], 4096])
def test_unknown_noise_keeps_the_total(current):
    assert choose_total(table(math.nan), current).total_batch_size == current
    assert choose_total(table(math.nan), current, hysteresis=0.0).total_batch_size == current


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("max_growth", 1.0),
        ("probe_factor", 1.0),
        ("max_certain_growth", 1.9),
        ("noise_scale_errors", 0.0),
        ("max_probe_waste", 1.1),
        ("max_drift", -0.1),
    ],
)
def test_a_setting_of_the_total_out_of_range_is_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"TotalSettings\.{name}="):
        TotalSettings(**{name: wrong})
