"""Fixtures of several tests of the mathematics."""

import pytest

from lightning_hetero.core.batching import optperf_cache
from lightning_hetero.core.batching.optperf import solve_step_times


@pytest.fixture
def solves(monkeypatch):
    """How many candidates every call of their solver had."""
    calls = []

    def solve(cluster, totals, **bounds):
        calls.append(len(totals) - 1)
        return solve_step_times(cluster, totals, **bounds)

    monkeypatch.setattr(optperf_cache, "solve_step_times", solve)
    return calls
