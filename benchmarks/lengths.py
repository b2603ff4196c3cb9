"""Step times of batches of unequal lengths on emulated workers: by number, by cost, and the optimum.

Workers have exactly known speeds, and lengths are lognormal. A plan is learned from times with 3 % noise over 300
steps; the figures are those of the 100 steps behind them, without noise. The optimum is computed anew here, and is
exact for padded batches; for packed ones it is a bound that no division beats.

It needs ``pip install '.[transformers]'``.

    python benchmarks/lengths.py
"""

import argparse
from itertools import permutations, starmap
from pathlib import Path

import numpy as np
from hardware import write_table
from transformers.trainer_pt_utils import BatchRebalanceSampler

from lightning_hetero.core import BatchPlan, PlanContext, StepObservations
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Decision
from lightning_hetero.core.timing.cost.features import share_features
from lightning_hetero.data.cost.division import CostDivision
from lightning_hetero.engine.cost_learning import CostLearning

HERE = Path(__file__).parent
PADDED, PACKED, ATTENTION = (0, 0, 1, 0, 0), (0, 1, 0, 0, 0), (0, 0, 0.7, 0, 0.3)
ROWS = (
    ("1/1", "padded", (1, 1), PADDED, 0.0),
    ("1/1/1/1", "padded", (1, 1, 1, 1), PADDED, 0.0),
    ("1/0.5/0.25", "padded", (1, 0.5, 0.25), PADDED, 0.0),
    ("4/1", "padded", (4, 1), PADDED, 0.0),
    ("1/0.5/0.25", "packed", (1, 0.5, 0.25), PACKED, 0.0),
    ("1/0.5/0.25", "padded, attention's square", (1, 0.5, 0.25), ATTENTION, 0.0),
    ("1/0.5/0.25", "padded, a fixed time", (1, 0.5, 0.25), PADDED, 8.0),
)
PER_WORKER, LEARNING, MEASURED, ROUND, NOISE = 16, 300, 100, 20, 0.03
METHODS = ("even", "count", "rebalance", "cost")


class Cluster:
    """Workers that take ``(fixed + theta . f) / speed`` milliseconds for a share, and their batches."""

    def __init__(self, speeds, theta, fixed, seed):
        self.rng, self.speeds, self.theta, self.fixed = np.random.default_rng(seed), np.array(speeds), theta, fixed
        self.total = PER_WORKER * len(speeds)
        self.costs = self.rng.lognormal(0, 0.8, self.total * (LEARNING + MEASURED))
        self.costs /= self.costs.mean()
        order = self.rng.permutation(len(self.costs))
        self.batches = order.reshape(-1, self.total)

    def features(self, shares):
        return np.array([share_features(self.costs[share]) for share in shares])

    def times(self, shares):
        return (self.fixed + self.features(shares) @ np.array(self.theta)) / self.speeds * 1e-3

    def observe(self, shares, planned, work):
        """What the workers measure in some steps."""
        compute = np.array([self.times(share) for share in shares])
        compute = compute * np.exp(self.rng.normal(0, NOISE, compute.shape))
        end, zero = compute.max(axis=1, keepdims=True) + 1e-4, np.zeros_like(compute)
        return StepObservations(
            planned, 0.4 * compute, 0.6 * compute, 0.1 * compute, zero, end - compute, end + zero, work=work
        )


def cut_by_count(batch, sizes):
    """The batch in its own order, cut by the number of samples."""
    return np.split(batch, np.cumsum(sizes)[:-1])


def learned(cluster, by_cost):
    """Shares of each measured batch under the plan that was learned from the steps before."""
    workers = len(cluster.speeds)
    context = PlanContext(cluster.total, tuple(f"worker {i}" for i in range(workers)), (1,) * workers)
    plan, planner = BatchPlan(cluster.total, (PER_WORKER,) * workers), PerfModelPlanner()
    division = CostDivision(cluster.costs, CostWeights.of("padded_cost"))
    learning = CostLearning(division)

    def divided(batch):
        if not by_cost:
            return cut_by_count(batch, plan.local_batch_sizes)
        return [np.array(own) for own in division.divide(batch, plan.local_batch_sizes, plan).indices]

    for first in range(0, LEARNING, ROUND):
        shares = list(map(divided, cluster.batches[first : first + ROUND]))
        planned = np.tile(np.array(plan.local_batch_sizes, dtype=float), (ROUND, 1))
        seen = cluster.observe(shares, planned, np.array(list(map(cluster.features, shares))) if by_cost else None)
        seen = learning.observe(seen, plan) if by_cost else seen
        decision = Decision.of(planner.decide(seen, plan, context), planner, cluster.total)
        planner = decision.planner or planner
        decision = learning.carried_by(decision, plan) if by_cost else decision
        plan = decision.proposal.plan if decision.proposal is not None else plan
    return list(map(divided, cluster.batches[LEARNING:]))


class Rebalanced(BatchRebalanceSampler):
    """Transformers' sampler for equal GPUs: sorted groups, whose sizes are adjusted until their costs are alike.

    In place of its own model of the cost, it is given the true one, so that it has nothing to be wrong about.
    """

    def __init__(self, cluster):
        self.priced = cluster
        super().__init__(cluster.costs.tolist(), cluster.total, len(cluster.speeds), grad_accum=1)

    def _group_cost(self, group):
        return float(self.priced.features([[index for index, _ in group]])[0] @ np.array(self.priced.theta))

    def _cost(self, bs, max_len):
        return float(np.array([bs, bs * max_len, bs * max_len, bs * max_len**2, bs * max_len**2]) @ self.priced.theta)

    def divide(self, batch):
        return [own for (own,) in self._assign(batch.tolist(), self.priced.costs[batch].tolist())]


def optimum(cluster, batch):
    """Least seconds of the step: exact with padding, a bound without.

    Some order of the workers has an optimal division into blocks of the samples, sorted by length: exchanging samples
    between two blocks that overlap makes no block longer. In a given time, each worker takes as many as it can.
    """
    lengths, (per_sample, _, padded, _, squared) = np.sort(cluster.costs[batch])[::-1], cluster.theta
    below = (lengths.sum() * (1 - squared) + len(cluster.speeds) * cluster.fixed) / sum(cluster.speeds)
    if not padded:
        return below * 1e-3

    def done(order, time):
        first = 0
        for speed in order:
            longest = lengths[first]
            first += int(
                max(0.0, time * speed - cluster.fixed) / (per_sample + padded * longest + squared * longest**2)
            )
            if first >= len(lengths):
                return True
        return False

    above, orders = below * 1e3, set(permutations(cluster.speeds))
    while above > 1.0005 * below:
        time = (below * above) ** 0.5
        if any(done(order, time) for order in orders):
            above = time
        else:
            below = time
    return below * 1e-3


def measure(speeds, theta, fixed, seed):
    """Share of the optimum that each method reaches in the mean of the measured steps."""
    cluster = Cluster(speeds, theta, fixed, seed)
    batches = cluster.batches[LEARNING:]
    shares = {
        "even": [cut_by_count(batch, [PER_WORKER] * len(speeds)) for batch in batches],
        "count": learned(cluster, by_cost=False),
        "rebalance": list(map(Rebalanced(cluster).divide, batches)),
        "cost": learned(cluster, by_cost=True),
    }
    best = sum(optimum(cluster, batch) for batch in batches)
    return {name: best / sum(cluster.times(one).max() for one in shares[name]) for name in METHODS}


def row(workers, cost, speeds, theta, fixed, seeds=5):
    found = [measure(speeds, theta, fixed, seed) for seed in range(seeds)]
    figures = {}
    for name in METHODS:
        values = [one[name] for one in found]
        figures |= {name: round(float(np.mean(values)), 3), f"{name}_least": round(min(values), 3)}
    return {"workers": workers, "cost_of_a_share": cost, **figures}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lengths.json")
    title = "Share of the optimum that the steps of a batch of unequal lengths reach, mean and least of 5 seeds"
    write_table(list(starmap(row, ROWS)), parser.parse_args().out, title)


if __name__ == "__main__":
    main()
