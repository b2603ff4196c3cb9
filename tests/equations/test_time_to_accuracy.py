"""The policy of density and total by time to accuracy (S sec. 4): it follows the link, and stays where that stays.

Totals, profiles and resumed runs: tests/decisions/test_time_to_accuracy.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import density_penalty
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.message_times import MessageTimes
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import DensitySettings, TimeToAccuracyPlanner

SPEEDS, FIXED, LATENCY = np.array([0.001, 0.003]), 0.02, 1e-3  # seconds of a sample, of a step, of a message
SIZE = MessageSize(2_000_000, 2, parts=(6,), listed=64, marked=64, marked_from=2.0, align=1)  # 64 + 8e6 * density


def planner(**fields):
    return TimeToAccuracyPlanner(**{"initial_total": 40, **fields})


class Training:
    """Two workers and a link, in windows of eight steps under a planner's decisions.

    Messages take ``busy`` seconds more in a step than alone, and their first ``burst`` bytes cross at once, as a token
    bucket lets them. So many steps came before that the training is no longer young.
    """

    def __init__(self, planner, total=40, density=0.01, *, scatter=0.0, stale=False, seed=0, step=100_000,
                 latency=LATENCY, burst=0.0, busy=0.0, handling=0.0, may_be_stale=False):  # fmt: skip
        self.planner, self.density, self.stale, self.step = planner, density, stale, step
        self.plan, self.rng = BatchPlan(total, (total // 2, total - total // 2)), np.random.default_rng(seed)
        self.scatter, self.burst, self.busy, self.handling, self.latency = scatter, burst, busy, handling, latency
        self.times = MessageTimes((LinkEstimate(),) * 2, 0.5 * LATENCY)  # half of it was measured before training
        self.may_be_stale = may_be_stale
        self.densities, self.ways = [], []

    def crossing(self, rate, density=None):
        return self.latency + max(SIZE.bytes(density or self.density) - self.burst, 0.0) / rate

    def window(self, rate):
        sizes = np.tile(np.array(self.plan.local_batch_sizes, float), (8, 1))
        compute = (FIXED + sizes * SPEEDS) * np.exp(self.rng.normal(0.0, self.scatter / 4, (8, 2)))
        sent = self.busy + self.crossing(rate) * np.exp(self.rng.normal(0.0, self.scatter, (8, 1)))
        own, slowest = self.handling * self.density, compute.max(axis=1, keepdims=True)
        step = np.maximum(slowest + own, sent) if self.stale else slowest + own + sent
        zeros = np.zeros_like(compute)
        sync = zeros if self.stale else slowest - compute + own + sent
        seen = StepObservations(sizes, compute / 3, 2 * compute / 3, compute / 3, zeros, sync, np.tile(step, (1, 2)))
        seconds = float(np.median(sent))
        self.times = self.times.observe(SIZE.bytes(self.density), np.full(2, seconds))
        self.step += 8
        link = MessageLink(
            self.density, SIZE, self.times.links, seconds, self.stale, self.times.latency, self.times.latency_error,
            self.may_be_stale, self.step,
        )  # fmt: skip
        self.context = PlanContext(self.plan.total_batch_size, ("a", "b"), (1, 1), link=link)
        self.decision = self.planner.decide(seen, self.plan, self.context)
        self.planner, proposal = self.decision
        self.plan = self.plan if proposal is None else proposal.plan
        if self.decision.density is not None:
            self.density = self.decision.density.density
        if self.may_be_stale and self.decision.stale is not None:
            self.stale = self.decision.stale
        self.ways.append(self.stale)
        self.densities.append(self.density)

    def run(self, rate, windows):
        for _ in range(windows):
            self.window(rate)
        return self

    @property
    def compute(self):
        return float((FIXED + np.array(self.plan.local_batch_sizes) * SPEEDS).max())

    def objective(self, density, rate):
        """Time to accuracy as it truly is, relative (S eq. 5)."""
        own, sent = self.handling * density, self.busy + self.crossing(rate, density)
        seconds = max(self.compute + own, sent) if self.stale else self.compute + own + sent
        return (1.0 + density_penalty(density)) * seconds


def changes(values):
    return [(a, b) for a, b in itertools.pairwise(values) if a != b]


def turns(values):
    """How often values that fell rise, or the other way round."""
    return len(changes([b > a for a, b in changes(values)]))


def test_on_any_trace_the_density_comes_near_the_best_and_hardly_turns_on_the_same_link(seed):
    """Rates of a hundredfold range, noise, a token bucket, messages that take longer in a step than alone."""
    rng = np.random.default_rng(seed)
    training = Training(
        planner(), seed=seed, density=float(np.exp(rng.uniform(*np.log([0.001, 0.3])))), stale=bool(seed % 2),
        scatter=float(rng.choice([0.0, 0.1, 0.2])), burst=float(rng.choice([0.0, 2e4, 7e4])),
        busy=float(rng.choice([0.0, 3e-3])), handling=float(rng.choice([0.0, 0.05])),
    )  # fmt: skip
    for _ in range(3):
        rate, begin = float(np.exp(rng.uniform(*np.log([1e6, 1e8])))), len(training.densities)
        training.run(rate, 25)
        seen = training.densities[max(begin - 1, 0) :]
        assert turns(seen) <= (3 if training.burst else 0), seen
        assert len(changes(seen[-12:])) <= 1, seen
        best = min(training.objective(density, rate) for density in np.geomspace(0.001, 0.3, 60))
        assert training.objective(training.density, rate) < 1.12 * best
    assert training.plan.total_batch_size == 40
    assert training.plan.shares[0] > 2 * training.plan.shares[1], "the split is not that of the speeds"


@pytest.mark.parametrize("scatter", [0.0, 0.15])
def test_messages_are_late_only_where_that_is_worth_its_price_and_after_less_was_sent(scatter):
    """A link on which enough can be sent in time, one of a hundredth of the rate, and the first again."""
    training = Training(planner(), may_be_stale=True, scatter=scatter)
    for rate, windows, stale in ((50e6, 10, False), (2e5, 20, True), (50e6, 16, False)):
        assert training.run(rate, windows).stale is stale
    assert len(changes(training.ways)) == 2, "to and fro"
    first = Training(planner(), density=0.1, may_be_stale=True).run(2e5, 12)
    less = next(window for window, density in enumerate(first.densities) if density < 0.1)
    assert first.density == first.densities[less] == 0.001
    assert first.ways.index(True) > less
    free = Training(planner(profile=lambda density, total: -np.log10(density)), may_be_stale=True).run(2e6, 8)
    assert free.stale, "a profile's probe trainings had late gradients, so that they cost no more"


def test_the_density_stays_within_its_bounds_and_growth_and_a_link_of_next_to_nothing_is_said():
    assert Training(planner(max_density=0.1), density=0.9).run(1e9, 3).density == 0.1
    assert Training(planner(min_density=0.05), density=0.001).run(1e5, 3).density == 0.05
    for growth in (1.4, 3.0):
        settings = DensitySettings(max_growth=growth)
        steps = changes(Training(planner(density_settings=settings), density=0.001).run(75e6, 6).densities)
        assert max(b / a for a, b in steps) == pytest.approx(growth, rel=0.02)
    fast = Training(planner()).run(75e6, 4)
    assert not fast.decision.density.communication_bound
    poor = fast.run(1e4, 4)
    assert (poor.density, poor.decision.density.communication_bound) == (0.001, True)
    assert "communication-bound" in poor.decision.density.describe()


def test_predictions_include_the_messages():
    training = Training(planner()).run(10e6, 7)
    where = replace(training.context, link=replace(training.context.link, density=training.density))
    seconds = training.compute + training.crossing(10e6)
    assert training.planner.predict(training.plan, where) == pytest.approx(seconds, rel=0.05)
    stale = replace(where, link=replace(where.link, stale=True))
    assert training.planner.predict(training.plan, stale) == pytest.approx(training.compute, rel=0.05)


def test_the_papers_rule_of_idle_time_moves_five_percent_at_a_time():
    training = Training(planner(idle_rule=True), scatter=0.1).run(75e6, 8)
    fast = training.density
    thin = training.run(2e6, 20).density
    assert thin < fast / 2
    assert training.run(75e6, 40).density > 2 * thin
