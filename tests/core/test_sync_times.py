"""``gamma``, ``t_o`` and ``t_u`` from what workers measure of their steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.sync_times import estimate_gamma, estimate_sync_times

moderate = settings(max_examples=150, deadline=None, derandomize=True)


def test_gamma_weighs_workers_by_inverse_variance():
    # shares of worker 0: 0.2, 0.3, 0.4 (median 0.3, deviation 0.1); of worker 1: 0.5, 0.52, 0.54 (0.52, 0.02)
    first = np.array([[0.2, 0.50], [0.3, 0.52], [0.4, 0.54]])
    weight = [1 / ((1.4826 * spread) ** 2 + 1e-6) for spread in (0.1, 0.02)]
    expected = (0.3 * weight[0] + 0.52 * weight[1]) / sum(weight)
    assert estimate_gamma(first, np.ones((3, 2))) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.5115, abs=1e-3)


@moderate
@given(st.integers(0, 2**32 - 1))
def test_gamma_is_a_share(seed):
    rng = np.random.default_rng(seed)
    assert 0 <= estimate_gamma(2 * rng.random((4, 3)), rng.random((4, 3)) * rng.integers(0, 2, (4, 3))) <= 1


def test_network_times_are_those_of_whoever_waits_least():
    overlapped = np.array([[0.9, 0.2, 0.5], [0.3, 0.8, 0.4], [0.25, 0.7, 0.6]])
    last = np.array([[0.03, 0.4, 0.1], [0.05, 0.02, 0.1], [0.4, 0.4, 9.0]])
    assert estimate_sync_times(overlapped, last) == (0.25, 0.03)
