"""Simulated clusters of exactly known speed, and the loop that a policy closes with them."""

from dataclasses import replace

import numpy as np

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

FAST = NodeTimeModel(0.0004, 0.004, 0.0008, 0.003)
MIDDLE = NodeTimeModel(0.0008, 0.008, 0.0016, 0.003)
SLOW = NodeTimeModel(0.0020, 0.005, 0.0040, 0.006)
CLUSTER = ClusterTimeModel((FAST, MIDDLE, SLOW), gamma=0.2, t_o=0.02, t_u=0.004)

NEEDED = {"max_total_batch_size": 4096}
"""Settings without which a planner cannot be made, by the names in ``PolicyEntry.needs``."""


def planner_of(name):
    """The planner of a policy, with what it needs; ``None`` for a split that never changes."""
    entry = POLICIES[name]
    return entry.factory(**{need: NEEDED[need] for need in entry.needs if need in NEEDED})


def context(total, workers, **changes):
    names = tuple(f"host-{i}" for i in range(workers))
    return PlanContext(total, names, **{"min_local": (1,) * workers, "capacities": (1.0,) * workers, **changes})


def line_workers(*seconds, fixed=0.0, **sync):
    """Workers that take so many seconds for a sample, a third of them before the backward pass."""
    nodes = tuple(NodeTimeModel(t / 3, fixed / 3, 2 * t / 3, 2 * fixed / 3) for t in seconds)
    return ClusterTimeModel(nodes, **sync)


def slowed(cluster, rank, factor):
    node = cluster.nodes[rank]
    slow = NodeTimeModel(*(factor * value for value in (node.q, node.s, node.k, node.m)))
    return replace(cluster, nodes=(*cluster.nodes[:rank], slow, *cluster.nodes[rank + 1 :]))


def measure(cluster, sizes, rng, *, steps=10, noise=0.02, sent=0.0):
    """What the workers measure of some steps; whoever is ready early waits inside its synchronization."""
    q, s, k, m = np.array([(n.q, n.s, n.k, n.m) for n in cluster.nodes]).T
    b = np.broadcast_to(np.asarray(sizes, dtype=float), (steps, len(q)))
    forward = (q * b + s) * np.maximum(1 + noise * rng.standard_normal(b.shape), 0.1)
    backward = (k * b + m) * np.maximum(1 + noise * rng.standard_normal(b.shape), 0.1)
    first = cluster.gamma * backward
    start, ready = forward + first, forward + backward
    begin = np.maximum(ready.max(axis=1), start.max(axis=1) + cluster.t_o)[:, None]
    done = begin + cluster.t_u + sent
    over = cluster.t_o + start.max(axis=1, keepdims=True) - start
    last = cluster.t_u + sent + ready.max(axis=1, keepdims=True) - ready
    return StepObservations(b, forward, backward, first, over, last, np.repeat(done, len(q), axis=1))


def even_plan(context):
    return BatchPlan(context.total_batch_size, even_sizes(context.total_batch_size, len(context.identities)))


def drive(planner, cluster, plan, context, decisions, rng, **how):
    """Measure, decide, adopt, again and again; returns planner, plan and the decisions that changed it."""
    changes = []
    for decision in range(decisions):
        planner, proposal = planner.decide(measure(cluster, plan.local_batch_sizes, rng, **how), plan, context)
        if proposal is not None:
            plan = proposal.plan
            changes.append(decision)
    return planner, plan, changes


def excess(cluster, plan):
    """How much longer a step takes than it has to, by the true times."""
    return cluster.step_time(plan.local_batch_sizes) / solve_optperf(cluster, plan.total_batch_size).step_time - 1


def random_cluster(seed):
    rng = np.random.default_rng(seed)

    def node():
        sample = 0.001 * np.exp(0.7 * rng.standard_normal())
        return NodeTimeModel(0.35 * sample, rng.uniform(0, 0.006), 0.65 * sample, rng.uniform(0, 0.004))

    nodes = tuple(node() for _ in range(rng.integers(2, 9)))
    return ClusterTimeModel(nodes, rng.uniform(0.05, 0.4), rng.uniform(0, 0.04), rng.uniform(0, 0.005))
