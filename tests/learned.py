"""Planners that know workers already, for tests of what they decide."""

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext


def knowing(models, *, t_o=0.0, t_u=0.0, gamma=1.0, sizes=(4, 8), steps=6):
    """A planner that has seen these workers, ``{identity: (q, s, k, m)}``, at some sizes without any noise."""
    q, s, k, m = np.array(list(models.values()), dtype=float).T
    planner = PerfModelPlanner()
    for _ in range(3):
        for size in sizes:
            b = np.full((steps, len(models)), float(size))
            a, p = q * b + s, k * b + m
            over, last = np.full(b.shape, t_o), np.full(b.shape, t_u)
            step = np.broadcast_to((a + p).max(axis=1, keepdims=True) + t_u, b.shape)
            seen = StepObservations(b, a, p, gamma * p, over, last, step)
            planner = planner.observe(seen, PlanContext(size * len(models), tuple(models), (1,) * len(models)))
    return planner
