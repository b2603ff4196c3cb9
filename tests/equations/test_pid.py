"""Proportional control (D sec. III-C): one step by the paper's equations, and closed loops on simulated workers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.control_settings import ControlSettings
from lightning_hetero.core.batching.integer_split import even_sizes, proportional_sizes
from lightning_hetero.core.batching.learned_bound import LearnedBound
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.batching.proportional_control import ControllerState
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from tests.equations.clusters import context


def observed(sizes, seconds):
    """Steps at these sizes in which the workers compute for so long, shape ``(steps, workers)``."""
    b, zeros = np.broadcast_to(np.asarray(sizes, float), seconds.shape), np.zeros_like(seconds)
    step = np.repeat(seconds.max(axis=1, keepdims=True), seconds.shape[1], axis=1)
    return StepObservations(b, seconds / 3, 2 * seconds / 3, zeros, zeros, step - seconds, step)


def once(sizes, seconds, planner=None, **ctx):
    """One decision on five equal steps: the sizes from then on, and the planner."""
    planner, where = planner or ProportionalPlanner(), context(sum(sizes), len(sizes), **ctx)
    seen = observed(sizes, np.tile(np.asarray(seconds, float), (5, 1)))
    decision = planner.decide(seen, BatchPlan(sum(sizes), sizes), where)
    return sizes if decision.proposal is None else decision.proposal.plan.local_batch_sizes, decision.planner


class Loop:
    """Workers whose steps take ``times(sizes)`` with scatter, under the controller's decisions."""

    def __init__(self, sizes, *, noise=0.0, seed=0, steps=5, **ctx):
        self.plan, self.steps, self.noise = BatchPlan(sum(sizes), tuple(sizes)), steps, noise
        self.planner, self.rng = ProportionalPlanner(), np.random.default_rng(seed)
        self.context, self.seen = context(sum(sizes), len(sizes), **ctx), [tuple(sizes)]

    def run(self, times, decisions):
        for _ in range(decisions):
            exact = np.array([times(np.array(self.sizes, float)) for _ in range(self.steps)])
            scatter = np.maximum(1 + self.noise * self.rng.standard_normal(exact.shape), 0.1)
            decision = self.planner.decide(observed(self.sizes, exact * scatter), self.plan, self.context)
            self.planner, self.plan = decision.planner, decision.proposal.plan if decision.proposal else self.plan
            assert self.plan.total_batch_size == self.context.total_batch_size
            self.seen.append(self.sizes)
        return self

    @property
    def sizes(self):
        return self.plan.local_batch_sizes

    @property
    def changed(self):
        """Decisions that changed sizes."""
        return [i for i, (a, b) in enumerate(zip(self.seen, self.seen[1:], strict=False)) if a != b]


def lines(slopes, offsets=0.0):
    return lambda sizes: np.asarray(slopes) * sizes + np.asarray(offsets)


def spread(times, sizes):
    t = times(np.array(sizes, float))
    return t.max() / t.min()


def test_one_step_is_equations_4_and_5_brought_to_the_total(seed):
    """``b_i - X_i (mu_i - mean mu)`` with ``X_i = b_i / mu_i``, which the paper does not bring to the total."""
    rng, eager = np.random.default_rng(seed), ProportionalPlanner(dead_band=0.0)
    for _ in range(20):
        n = int(rng.integers(2, 7))
        b, mu = rng.integers(50, 400, n), rng.uniform(0.5, 1.5, n)
        wanted = b - b / mu * (mu - mu.mean())
        new, _ = once(tuple(b.tolist()), mu, eager)
        assert np.abs(new - wanted * b.sum() / wanted.sum()).max() <= 1
    assert once((40, 40), (0.1, 0.3))[0] == (60, 20)
    far_apart = {"min_local": (2, 1, 5), "max_local": (20, 60, 33)}  # the rule's sizes are far below 1 before that
    assert once((10, 1, 33), (0.00014, 64.0, 0.55), **far_apart)[0] == (20, 1, 23)


def test_all_sizes_change_or_none_by_the_dead_band():
    """No size would change by more than 2 %."""
    assert once((100, 100, 100), (1.0, 1.02, 0.98))[0] == (100, 100, 100)
    assert once((100, 100, 100), (1.0, 1.02, 0.98), ProportionalPlanner(dead_band=0.01))[0] == (100, 98, 102)
    assert once((20, 20), (0.1, 0.3), ProportionalPlanner(dead_band=0.6))[0] == (20, 20)


def test_compute_times_become_equal_within_the_dead_band_in_a_few_changes(seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        n = int(rng.integers(2, 7))
        times = lines(rng.uniform(0.001, 0.02, n), rng.uniform(0, 0.05, n))
        loop = Loop(even_sizes(400 * n, n)).run(times, 20)
        assert spread(times, loop.sizes) <= 1.05 / 0.95 * (1 + 1 / min(loop.sizes)) ** 2
        assert all(decision < 15 for decision in loop.changed)


SMALL = [((4, 2, 1), 2, 0.6), ((2, 1), 2, 0.4), ((2, 1), 4, 0.6), ((1.5, 1.5, 1, 1), 4, 0.4)]


@pytest.mark.parametrize(("speeds", "each", "fixed"), SMALL)
def test_workers_with_few_samples_are_balanced_though_the_rule_moves_less_than_one(speeds, each, fixed):
    n = len(speeds)
    times = lines(1 / np.array(speeds), fixed / (1 - fixed) * each / min(speeds))
    loop = Loop((each,) * n, noise=0.02).run(times, 30)
    every = itertools.product(range(1, each * n), repeat=n)
    best = min(times(np.array(split)).max() for split in every if sum(split) == each * n)
    assert times(np.array(loop.sizes)).max() <= 1.001 * best
    assert all(decision < 8 for decision in loop.changed)


def test_a_sample_that_made_the_step_longer_is_taken_back_and_not_moved_again():
    loop = Loop((2, 2), noise=0.02).run(lines([1 / 1.3, 1.0]), 60)
    assert loop.seen[:3] == [(2, 2), (3, 1), (2, 2)]
    assert len(loop.changed) == 2


def test_a_sample_is_not_moved_to_and_fro_between_workers_that_are_alike():
    """Noise picks another pair each time, and says now and then that it helped."""
    taken = dict(zip((16, 32, 8, 40), (0.161, 0.16, 0.084, 0.159), strict=True))
    rates = np.array([taken[b] / b for b in (16, 32, 8, 32, 16, 40)])
    ctx = {"min_local": (8,) * 6, "multiple": 8}
    for seed in range(4):
        loop = Loop((16, 32, 8, 32, 16, 40), noise=0.1, steps=8, seed=seed, **ctx).run(lines(rates), 100)
        assert len(loop.changed) <= 8


def test_noise_causes_no_oscillation_and_splits_no_equal_workers(seed):
    times = lines([0.001, 0.002, 0.004, 0.006], [0.01, 0.0, 0.02, 0.0])
    loop = Loop(even_sizes(512, 4), noise=0.03, seed=seed, steps=10).run(times, 50)
    assert len(loop.changed) <= 8
    assert spread(times, loop.sizes) < 1.2
    assert len(Loop((64,) * 4, noise=0.03, seed=seed, steps=10).run(lines([0.002] * 4, 0.01), 40).changed) <= 1
    for slopes in ((1.0, 2.0, 10 / 3), (1.0, 1.0, 1.0)):  # more noise than the dead band stops for long
        loop = Loop((64, 64, 64), noise=0.15, seed=seed, steps=10).run(lines(slopes), 60)
        assert len(loop.changed) <= 8
        assert max(np.array(slopes) * loop.sizes) <= 1.06 * np.mean(np.array(slopes) * loop.sizes)


PINNED = [  # speeds, total, minimum: the slowest worker takes longer than all others even with its minimum
    ((1, 0.5, 0.1), 192, 30),
    ((1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.02), 512, 4),
]


@pytest.mark.parametrize(("speeds", "total", "least"), PINNED)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_worker_held_at_its_minimum_lets_the_others_settle(speeds, total, least, noise):
    """Its time stays above the mean whatever the others do: with it in the mean, they are never done."""
    n = len(speeds)
    loop = Loop(even_sizes(total, n), noise=noise, min_local=(least,) * n).run(lines(1 / np.array(speeds)), 60)
    assert len(loop.changed) <= 3
    assert loop.sizes[-1] == least
    free = [(b / speed, b) for b, speed in zip(loop.sizes, speeds, strict=True) if b > least]
    assert max(free)[0] / min(free)[0] <= (1.1 + noise) * (1 + 1 / min(b for _, b in free))


def test_random_shapes_and_bounds_settle_near_the_best_split(seed):
    for case in range(4):
        rng = np.random.default_rng([seed, case])
        n, least = int(rng.integers(2, 7)), int(rng.integers(1, 33))
        total = int(rng.integers(n * least + 1, 6 * n * max(least, 8)))
        most = np.maximum(rng.integers(least, int(0.7 * total) + 2, n), least)
        most += max(total - int(most.sum()), 0) // n + 1
        speeds = np.exp(0.9 * rng.standard_normal(n))
        bounds = {"min_local": (least,) * n, "max_local": None if case % 2 else tuple(most.tolist())}
        loop = Loop(proportional_sizes(total, [1.0] * n, **bounds), **bounds).run(lines(1 / speeds), 40)
        assert len(loop.changed) <= 3 + 2  # by the rule, and a sample that was moved and taken back
        best = proportional_sizes(total, speeds, **bounds)
        reached, least_time = (max(np.array(sizes) / speeds) for sizes in (loop.sizes, best))
        assert reached <= 1.05 * least_time + 1 / min(speeds)  # the dead band, and a sample of the slowest


def test_differences_within_the_noise_change_nothing_unless_that_is_asked_for():
    scatter = np.where(np.arange(7)[:, None] % 2, [0.1, 0.13], [0.13, 0.1])
    seen, plan, where = observed((200, 200), scatter), BatchPlan(400, (200, 200)), context(400, 2)
    sure = ProportionalPlanner(dead_band=0.01)
    assert sure.decide(seen, plan, where).proposal is None
    eager = replace(sure, settings=ControlSettings(significant_errors=0.0))
    assert eager.decide(seen, plan, where).proposal is not None


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 0.5), ({"gain_after_reversal": 0.25}, 0.25), ({"gain_after_reversal": 0.25, "min_gain": 0.4}, 0.4)],
)
def test_a_size_that_turns_round_goes_part_of_the_way(settings, share):
    sizes, planner = once((200, 200), (0.1, 0.3), ProportionalPlanner(settings=ControlSettings(**settings)))
    assert sizes == (300, 100)
    after, _ = once(sizes, (0.2, 0.1), planner)
    x, error = np.array([300 / 0.2, 100 / 0.1]), np.array([0.05, -0.05])
    wanted = np.array(sizes) - share * x * error
    assert after == pytest.approx(400 * wanted / wanted.sum(), abs=1)


# upper bounds that are learned where throughput fell after a rise


def thrashing(factor=5.0, slopes=(0.001, 0.003)):
    """Worker 0 has memory for 60 samples; above that every sample takes ``factor`` times as long."""
    return lambda sizes: np.array(slopes) * sizes * np.where([sizes[0] > 60, False], factor, 1.0)


def test_a_bound_is_learned_where_throughput_fell_after_a_rise():
    loop = Loop((50, 50)).run(thrashing(), 3)
    assert loop.seen == [(50, 50), (75, 25), (50, 50), (50, 50)]


def test_bounds_never_make_the_total_impossible():
    both = ControllerState((50, 50), bounds=(LearnedBound(40, 500.0, lifetime=20),) * 2)
    assert once((50, 50), (0.1, 0.3), ProportionalPlanner(state=both))[0] == (75, 25)


# the policy


def test_it_starts_by_what_it_knows_then_by_what_is_given_then_by_capacities():
    free = context(40, 2, capacities=(1.0, 4.0))
    places = (free, replace(free, given=(25, 15)), replace(free, capacities=()))
    expected = {(0, "open_loop"): [(8, 32), (25, 15), None], (0, "equal"): [None, (25, 15), None],
                (2, "open_loop"): [(30, 10)] * 3, (2, "equal"): [(30, 10)] * 3}  # fmt: skip
    for (known, start), sizes in expected.items():
        throughput = {"host-0": 300.0, "host-1": 100.0} if known else {}
        found = [ProportionalPlanner(throughput=throughput, start=start).initial(where) for where in places]
        assert [proposal and proposal.plan.local_batch_sizes for proposal in found] == sizes


def test_it_decides_on_three_steps_at_the_sizes_that_run():
    planner, where, plan = ProportionalPlanner(), context(40, 2), BatchPlan(40, (20, 20))

    def steps(count, sizes=(20, 20)):
        return observed(sizes, np.tile(np.array(sizes) * [0.003, 0.009], (count, 1)))

    decision = planner.decide(steps(2), plan, where)
    assert decision.proposal is None
    assert "2 steps" in decision.kept
    assert planner.decide(steps(9, (30, 10)), plan, where).proposal is None, "of another plan"
    assert decision.planner.decide(steps(1), plan, where).proposal is not None
    least = replace(where, min_local=(8, 1))  # a rank that runs at least 8, whatever it was given
    assert planner.decide(steps(5, (8, 36)), BatchPlan(40, (4, 36)), least).proposal is not None


def test_it_remembers_the_newest_throughput_of_each_worker_and_weighs_the_past_by_its_decay():
    before = ProportionalPlanner(throughput={"host-0": 1.0, "elsewhere": 7.0})
    _, after = once((30, 10), (0.09, 0.09), before)
    speeds = {"elsewhere": 7.0, "host-0": pytest.approx(1 / 0.003), "host-1": pytest.approx(1 / 0.009)}
    assert after.throughput == speeds
    seen, plan = observed((30, 30), np.array([[0.2, 0.6]] * 20 + [[0.1, 0.1]] * 5)), BatchPlan(60, (30, 30))
    found = [ProportionalPlanner(decay=decay).decide(seen, plan, context(60, 2)) for decay in (0.0, 0.5, 0.999)]
    faster = [decision.planner.throughput["host-1"] for decision in found]
    assert faster == sorted(faster, reverse=True)
    assert faster[0] > 1.5 * faster[2]
