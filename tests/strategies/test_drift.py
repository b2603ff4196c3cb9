"""Processes whose speeds swing, end to end: where the split ends, and that it is what a simulation would decide."""

import random

import numpy as np
import torch

from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.engine.engine import HeteroEngine
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, fit, run_ranks

TOTAL, STEPS, CALM = 120, 150, 80
DEVICES = np.array([[0.30, 3.0, 0.50, 3.0], [0.40, 2.0, 0.60, 4.0], [0.60, 3.0, 1.00, 4.0]]) / 1e3
"""Seconds ``(q, s, k, m)`` of each rank: ``a = q b + s`` outside of the backward pass, ``P = k b + m`` in it."""


def swing(rank, step):
    """Factor on what rank 1 takes: slower, as it was, faster, as it was, and calm in the end."""
    return (1.25, 1.0, 0.8, 1.0)[step // 20] if rank == 1 and step < CALM else 1.0


class Paced(Regressor):
    """Takes what its device would take, 2 % more or less, by counted time."""

    def __init__(self, rank):
        super().__init__(features=8, dtype=torch.float32, lr=1e-3)
        self.rank, self.noise, self.counted = rank, random.Random(rank), CountedTime(rank, 1e8)

    def forward(self, x):
        q, s, k, m = DEVICES[self.rank] * swing(self.rank, self.trainer.global_step) * self.noise.gauss(1.0, 0.02)
        self.counted.sleep(q * len(x) + s)
        y = self.net(x)
        y.register_hook(lambda _: self.counted.sleep(k * len(x) + m))
        return y


def _train(rank):
    looks, decide, exchange = [], PerfModelPlanner.decide, HeteroEngine.exchange

    def recorded(self, observations, current, context):
        decision = decide(self, observations, current, context)
        looks.append([observations, current, context, decision.proposal, decision.kept, True])
        return decision

    def told(self, planner, *, last=False, **kwargs):
        before = len(looks)
        done = exchange(self, planner, last=last, **kwargs)
        for look in looks[before:]:
            look[-1] = not last  # what the round at the end of training proposes comes too late
        return done

    PerfModelPlanner.decide, HeteroEngine.exchange = recorded, told
    dataset = Points(TOTAL * STEPS, 8, torch.float32)
    found = fit(rank, {"policy": "perf_model"}, 3, TOTAL // 3, model=Paced(rank), dataset=dataset, max_epochs=1)
    return found["history"], looks


def seconds(sizes):
    """What a step takes by the devices' own times, when all are calm."""
    q, s, k, m = DEVICES.T
    return float(((q + k) * np.array(sizes) + s + m).max())


def least():
    """Time of the best split of all."""
    return min(seconds((i, j, TOTAL - i - j)) for i in range(1, TOTAL) for j in range(1, TOTAL - i))


def test_after_a_swing_of_speeds_the_split_is_near_the_optimum_and_what_a_simulation_decides():
    """By the known times of the devices; no clock is asked, neither here nor in the ranks.

    A planner that gets the observations of the run, and nothing else, proposes the same plans for the same reasons.
    """
    results = run_ranks(_train, 3)
    history, looks = results[0]
    assert all(other == history for other, _ in results)
    assert [len(seen) for _, seen in results[1:]] == [0, 0]
    assert seconds((TOTAL // 3,) * 3) > 1.4 * least()
    assert max(step for _, step, _ in history) < STEPS
    assert seconds(history[-1][2]) <= 1.03 * least(), history

    planner = PerfModelPlanner()
    for observations, current, context, proposal, kept, _ in looks:
        decision = planner.decide(observations, current, context)
        assert (decision.proposal, decision.kept) == (proposal, kept)
        planner = decision.planner
    adopted = [
        proposal.plan.local_batch_sizes for *_, proposal, _, in_time in looks if proposal is not None and in_time
    ]
    assert adopted == [sizes for _, _, sizes in history[1:]]
