"""The policy of density and total by time to accuracy (S sec. 4): it follows the link, and stays where that stays.

Totals, profiles and resumed runs: tests/decisions/test_time_to_accuracy.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import density_penalty
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.message_times import MessageTimes
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile

SPEEDS, FIXED, LATENCY = np.array([0.001, 0.003]), 0.02, 1e-3  # seconds of a sample, of a step, of a message
SIZE = MessageSize(2_000_000, 2, parts=(6,), listed=64, marked=64, marked_from=2.0, align=1)  # 64 + 8e6 * density


def planner(**fields):
    return TimeToAccuracyPlanner(**{"initial_total": 40, **fields})


class Training:
    """Two workers and a link, in windows of eight steps under a planner's decisions.

    Messages take ``busy`` seconds more in a step than alone, and their first ``burst`` bytes cross at once, as a token
    bucket lets them.
    """

    def __init__(self, planner, total=40, density=0.01, *, scatter=0.0, stale=False, seed=0,
                 latency=LATENCY, burst=0.0, busy=0.0, handling=0.0):  # fmt: skip
        self.planner, self.density, self.stale = planner, density, stale
        self.plan, self.rng = BatchPlan(total, (total // 2, total - total // 2)), np.random.default_rng(seed)
        self.scatter, self.burst, self.busy, self.handling, self.latency = scatter, burst, busy, handling, latency
        self.times = MessageTimes(latency=0.5 * LATENCY)  # half of it was measured before training
        self.densities = []

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
        link = MessageLink(self.density, SIZE, self.times.rates, seconds, self.stale, self.times.latency)
        self.context = PlanContext(self.plan.total_batch_size, ("a", "b"), (1, 1), link=link)
        self.decision = self.planner.decide(seen, self.plan, self.context)
        self.planner, proposal = self.decision
        self.plan = self.plan if proposal is None else proposal.plan
        if self.decision.density is not None:
            self.density = self.decision.density.density
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


def test_on_any_trace_the_density_comes_near_the_best_and_stays_there(seed):
    """Rates of a hundredfold range, noise, a token bucket, messages that take longer in a step than alone."""
    rng = np.random.default_rng(seed)
    training = Training(
        planner(), seed=seed, density=float(np.exp(rng.uniform(*np.log([0.001, 0.3])))), stale=bool(seed % 2),
        scatter=float(rng.choice([0.0, 0.1, 0.2])), burst=float(rng.choice([0.0, 2e4, 7e4])),
        busy=float(rng.choice([0.0, 3e-3])), handling=float(rng.choice([0.0, 0.05])) * (seed % 2 == 0),
    )  # fmt: skip
    for _ in range(3):
        rate = float(np.exp(rng.uniform(*np.log([1e6, 1e8]))))
        training.run(rate, 25)
        best = min(training.objective(density, rate) for density in np.geomspace(0.001, 0.3, 60))
        reached = [training.objective(density, rate) for density in training.densities[-8:]]
        assert np.median(reached) < (1.25 if training.burst else 1.12) * best
    assert training.plan.total_batch_size == 40
    assert training.plan.shares[0] > 2 * training.plan.shares[1], "the split is not that of the speeds"


def test_the_density_goes_to_its_optimum_at_once_within_bounds_and_a_link_of_next_to_nothing_is_said():
    link = MessageLink(0.01, SIZE, (75e6, 75e6), latency=0.05)
    begun, tried = planner().begin(link).density, np.geomspace(0.001, 0.3, 400)
    sent = [link.transfer(density) * (1 + density_penalty(density)) for density in (begun, *tried)]
    assert sent[0] < 1.01 * min(sent)
    fast = Training(planner(), density=0.001).run(75e6, 2)  # no link was measured before training
    best = min(fast.objective(density, 75e6) for density in np.geomspace(0.001, 0.3, 60))
    assert fast.objective(fast.density, 75e6) < 1.05 * best
    assert Training(planner(max_density=0.1), density=0.9).run(1e9, 3).density == 0.1
    assert Training(planner(min_density=0.05), density=0.001).run(1e5, 3).density == 0.05
    assert not fast.decision.density.communication_bound
    poor = fast.run(1e4, 1)
    assert (poor.density, poor.decision.density.communication_bound) == (0.001, True)
    assert "communication-bound" in poor.decision.density.describe()


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("mbit", [10, 100, 1000])
def test_after_two_steps_the_density_is_near_the_best_for_measured_link_and_computing(mbit, stale):
    even = 0.2  # seconds of the slower worker
    devices = [DeviceProfile(0.0, 0.02, slow * 1e-3, 0.02, jitter=0.05) for slow in (2, 5)]
    link = LinkProfile(gradient_bytes=80e6, rate=mbit * 125e3, latency=LATENCY, jitter=0.1)
    result = ClusterSimulator(
        devices, 64, link=link, policy=planner(), compression=BlockTopK(warmup_steps=0), staleness=int(stale)
    ).run(3)

    def objective(density):
        sent = LATENCY + 80e6 / 64 * density / 2 * 34 / link.rate  # blocks of 16 elements, shared by two workers
        return (1.0 + density_penalty(density)) * (max(even, sent) if stale else even + sent)

    assert objective(result.densities[2]) < 1.03 * min(map(objective, np.geomspace(0.001, 0.3, 200)))


@pytest.mark.parametrize("lost", [0.0, 0.23, 0.5])
@pytest.mark.parametrize("mbit", [100, 500])
def test_what_stale_messages_cost_computing_is_measured(mbit, lost, seed):
    """Computing gets longer by a share of the time that a message is under way; 0.23 is 30 % where one always is."""
    devices = [DeviceProfile(0.0, 0.02, slow * 1e-3, 0.02, jitter=0.05) for slow in (2, 5)]
    link = LinkProfile(gradient_bytes=160e6, rate=mbit * 125e3, latency=LATENCY, jitter=0.1, contention=lost)
    settings = {"compression": BlockTopK(warmup_steps=0), "staleness": 1, "seed": seed}
    result = ClusterSimulator(devices, 64, link=link, policy=planner(), **settings).run(160)
    alone = max(0.04 + size * slow * 1e-3 for size, slow in zip((46, 18), (2, 5), strict=True))

    def objective(density):
        sent = LATENCY + 160e6 / 64 * density / 2 * 34 / link.rate
        return (1.0 + density_penalty(density)) * max(alone + lost * sent, sent)

    reached = float(np.median([objective(density) for density in result.densities[40:]]))
    assert reached < 1.06 * min(map(objective, np.geomspace(0.001, 0.3, 200)))


def test_of_few_long_steps_the_density_follows_and_the_split_waits_for_more():
    training = Training(planner(), density=0.1).run(75e6, 2)
    before, plan = training.density, training.plan
    sizes = np.tile(np.array(plan.local_batch_sizes, float), (2, 1))
    compute, zeros = FIXED + sizes * SPEEDS[::-1], np.zeros_like(sizes)
    seen = StepObservations(sizes, compute / 3, 2 * compute / 3, zeros, zeros, zeros, compute)
    link = MessageLink(before, SIZE, (1e6, 1e6), 1e-6 * SIZE.bytes(before), False, LATENCY)
    planners = [training.planner]
    for _ in range(4):
        decision = planners[-1].decide(seen, plan, replace(training.context, link=link))
        planners.append(decision.planner)
    assert all(one.density < before / 4 for one in planners[1:])
    assert [one.model == planners[0].model for one in planners] == [True] * 4 + [False]


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
