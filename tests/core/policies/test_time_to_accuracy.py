"""The planner of density and total on a simulated cluster: it follows the link, and stays where the link stays."""

import io
import math
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.bayesian_search import ProfilePenalty
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.core.compression.objective import density_penalty
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink, without_messages
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.message_times import MessageTimes
from lightning_hetero.core.link.staleness import StaleSettings
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner

SPEEDS = np.array([0.001, 0.003])  # seconds of a sample
FIXED, LATENCY = 0.02, 1e-3  # seconds
SIZE = MessageSize(2_000_000, 2, parts=(6,), listed=64, marked=64, marked_from=2.0, align=1)  # 64 + 8e6 * density


class Cluster:
    """Two workers and a link; runs windows of eight steps under the decisions of a planner.

    Messages of a step are seen with ``scatter``, and take ``busy`` seconds more than their latency. The first ``burst``
    bytes of a message cross at once, as a token bucket lets them. The training has run for so many steps before that it
    is no longer young.
    """

    def __init__(
        self, planner, total=40, density=0.01, scatter=0.0, stale=False, noise=None, latency=LATENCY, seed=0,
        burst=0.0, busy=0.0, handling=0.0, may_be_stale=False, step=100_000,
    ):  # fmt: skip
        self.planner, self.density, self.stale, self.noise = planner, density, stale, noise
        self.plan, self.rng = BatchPlan(total, (total // 2, total - total // 2)), np.random.default_rng(seed)
        self.scatter, self.burst, self.busy, self.handling = scatter, burst, busy, handling
        self.times, self.densities, self.totals = MessageTimes((LinkEstimate(),) * 2, 0.5 * LATENCY), [], []
        self.later = latency  # half of the usual one was measured before training
        self.step, self.may_be_stale, self.ways = step, may_be_stale, []

    def message_bytes(self, density):
        return SIZE.bytes(density)

    def crossing(self, num_bytes, rate, shape=()):
        """Seconds of messages of this size."""
        exact = self.later + max(num_bytes - self.burst, 0.0) / rate
        return exact * np.exp(self.rng.normal(0.0, self.scatter, shape))

    def window(self, rate):
        """One window on a link of this rate, then the planner's decision."""
        shape = (8, 2)
        sizes = np.tile(np.array(self.plan.local_batch_sizes, float), (8, 1))
        compute = (FIXED + sizes * SPEEDS) * np.exp(self.rng.normal(0.0, self.scatter / 4, shape))
        sent = self.busy + self.crossing(self.message_bytes(self.density), rate, (8, 1))
        own = self.handling * self.density
        slowest = compute.max(axis=1, keepdims=True)
        step = np.maximum(slowest + own, sent) if self.stale else slowest + own + sent
        zeros = np.zeros(shape)
        sync = zeros if self.stale else slowest - compute + own + sent
        observations = StepObservations(
            sizes, compute / 3, 2 * compute / 3, compute / 3, zeros, sync, np.tile(step, (1, 2))
        )
        seconds = float(np.median(sent))
        self.times = self.times.observe(self.message_bytes(self.density), np.full(2, seconds))
        self.step += 8
        link = MessageLink(
            self.density, SIZE, self.times.links, seconds, self.stale, self.times.latency,
            self.times.latency_error, self.may_be_stale, self.step,
        )  # fmt: skip
        context = PlanContext(self.plan.total_batch_size, ("a", "b"), (1, 1), noise=self.noise, link=link)
        self.planner, proposal = self.planner.decide(observations, self.plan, context)
        self.plan = self.plan if proposal is None else proposal.plan
        self.density = self.planner.density or self.density
        if self.may_be_stale and self.planner.choice is not None:
            self.stale = self.planner.choice.stale
        self.ways.append(self.stale)
        self.densities.append(self.density)
        self.totals.append(self.plan.total_batch_size)
        return context

    def run(self, rate, windows):
        for _ in range(windows):
            self.window(rate)
        return self

    @property
    def compute(self):
        return float((FIXED + np.array(self.plan.local_batch_sizes) * SPEEDS).max())


def changes(values):
    return [(a, b) for a, b in zip(values, values[1:], strict=False) if a != b]


def planner(**fields):
    return TimeToAccuracyPlanner(initial_total=40, **fields)


@pytest.mark.parametrize("stale", [False, True])
def test_density_follows_the_link_within_a_few_windows(stale):
    cluster = Cluster(planner(), stale=stale).run(75e6, 7)
    fast = cluster.density
    cluster.run(2e6, 5)
    thin = cluster.density
    assert thin < fast / 5
    cluster.run(75e6, 7)
    assert cluster.density > 3 * thin
    transfer = LATENCY + cluster.message_bytes(thin) / 2e6
    assert transfer < (cluster.compute if stale else 0.15 * cluster.compute)
    sizes = cluster.plan.local_batch_sizes
    assert sizes[0] > 2 * sizes[1], "the split is not that of the speeds"
    assert set(cluster.totals) == {40}


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("idle_rule", [False, True])
def test_a_link_that_scatters_is_no_reason_to_go_to_and_fro(idle_rule, stale):
    cluster = Cluster(planner(idle_rule=idle_rule), scatter=0.3, stale=stale).run(10e6, 40)
    settled = cluster.densities[20:]
    moves = changes(settled)
    assert idle_rule or len(moves) <= 1, moves  # that rule is always on its way up or down, and 5 % of a step is much
    assert max(settled) < (10 if idle_rule else 4.5) * min(settled)


def test_density_finds_back_from_the_least():
    """There messages are so small that latency makes the link look slow; each step up shows more of it."""
    cluster = Cluster(planner(), density=0.001).run(75e6, 12)
    assert cluster.density > Cluster(planner(), density=0.3).run(75e6, 12).density / 4
    assert all(later > earlier for earlier, later in changes(cluster.densities))


def test_latency_that_grows_while_training_is_told_from_the_rate():
    """Of a machine that became busy, say: a lower density seems to pay, and that it does not shows the truth."""
    cluster = Cluster(planner(), latency=8e-3).run(75e6, 10)
    assert cluster.times.latency == pytest.approx(8e-3, rel=0.2)
    assert cluster.densities[0] < 0.01 <= cluster.density
    assert all(later > earlier for earlier, later in changes(cluster.densities))


def objective(cluster, density, rate):
    """Time to accuracy as it truly is, relative."""
    own = cluster.handling * density
    sent = cluster.busy + cluster.later + max(cluster.message_bytes(density) - cluster.burst, 0.0) / rate
    seconds = max(cluster.compute + own, sent) if cluster.stale else cluster.compute + own + sent
    return (1.0 + density_penalty(density)) * seconds


SEGMENT = 30  # windows of eight steps on a link of one rate


@pytest.mark.parametrize("seed", range(10))
def test_the_density_follows_any_trace_and_turns_once_at_most_on_the_same_link(seed):
    """Rates of a hundredfold range, noise, a token bucket, messages that take longer in a step than alone.

    It goes too far only where it cannot know better: first bytes that cross at once make small messages look fast.
    """
    rng = np.random.default_rng(seed)
    cluster = Cluster(
        planner(), seed=seed, density=float(np.exp(rng.uniform(*np.log([0.001, 0.3])))), stale=bool(seed % 2),
        scatter=float(rng.choice([0.0, 0.1, 0.2])), burst=float(rng.choice([0.0, 2e4, 7e4])),
        busy=float(rng.choice([0.0, 3e-3])), handling=float(rng.choice([0.0, 0.05])),
    )  # fmt: skip
    for _ in range(4):
        rate = float(np.exp(rng.uniform(*np.log([1e6, 1e8]))))
        begin = len(cluster.densities)
        cluster.run(rate, SEGMENT)
        seen = cluster.densities[max(begin - 1, 0) :]
        moves = changes(seen)
        turns = len(changes([later > earlier for earlier, later in moves]))
        assert turns <= (cluster.burst > 0.0), f"to and fro on a link of {rate:.3g} bytes a second: {moves}"
        assert len(changes(seen[-SEGMENT // 2 :])) <= 1, f"not settled: {seen[-SEGMENT // 2 :]}"
        best = min(objective(cluster, density, rate) for density in cluster.planner.densities)
        assert objective(cluster, cluster.density, rate) < 1.12 * best, (rate, cluster.density)


@pytest.mark.parametrize("scatter", [0.0, 0.15])
def test_messages_come_late_only_where_that_is_worth_its_price(scatter):
    """A link on which enough can be sent in time, one of a hundredth of the rate, and the first again."""
    cluster = Cluster(planner(), may_be_stale=True, scatter=scatter).run(50e6, 20)
    assert not any(cluster.ways), "messages were delayed where they hide anyway, or cost next to nothing"
    cluster.run(2e5, 30)
    assert cluster.ways[-1], "nothing was delayed where even the least message is half of a step"
    assert cluster.compute > 0.8 * cluster.crossing(cluster.message_bytes(cluster.density), 2e5)
    cluster.run(50e6, 30)
    assert not cluster.ways[-1]
    assert len(changes(cluster.ways)) == 2, "to and fro"
    with_profile = Cluster(planner(profile=lambda density, total: -np.log10(density)), may_be_stale=True).run(2e6, 20)
    assert with_profile.ways[-1], "a profile's probe trainings had late gradients, so that they cost no more"


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_sending_less_goes_before_a_delay(density):
    """Both pay on this link; looks count only once the density is what suits it."""
    cluster = Cluster(planner(), density=density, may_be_stale=True).run(2e5, 12)
    less = next(window for window, used in enumerate(cluster.densities) if used < density)
    assert cluster.density == cluster.densities[less] == 0.001
    assert cluster.ways.index(True) == less + StaleSettings().rounds


def test_a_young_training_sends_less_by_and_by():
    """What a cut holds back counts as a share of the steps so far, one way; a profile knows it from its probes."""
    old, young = (Cluster(planner(), density=0.1, step=step).run(20e6, 100) for step in (100_000, 0))
    assert [later < 0.01 for _, later in changes([0.1, *old.densities])] == [True]
    steps = [8 * (window + 1) for window in range(1, 100)]
    moves = [
        (n, before, after)
        for n, before, after in zip(steps, young.densities, young.densities[1:], strict=False)
        if before != after
    ]
    assert len(moves) > 1
    assert all(after < before and 1 / after - 1 / before < n for n, before, after in moves), moves
    assert young.density > 2 * old.density
    told = planner(profile=lambda density, total: -0.1 * np.log10(density))
    assert Cluster(told, density=0.1, step=0).run(20e6, 3).density < 0.01


def test_a_density_outside_the_bounds_is_brought_inside():
    assert Cluster(planner(max_density=0.1), density=0.9).run(1e9, 3).density == 0.1
    assert Cluster(planner(min_density=0.05), density=0.001).run(1e5, 3).density == 0.05


def test_a_link_of_next_to_nothing_is_the_bound_and_says_so():
    cluster = Cluster(planner()).run(75e6, 4).run(1.25e5, 4)
    assert cluster.density == 0.001
    assert not Cluster(planner()).run(75e6, 4).planner.choice.communication_bound
    cluster.run(1e4, 4)
    assert cluster.planner.choice.communication_bound
    assert "communication-bound" in cluster.planner.choice.describe()


NOISE = RunningNoiseScale().update(trace=400.0, global_sq_norm=1.0 + 400 / 40, total_batch_size=40)


def test_a_thin_link_asks_for_larger_totals():
    """Goodput weighs the exchange, which a larger total makes rarer, against efficiency."""
    fields = {"moves_batch": True, "max_total_batch_size": 1000, "min_density": 0.05, "min_steps": 8}
    thick = Cluster(planner(**fields), noise=NOISE).run(1e9, 16)
    thin = Cluster(planner(**fields), noise=NOISE).run(2e6, 16)
    assert thin.plan.total_batch_size > 1.3 * thick.plan.total_batch_size > 40
    assert len(changes(thin.totals[10:])) == 0
    choice = thin.planner.choice
    assert choice.total_batch_size == thin.plan.total_batch_size
    table = {c.total_batch_size: c.goodput for c in thin.planner.table}
    assert max(table.values()) <= 1.05 * table[choice.total_batch_size]


PROFILE = ConvergenceProfile(
    16,
    256,
    1.0,
    tuple((r, x, 0.5 * r + abs(math.log2(x / 80))) for r in (0, 0.5, 0.9, 0.99) for x in (16, 40, 80, 256)),
)


def test_a_profile_says_what_totals_and_densities_cost():
    """Without a noise scale: totals are best at 80, and rates cost little up to half of it."""
    penalty = ProfilePenalty(PROFILE)
    fields = {"moves_batch": True, "max_total_batch_size": 256, "min_steps": 8, "profile": penalty}
    cluster = Cluster(planner(**fields)).run(75e6, 16)
    assert 70 <= cluster.plan.total_batch_size <= 110
    assert len(changes(cluster.totals[10:])) == 0
    assert penalty(0.01, 80) > penalty(0.5, 80)
    assert penalty(0.1, 1000) == pytest.approx(penalty(0.1, 256))
    free = Cluster(planner(profile=lambda density, total: 0.0 * density)).run(10e6, 6)
    dear = Cluster(planner(profile=lambda density, total: -3 * np.log10(density))).run(75e6, 6)
    assert free.density < 0.01 < dear.density


def test_step_times_of_totals_are_kept_from_look_to_look(solves):
    """Without what messages take, so that a link that changes leaves them as they are."""
    noise = RunningNoiseScale().update(trace=100.0, global_sq_norm=1.0 + 100 / 40, total_batch_size=40)
    settled = {"max_total_batch_size": 400, "moves_batch": True, "initial_total": 40, "min_steps": 10**6}
    cluster = Cluster(TimeToAccuracyPlanner(**settled), noise=noise)
    for rate in (1e7,) * 6:
        cluster.window(rate)
    solves.clear()
    goodputs = set()
    for rate in (1e7, 1e6, 1e5):
        cluster.window(rate)
        goodputs.add(cluster.planner.current(cluster.planner.table, 40).goodput)
    assert len(goodputs) == 3
    assert sum(solves) < len(cluster.planner.table)
    assert all(1 <= count <= 3 for count in solves)


def saved_and_loaded(state):
    """As a checkpoint of which only plain values are believed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("may_be_stale", [False, True])
def test_resumed_after_every_window_it_decides_as_the_run_without_a_break(may_be_stale):
    """What it believes of the link, what it has tried, and what a change of the density rested on are in the state."""
    fields = {"scatter": 0.2, "handling": 0.01, "may_be_stale": may_be_stale, "step": 2_000}
    whole, broken = Cluster(planner(), **fields), Cluster(planner(), **fields)
    for rate in [75e6] * 8 + [2e6] * 8 + [2e5] * 8 + [75e6] * 16:
        whole.window(rate)
        broken.planner = planner().loaded(saved_and_loaded(broken.planner.state_dict()))
        broken.window(rate)
    assert len(changes(whole.densities)) >= 2
    assert any(whole.ways) == may_be_stale
    for name in ("densities", "ways", "plan"):
        assert getattr(broken, name) == getattr(whole, name), name


def test_without_a_link_it_is_the_planner_of_the_total():
    cluster = Cluster(planner()).run(75e6, 3)
    sizes = np.tile(np.array(cluster.plan.local_batch_sizes, float), (8, 1))
    zeros = np.zeros_like(sizes)
    seen = StepObservations(sizes, sizes, sizes, sizes, zeros, zeros, zeros)
    assert without_messages(seen, None) is seen
    after, proposal = planner().decide(seen, cluster.plan, PlanContext(40, ("a", "b"), (1, 1)))
    assert after.density is None
    assert after.choice is None


def test_step_times_are_predicted_with_the_messages():
    cluster = Cluster(planner()).run(10e6, 6)
    context = cluster.window(10e6)
    measured = cluster.compute + LATENCY + cluster.message_bytes(cluster.density) / 10e6
    context = replace(context, link=replace(context.link, density=cluster.density))
    assert cluster.planner.predict(cluster.plan, context) == pytest.approx(measured, rel=0.05)


def test_what_is_decided_on_the_split_is_told_beside_the_density():
    """The split with its gain, and how sure the prediction is; the density is for all micro-batches together."""
    cluster = Cluster(planner()).run(10e6, 6)
    context, plan = replace(cluster.window(10e6), accumulation=2), BatchPlan(40, (20, 20))
    decision = cluster.planner.decide(StepObservations.empty(2), plan, context)
    assert decision.density.total_batch_size == 80
    assert decision.proposal.plan.local_batch_sizes != (20, 20)
    assert decision.proposal.reason.endswith("less), messages apart")
    assert decision.proposal.plan.step_time == pytest.approx(
        decision.planner.predict(decision.proposal.plan, context), rel=0.02
    )
    assert decision.soon
    assert decision.error == decision.planner.model.error(plan, context) > 0.0


def test_the_idle_rule_moves_with_idle_time():
    cluster = Cluster(planner(idle_rule=True)).run(75e6, 12)
    fast = cluster.density
    assert cluster.run(2e6, 20).density < fast / 2
    thin = cluster.density
    assert cluster.run(75e6, 60).density > 2 * thin, "five per cent at a time"


@pytest.mark.parametrize(
    "traces", [(400.0,), (300.0, 500.0) * 50], ids=["uncertain noise scale", "certain noise scale"]
)
def test_a_decision_makes_few_calls_however_many_totals_and_densities_are_in_question(traces):
    """All ranks wait for it. Once 75,888 and 219,209 calls, it took 1.9 s with 161 tensors."""
    noise = RunningNoiseScale(horizon=1e6)
    for trace in traces:
        noise = noise.update(trace=trace, global_sq_norm=1.0 + trace / 40, total_batch_size=40)
    sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 16)
    zeros = np.zeros_like(sizes)
    seen = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
    size = message_size(62_500, 16, "bfloat16", 2)
    link = MessageLink(0.1, size, (LinkEstimate(1e5),) * 2, seconds=0.4, step=40_000)
    context = PlanContext(40, ("a", "b"), (1, 1), link=link, noise=noise)
    moves = TimeToAccuracyPlanner(initial_total=40, max_total_batch_size=1000, moves_batch=True)
    calls = Counter()

    def count(frame, event, _):
        calls[event] += "lightning_hetero" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        decision = moves.decide(seen, BatchPlan(40, (30, 10)), context)
    finally:
        sys.setprofile(None)
    assert decision.proposal is not None
    assert decision.density is not None
    assert len(decision.planner.table) > 10
    assert 100 < calls["call"] <= 2000


def test_a_rate_of_a_checkpoint_is_kept_by_the_idle_rule_alone():
    """The link is measured anew in a resumed run; a rate that nothing updates would hold for ever."""
    state = planner(idle_rule=True).state_dict() | {"believed": {"rate": 1e6}}
    assert planner(idle_rule=True).loaded(state).bandwidth.rate == 1e6
    assert planner(idle_rule=False).loaded(state).bandwidth.rate is None


def link_of(**fields):
    """A link whose rate was measured."""
    return MessageLink(0.01, SIZE, (LinkEstimate(1e7),) * 2, latency=LATENCY, step=100_000, **fields)


def test_the_rate_of_the_idle_rule_replaces_that_of_the_transfers():
    context = PlanContext(40, ("a", "b"), (1, 1), link=link_of())
    assert planner()._link(context).rates == (1e7, 1e7)
    assert planner(bandwidth=LinkEstimate(1e5))._link(context).rates == (1e5,)


def test_stale_messages_cost_samples_only_where_the_planner_may_make_them_synchronous():
    density, total = np.array([0.01]), np.array([40.0])
    never, forced, by_choice = (
        planner().extra(density, total, link_of(stale=stale, may_be_stale=may))
        for stale, may in ((False, False), (True, False), (True, True))
    )
    assert forced == never < by_choice


def test_a_change_of_the_density_alone_brings_the_next_sync_round_soon():
    cluster = Cluster(planner()).run(75e6, 12)
    context, empty = cluster.window(75e6), StepObservations.empty(2)
    link = replace(context.link, density=cluster.density)
    thin = replace(link, estimates=(LinkEstimate(1e6),) * 2)
    settled, changed = (cluster.planner.decide(empty, cluster.plan, replace(context, link=one)) for one in (link, thin))
    assert (settled.density.density == cluster.density, settled.soon) == (True, False)
    assert (changed.density.density < cluster.density, changed.soon) == (True, True)


def test_the_goodput_of_a_total_counts_stale_messages_beside_computing():
    """The slower one of the two is the step; synchronous messages come on top."""
    one = planner(min_density=0.01, max_density=0.011)
    stale, waits = (
        one.candidates({(40, 1): 0.05}, PlanContext(40, ("a", "b"), (1, 1), link=link_of(stale=stale)))[0].step_time
        for stale in (True, False)
    )
    assert stale == 0.05
    assert waits > 0.05 + LATENCY
