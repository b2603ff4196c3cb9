"""The policy of the total batch (C sec. 4): what a decision may change, by how much, and when."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.goodput import GoodputPlanner
from tests.equations import clusters
from tests.equations.clusters import line_workers, measure

WORKERS = line_workers(0.001, 0.003, fixed=0.01)
UNKNOWN, NOTHING = RunningNoiseScale(), StepObservations.empty(2)


def noise(phi, steps=1000):
    """A noise scale of which so many steps were seen at 40 samples, without scatter."""
    return RunningNoiseScale().update(trace=phi, global_sq_norm=1 + phi / 40, total_batch_size=40, steps=steps)


def context(total, phi=None, **known):
    known = {
        "capacities": (),
        "noise": phi if phi is None or isinstance(phi, RunningNoiseScale) else noise(phi),
    } | known
    return clusters.context(total, 2, **known)


def plan(*sizes):
    return BatchPlan(sum(sizes), sizes)


def seen(sizes, workers=WORKERS, times=8):
    return measure(workers, sizes, np.random.default_rng(0), steps=times, noise=0.0)


def naive(most=4096, **fields):
    return GoodputPlanner(most, **{"initial_total": 40, "steps": 100, **fields})


def planner(most=4096, workers=WORKERS, **fields):
    """One that has seen both workers at two sizes, and has waited long enough."""
    known = GoodputPlanner(most)
    for sizes in ((20, 20), (30, 10)):
        known = known.decide(seen(sizes, workers), plan(*sizes), context(40)).planner
    return replace(known, **{"initial_total": 40, "steps": 100, **fields})


def decided(before, sizes, phi, observed=NOTHING, **known):
    """``(total of the next steps over all micro-batches, its split, the decision)``."""
    decision = before.decide(observed, plan(*sizes), context(sum(sizes), phi, **known))
    chosen = decision.proposal.plan if decision.proposal else plan(*sizes)
    return chosen.total_batch_size * decision.planner.accumulation, chosen.local_batch_sizes, decision


def test_the_total_jumps_to_the_best_one_and_as_far_as_the_noise_scale_is_sure():
    for phi in (10.0, 300.0, 2000.0):
        total, _, decision = decided(planner(), (30, 10), phi)
        table = {one.total_batch_size: one.throughput * (phi + 40) / (phi + one.total_batch_size)
                 for one in decision.planner.table}  # fmt: skip
        assert table[total] > 0.98 * max(table.values())
    sure, few = (decided(planner(), (30, 10), noise(30_000.0, steps))[0] for steps in (100_000, 8))
    assert 40 < few < 0.7 * sure, "eight steps do not tell 30,000 samples from far fewer"
    assert decided(planner(), (30, 10), 0.0)[0] < 10


def test_a_change_of_the_total_has_to_gain_enough_and_to_pay():
    known = planner(hysteresis=0.0).decide(NOTHING, plan(30, 10), context(40, 300.0)).planner
    goodputs = {candidate.total_batch_size: candidate.goodput for candidate in known.table}
    gain = max(goodputs.values()) / goodputs[40] - 1
    assert gain > 0.01
    assert decided(planner(hysteresis=gain * 1.01), (30, 10), 300.0)[0] == 40
    assert decided(planner(hysteresis=gain * 0.99), (30, 10), 300.0)[0] > 40
    dear, _, decision = decided(planner(), (30, 10), 1e6, change_cost=1e6)
    assert (dear, decision.proposal) == (40, None)
    assert decided(planner(), (30, 10), 1e6)[2].soon, "more is likely to follow"


@pytest.mark.parametrize("start", [naive, planner])
def test_while_noise_or_the_first_total_is_unknown_only_the_split_changes(start):
    for before, phi in ((start(), None), (start(), UNKNOWN), (start(initial_total=None), 1e6)):
        total, split, decision = decided(before, (20, 20), phi, seen((20, 20)), epoch_begins=True)
        assert (total, split[0] > 25) == (40, True)
        assert (decision.planner.steps, decision.error > 0) == (108, True)


def test_bounds_of_the_total_and_of_the_workers():
    assert decided(planner(60), (30, 10), 1e6)[0] == 60
    assert decided(planner(min_total_batch_size=32), (30, 10), 0.0)[0] == 32
    slow_link = planner(workers=replace(WORKERS, t_u=1.0), initial_total=28)
    assert decided(slow_link, (20, 8), 1e6, max_local=(30, 10))[:2] == (40, (30, 10))
    assert decided(planner(), (20, 20), 0.0, min_local=(20, 6))[1] == (20, 6)


# while workers have been seen at one size only, a larger total tells the constant part of a step


@pytest.mark.parametrize(
    ("phi", "expected"),
    [(61.0, 60), (0.0, 50)],  # (61 + 40) / (61 + 60) = 0.835, 40 / 50 = 0.8
)
def test_one_size_known_is_explored_and_wastes_a_fifth_of_the_samples_at_most(phi, expected):
    total, _, decision = decided(naive(), (20, 20), phi, seen((20, 20)))
    assert abs(total - expected) <= 0.1 * expected
    assert (decision.planner.steps, decision.soon) == (0, True)
    assert (phi + 40) / (phi + total) >= 0.8


# micro-batches


def test_the_number_of_micro_batches_changes_only_when_an_epoch_begins():
    slow_link = planner(workers=replace(WORKERS, t_u=1.0))
    assert decided(slow_link, (20, 20), 1e6, max_local=(20, 20))[2].proposal is None
    total, split, decision = decided(slow_link, (20, 20), 1e6, max_local=(20, 20), epoch_begins=True)
    count = decision.planner.accumulation
    assert (count > 1, max(split) <= 20, total) == (True, True, count * sum(split))
