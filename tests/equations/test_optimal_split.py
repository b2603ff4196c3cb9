"""The optimal split (C sec. 3.3) against brute force, a greedy one, and bisection; and splits without a time model."""

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.finish_lines import check_bounds
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times, static_sizes
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from tests.equations.clusters import line_workers


def finish(cluster, i, b):
    """Seconds until worker ``i`` is done with ``b`` samples, by C eq. 5 or, where the link is slower, eq. 6."""
    node = cluster.nodes[i]
    a, p = node.q * b + node.s, node.k * b + node.m
    return max(a + p + cluster.t_u, a + cluster.gamma * p + cluster.t_o + cluster.t_u)


def longest(cluster, sizes):
    return max(finish(cluster, i, b) for i, b in enumerate(sizes))


def random_cluster(rng, workers):
    """Speeds up to a thousand times apart, fixed times from nothing to all there is, now and then hardly any slope."""
    per_sample = 1e-4 * 10 ** rng.uniform(0, 3, workers)
    fixed, share, flat = rng.choice([0.0, 0.001, 0.01, 1.0]), rng.random(workers), rng.random(workers) < 0.1
    per_sample[flat], share[flat] = rng.choice([1e-12, 1e-10]), 1.0  # the model takes 1e-12 for anything below
    s, m = fixed * rng.random((2, workers))
    nodes = tuple(NodeTimeModel(*row) for row in np.stack([share * per_sample, s, (1 - share) * per_sample, m], 1))
    t_o = rng.choice([0.0, 0.1, 1.0, 10.0]) * max(fixed, 0.001) * rng.random()
    return ClusterTimeModel(nodes, rng.choice([0.0, 1.0, rng.random()]), t_o, 0.01 * rng.random())


def random_problem(rng, per_worker=60):
    """A cluster, a total, and bounds of each worker that allow it."""
    n = int(rng.integers(1, 8))
    total = int(rng.integers(2 * n, per_worker * n))
    low = rng.integers(0, 3, n)
    high = np.full(n, total) if rng.random() < 0.5 else low + rng.integers(0, 3 * total // n, n)
    high[rng.integers(n)] += max(0, total - high.sum())
    return random_cluster(rng, n), total, {"min_local": low.tolist(), "max_local": high.tolist()}


def greedy(cluster, total, low, high):
    """The exact integer optimum: each sample to the worker that is then done first, since finish times only rise."""
    sizes = list(low)
    ends = [(finish(cluster, i, b + 1), i) for i, b in enumerate(sizes) if b < high[i]]
    heapq.heapify(ends)
    for _ in range(total - sum(sizes)):
        _, i = heapq.heappop(ends)
        sizes[i] += 1
        if sizes[i] < high[i]:
            heapq.heappush(ends, (finish(cluster, i, sizes[i] + 1), i))
    return longest(cluster, sizes)


def test_no_split_in_multiples_is_better_and_no_allowed_total_is_refused(seed):
    """Every split of small totals is tried; where none is within the bounds, that is an error."""
    rng, refused = np.random.default_rng(seed), 0
    for _ in range(60):
        n, multiple = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 8]))
        total, cluster = multiple * int(rng.integers(1, 9)), random_cluster(rng, n)
        low = rng.integers(0, multiple + 2, n)
        high = low + rng.integers(0, total, n)
        splits = np.array(list(itertools.product(range(0, total + 1, multiple), repeat=n)))
        splits = splits[(splits.sum(1) == total) & (splits >= low).all(1) & (splits <= high).all(1)]
        bounds = {"min_local": low.tolist(), "max_local": high.tolist(), "multiple": multiple}
        if not len(splits):
            refused += 1
            with pytest.raises(ValueError, match="min_local|max_local"):
                solve_optperf(cluster, total, **bounds)
            continue
        plan = solve_optperf(cluster, total, **bounds)
        assert (splits == plan.local_batch_sizes).all(1).any()
        best = min(longest(cluster, sizes) for sizes in splits)
        assert longest(cluster, plan.local_batch_sizes) == pytest.approx(best, rel=1e-9)
        assert solve_step_times(cluster, [total], **bounds)[0] <= plan.step_time * (1 + 1e-9)
    assert 0 < refused < 60


def test_larger_totals_get_the_integer_optimum_within_their_bounds(seed):
    rng, kinds = np.random.default_rng(seed), set()
    for _ in range(80):
        cluster, total, bounds = random_problem(rng)
        plan = solve_optperf(cluster, total, **bounds)
        sizes, low, high = np.array(plan.local_batch_sizes), bounds["min_local"], bounds["max_local"]
        assert sizes.sum() == total == plan.total_batch_size
        assert (sizes >= low).all()
        assert (sizes <= high).all()
        assert plan.step_time == pytest.approx(longest(cluster, sizes), rel=1e-9)
        assert plan.step_time <= greedy(cluster, total, low, high) * (1 + 1e-9)
        for node, b, bottleneck in zip(cluster.nodes, sizes, plan.bottlenecks, strict=True):
            hidden = (1 - cluster.gamma) * node.backward_time(b) - cluster.t_o
            if abs(hidden) > 1e-9:
                assert bottleneck == ("compute" if hidden > 0 else "communication")
                kinds.add(bottleneck)
    assert len(kinds) == 2


def test_real_optima_of_many_totals_at_once_are_the_least_times_in_which_workers_can_take_them(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        cluster, total, bounds = random_problem(rng, per_worker=500)
        low, high = bounds["min_local"], bounds["max_local"]
        totals = [total, max(1, sum(low)), sum(high), *rng.integers(max(1, sum(low)), sum(high) + 1, 4).tolist()]
        alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
        least = longest(cluster, low)
        for total, time in zip(totals, solve_step_times(cluster, totals, **bounds), strict=True):
            taken = [
                np.minimum((t - beta_1) / alpha_1, (t - beta_2) / alpha_2)
                for t in time * np.array([1 - 1e-8, 1 + 1e-8])
            ]
            before, after = (np.clip(sizes, low, high).sum() for sizes in taken)
            assert after >= total * (1 - 1e-9)
            assert before <= total or time == pytest.approx(least)
    assert solve_step_times(cluster, []).shape == (0,)


def test_equal_workers_get_even_sizes_and_faster_ones_no_fewer():
    rng = np.random.default_rng(0)
    for _ in range(60):
        cluster = random_cluster(rng, 3)
        equal = replace(cluster, nodes=(cluster.nodes[0],) * int(rng.integers(2, 9)))
        sizes = solve_optperf(equal, len(equal.nodes) + int(rng.integers(5000))).local_batch_sizes
        assert max(sizes) - min(sizes) <= 1
        slow = NodeTimeModel(*rng.uniform(1e-4, 1e-2, 4))
        fast = NodeTimeModel(*(value / rng.uniform(1.01, 50) for value in (slow.q, slow.s, slow.k, slow.m)))
        both = solve_optperf(replace(cluster, nodes=(slow, fast, *cluster.nodes[1:])), int(rng.integers(8, 2000)))
        assert both.local_batch_sizes[1] >= both.local_batch_sizes[0]


def test_workers_that_only_slow_the_job_down_are_named_with_the_time_without_them(seed):
    """No subset is faster; and none is left out that takes no longer for its least than the others for all."""
    rng, left = np.random.default_rng(seed), 0
    for _ in range(60):
        n = int(rng.integers(2, 6))
        per_sample = rng.uniform(1e-3, 2e-2, 3)[rng.integers(0, 3, n)] * np.where(rng.random(n) < 0.3, 10.0, 1.0)
        cluster = ClusterTimeModel(tuple(NodeTimeModel(t / 3, 4 * t, 2 * t / 3, 0.0) for t in per_sample))
        total = int(rng.integers(2 * n, 5 * n))
        high = np.full(n, total) if rng.random() < 0.5 else rng.integers((total + 1) // 2, total + 1, n)
        plan = solve_optperf(cluster, total, max_local=high.tolist())
        parts = [list(part) for k in range(1, n + 1) for part in itertools.combinations(range(n), k)]
        least = min(
            greedy(replace(cluster, nodes=tuple(cluster.nodes[i] for i in part)), total, [1] * len(part), high[part])
            for part in parts
            if high[part].sum() >= total
        )
        assert (plan.step_time_without or plan.step_time) == pytest.approx(least, rel=1e-9)
        assert all(finish(cluster, i, 1) > plan.step_time_without for i in plan.leave_out)
        assert bool(plan.leave_out) == (plan.step_time_without is not None)
        left += bool(plan.leave_out)
    assert left > 5


# splits without a time model


def test_a_first_split_is_in_proportion_to_measured_speed(seed):
    """C eq. 8: ``b_i' = B (1 / t_i) / sum_j (1 / t_j)`` with the seconds ``t_i`` of a sample."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        n = int(rng.integers(1, 9))
        seconds, ran, total = 10 ** rng.uniform(-4, 1, n), rng.integers(1, 30, n), n + int(rng.integers(2000))
        sizes = bootstrap_sizes(total, ran.tolist(), seconds, min_local=0)
        speed = ran / seconds
        assert sum(sizes) == total
        assert np.abs(np.array(sizes) - total * speed / speed.sum()).max() < 1 + 1e-6
    assert bootstrap_sizes(40, [20, 20], [0.1, 0.3], max_local=25) == (25, 15)
    with pytest.raises(ValueError, match="time"):
        bootstrap_sizes(40, [20, 20], [0.1, float("nan")])


def test_an_open_loop_split_is_in_proportion_to_capacities():
    """D sec. III-B."""
    assert static_sizes(100, [4.5e12, 1.5e12]) == (75, 25)
    assert static_sizes(8, [1000, 1], min_local=2, max_local=[6, 8]) == (6, 2)
    assert static_sizes(24, [2, 1], multiple=4) == (16, 8)
    with pytest.raises(ValueError, match="capacities|shares"):
        static_sizes(40, [1, -1])


# bounds


@pytest.mark.parametrize(
    ("total", "bounds", "error", "names"),
    [
        (8.0, {}, TypeError, "total_batch_size"),
        (8, {"min_local": 1.5}, TypeError, "min_local"),
        (8, {"min_local": [1]}, ValueError, "min_local"),
        (8, {"max_local": False}, TypeError, "max_local"),
        (8, {"min_local": [6, 3]}, ValueError, "9"),
        (8, {"max_local": [1, 6]}, ValueError, "7"),
        (8, {"min_local": [1, 4], "max_local": [8, 3]}, ValueError, "worker 1"),
    ],
)
def test_bad_totals_and_bounds_are_named_by_all_splits(total, bounds, error, names):
    calls = [
        lambda: solve_optperf(line_workers(0.001, 0.002), total, **bounds),
        lambda: bootstrap_sizes(total, [4, 4], [0.1, 0.1], **bounds),
        lambda: static_sizes(total, [4, 4], **bounds),
    ]
    for call in calls:
        with pytest.raises(error, match=names):
            call()


@pytest.mark.parametrize(("total", "fitting"), [(5, {12}), (22, {20, 24}), (31, {24})])
def test_totals_that_are_no_multiples_are_refused_with_those_that_fit(total, fitting):
    with pytest.raises(ValueError, match="multiple|min_local|max_local") as error:
        check_bounds(3, total, 1, 10, multiple=4)
    assert all(str(other) in str(error.value) for other in fitting)


def test_bounds_are_one_for_all_or_one_for_each_and_candidates_outside_them_an_error():
    with pytest.raises(ValueError, match="total_batch_size"):
        solve_step_times(line_workers(0.001, 0.002), [4, 8], max_local=3)
    low, high = check_bounds(3, 12, [1, 2, 3], [8, 8, 100])
    assert (low.tolist(), high.tolist()) == ([1, 2, 3], [8, 8, 12]), "nobody gets more than the total"
