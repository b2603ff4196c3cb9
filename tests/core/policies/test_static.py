"""The open-loop split as a policy."""

import numpy as np

from lightning_hetero.core.policies.static import StaticPlanner
from tests.core.policies.simulated import CLUSTER, context, drive, slowed


def test_static_is_proportional_to_capacities_and_never_changes():
    ctx = context(192, 3, capacities=(8, 4, 4))
    planner = StaticPlanner()
    plan = planner.initial(ctx).plan
    assert plan.local_batch_sizes == (96, 48, 48)
    _, later, changes = drive(planner, slowed(CLUSTER, 0, 10.0), plan, ctx, 5, np.random.default_rng(0))
    assert (later, changes) == (plan, [])
    assert planner.predict(plan, ctx) is None


def test_static_keeps_bounds():
    ctx = context(192, 3, capacities=(8, 4, 4), max_local=(60, 192, 192))
    assert StaticPlanner().initial(ctx).plan.local_batch_sizes == (60, 66, 66)
