"""Goodput against its formula, brute force over splits, and what the choice of a total has to keep to."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching import optperf_cache
from lightning_hetero.core.batching.goodput import Candidate, candidate_totals, choose_total, efficiency
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times
from lightning_hetero.core.batching.optperf_cache import SolvedTotals, goodput_table
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


# table


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


# what is kept of it


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
