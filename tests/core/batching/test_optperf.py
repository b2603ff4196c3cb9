"""The exact split against a linear and an integer programme, the closed cases of the paper, and bounds."""

import heapq
import itertools
import re
import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.optperf import overlap_state, solve_optperf, solve_step_times, static_sizes
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

moderate = settings(max_examples=200, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Problem:
    cluster: ClusterTimeModel
    total: int
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def bounds(self):
        return {"min_local": self.low, "max_local": self.high}


unit = st.floats(0, 1)


@st.composite
def clusters(draw, workers=None):
    """Speeds up to 1000 times apart; fixed times from nothing to all there is; slopes down to zero."""
    n = workers or draw(st.integers(1, 8))
    fixed = draw(st.sampled_from([0.0, 0.001, 0.01, 1.0]))
    flat = draw(st.sampled_from([False, False, False, True]))

    def node():
        seconds = 1e-4 * 10 ** draw(st.floats(0, 3))
        if flat and draw(st.booleans()):
            seconds = draw(st.sampled_from([0.0, 1e-15, 1e-12]))
        share = draw(unit)
        return NodeTimeModel(share * seconds, fixed * draw(unit), (1 - share) * seconds, fixed * draw(unit))

    gamma = draw(st.one_of(st.sampled_from([0.0, 1.0]), unit))
    t_o = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])) * max(fixed, 0.001) * draw(unit)
    return ClusterTimeModel(tuple(node() for _ in range(n)), gamma, t_o, 0.01 * draw(unit))


@st.composite
def problems(draw):
    cluster = draw(clusters())
    n = len(cluster.nodes)
    total = draw(st.integers(2 * n, draw(st.sampled_from([4, 60, 500])) * n))
    low = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if draw(st.booleans()):
        high = [total] * n
    else:
        high = [b + draw(st.integers(0, 3 * total // n)) for b in low]
        high[draw(st.integers(0, n - 1))] += max(0, total - sum(high))
    return Problem(cluster, total, tuple(low), tuple(high))


def linear_programme(problem):
    """Least ``T`` with ``alpha b + beta <= T`` on both lines of each worker; unknowns in shares and in even steps."""
    n, total = len(problem.low), problem.total
    alpha_1, beta_1, alpha_2, beta_2 = problem.cluster.coefficients()
    unit = problem.cluster.step_time(np.maximum(problem.low, total / n))
    lines = np.zeros((2 * n, n + 1))
    lines[range(n), range(n)], lines[range(n, 2 * n), range(n)] = alpha_1 / unit, alpha_2 / unit
    lines[:, n] = -1.0
    return lines, -np.concatenate([beta_1, beta_2]) / unit, unit


def continuous_by_linprog(problem):
    n = len(problem.low)
    lines, limits, unit = linear_programme(problem)
    lines[:, :n] *= problem.total
    bounds = [(low / problem.total, high / problem.total) for low, high in zip(problem.low, problem.high, strict=True)]
    result = linprog(
        [0.0] * n + [1.0],
        A_ub=lines,
        b_ub=limits,
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[1.0],
        bounds=[*bounds, (0, None)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert result.status == 0
    return result.fun * unit


def integers_by_milp(problem):
    n = len(problem.low)
    lines, limits, _ = linear_programme(problem)
    result = milp(
        [0.0] * n + [1.0],
        constraints=[
            LinearConstraint(lines, ub=limits),
            LinearConstraint([[1.0] * n + [0.0]], problem.total, problem.total),
        ],
        bounds=Bounds([*problem.low, 0], [*problem.high, np.inf]),
        integrality=[1] * n + [0],
        options={"mip_rel_gap": 0.0, "time_limit": 2.0},
    )
    return None if result.x is None else np.round(result.x[:n])


def continuous_by_bisection(problem):
    """The least time in which the cluster can take the total, by halving an interval."""
    alpha_1, beta_1, alpha_2, beta_2 = problem.cluster.coefficients()
    least = problem.cluster.step_time(problem.low)
    most = max(least, problem.cluster.step_time(problem.high))

    def capacity(time):
        return np.minimum(np.minimum((time - beta_1) / alpha_1, (time - beta_2) / alpha_2), problem.high).sum()

    if capacity(least) >= problem.total:
        return least
    for _ in range(100):
        middle = 0.5 * (least + most)
        least, most = (middle, most) if capacity(middle) < problem.total else (least, middle)
    return most


@moderate
@given(problems())
def test_real_optimum_is_the_linear_programmes(problem):
    time = solve_step_times(problem.cluster, [problem.total], **problem.bounds)[0]
    assert time == pytest.approx(continuous_by_linprog(problem), rel=1e-7)
    assert solve_optperf(problem.cluster, problem.total, **problem.bounds).step_time >= time * (1 - 1e-9)


@moderate
@given(problems())
def test_integer_optimum_is_never_worse_than_the_integer_programmes(problem):
    plan = solve_optperf(problem.cluster, problem.total, **problem.bounds)
    reference = integers_by_milp(problem)
    if reference is not None and reference.sum() == problem.total:
        assert plan.step_time <= problem.cluster.step_time(reference) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_multiples_are_the_best_of_all_splits(seed):
    """Every split in multiples within the bounds is tried; where there is none, that is an error."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        workers, multiple = rng.integers(1, 5), int(rng.choice([1, 2, 3, 4, 8]))
        total = multiple * int(rng.integers(1, 9))
        scale = 10.0 ** rng.uniform(-4, -1, (workers, 4)) * [1, rng.choice([0, 1]), 1, rng.choice([0, 1])]
        nodes = tuple(NodeTimeModel(*row) for row in scale * rng.random((workers, 4)))
        cluster = ClusterTimeModel(nodes, rng.random(), rng.choice([0, 0.1, 1]) * rng.random(), 0.01 * rng.random())
        low = rng.integers(0, multiple + 2, workers).tolist()
        high = (low + rng.integers(0, total, workers)).tolist()
        splits = itertools.product(*(range(0, total + 1, multiple),) * workers)
        fitting = [sizes for sizes in splits if sum(sizes) == total and inside(low, sizes, high)]
        bounds = {"min_local": low, "max_local": high, "multiple": multiple}
        if not fitting:
            with pytest.raises(ValueError, match=r"min_local|max_local"):
                solve_optperf(cluster, total, **bounds)
            continue
        plan = solve_optperf(cluster, total, **bounds)
        assert plan.local_batch_sizes in fitting
        best = min(cluster.step_time(np.array(sizes)) for sizes in fitting)
        assert cluster.step_time(np.array(plan.local_batch_sizes)) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("total", "named"), [(5, "min_local"), (10, "min_local"), (13, "multiples"), (22, "multiples"), (31, "max_local")]
)
def test_totals_that_are_no_multiples_are_refused_with_those_that_fit(total, named):
    cluster = ClusterTimeModel((NodeTimeModel(0.1, 0, 0.1, 0),) * 3, 0.5, 0, 0)
    bounds = {"min_local": 1, "max_local": 10, "multiple": 4}
    with pytest.raises(ValueError, match=named) as error:
        solve_optperf(cluster, total, **bounds)
    fitting = re.findall(r"(?:to|it|or) (\d+)", str(error.value))
    assert fitting
    for found in fitting:
        solve_optperf(cluster, int(found), **bounds)


def inside(low, sizes, high):
    return all(least <= size <= most for least, size, most in zip(low, sizes, high, strict=True))


@moderate
@given(problems())
def test_sums_and_bounds_are_kept_and_the_time_is_the_models(problem):
    plan = solve_optperf(problem.cluster, problem.total, **problem.bounds)
    sizes = np.array(plan.local_batch_sizes)
    assert sizes.sum() == problem.total == plan.total_batch_size
    assert (sizes >= problem.low).all()
    assert (sizes <= problem.high).all()
    assert plan.step_time == pytest.approx(problem.cluster.step_time(sizes), rel=1e-12)
    assert set(plan.bottlenecks) <= {"compute", "communication"}


@moderate
@given(problems(), st.lists(unit, min_size=1, max_size=6))
def test_many_totals_at_once_equal_one_by_one(problem, where):
    least, most = max(1, sum(problem.low)), sum(problem.high)
    totals = [problem.total, least, most, *(int(least + w * (most - least)) for w in where)]
    times = solve_step_times(problem.cluster, totals, **problem.bounds)
    expected = [continuous_by_bisection(replace(problem, total=total)) for total in totals]
    assert times == pytest.approx(expected, rel=1e-9)


def test_lines_that_cross_at_the_start_to_rounding():
    """The time from which communication no longer binds differs from the start by less than a float can tell."""
    cluster = ClusterTimeModel((NodeTimeModel(0, 0, 1e-4, 0),), gamma=0.0, t_o=1e-13, t_u=0.01)
    assert solve_step_times(cluster, [1, 2], min_local=0).tolist() == pytest.approx([0.0101, 0.0102])


@settings(moderate, max_examples=60)
@given(clusters(), st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_step_time_rises_with_the_total(cluster, totals):
    totals = np.sort(np.array(totals)) + len(cluster.nodes)
    times = solve_step_times(cluster, totals)
    assert times.shape == totals.shape
    assert (np.diff(times) >= 0).all()


def test_no_candidates_no_times():
    assert solve_step_times(ClusterTimeModel((NodeTimeModel(1, 0, 0, 0),)), []).shape == (0,)


# -- the closed cases of Cannikin, sec. 3.3 and appendix A: sizes are chosen, and a cluster for which they are optimal


@st.composite
def closed_cases(draw, kinds):
    """A cluster whose workers, at the drawn sizes, are all ready for the last bucket at the same time."""
    gamma, t_o, t_u, ready = draw(st.floats(0.05, 0.85)), 0.1, 0.02, 1.0  # (1 - gamma) 0.9 above t_o
    sizes, nodes, bottlenecks = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(kinds))
        hidden = draw(st.floats(1.2, 4.0)) if kind == "compute" else draw(st.floats(0.2, 0.8))
        backward = min(hidden * t_o / (1 - gamma), 0.9)  # (1 - gamma) P above or below t_o
        forward = ready - backward if kind == "compute" else ready - t_o - gamma * backward
        size, share_a, share_p = draw(st.integers(1, 200)), draw(st.floats(0.1, 1.0)), draw(st.floats(0.1, 1.0))
        nodes.append(
            NodeTimeModel(
                share_a * forward / size, (1 - share_a) * forward, share_p * backward / size, (1 - share_p) * backward
            )
        )
        sizes.append(size)
        bottlenecks.append("compute" if (1 - gamma) * backward >= t_o else "communication")
    return ClusterTimeModel(tuple(nodes), gamma, t_o, t_u), tuple(sizes), tuple(bottlenecks)


@moderate
@given(
    st.one_of(closed_cases(["compute"]), closed_cases(["communication"]), closed_cases(["compute", "communication"]))
)
def test_cannikin_appendix_a(case):
    cluster, sizes, bottlenecks = case
    plan = solve_optperf(cluster, sum(sizes))
    assert plan.local_batch_sizes == sizes
    assert plan.step_time == pytest.approx(solve_step_times(cluster, [sum(sizes)])[0], rel=1e-9)
    if all(b == "compute" for b in bottlenecks):  # A.1: equal compute times
        compute = [node.compute_time(b) for node, b in zip(cluster.nodes, plan.local_batch_sizes, strict=True)]
        assert compute == pytest.approx([compute[0]] * len(sizes))
        assert plan.step_time == pytest.approx(compute[0] + cluster.t_u)
    if all(b == "communication" for b in bottlenecks):  # A.2: the first bucket is ready everywhere at the same time
        starts = [
            node.forward_time(b) + cluster.gamma * node.backward_time(b)
            for node, b in zip(cluster.nodes, plan.local_batch_sizes, strict=True)
        ]
        assert starts == pytest.approx([starts[0]] * len(sizes))
        assert plan.step_time == pytest.approx(starts[0] + cluster.t_o + cluster.t_u)
    assert cluster.finish_times(plan.local_batch_sizes) == pytest.approx(plan.step_time)  # A.3: ready together


def test_bottlenecks_are_named():
    long_forward = NodeTimeModel(q=0.01, s=0, k=0.001, m=0)
    long_backward = NodeTimeModel(q=0.001, s=0, k=0.01, m=0)
    cluster = ClusterTimeModel((long_forward, long_backward), gamma=0.1, t_o=0.05, t_u=0.01)
    assert solve_optperf(cluster, 40).bottlenecks == ("communication", "compute")


# -- fairness


@moderate
@given(clusters(workers=4), st.floats(1.01, 50), st.integers(8, 2000))
def test_faster_worker_never_gets_fewer(cluster, factor, total):
    slow = cluster.nodes[0]
    fast = NodeTimeModel(slow.q / factor, slow.s / factor, slow.k / factor, slow.m / factor)
    cluster = replace(cluster, nodes=(slow, fast, *cluster.nodes[1:]))
    if slow.q + slow.k > 1e-9:
        sizes = solve_optperf(cluster, total).local_batch_sizes
        assert sizes[1] >= sizes[0]


@moderate
@given(clusters(workers=1), st.integers(1, 9), st.integers(0, 5000))
def test_equal_workers_get_even_sizes(cluster, workers, extra):
    sizes = solve_optperf(replace(cluster, nodes=tuple(cluster.nodes) * workers), workers + extra).local_batch_sizes
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


# -- workers that only slow the job down


@settings(moderate, max_examples=60)
@given(problems())
def test_time_without_equals_a_solution_without(problem):
    plan = solve_optperf(problem.cluster, problem.total, **problem.bounds)
    kept = [i for i in range(len(problem.low)) if i not in plan.leave_out]
    if not plan.leave_out:
        assert plan.step_time_without is None
        return
    without = solve_optperf(
        replace(problem.cluster, nodes=tuple(problem.cluster.nodes[i] for i in kept)),
        problem.total,
        min_local=[problem.low[i] for i in kept],
        max_local=[problem.high[i] for i in kept],
    )
    assert plan.step_time_without == pytest.approx(without.step_time, rel=1e-12)
    assert plan.step_time_without < plan.step_time


def test_no_subset_is_faster_than_without_those_that_are_left_out():
    """Nor is one left out whose single sample takes no longer than the others need for all."""
    rng, left = np.random.default_rng(0), 0
    for _ in range(300):
        n, kinds = int(rng.integers(2, 7)), rng.uniform(1e-3, 2e-2, 3)
        times = kinds[rng.integers(0, 3, n)] * np.where(rng.random(n) < 0.3, 10.0, 1.0)
        nodes = tuple(NodeTimeModel(t / 3, 4 * t, 2 * t / 3, 0.0) for t in times.tolist())
        total = int(rng.integers(n, 5 * n))
        plan = solve_optperf(ClusterTimeModel(nodes), total)
        parts = (part for k in range(1, n + 1) for part in itertools.combinations(range(n), k))
        least = min(solve_optperf(ClusterTimeModel(tuple(nodes[i] for i in part)), total).step_time for part in parts
                    if len(part) <= total)  # fmt: skip
        assert (plan.step_time_without or plan.step_time) == pytest.approx(least, rel=1e-12)
        assert all(nodes[i].compute_time(1) > plan.step_time_without for i in plan.leave_out)
        left += bool(plan.leave_out)
    assert left > 50


@pytest.mark.parametrize("slow_workers", [1, 2, 3])
def test_equally_slow_workers_are_reported_together(slow_workers):
    fast, slow = NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.001, 1.0, 0, 0)
    plan = solve_optperf(ClusterTimeModel((fast,) * 3 + (slow,) * slow_workers), 30)
    assert plan.leave_out == tuple(range(3, 3 + slow_workers))
    assert plan.local_batch_sizes[3:] == (1,) * slow_workers
    assert plan.step_time_without == pytest.approx(0.010)


def test_slow_worker_that_still_helps_is_kept():
    plan = solve_optperf(ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.1, 0, 0, 0))), 1000)
    assert plan.leave_out == ()
    assert plan.local_batch_sizes == (991, 9)


def test_slow_worker_that_the_others_cannot_replace_is_kept():
    cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(1, 0, 0, 0)))
    assert solve_optperf(cluster, 10, max_local=9).leave_out == ()
    assert solve_optperf(cluster, 10).leave_out == (1,)


# -- size


@pytest.mark.parametrize("seed", range(6))
def test_fast_workers_among_many_slow_ones_get_the_samples_that_end_first(seed):
    rng = np.random.default_rng(seed)
    times = np.where(rng.random(300) < 0.1, 10.0 ** rng.uniform(-5, -3, 300), rng.uniform(0.9, 1.1, 300)).tolist()
    nodes = tuple(NodeTimeModel(seconds, 0.0, 0.0, 0.0) for seconds in times)
    total = 300 + int(rng.integers(200, 20_000))
    ends = [(2 * seconds, i, 1) for i, seconds in enumerate(times)]
    heapq.heapify(ends)
    for _ in range(total - 300):
        _, i, size = heapq.heappop(ends)
        heapq.heappush(ends, ((size + 2) * times[i], i, size + 1))
    least = max(size * times[i] for _, i, size in ends)
    plan = solve_optperf(ClusterTimeModel(nodes), total)
    assert sum(plan.local_batch_sizes) == total
    assert plan.step_time == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("t_o", [1e9, 1e15, 1e21])
def test_a_sample_below_the_last_digit_of_the_time_is_given_to_anybody(t_o):
    """Without a list of all samples of all workers, which would be longer than any memory."""
    nodes = (NodeTimeModel(0.006, 0.003, 0.012, 0.003),) * 3000
    tracemalloc.start()
    plan = solve_optperf(ClusterTimeModel(nodes, 0.12, t_o, 1.0), 100_000)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert sum(plan.local_batch_sizes) == 100_000
    assert max(plan.local_batch_sizes) - min(plan.local_batch_sizes) <= (1 if t_o < 1e12 else 100_000)


def test_hundred_thousand_workers():
    n = 100_000
    seconds = np.geomspace(1e-3, 1e-1, n)
    cluster = ClusterTimeModel(tuple(NodeTimeModel(0.4 * t, 0.001, 0.6 * t, 0.001) for t in seconds), 0.3, 0.01, 0.01)
    plan = solve_optperf(cluster, 64 * n)
    assert sum(plan.local_batch_sizes) == 64 * n
    assert list(plan.local_batch_sizes) == sorted(plan.local_batch_sizes, reverse=True)
    real = solve_step_times(cluster, [64 * n, 128 * n])
    assert real[0] <= plan.step_time * (1 + 1e-9)
    assert plan.step_time < real[1]


def test_many_workers_with_no_time_per_sample():
    plan = solve_optperf(ClusterTimeModel((NodeTimeModel(0, 7.0, 0, 0),) * 20_000), 59_999)
    assert sum(plan.local_batch_sizes) == 59_999
    assert plan.step_time == pytest.approx(7.0)


def test_many_workers_of_which_most_are_too_slow():
    n = 2000
    nodes = [NodeTimeModel(0.001, 0.001 if i % 2 else 10.0 + 0.001 * i, 0, 0) for i in range(n)]
    plan = solve_optperf(ClusterTimeModel(tuple(nodes)), 10 * n)
    assert plan.leave_out == tuple(range(0, n, 2))


# -- bad arguments

TWO = ClusterTimeModel((NodeTimeModel(0.001, 0, 0.001, 0),) * 2)


@pytest.mark.parametrize(
    ("total", "bounds", "error", "says"),
    [
        (0, {}, ValueError, "total_batch_size=0"),
        (-4, {}, ValueError, "total_batch_size=-4"),
        (8.0, {}, TypeError, "total_batch_size=8.0 is a float"),
        (True, {}, TypeError, "is a bool"),
        (None, {}, TypeError, "is a NoneType"),
        ("8", {}, TypeError, "is a str"),
        (8, {"min_local": -1}, ValueError, "min_local=-1"),
        (8, {"min_local": 1.5}, TypeError, "min_local=1.5"),
        (8, {"min_local": True}, TypeError, "min_local=True"),
        (8, {"min_local": None}, TypeError, "min_local=None"),
        (8, {"min_local": "1"}, TypeError, "min_local='1'"),
        (8, {"min_local": [1]}, ValueError, "1 entries for 2 workers"),
        (8, {"min_local": [1, -1]}, ValueError, r"min_local\[1\]=-1"),
        (8, {"min_local": [1, 1.0]}, TypeError, r"min_local\[1\]=1.0"),
        (8, {"min_local": [1, None]}, TypeError, r"min_local\[1\]=None"),
        (8, {"min_local": np.array([1.0, 1.0])}, TypeError, r"min_local\[0\]=1.0"),
        (8, {"max_local": -1}, ValueError, "max_local=-1"),
        (8, {"max_local": False}, TypeError, "max_local=False"),
        (8, {"max_local": [8, True]}, TypeError, r"max_local\[1\]=True"),
        (8, {"max_local": "ab"}, TypeError, "max_local='ab'"),
        (8, {"max_local": [4, 4, 4]}, ValueError, "3 entries for 2 workers"),
        (8, {"min_local": 5}, ValueError, r"together 10.*Raise the total to 10"),
        (8, {"min_local": [6, 3]}, ValueError, r"together 9"),
        (8, {"max_local": 3}, ValueError, r"\[3, 3\] sum to 6.*Lower the total to 6"),
        (8, {"max_local": [1, 6]}, ValueError, r"\[1, 6\] sum to 7"),
        (8, {"min_local": [1, 4], "max_local": [8, 3]}, ValueError, "worker 1 has a lower bound of 4 above.*of 3"),
    ],
)
def test_bad_arguments_are_named(total, bounds, error, says):
    with pytest.raises(error, match=says):
        solve_optperf(TWO, total, **bounds)
    with pytest.raises(error, match=says):
        bootstrap_sizes(total, [4, 4], [0.1, 0.1], **bounds)
    with pytest.raises(error, match=says):
        static_sizes(total, [4, 4], **bounds)


@pytest.mark.parametrize(("totals", "bounds"), [([1, 8], {}), ([4, 8], {"max_local": 3}), ([8], {"min_local": 5})])
def test_candidates_outside_the_bounds_are_an_error(totals, bounds):
    with pytest.raises(ValueError, match="total_batch_size"):
        solve_step_times(TWO, totals, **bounds)


@moderate
@given(
    st.lists(st.tuples(*[st.floats(1e-4, 1e-2)] * 2, *[st.floats(0, 0.1)] * 2), min_size=1, max_size=10),
    st.floats(0, 0.9),
    st.floats(0, 0.5),
    st.integers(2, 500),
)
def test_overlap_states_are_the_bottlenecks_and_grow_with_the_total(nodes, gamma, t_o, per_worker):
    """With the total more workers are bound by computing, and none that was any less (Cannikin, sec. 4.5)."""
    cluster, n = ClusterTimeModel(tuple(NodeTimeModel(q, s, k, m) for q, k, s, m in nodes), gamma, t_o), len(nodes)
    totals = [n, n * per_worker, 3 * n * per_worker]
    times = solve_step_times(cluster, totals, min_local=0)
    states = overlap_state(cluster, times)
    bits = np.array([np.unpackbits(np.frombuffer(state, dtype=np.uint8))[:n] for state in states], dtype=bool)
    assert (bits[:-1] <= bits[1:]).all()
    alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
    for total, seconds, computes in zip(totals, times, bits, strict=True):
        most = np.minimum((seconds - beta_1) / alpha_1, (seconds - beta_2) / alpha_2)
        if most.sum() > total * (1 + 1e-9):
            continue  # somebody takes as long for nothing at all
        sizes = np.array(solve_optperf(cluster, total, min_local=0).local_batch_sizes)
        longer = alpha_1 * sizes + beta_1 - (alpha_2 * sizes + beta_2)
        sample = (alpha_1 - alpha_2) * 2 + 1e-9  # sizes are whole numbers here
        assert (longer[computes] >= -sample[computes]).all()
        assert (longer[~computes] <= sample[~computes]).all()


# -- without a time model


@pytest.mark.parametrize("capacities", [[], [0, 0], [1, -1], [1, float("inf")]])
def test_static_names_bad_capacities(capacities):
    with pytest.raises(ValueError, match="capacities is empty|shares must be finite"):
        static_sizes(40, capacities)


def test_static_is_proportional():
    assert static_sizes(100, [4.5e12, 1.5e12]) == (75, 25)
    assert static_sizes(8, [1000, 1], min_local=2, max_local=[6, 8]) == (6, 2)
