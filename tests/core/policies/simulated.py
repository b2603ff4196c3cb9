"""Simulated clusters of known speed, and the loop that a policy closes with them."""

from dataclasses import replace

import numpy as np

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

FAST, MIDDLE, SLOW = (
    NodeTimeModel(0.0004, 0.004, 0.0008, 0.003),
    NodeTimeModel(0.0008, 0.008, 0.0016, 0.003),
    NodeTimeModel(0.0020, 0.005, 0.0040, 0.006),
)


CLUSTER = ClusterTimeModel((FAST, MIDDLE, SLOW), gamma=0.2, t_o=0.02, t_u=0.004)


def context(total, workers, **changes):
    names = tuple(f"host-{i}" for i in range(workers))
    return PlanContext(total, names, **{"min_local": (1,) * workers, "capacities": (1.0,) * workers, **changes})


def saving(planner, cluster, times, plan, running, ctx):
    """Share of a step that a plan saves in expectation, and the share that it loses to what is not known."""
    here = np.array(running.local_batch_sizes) * (ctx.total_batch_size / running.total_batch_size)
    return planner._prediction(times, ctx).saving(cluster, plan.local_batch_sizes, here)


def slowed(cluster, rank, factor):
    node = cluster.nodes[rank]
    slow = NodeTimeModel(*(factor * value for value in (node.q, node.s, node.k, node.m)))
    return replace(cluster, nodes=(*cluster.nodes[:rank], slow, *cluster.nodes[rank + 1 :]))


def measure(cluster, sizes, rng, *, steps=10, noise=0.02):
    """What the workers measure of ``steps`` steps; whoever is ready early waits inside its synchronisation."""
    b = np.broadcast_to(np.asarray(sizes, dtype=float), (steps, len(sizes)))
    q, s, k, m = np.array([(n.q, n.s, n.k, n.m) for n in cluster.nodes]).T
    forward = (q * b + s) * (1 + noise * rng.standard_normal(b.shape))
    backward = (k * b + m) * (1 + noise * rng.standard_normal(b.shape))
    first = cluster.gamma * backward * (1 + noise * rng.standard_normal(b.shape))
    start, ready = forward + first, forward + backward
    return StepObservations(
        b,
        forward,
        backward,
        first,
        cluster.t_o + start.max(axis=1, keepdims=True) - start,
        cluster.t_u + ready.max(axis=1, keepdims=True) - ready,
        np.zeros_like(b),
    )


def drive(planner, cluster, plan, context, decisions, rng, **how):
    """Measure, decide, adopt, again and again; returns planner, plan and the decisions that changed it."""
    changes = []
    for decision in range(decisions):
        planner, proposal = planner.decide(measure(cluster, plan.local_batch_sizes, rng, **how), plan, context)
        if proposal is not None:
            assert proposal.reason
            assert proposal.plan.total_batch_size == context.total_batch_size
            plan = proposal.plan
            changes.append(decision)
    return planner, plan, changes


def even_plan(context):
    return BatchPlan(context.total_batch_size, even_sizes(context.total_batch_size, len(context.identities)))


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


def learned(kind, ctx):
    return drive(POLICIES[kind].factory(), CLUSTER, even_plan(ctx), ctx, 6, np.random.default_rng(0))[0]
