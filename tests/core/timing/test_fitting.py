"""``gamma``, ``t_o`` and ``t_u`` from what workers measure of their steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, fit_line, steps_that_tell
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.times import EstimatorSettings
from tests.core.timing.test_link_times import looks

moderate = settings(max_examples=150, deadline=None, derandomize=True)


def test_gamma_weighs_workers_by_inverse_variance():
    # shares of worker 0: 0.2, 0.3, 0.4 (median 0.3, deviation 0.1); of worker 1: 0.5, 0.52, 0.54 (0.52, 0.02)
    first = np.array([[0.2, 0.50], [0.3, 0.52], [0.4, 0.54]])
    weight = [1 / ((1.4826 * spread) ** 2 + 1e-6) for spread in (0.1, 0.02)]
    expected = (0.3 * weight[0] + 0.52 * weight[1]) / sum(weight)
    assert estimate_gamma(first, np.ones((3, 2))) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.5115, abs=1e-3)


def test_an_odd_step_does_not_move_gamma():
    first = 0.3 + 0.01 * np.array([[-2.0], [-1.0], [-1.0], [0.0], [1.0], [1.0], [2.0]])
    first[0] = 0.95
    assert estimate_gamma(first, np.ones((7, 1))) == pytest.approx(0.3, abs=0.011)


@moderate
@given(st.integers(0, 2**32 - 1))
def test_gamma_is_a_share(seed):
    rng = np.random.default_rng(seed)
    assert 0 <= estimate_gamma(2 * rng.random((4, 3)), rng.random((4, 3)) * rng.integers(0, 2, (4, 3))) <= 1


def test_network_times_are_those_of_whoever_waits_least():
    overlapped = np.array([[0.9, 0.2, 0.5], [0.3, 0.8, 0.4], [0.25, 0.7, 0.6]])
    last = np.array([[0.03, 0.4, 0.1], [0.05, 0.02, 0.1], [0.4, 0.4, 9.0]])
    assert estimate_sync_times(overlapped, last) == (0.25, 0.03)


# which steps tell t_o


def chain(rng, workers, buckets, noise, *, balance, accumulation=1, seconds=(0.001, 0.2)):
    """A step, bucket by bucket: what workers measure, and what the link takes for all buckets but the last."""
    n, gamma, wire = accumulation, rng.uniform(0.05, 0.4), rng.uniform(*seconds) / buckets
    usual = np.ones((2, workers)) if balance else rng.uniform(0.5, 1.5, (2, workers))
    a, p = usual * [[0.3], [1.0]] * np.exp(noise * rng.standard_normal((2, workers)))
    share = gamma + (1 - gamma) * np.arange(buckets) / (buckets - 1)
    ready = (n * a + (n - 1) * p)[:, None] + p[:, None] * share
    end, waits = -np.inf, np.empty((workers, buckets))
    for j in range(buckets):
        begin = np.maximum(ready[:, j], end)
        end = max(ready[:, j].max(), end) + wire
        waits[:, j] = end - begin
    rows = (np.ones(workers), a, p, gamma * p, waits[:, :-1].sum(axis=1), waits[:, -1], np.ones(workers))
    return StepObservations(*(row[None] for row in rows)), wire * (buckets - 1), wire


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("balance", [True, False])
def test_steps_that_tell_have_the_links_own_time(balance, accumulation):
    """To a tenth; the others have more, up to several times as much."""
    rng, told, more = np.random.default_rng(0), 0, []
    for _ in range(2000):
        seen, t_o, t_u = chain(
            rng, int(rng.integers(2, 9)), int(rng.integers(2, 20)), 0.1, balance=balance, accumulation=accumulation
        )
        assert seen.last_sync.min() == pytest.approx(t_u)
        least = seen.overlapped_sync.min()
        if steps_that_tell(seen, accumulation)[0]:
            told += 1
            assert t_o - 1e-12 <= least <= 1.1 * t_o
        else:
            more.append(least / t_o)
    assert told > 500
    assert max(more) > 2
    assert min(more) > 1 - 1e-9


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_link_that_is_busy_until_the_end_always_tells(accumulation):
    """Whoever is the last with its first bucket, and with its last one."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        seen, t_o, _ = chain(rng, 6, 12, 0.1, balance=True, accumulation=accumulation, seconds=(9.0, 12.0))
        assert steps_that_tell(seen, accumulation).all()
        assert seen.overlapped_sync.min() == pytest.approx(t_o)


def test_all_that_estimates_a_link_goes_by_the_steps_that_tell():
    seen = looks([True, False, False] * 4)
    last = 0.1 / (0.1 + 0.2)
    assert Computing.of(seen).last == pytest.approx(last)
    assert ClusterTimeModel.fit(seen).t_o == pytest.approx(0.2)
    context = PlanContext(2, ("a", "b"), (1, 1))
    assert PerfModelPlanner().observe(seen, context).link.at(2)[0] == pytest.approx(0.2)


def test_planners_count_the_micro_batches_of_a_step_and_have_the_settings_of_the_estimator():
    rng, context = np.random.default_rng(0), PlanContext(6, tuple("abcdef"), (1,) * 6, accumulation=3)
    found, slower = (
        chain(rng, 6, 12, 0.1, balance=True, accumulation=3, seconds=at) for at in ((2.0, 2.0), (15.0, 15.0))
    )
    assert not steps_that_tell(found[0]).all()
    planner = PerfModelPlanner(TimePosterior(settings=EstimatorSettings(link_jump=1e9))).observe(found[0], context)
    assert planner.link.error(6) < 0.2 * found[1]
    for _ in range(3):
        planner = planner.observe(found[0], context)
    assert planner.link.at(6)[0] == pytest.approx(found[1])
    many = StepObservations(*(np.repeat(getattr(slower[0], name), 8, axis=0) for name in StepObservations.FIELDS))
    assert planner.observe(many, context).link.at(6)[0] < 0.95 * slower[1]
    assert PerfModelPlanner(link=planner.link).observe(many, context).link.at(6)[0] == pytest.approx(slower[1])


def test_who_is_last_with_all_of_a_step_tells_though_its_backward_pass_is_short():
    ones = np.ones((1, 2))
    seen = StepObservations(ones, [[3.0, 1.0]] * ones, [[1.0, 1.5]] * ones, 0.2 * ones, [[0.2, 2.5]] * ones, ones, ones)
    assert steps_that_tell(seen).all()


def test_who_is_last_along_with_others_is_last():
    ones = np.ones((1, 3))
    seen = StepObservations(ones, ones, [[1.0, 1.0, 1.2]] * ones, 0.2 * ones, [[0.5, 0.5, 0.3]] * ones, ones, ones)
    assert steps_that_tell(seen).all()


def test_where_no_step_tells_the_least_of_all_is_nearest():
    overlapped, last = (
        np.array([[0.9, 0.5], [0.4, 0.7], [0.6, 0.8]]),
        np.array([[0.03, 0.4], [0.05, 0.02], [0.4, 0.04]]),
    )
    assert estimate_sync_times(overlapped, last, np.array([False, False, False])) == (0.4, 0.03)
    assert estimate_sync_times(overlapped, last, np.array([True, False, True])) == (0.55, 0.03)


def test_a_link_that_hides_behind_computing_is_not_taken_for_a_slow_one():
    """Sixteen workers that finish together, give or take 8 %: what they wait for each other is no time of the link."""
    rng, link = np.random.default_rng(0), LinkTimes()
    for _ in range(12):
        steps = []
        rng_of_round = np.random.default_rng(rng.integers(1 << 30))
        for _ in range(8):
            part, t_o, _ = chain(np.random.default_rng(5), 16, 18, 0.0, balance=True)
            a = part.forward * np.exp(0.08 * rng_of_round.standard_normal((1, 16)))
            p = part.backward * np.exp(0.08 * rng_of_round.standard_normal((1, 16)))
            gamma = float(part.first_bucket[0, 0] / part.backward[0, 0])
            share = gamma + (1 - gamma) * np.arange(18) / 17
            ready, end, waits = a[0][:, None] + p[0][:, None] * share, -np.inf, np.zeros(16)
            for j in range(17):
                begin = np.maximum(ready[:, j], end)
                end = max(ready[:, j].max(), end) + t_o / 17
                waits += end - begin
            steps.append((part.local_batch_sizes, a, p, gamma * p, waits[None], part.last_sync, part.step_time))
        link = link.observe(StepObservations(*(np.concatenate(x) for x in zip(*steps, strict=True))))
    assert link.at(16)[0] == pytest.approx(t_o, rel=0.1)


@moderate
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_coefficients_are_never_negative(seed, n):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(1, 50, n).astype(float), rng.random(n) * 10 ** rng.uniform(-6, 2)
    slope, intercept = fit_line(x, y, rng.random(n) + 0.1)
    assert slope >= 0
    assert intercept >= 0
    assert np.isfinite([slope, intercept]).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("intercept", [0.0, 5.0])
def test_line_agrees_with_scipys_bounded_huber_fit(seed, intercept):
    rng = np.random.default_rng(seed)
    x = rng.uniform(1, 50, 60)
    y = (0.5 * x + intercept) * (1 + 0.1 * rng.standard_normal(60)) * np.where(rng.random(60) < 0.1, 4.0, 1.0)
    y = np.abs(y)
    slope, offset = fit_line(x, y, iterations=200)
    spread = 1.345 * 1.4826 * np.median(np.abs(y - slope * x - offset) / y)
    reference = least_squares(
        lambda line: (y - line[0] * x - line[1]) / y,
        x0=[0.4, 1.0],
        bounds=([0, 0], [np.inf, np.inf]),
        loss="huber",
        f_scale=spread,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    ).x
    assert slope * x + offset == pytest.approx(reference[0] * x + reference[1], rel=1e-3)
    few = fit_line(x, y)
    assert few[0] * x + few[1] == pytest.approx(slope * x + offset, rel=1e-2)


def test_line_is_weighted():
    x, y = np.array([10.0, 20, 10, 20]), np.array([10.0, 20, 20, 40])
    slope, _ = fit_line(x, y, np.array([1e6, 1e6, 1, 1]))
    assert slope == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        ([4, 4, 4], [2, 2, 2], (0.5, 0.0)),  # one size: through the origin
        ([1, 2, 3], [2, 4, 6], (2.0, 0.0)),
        ([1, 2, 3], [5, 5, 5], (0.0, 5.0)),
        ([1, 2], [0, 0], (0.0, 0.0)),
        ([7], [21], (3.0, 0.0)),
        ([10, 20], [1, 4], (0.1, 0.0)),  # a line would start below zero: smallest relative error through the origin
    ],
)
def test_line_of_special_points(x, y, line):
    slope, intercept = fit_line(np.array(x, float), np.array(y, float))
    if line[0] == 0.1:
        assert intercept == 0.0
        assert 0.1 <= slope <= 0.2
    else:
        assert (slope, intercept) == pytest.approx(line, abs=1e-12)
