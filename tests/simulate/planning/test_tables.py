"""Answers as text: what is said of the worker that is missed least."""

from dataclasses import replace

import pytest

from lightning_hetero.simulate.planning import Cluster, Link, Worker, plan_cluster
from lightning_hetero.simulate.planning.tables import plan_text

FAST, SLOW = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (-0.25, "nobody: the one that is missed least, a slow, brings 25.0% of the speed"),
        (0.0005, "nobody: the one that is missed least, a slow, brings 0.0% of the speed"),
        (0.02, "a slow: the others are 2.0% faster without it"),
    ],
)
def test_leaving_out_a_worker_is_advised_for_a_gain_that_shows(gain, text):
    answer = plan_cluster(Cluster((FAST, FAST, SLOW), Link(4e6, 1e9)), 60)
    assert answer.leave_out == 2
    assert text in plan_text(replace(answer, gain_without_it=gain))
