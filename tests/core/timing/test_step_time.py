"""The time model against a step taken apart by brute force, and its fit against known coefficients and scipy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel, fit_node

moderate = settings(max_examples=150, deadline=None, derandomize=True)
seconds = st.floats(0, 10)
nodes = st.builds(NodeTimeModel, seconds, seconds, seconds, seconds)
clusters = st.builds(
    ClusterTimeModel, st.lists(nodes, min_size=1, max_size=6).map(tuple), st.floats(0, 1), seconds, seconds
)


def sizes_for(cluster, data):
    return data.draw(st.lists(st.integers(0, 500), min_size=len(cluster.nodes), max_size=len(cluster.nodes)))


# -- the model


@moderate
@given(seconds, seconds, seconds, seconds, st.integers(0, 500))
def test_times_of_a_worker_are_lines_in_its_samples(q, s, k, m, b):
    node = NodeTimeModel(q, s, k, m)
    assert (node.forward_time(b), node.backward_time(b)) == (q * b + s, k * b + m)
    assert node.compute_time(b) == pytest.approx(q * b + s + k * b + m)


@moderate
@given(clusters, st.data())
def test_step_time_is_equation_7(cluster, data):
    sizes = sizes_for(cluster, data)
    compute, starts = [], []
    for node, b in zip(cluster.nodes, sizes, strict=True):
        a, backward = node.q * b + node.s, node.k * b + node.m
        compute.append(a + backward)
        starts.append(a + cluster.gamma * backward)
    expected = max(max(compute) + cluster.t_u, max(starts) + cluster.t_o + cluster.t_u)
    assert cluster.step_time(sizes) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@moderate
@given(clusters, st.data(), st.integers(1, 6))
def test_accumulated_is_a_window_of_micro_batches(cluster, data, n):
    sizes = sizes_for(cluster, data)
    starts, ends = [], []
    for node, b in zip(cluster.nodes, sizes, strict=True):
        clock = 0.0
        for _ in range(n - 1):  # not synchronised
            clock += node.forward_time(b)
            clock += node.backward_time(b)
        clock += node.forward_time(b)
        starts.append(clock + cluster.gamma * node.backward_time(b))
        ends.append(clock + node.backward_time(b))
    window = max(max(ends), max(starts) + cluster.t_o) + cluster.t_u
    assert cluster.accumulated(n).step_time(sizes) == pytest.approx(window, rel=1e-9, abs=1e-9)


def test_accumulating_one_micro_batch_changes_nothing():
    cluster = ClusterTimeModel((NodeTimeModel(1, 2, 3, 4),), 0.5, 1, 1)
    assert cluster.accumulated(1) == cluster
    assert cluster.nodes[0].accumulated(1) == cluster.nodes[0]


@pytest.mark.parametrize("name", ["q", "s", "k", "m"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(-1e-9, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError), (None, TypeError)],
)
def test_node_names_bad_coefficients(name, value, error):
    with pytest.raises(error, match=f"{name}="):
        NodeTimeModel(**{"q": 1, "s": 1, "k": 1, "m": 1, name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": ()}, "nodes is empty"),
        ({"gamma": -0.1}, "gamma=-0.1"),
        ({"gamma": 1.1}, "gamma=1.1"),
        ({"t_o": -1}, "t_o=-1"),
        ({"t_u": float("nan")}, "t_u=nan"),
    ],
)
def test_cluster_names_bad_values(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(ClusterTimeModel((NodeTimeModel(1, 0, 0, 0),)), **changes)


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], 1, [[1, 2]]])
def test_one_size_per_worker(sizes):
    with pytest.raises(ValueError, match=r"one batch size per worker \(2\)"):
        ClusterTimeModel((NodeTimeModel(1, 0, 0, 0),) * 2).step_time(sizes)


# -- observations


def observations(sizes, true, rng=None, noise=0.0):
    """What a cluster with the model ``true`` measures; who is ready early waits, and sees longer synchronisations."""
    sizes = np.asarray(sizes, dtype=float)
    q, s, k, m = np.array([(n.q, n.s, n.k, n.m) for n in true.nodes]).T
    scatter = 1.0 if rng is None else 1 + noise * rng.standard_normal((2, *sizes.shape))
    forward, backward = (q * sizes + s, k * sizes + m) * (scatter if rng is not None else np.ones((2, 1, 1)))
    start, ready = forward + true.gamma * backward, forward + backward
    return StepObservations(
        sizes,
        forward,
        backward,
        true.gamma * backward,
        true.t_o + start.max(axis=1, keepdims=True) - start,
        true.t_u + ready.max(axis=1, keepdims=True) - ready,
        np.broadcast_to(ready.max(axis=1, keepdims=True), sizes.shape),
    )


# -- the fit


@settings(moderate, max_examples=60)
@given(
    st.lists(nodes, min_size=1, max_size=4),
    st.floats(0, 1),
    seconds,
    seconds,
    st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True),
)
def test_fit_of_exact_data_is_exact(nodes, gamma, t_o, t_u, sizes):
    true = ClusterTimeModel(tuple(nodes), gamma, t_o, t_u)
    fitted = ClusterTimeModel.fit(observations([[b] * len(nodes) for b in sizes], true))
    scale = max(max(n.compute_time(200) for n in nodes), 1e-6)
    for b in ([1] * len(nodes), [100] * len(nodes), [200] * len(nodes)):
        assert fitted.step_time(b) == pytest.approx(true.step_time(b), rel=1e-6, abs=1e-9 * scale)
    for found, node in zip(fitted.nodes, nodes, strict=True):
        assert (found.q, found.k) == pytest.approx((node.q, node.k), abs=1e-6 * scale)
        assert (found.s, found.m) == pytest.approx((node.s, node.m), abs=1e-6 * scale)
    assert (fitted.t_o, fitted.t_u) == pytest.approx((t_o, t_u), abs=1e-9 * scale)
    if all(n.backward_time(1) > 1e-6 for n in nodes):
        assert fitted.gamma == pytest.approx(gamma, abs=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_fit_is_near_under_noise_with_gross_outliers(seed):
    rng = np.random.default_rng(seed)
    true = ClusterTimeModel(
        (NodeTimeModel(0.001, 0.02, 0.002, 0.01), NodeTimeModel(0.004, 0.01, 0.009, 0.03)), 0.3, 0.02
    )
    obs = observations(rng.integers(8, 65, (200, 2)), true, rng, noise=0.05)
    gross = np.where(rng.random(obs.forward.shape) < 0.1, rng.uniform(3, 20, obs.forward.shape), 1.0)
    fitted = ClusterTimeModel.fit(replace(obs, forward=obs.forward * gross, backward=obs.backward * gross))
    for found, node in zip(fitted.nodes, true.nodes, strict=True):
        assert found.q + found.k == pytest.approx(node.q + node.k, rel=0.1)
        for b in (8, 32, 64):
            assert found.compute_time(b) == pytest.approx(node.compute_time(b), rel=0.05)


def test_node_with_one_size_goes_through_the_origin():
    node = fit_node(np.full(5, 8.0), np.full(5, 0.4), np.full(5, 0.8))
    assert (node.q, node.s, node.k, node.m) == pytest.approx((0.05, 0, 0.1, 0))


def test_fit_needs_a_step():
    with pytest.raises(ValueError, match="at least one"):
        ClusterTimeModel.fit(StepObservations.empty(2))
