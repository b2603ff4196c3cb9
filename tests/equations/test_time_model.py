"""Time of a step (C eq. 3-7), fitted lines, means of windows, CPU quotas, and the time of samples of unequal cost."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares
from scipy.stats.mstats import winsorize

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cost.features import FEATURES, share_features
from lightning_hetero.core.timing.cost.model import CostFit, fit_cost, reduced_to_plan
from lightning_hetero.core.timing.cpu_quota import quota_limited_times
from lightning_hetero.core.timing.fitting import fit_line
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels, NodeTimeModel, fit_node
from lightning_hetero.core.timing.step_times import SmoothingSettings
from lightning_hetero.core.timing.times import EstimatorSettings
from lightning_hetero.core.timing.winsorized_mean import winsorize_top, winsorized_mean

seconds = st.floats(0, 10)
nodes = st.builds(NodeTimeModel, seconds, seconds, seconds, seconds)
clusters = st.builds(ClusterTimeModel, st.lists(nodes, min_size=1, max_size=6), st.floats(0, 1), seconds, seconds)
close = {"rel": 1e-9, "abs": 1e-9}


@given(clusters, st.data(), st.integers(1, 6), seconds, st.floats(0, 0.5))
def test_a_step_and_a_window_of_micro_batches_are_equation_7(cluster, data, window, more, share):
    count = len(cluster.nodes)
    sizes = data.draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
    finish = []
    for node, b in zip(cluster.nodes, sizes, strict=True):
        a, p = node.q * b + node.s, node.k * b + node.m
        assert (node.forward_time(b), node.backward_time(b), node.compute_time(b)) == pytest.approx((a, p, a + p))
        a += (window - 1) * (a + p)  # all but the last micro-batch run before it, without synchronization
        sent = a + cluster.gamma * p + cluster.t_o + cluster.t_u
        finish.append(max(a + p + cluster.t_u, sent))
        assert node.accumulated(window).forward_time(b) == pytest.approx(a)
        assert node.accumulated(window).backward_time(b) == pytest.approx(p)
    whole = cluster.accumulated(window)
    assert whole.finish_times(sizes) == pytest.approx(finish, **close)
    assert whole.step_time(sizes) == pytest.approx(max(finish), **close)
    slower = whole.slowed(share, more).step_time(sizes)
    assert slower == pytest.approx((1 + share) * max(finish) + more, **close)
    assert (whole == cluster) == (window == 1 or whole.step_time([500] * count) == cluster.step_time([500] * count))
    alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
    lines = np.maximum(alpha_1 * sizes + beta_1, alpha_2 * sizes + beta_2)
    assert lines == pytest.approx(cluster.finish_times(sizes))
    assert min(alpha_1.min(), alpha_2.min()) > 0, "sizes are found by dividing by them"


def test_models_of_workers_are_a_sequence_of_them():
    models = NodeModels(np.arange(12.0).reshape(3, 4))
    assert list(models) == [NodeTimeModel(*map(float, range(i, i + 4))) for i in (0, 4, 8)]
    assert (len(models), models[1:] == tuple(models)[1:], models == [1]) == (3, True, False)
    assert hash(models) == hash(NodeModels(np.arange(12.0).reshape(3, 4)))
    faster = ClusterTimeModel(models, t_u=1.0).slowed(0.0, -3.0)
    assert faster.t_u == 0.0, "no time is negative"


ONE = (NodeTimeModel(1, 0, 0, 0),)
FILTERS = {"walks": (0.1,), "rounds": (1.0,), "prior": (1.0,)}
NUMBERS = [one.name for one in fields(EstimatorSettings) if one.name not in FILTERS]
HOSTILE = [
    *((NodeTimeModel, {**dict.fromkeys("qskm", 1), n: v}, n) for n in "qskm" for v in (-1e-9, math.nan, math.inf, "1")),
    (NodeModels, {"coefficients": np.array([[1.0, 1.0, -1.0, 1.0]])}, "coefficients"),
    (NodeModels, {"coefficients": np.array([[1.0, np.inf, 1.0, 1.0]])}, "coefficients"),
    (ClusterTimeModel, {"nodes": ()}, "nodes"),
    *((ClusterTimeModel, {"nodes": ONE, "gamma": value}, "gamma") for value in (-0.1, 1.1)),
    *((ClusterTimeModel, {"nodes": ONE, name: v}, name) for name in ("t_o", "t_u") for v in (-1, math.nan)),
    *((EstimatorSettings, {name: value}, name) for name in NUMBERS for value in (-0.1, math.nan, math.inf)),
    *((EstimatorSettings, {n: 0.0}, n) for n in ("jump_probability", "skew_probability", "jump", "jitter_steps")),
    *((EstimatorSettings, {n: 0.0}, n) for n in ("own_jitter_steps", "gate", "least_part", "residual_prior")),
    *((EstimatorSettings, {name: 1.0}, name) for name in ("jump_probability", "skew_probability")),
    *((EstimatorSettings, {name: 1.1}, name) for name in ("switch", "wide", "residual_shortfall")),
    (EstimatorSettings, {"skew_stall": 0.9}, "skew_stall"),
    (EstimatorSettings, {"walks": (0.1,)}, "walks"),
    (EstimatorSettings, dict.fromkeys(FILTERS, ()), "walks"),
    (EstimatorSettings, {**FILTERS, "walks": (0.0,)}, "walks"),
    (EstimatorSettings, {**FILTERS, "rounds": (-1.0,)}, "rounds"),
    (EstimatorSettings, {**FILTERS, "prior": (0.0,)}, "prior"),
    *((SmoothingSettings, {one.name: -1}, one.name) for one in fields(SmoothingSettings)),
    *((SmoothingSettings, {name: 0}, name) for name in ("noise_steps", "longest_mean_steps", "outlier_ratio")),
]


@pytest.mark.parametrize(("cls", "given", "name"), HOSTILE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_no_model_or_setting_may_be_is_refused_by_name(cls, given, name):
    with pytest.raises((ValueError, TypeError), match=name):
        cls(**given)


ENDS = {"switch": 1.0, "wide": 1.0, "residual_shortfall": 1.0, "skew_stall": 1.0, "odd": 0.0, "jitter": 0.0}


def test_settings_may_be_at_the_ends_of_their_ranges():
    assert EstimatorSettings(**ENDS, **{**FILTERS, "rounds": (0.0,)}).switch == 1.0
    assert SmoothingSettings(1, 1, 1e-9, 0.0).noise_steps == 1


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], 1, [[1, 2]]])
def test_a_step_has_one_size_per_worker(sizes):
    with pytest.raises(ValueError, match="one batch size per worker"):
        ClusterTimeModel(ONE * 2).step_time(sizes)


# the fit


def measured(sizes, true, rng=None, noise=0.0):
    """What a cluster measures; who is ready early waits, and sees longer synchronizations."""
    sizes = np.asarray(sizes, dtype=float)
    q, s, k, m = np.array([(n.q, n.s, n.k, n.m) for n in true.nodes]).T
    scatter = np.ones((2, *sizes.shape)) if rng is None else 1 + noise * rng.standard_normal((2, *sizes.shape))
    forward, backward = np.array([q * sizes + s, k * sizes + m]) * scatter
    start, ready = forward + true.gamma * backward, forward + backward
    waits = true.t_o + start.max(axis=1, keepdims=True) - start, true.t_u + ready.max(axis=1, keepdims=True) - ready
    return StepObservations(sizes, forward, backward, true.gamma * backward, *waits, ready + waits[1])


@given(
    st.lists(nodes, min_size=1, max_size=4),
    *(st.floats(0, 1), seconds, seconds),
    st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True),
)
def test_the_fit_of_exact_times_is_exact(nodes, gamma, t_o, t_u, sizes):
    true = ClusterTimeModel(nodes, gamma, t_o, t_u)
    fitted = ClusterTimeModel.fit(measured([[b] * len(nodes) for b in sizes], true))
    scale = max(*(n.compute_time(200) for n in nodes), 1e-6)
    assert fitted.array == pytest.approx(true.array, abs=1e-6 * scale)
    assert (fitted.t_o, fitted.t_u) == pytest.approx((t_o, t_u), abs=1e-9 * scale)
    if all(n.backward_time(1) > 1e-6 for n in nodes):
        assert fitted.gamma == pytest.approx(gamma, abs=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        ClusterTimeModel.fit(StepObservations.empty(2))


def test_odd_steps_at_a_size_count_as_the_longest_of_the_rest():
    """A worker at two sizes, of which one was seen more often, and one step of each took a hundred times as long."""
    b = np.array([10.0] * 12 + [20.0] * 4)[:, None]
    forward = 0.01 * b + 0.1
    forward[[3, 13]] *= 100
    zeros = np.zeros_like(b)
    (node,) = ClusterTimeModel.fit(StepObservations(b, forward, 2 * b, b, zeros, zeros, zeros)).nodes
    assert (node.q, node.s, node.k, node.m) == pytest.approx((0.01, 0.1, 2.0, 0.0))


def huber(x, y, spread):
    """Line with both coefficients at least 0 and the least Huber loss of relative residuals, by scipy."""
    box = {"bounds": ([0, 0], [np.inf, np.inf]), "loss": "huber", "f_scale": spread}
    ends = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12)
    return least_squares(lambda line: (y - line[0] * x - line[1]) / y, x0=[0.4, 1.0], **box, **ends).x


@pytest.mark.parametrize("intercept", [0.0, 5.0])
def test_a_robust_line_is_scipys(intercept, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(1, 50, 60)
    y = (0.5 * x + intercept) * np.abs(1 + 0.1 * rng.standard_normal(60)) * np.where(rng.random(60) < 0.1, 4.0, 1.0)
    slope, offset = fit_line(x, y, iterations=200)
    best = huber(x, y, 1.345 * 1.4826 * np.median(np.abs(y - slope * x - offset) / y))
    assert slope * x + offset == pytest.approx(best[0] * x + best[1], rel=1e-3)
    few = fit_line(x, y)
    assert few[0] * x + few[1] == pytest.approx(slope * x + offset, rel=1e-2)


LINES = {
    "one size goes through the origin": ([4, 4, 4], [2, 2, 2], None, (0.5, 0.0)),
    "one point": ([7], [21], None, (3.0, 0.0)),
    "a line": ([1, 2, 3], [3, 5, 7], None, (2.0, 1.0)),
    "flat": ([1, 2, 3], [5, 5, 5], None, (0.0, 5.0)),
    "falling is flat": ([1, 2], [3, 1], None, (0.0, 1.2)),
    "nothing": ([1, 2], [0, 0], None, (0.0, 0.0)),
    "below zero at the start": ([10, 20], [1, 4], None, ((10 + 80 / 16) / (100 + 400 / 16), 0.0)),
    "weights": ([10, 20, 10, 20], [10, 20, 20, 40], [1e9, 1e9, 1, 1], (1.0, 0.0)),
    "an outlier": ([1, 2, 3, 4], [3, 5, 7, 90], None, (2.0, 1.0)),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_special_points(name):
    x, y, weight, line = LINES[name]
    found = fit_line(np.array(x, float), np.array(y, float), None if weight is None else np.array(weight, float))
    assert found == pytest.approx(line, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_no_coefficient_is_negative(seed, count):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(1, 50, count).astype(float), rng.random(count) * 10 ** rng.uniform(-6, 2)
    node = fit_node(x, y, rng.random(count), rng.random(count) + 0.1)
    assert min(node.q, node.s, node.k, node.m) >= 0
    assert node.forward_time(8.0) < math.inf


# windows of steps


@given(st.integers(0, 2**32 - 1), st.integers(1, 64))
def test_the_longest_tenth_of_a_window_counts_as_the_longest_of_the_rest(seed, steps):
    times = np.random.default_rng(seed).lognormal(sigma=0.5, size=(steps, 3))
    dropped = math.ceil(steps / 10) if steps > 2 else 0
    expected = np.stack([winsorize(worker, limits=(0.0, (dropped + 0.5) / steps)) for worker in times.T], axis=1)
    if not dropped:
        expected = times
    np.testing.assert_allclose(winsorize_top(times), expected)
    assert winsorized_mean(times[:, 0]) == pytest.approx(expected[:, 0].mean())
    assert winsorize_top(np.zeros((0, 3))).shape == (0, 3)
    assert winsorized_mean(np.array([1.0, 1.0, 1.0, 1.0, 6.0] * 4)) == 2.0, "what takes long often is in the mean"


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 2.0), st.floats(0.2, 3.0), st.integers(1, 40))
def test_a_quota_bounds_steps_that_used_all_of_it(seed, cores, ratio, steps):
    """Within a tenth of what it earns, and within a period of 0.1 s, the quota is what bounds the worker."""
    outside, backward = np.random.default_rng(seed).uniform(0.01, 0.03, (2, steps))
    used = (outside + backward).sum()
    seen = ratio / cores * outside[::-1].copy(), ratio / cores * backward[::-1].copy()
    found = quota_limited_times(*seen, outside, backward, cores)
    slack = (ratio - 1) * used / cores - min(0.1, 0.1 * used / cores)
    if slack > 1e-9:
        assert [x.tolist() for x in found] == [x.tolist() for x in seen]
    elif slack < -1e-9:
        np.testing.assert_allclose(found, np.stack([outside, backward]) * max(ratio, 1.0) / cores)
    none = np.zeros(steps)
    assert quota_limited_times(*seen, none, none, cores) == seen


# samples of unequal cost

SIZES, SPEEDS, FIXED = np.array([16.0, 8.0, 4.0]), np.array([1.0, 2.0, 4.0]), 5.0
COST, PADDED = (0, 1, 0, 0, 0), (0, 0, 1, 0, 0)


def shares(steps, seed, count=lambda n, rng: int(n)):
    rng = np.random.default_rng(seed)
    return np.array([[share_features(rng.lognormal(0, 0.7, count(n, rng))) for n in SIZES] for _ in range(steps)])


def times_of(work, theta, noise=0.02, seed=0):
    exact = FIXED + SPEEDS * (work @ np.array(theta, dtype=float))
    return exact * np.exp(np.random.default_rng(seed).normal(0, noise, exact.shape))


def fit(work, times):
    return fit_cost(work, times, np.tile(SIZES, (len(work), 1)))


@given(st.lists(st.floats(0, 100), max_size=8))
def test_features_of_a_share_are_its_number_sum_padding_and_their_squares(costs):
    n, most = len(costs), max(costs, default=0.0)
    found = dict(zip(FEATURES, share_features(costs), strict=True))
    expected = {"samples": n, "cost": sum(costs), "padded_cost": n * most, "squared_cost": sum(x * x for x in costs)}
    assert found == pytest.approx({**expected, "padded_squared_cost": n * most**2})


@pytest.mark.parametrize("theta", [COST, PADDED, (0, 0.7, 0, 0.3, 0), (0, 0, 0.6, 0, 0.4)], ids=str)
def test_the_features_are_those_that_the_times_were_made_of(theta, seed):
    work = shares(80, seed)
    found = fit(work, times_of(work, theta, seed=seed))
    unit = (work @ np.array(theta)).sum() / (80 * SIZES.sum())
    assert [weight > 0 for weight in found.theta] == [weight > 0 for weight in theta]
    np.testing.assert_allclose(found.slope, SPEEDS * unit, rtol=0.1)
    if theta in (COST, PADDED):  # with two features, fixed time and weights are found by turns, and not to the end
        np.testing.assert_allclose(fit(work, times_of(work, theta, noise=0.0)).fixed, FIXED, rtol=1e-6)
    np.testing.assert_allclose(found.fixed_work, np.array(found.fixed) / found.slope)
    np.testing.assert_allclose((work @ np.array(found.theta)).sum(), 80 * SIZES.sum())


def test_samples_count_where_their_number_varies():
    work = shares(120, 4, count=lambda n, rng: int(n * rng.uniform(0.5, 1.5)))
    theta = fit(work, times_of(work, (0.6, 0.4, 0, 0, 0))).theta
    assert (theta[0] > 0.4, theta[1] > 0.2, sum(theta[2:])) == (True, True, 0)


SPOILED = ["one worker stalls", "all stall", "all stall often", "fewer samples than workers", "not known"]


@pytest.mark.parametrize("name", SPOILED)
def test_steps_that_are_no_steps_do_not_count(name, seed):
    work = shares(60, seed)
    times = times_of(work, PADDED, seed=seed)
    if name == "not known":
        times[5, 0], times[9, 2], work[11, 1, 2] = np.nan, np.inf, np.nan
    elif name == "fewer samples than workers":  # as the last batch of an epoch
        for worker in range(3):
            work[10 * worker, worker], times[10 * worker, worker] = 0.0, 0.0
    else:
        where = {"one worker stalls": np.s_[::11, 1], "all stall": np.s_[1::30], "all stall often": np.s_[1::10]}[name]
        times[where] *= 300 if name == "all stall" else 8
    found = fit(work, times)
    np.testing.assert_allclose(np.array(found.theta) / found.theta[2], PADDED, atol=0.3)
    np.testing.assert_allclose(np.array(found.slope) / found.slope[0], SPEEDS, rtol=0.2)


def test_a_worker_without_samples_has_no_line_and_few_steps_teach_nothing():
    work = shares(60, 2)
    times = times_of(work, PADDED)
    work[:, 1], times[:, 1] = 0.0, 0.0
    found = fit(work, times)
    assert (found.fixed[1], found.slope[2] / found.slope[0]) == (0.0, pytest.approx(4.0, rel=0.15))
    assert fit(work[:7], times[:7]) is None
    assert fit(work[:8], times[:8]) is not None
    assert fit(0 * work, times) is fit(work, 0 * times) is None
    assert CostFit(COST, (0.2, 1.0), (0.1, 0.0), 0.0).fixed_work == (2.0, 1e12)


def observed(work, theta):
    compute = times_of(work, theta, noise=0.0)
    load, forward, update, backward = 0.1 * compute, 0.2 * compute, 0.1 * compute, 0.6 * compute
    end = compute.max(axis=1, keepdims=True) + 2.0
    passes = np.tile(SIZES, (len(work), 1)), forward, backward, 0.5 * backward, np.zeros_like(forward)
    ends = (end - 0.4 * compute)[:, :, None]
    return StepObservations(*passes, end - compute, np.tile(end, (1, 3)), load, update, bucket_ends=ends, work=work)


def test_steps_reduced_to_the_plan_are_as_if_each_worker_had_had_its_planned_work():
    work, theta = shares(40, 1), np.array(COST, dtype=float)
    theta *= 40 * SIZES.sum() / (work @ theta).sum()
    seen, planned = observed(work, theta), FIXED + SPEEDS * SIZES
    reduced, end = reduced_to_plan(seen, theta), planned.max() + 2.0
    parts = {"data_wait": 0.1, "forward": 0.2, "optimizer": 0.1, "backward": 0.6, "first_bucket": 0.3}
    expected = {name: share * planned for name, share in parts.items()}
    for name, values in {**expected, "last_sync": end - planned, "step_time": np.full(3, end)}.items():
        np.testing.assert_allclose(getattr(reduced, name), np.tile(values, (40, 1)), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(reduced.bucket_ends[:, :, 0], np.tile(end - 0.4 * planned, (40, 1)))
    assert reduced.work.shape == (40, 3, 0)
    work[7] *= 50  # its time was short for another reason
    reduced = reduced_to_plan(replace(seen, work=work), theta)
    assert min(getattr(reduced, name).min() for name in ("forward", "backward", "step_time")) > 0
    for few in (seen.rows(slice(1)), replace(seen, work=None)):
        np.testing.assert_array_equal(reduced_to_plan(few, theta).compute, few.compute)
