"""Time of a step (C eq. 3-7), fitted lines, and the time of samples of unequal cost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cost.features import FEATURES, share_features
from lightning_hetero.core.timing.cost.model import fit_cost, reduced_to_plan
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, fit_line
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from tests.equations.clusters import measure

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
    alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
    lines = np.maximum(alpha_1 * sizes + beta_1, alpha_2 * sizes + beta_2)
    assert lines == pytest.approx(cluster.finish_times(sizes))
    assert min(alpha_1.min(), alpha_2.min()) > 0, "sizes are found by dividing by them"


ONE = (NodeTimeModel(1, 0, 0, 0),)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "1"])
def test_what_no_model_may_be_is_refused_by_name(value):
    for name in "qskm":
        with pytest.raises((ValueError, TypeError), match=name):
            NodeTimeModel(**{**dict.fromkeys("qskm", 1), name: value})
    for name in ("gamma", "t_o", "t_u"):
        with pytest.raises((ValueError, TypeError), match=name):
            ClusterTimeModel(ONE, **{name: value})
    with pytest.raises(ValueError, match="nodes"):
        ClusterTimeModel(())
    for sizes in ([1], 1, [[1, 2]]):
        with pytest.raises(ValueError, match="batch size"):
            ClusterTimeModel(ONE * 2).step_time(sizes)


# the fit


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5))
def test_gamma_is_weighted_by_inverse_variance_with_medians(seed, steps, workers):
    """C eq. 12."""
    rng = np.random.default_rng(seed)
    first, backward = 1.5 * rng.random((steps, workers)), rng.random((steps, workers)) * rng.integers(0, 2)
    above = below = 0.0
    for worker in range(workers):
        shares = [min(f / max(p, 1e-12), 1.0) for f, p in zip(first[:, worker], backward[:, worker], strict=True)]
        middle = np.median(shares)
        weight = 1 / ((1.4826 * np.median([abs(share - middle) for share in shares])) ** 2 + 1e-6)
        above, below = above + middle * weight, below + weight
    assert estimate_gamma(first, backward) == pytest.approx(above / below)


def test_network_times_are_those_of_whoever_waits_least():
    """C eq. 12: the least over workers, the median over steps, and the least of all where no step tells."""
    overlapped = np.array([[0.9, 0.2, 0.5], [0.3, 0.8, 0.4], [0.25, 0.7, 0.6]])
    last = np.array([[0.03, 0.4, 0.1], [0.05, 0.02, 0.1], [0.4, 0.4, 9.0]])
    for tells, t_o in ((None, 0.25), ([True, True, False], 0.25), ([False, True, False], 0.3), ([False] * 3, 0.2)):
        found = estimate_sync_times(overlapped, last, tells if tells is None else np.array(tells))
        assert found == (t_o, 0.03)


@given(
    st.lists(nodes, min_size=1, max_size=4),
    *(st.floats(0, 1), seconds, seconds),
    st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True),
)
def test_the_fit_of_exact_times_is_exact(nodes, gamma, t_o, t_u, sizes):
    true = ClusterTimeModel(nodes, gamma, t_o, t_u)
    each = [[b] * len(nodes) for b in sizes]
    fitted = ClusterTimeModel.fit(measure(true, each, np.random.default_rng(0), steps=len(sizes), noise=0.0))
    scale = max(*(n.compute_time(200) for n in nodes), 1e-6)
    assert fitted.array == pytest.approx(true.array, abs=1e-6 * scale)
    assert (fitted.t_o, fitted.t_u) == pytest.approx((t_o, t_u), abs=1e-9 * scale)
    if all(n.backward_time(1) > 1e-6 for n in nodes):
        assert fitted.gamma == pytest.approx(gamma, abs=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        ClusterTimeModel.fit(StepObservations.empty(2))


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        ([4, 4, 4], [2, 2, 2], (0.5, 0.0)),  # one size goes through the origin
        ([1, 2, 3], [3, 5, 7], (2.0, 1.0)),
        ([1, 2], [3, 1], (0.0, 1.2)),  # falling is flat
        ([1, 2], [0, 0], (0.0, 0.0)),
        ([10, 20], [1, 4], ((10 + 80 / 16) / (100 + 400 / 16), 0.0)),  # below zero at the start
        ([1, 2, 3, 4], [3, 5, 7, 90], (2.0, 1.0)),  # an outlier
    ],
)
def test_a_line_of_special_points(x, y, line):
    assert fit_line(np.array(x, float), np.array(y, float)) == pytest.approx(line, abs=1e-6)


# samples of unequal cost

SIZES, SPEEDS, FIXED = np.array([16.0, 8.0, 4.0]), np.array([1.0, 2.0, 4.0]), 5.0
COST, PADDED = (0, 1, 0, 0, 0), (0, 0, 1, 0, 0)


def shares(steps, seed):
    rng = np.random.default_rng(seed)
    return np.array([[share_features(rng.lognormal(0, 0.7, int(n))) for n in SIZES] for _ in range(steps)])


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


@pytest.mark.parametrize("name", ["one worker stalls", "all stall", "fewer samples than workers", "not known"])
def test_steps_that_are_no_steps_do_not_count(name, seed):
    work = shares(60, seed)
    times = times_of(work, PADDED, seed=seed)
    if name == "not known":
        times[5, 0], times[9, 2], work[11, 1, 2] = np.nan, np.inf, np.nan
    elif name == "fewer samples than workers":  # as the last batch of an epoch
        for worker in range(3):
            work[10 * worker, worker], times[10 * worker, worker] = 0.0, 0.0
    else:
        times[np.s_[::11, 1] if name == "one worker stalls" else np.s_[1::10]] *= 8
    found = fit(work, times)
    np.testing.assert_allclose(np.array(found.theta) / found.theta[2], PADDED, atol=0.3)
    np.testing.assert_allclose(np.array(found.slope) / found.slope[0], SPEEDS, rtol=0.2)


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
    few = seen.rows(slice(1))
    np.testing.assert_array_equal(reduced_to_plan(few, theta).compute, few.compute)
