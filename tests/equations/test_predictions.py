"""What a planner of the time model predicts, how sure it is of that, and what it makes of odd measurements.

Nothing here depends on how it estimates: a planner that learns in another way has to pass as it is.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.checkpoint_state import DamagedCheckpointError
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.timing.expected_maximum import expected_maximum
from tests.equations.clusters import CLUSTER, context, line_workers, measure, random_cluster

PLAN = BatchPlan(60, (30, 20, 10))


def seen(*looks, planner=None, ctx=None):
    planner = PerfModelPlanner() if planner is None else planner
    for look in looks:
        planner = planner.observe(look, ctx or context(60, 3))
    return planner


def looks(cluster, rng, sizes=(30, 20, 10), times=1, **how):
    return [measure(cluster, sizes, rng, **how) for _ in range(times)]


# the slowest of uncertain times


def test_the_largest_where_it_is_known_exactly():
    for mean, deviation in (([5.0], [2.0]), ([3.0, 1.0, 2.0], [0.0] * 3), ([1.0, 0.5], [1e-14, 0.01]), ([0.0], [0.0])):
        found = expected_maximum(np.array(mean), np.array(deviation))
        assert found == pytest.approx((mean[0], deviation[0]), abs=0.004 * max(deviation))


@pytest.mark.parametrize("workers", [2, 7, 40, 900])
def test_the_largest_is_that_of_drawn_values(workers, seed):
    """Many values are counted together where they are nearly the same."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, workers)
    mean, deviation = np.array([1.0, 1.02, 1.1])[kinds], np.array([0.03, 0.02, 0.01])[kinds]
    drawn = (mean + deviation * rng.standard_normal((4000, workers))).max(axis=1)
    found = expected_maximum(mean * rng.uniform(0.9995, 1.0005, workers), deviation)
    assert found == pytest.approx((drawn.mean(), drawn.std()), abs=0.002)


# predictions and their errors


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_errors_are_what_they_say(noise, seed):
    """Predictions of some clusters are off by about one standard error, which falls with what is seen."""
    off, first, last = [], [], []
    for case in range(15):
        cluster, rng = random_cluster([seed, case]), np.random.default_rng([seed, case])
        workers = len(cluster.nodes)
        plan, ctx = BatchPlan(32 * workers, (32,) * workers), context(32 * workers, workers)
        planner = seen(*looks(cluster, rng, (32,) * workers, 2, noise=noise), ctx=ctx)
        first.append(planner.error(plan, ctx))
        planner = seen(*looks(cluster, rng, (32,) * workers, 8, noise=noise), planner=planner, ctx=ctx)
        last.append(planner.error(plan, ctx))
        truth = measure(cluster, (32,) * workers, rng, steps=1000, noise=noise).step_time.mean()
        off.append((planner.predict(plan, ctx) - truth) / last[-1])
    assert 0.2 < np.sqrt(np.mean(np.square(off))) < 1.5
    assert np.mean(last) < np.mean(first)


def test_another_number_of_workers_follows_the_ring():
    """``latency (n - 1) + transfer (n - 1) / n`` beside computing, known of two and of four workers."""

    def workers(n):
        return line_workers(*(0.002,) * n, t_o=0.1 * (1 - 1 / n), t_u=0.01 * (n - 1))

    rng, planner = np.random.default_rng(0), PerfModelPlanner()
    for n in (2, 4) * 4:
        ctx = context(10 * n, n)
        planner = seen(*looks(workers(n), rng, (10,) * n, noise=0.001), planner=planner, ctx=ctx)
    eight = planner.predict(BatchPlan(80, (10,) * 8), context(80, 8))
    assert eight == pytest.approx(workers(8).step_time((10,) * 8), rel=0.03)


@given(st.integers(0, 2**32 - 1))
def test_whatever_is_measured_leaves_it_sound(seed):
    """Seconds up to ten digits apart, and times of nothing."""
    rng, planner, ctx = np.random.default_rng(seed), PerfModelPlanner(), context(60, 3)
    scale, wild = 10 ** rng.uniform(-7, 3), rng.random() < 0.5
    for _ in range(4):
        count = int(rng.integers(1, 33))
        b = np.broadcast_to(rng.integers(1, 1000, 3).astype(float), (count, 3))
        a, p = rng.random((2, count, 3)) * (10 ** rng.uniform(-7, 3, 3) if wild else scale)
        nothing, zeros = rng.random((2, 3)) < 0.3, np.zeros_like(b)
        look = StepObservations(b, a * ~nothing[0], p * (nothing[0] | ~nothing[1]), *[zeros] * 3, a + p)
        planner = planner.observe(look, ctx)
        assert 0 <= planner.predict(PLAN, ctx) < math.inf
        assert 0 <= planner.error(PLAN, ctx) < math.inf
        json.dumps(planner.state_dict(), allow_nan=False)


# what it keeps


def test_a_state_predicts_the_same_and_a_changed_one_is_refused():
    planner = seen(*looks(CLUSTER, np.random.default_rng(0), times=2))
    state = planner.state_dict()
    assert PerfModelPlanner().loaded(state).predict(PLAN, context(60, 3)) == planner.predict(PLAN, context(60, 3))
    for name in state:
        with pytest.raises(DamagedCheckpointError, match="time models"):
            PerfModelPlanner().loaded({**state, name: 0.5})
