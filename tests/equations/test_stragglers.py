"""Stragglers are found in every phase, with the right rank and cost, and none where nothing is wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.stragglers.detector import LINK, NOBODY, StragglerDetector
from lightning_hetero.core.stragglers.past import Past
from lightning_hetero.core.stragglers.round_times import PHASES, RoundTimes, exposed_link
from lightning_hetero.core.stragglers.settings import StragglerSettings

seeds = st.integers(0, 2**32 - 1)
PARTS = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


def at(forward=0.0, sizes=8, *, link=0.001, overlapped=0.0, last=None, steps=8, **parts):
    """Steps without jitter in which workers take these times; the last bucket ends with the slowest worker's."""
    shape = np.broadcast_shapes(*(np.shape(value) for value in (forward, sizes, *parts.values())))
    full = lambda value: np.tile(np.broadcast_to(np.asarray(value, dtype=float), shape), (steps, 1))  # noqa: E731
    busy = {PARTS[name]: full(parts.get(name, 0.0)) for name in PHASES} | {"forward": full(forward)}
    compute = sum(busy.values())
    begins = compute - 0.8 * busy["backward"] + overlapped  # a fifth of the backward pass before the first bucket
    end = np.maximum(compute, begins).max(axis=1, keepdims=True) + link
    sync = full(overlapped), end - compute if last is None else full(last)
    ends = (end - compute + busy["backward"])[:, :, None]
    outside, backward = busy.pop("forward"), busy.pop("backward")
    return StepObservations(
        full(sizes), outside, backward, 0.2 * backward, *sync, full(end[0, 0]), **busy, bucket_ends=ends
    )


def mixed(*looks):
    """One round of several looks, or of every second step of two."""
    fields = [np.concatenate([getattr(look, name) for look in looks]) for name in StepObservations.FIELDS]
    return StepObservations(*fields, bucket_ends=np.concatenate([look.bucket_ends for look in looks]))


def by_turns(one, other):
    return mixed(*(look.rows(slice(i, i + 1)) for i in range(8) for look in ((one, other)[i % 2],)))


def watched(rounds, steps=10):
    detector = StragglerDetector(rounds[0].forward.shape[1])
    events = [[f"{e.rank} {e.phase} {e.relieved}".strip() for e in detector.observe(one, steps)] for one in rounds]
    return detector, events


U, S, LASTS = at((0.1, 0.1, 0.1)), at((0.1, 0.1, 0.2)), at((0.1, 0.1, 0.3))
TWO = at((0.1, 0.1), link=0.01)
SLOW_LINK = at((0.1, 0.1), link=0.06)
BEGIN, SPLIT, OVER, OTHERS = ("2 forward", "2 forward split", "2 forward recovered", "2 forward others")
SLOWER, ON, OFF = "2 forward slower", "-1 link", "-1 link recovered"
USUAL_10 = at((0.01,) * 3)
SMALL = at((0.015, 0.014, 0.043), (12, 11, 1))
BUSY_LINK = at(backward=(0.1, 0.1), overlapped=0.05)
SCENES = {
    "a worker that recovers": ([U, U, S, S, U], {2: BEGIN, 4: OVER}),
    "its share falls": ([U, U, S, *[at((0.12,) * 3, (9, 9, 6))] * 3], {2: BEGIN, 3: SPLIT}),
    "it saves more than its share explains": (
        [USUAL_10, USUAL_10, at((0.01, 0.01, 0.05)), at((0.015, 0.014, 0.002), (12, 11, 1))],
        {2: BEGIN, 3: OVER},
    ),
    "others have more to do than is left of it": (
        [USUAL_10, USUAL_10, at((0.01, 0.01, 0.05)), SMALL, at((0.045, 0.044, 0.043), (12, 11, 1))],
        {2: BEGIN, 4: OTHERS},
    ),
    "it recovers at the share to which it fell": (
        [USUAL_10, USUAL_10, at((0.01, 0.01, 0.05)), SMALL, at((0.015, 0.014, 0.012), (12, 11, 1))],
        {2: BEGIN, 4: OVER},
    ),
    "a share explains seven tenths of its part": ([U, U, S, at((0.1, 0.1, 0.072), (10, 10, 4))], {2: BEGIN, 3: SPLIT}),
    "and no less": ([U, U, S, at((0.1, 0.1, 0.068), (10, 10, 4))], {2: BEGIN, 3: OVER}),
    "half of its excess is left at the new share": ([U, U, S, at((0.1, 0.1, 0.1265), (10, 10, 4))], {2: BEGIN}),
    "less is left": ([U, U, S, at((0.1, 0.1, 0.123), (10, 10, 4))], {2: BEGIN, 3: SPLIT}),
    "it is over within a round": ([U, U, mixed(at((0.1, 0.1, 0.3), steps=20), at((0.1,) * 3, steps=9))], {}),
    "it begins within a round": ([U, U, mixed(at((0.1,) * 3, steps=20), at((0.1, 0.1, 0.3), steps=6))], {2: BEGIN}),
    "it begins in the last steps of a round": (
        [*[U] * 8, mixed(U.rows(slice(5)), S.rows(slice(3))), S],
        {8: BEGIN},
    ),
    "nobody waits for it": ([at((0.2, 0.1))] * 2 + [at((0.2, 0.19))] * 4, {}),
    "all slow down": ([U, U, *[at((0.2,) * 3)] * 3], {}),
    "two at once": ([U, U, at((0.1, 0.2, 0.3))], {2: ("1 forward", "2 forward")}),
    "others get more to do": ([U, U, S, at((0.2, 0.2, 0.2), (16, 16, 8))], {2: BEGIN, 3: OTHERS}),
    "it costs half of the least": ([U, U, S, at((0.193, 0.193, 0.2), (16, 16, 8))], {2: BEGIN}),
    "a faster worker": ([U, U, *[at((0.1, 0.1, 0.05))] * 3], {}),
    "slow from the start": ([LASTS] * 5, {2: BEGIN}),
    "slow from the start by a tenth of the step": ([at((0.1, 0.12))] * 3, {2: "1 forward"}),
    "by less": ([at((0.1, 0.109))] * 3, {}),
    "three rounds after a change of the split": ([LASTS, *[at((0.1, 0.1, 0.3), (9, 8, 7))] * 4], {4: BEGIN}),
    "the split changes all the time": ([at((0.1, 0.1, 0.3), (8 + i, 8, 8 - i)) for i in range(6)], {}),
    "the split relieves it": ([LASTS] * 3 + [at((0.13,) * 3, (10, 10, 4))], {2: BEGIN, 3: SPLIT}),
    "it still costs half of what makes it one": (
        [at((0.1, 0.1, 0.3), link=0.0)] * 3 + [at((0.1, 0.1, 0.1054), link=0.0)],
        {2: BEGIN},
    ),
    "it costs less": ([at((0.1, 0.1, 0.3), link=0.0)] * 3 + [at((0.1, 0.1, 0.1051), link=0.0)], {2: BEGIN, 3: OVER}),
    "slow from the start, over, and slow again": ([LASTS] * 3 + [U, LASTS], {2: BEGIN, 3: OVER, 4: BEGIN}),
    "slow from the start, and slower still": (
        [LASTS] * 3 + [at((0.1, 0.1, 0.3), data=(0.0, 0.0, 0.4))] * 2 + [LASTS] * 4,
        {2: BEGIN, 3: (SLOWER, "2 data"), 5: "2 data recovered", 7: BEGIN},
    ),
    "it learns what is usual at another size": (
        [LASTS] * 3 + [at((0.1, 0.1, 0.3), (9, 8, 7))] * 4 + [at((0.1, 0.1, 0.36), (9, 8, 7))],
        {2: BEGIN, 7: (SLOWER, BEGIN)},
    ),
    "the slowest, when all others become slower": ([LASTS] * 3 + [at((0.15, 0.15, 0.3))] * 5, {2: BEGIN}),
    "the slowest of all that become slower": ([U, U, at((0.15, 0.15, 0.3))], {2: BEGIN}),
    "far beyond its past, most of it is over": ([U, U, S, at((0.1, 0.1, 0.14))], {2: BEGIN}),
    "four steps are judged": ([U, at((0.1, 0.1, 0.2), steps=4)], {1: BEGIN}),
    "three are not": ([at((0.1, 0.1, 0.3), steps=3)] * 4, {}),
    "one worker": ([at((0.1,)), at((0.3,))], {}),
    "no steps": ([StepObservations.empty(2)] * 2, {}),
    "within what is assumed at first": ([U, at((0.1, 0.1, 0.11))], {}),
    "doubt about an untried size": ([U, U, at((0.1, 0.1, 0.138), (8, 7, 9))], {}),
    "beyond the doubt": ([U, U, at((0.1, 0.1, 0.15), (8, 7, 9))], {2: BEGIN}),
    "no doubt at a known size": ([U, U, at((0.1, 0.1, 0.12))], {2: BEGIN}),
    "steps that scatter widely": ([U, U, by_turns(U, S)], {}),
    "a suspicious round does not teach what is usual": (
        [U] * 10 + [at((0.1, 0.1, 0.104)), at((0.1, 0.1, 0.1057))],
        {11: BEGIN},
    ),
    "all-reduces limit the step": (
        [at(backward=(0.1, 0.1, x), overlapped=0.3) for x in (0.1, 0.1, 0.15, 0.15, 0.6)],
        {4: "2 backward"},
    ),
    "a short backward pass hides less of the link": (
        [at(backward=(0.1, 0.01), overlapped=0.05, last=0.001, data=(0, x)) for x in (0.0, 0.0, 0.2)],
        {2: "1 data"},
    ),
    "a slower link": ([TWO, TWO, SLOW_LINK, SLOW_LINK, TWO], {2: ON, 4: OFF}),
    "a link slow from a change of the split on": (
        [BUSY_LINK] * 2 + [at(backward=(0.08, 0.12), sizes=(6, 10), overlapped=x) for x in (0.25, 0.05)],
        {2: ON, 3: OFF},
    ),
    "a link within its deviations": ([at((0.01, 0.01), link=x) for x in (0.1, 0.1, 0.108)], {}),
    "a link that scatters": (
        [at((0.01, 0.01), link=0.1)] * 2 + [by_turns(*(at((0.01, 0.01), link=x) for x in (0.1, 0.2)))],
        {},
    ),
    "a hidden link": ([at(backward=(0.1, 0.1), overlapped=x) for x in (0.01, 0.01, 0.06)], {}),
    "a link that recovers in part": ([TWO, TWO, SLOW_LINK, at((0.1, 0.1), link=0.03)], {2: ON, 3: OFF}),
    "a suspicious round of the link": (
        [at((0.01, 0.01), link=x) for x in (*[0.1] * 10, 0.1035, 0.1063)],
        {11: ON},
    ),
    "a suspicious round of the link, confirmed": (
        [at((0.01, 0.01), link=x) for x in (*[0.1] * 14, 0.104, 0.2, 0.1, 0.1071)],
        {15: ON, 16: OFF, 17: ON},
    ),
    "workers learn while the link is slow": (
        [TWO, TWO, SLOW_LINK] + [at((0.1, x), (7, 9), link=0.06) for x in (0.1, 0.1, 0.1, 0.125)],
        {2: ON, 6: "1 forward"},
    ),
    "a slow link lowers nothing for workers": (
        [TWO, TWO, at((0.1, 0.1), link=0.03), at((0.1, 0.1325), (7, 9), link=0.03)],
        {2: ON},
    ),
    "nor does being slow from the start": (
        [at((0.1, 0.1, 0.115))] * 3 + [at((0.1, 0.1, 0.145), (8, 7, 9))],
        {2: BEGIN},
    ),
}
SCENES |= {f"slow from the start in {p}": ([at(**{p: (0.1, 0.12, 0.3)})] * 4, {2: f"2 {p}"}) for p in PHASES}
SCENES |= {
    f"twice the samples explain a longer {scaled} pass, and no longer {fixed}": (
        [at(sizes=(8, 8, 16), **{scaled: (0.1, 0.1, 0.22), fixed: (0.1, 0.1, 0.13)})] * 3,
        {2: f"2 {fixed}"},
    )
    for scaled in ("forward", "backward")
    for fixed in ("data", "optimizer")
}


@pytest.mark.parametrize("name", SCENES)
def test_who_is_named_when_and_how_it_ends(name):
    rounds, expected = SCENES[name]
    found = [tuple(sorted(events)) for events in watched(rounds)[1]]
    told = {i: (one,) if isinstance(one, str) else tuple(sorted(one)) for i, one in expected.items()}
    assert {i: events for i, events in enumerate(found) if events} == told


COSTS = {
    "what the others wait": ([at((0.1, 0.15, 0.1))] * 2 + [at((0.1, 0.15, 0.2))] * 2, 10, 0.05, 0.1, 0.05 * 18, 8),
    "the slower of two": ([U, U, at((0.1, 0.2, 0.3))], 10, 0.2, 0.2, 0.2 * 8, 8),
    "no more steps than there were": ([U, U, S], 5, 0.1, 0.1, 0.1 * 5, 8),
    "rounds too short to judge": ([U, U, S, at((0.1, 0.1, 0.2), steps=3)], 8, 0.1, 0.1, 0.1 * 16, 8),
    "slow from the start": ([at((0.1, 0.12, 0.3))] * 3, 8, 0.18, 0.18, 0.18 * 8, 8),
    "slow from the start, and slower": ([LASTS] * 3 + [at((0.1, 0.1, 0.3), data=(0, 0, 0.4))], 8, 0.6, 0.4, 8 * 0.8, 8),
    "when others became slower, too": ([U, U, LASTS, at((0.15, 0.15, 0.3))], 8, 0.15, 0.2, 0.2 * 8 + 0.15 * 8, 8),
    "beyond the all-reduces": (
        [at(backward=(0.1, 0.1, x), overlapped=0.3) for x in (0.1, 0.1, 0.6)], 8, 0.28, 0.5, 0.28 * 8, 8
    ),
    "the newest steps": ([U, U, mixed(U.rows(slice(2)), S.rows(slice(6)))], 8, 0.1, 0.1, 0.1 * 6, 6),
    "the link": ([TWO, TWO, SLOW_LINK, *(at((0.1, 0.1), link=x) for x in (0.11, 0.04))], 8, 0.03, 0.05, 8 * 0.18, 8),
    "all all-reduces": (
        [at(backward=(0.1, 0.1), overlapped=x, last=y) for x, y in ((0.09, 0.01), (0.09, 0.01), (0.13, 0.05))],
        8, 0.05 - 0.01 + (0.15 - 0.11) - 0.0, 0.08, None, 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_what_a_straggler_costs_and_since_when(name):
    rounds, steps, cost, excess, lost, ago = COSTS[name]
    detector, _ = watched(rounds, steps)
    worst = detector.active[detector.worst]
    assert (worst.cost, worst.excess, worst.ago) == pytest.approx((cost, excess, ago))
    assert lost is None or detector.lost == pytest.approx(lost)
    assert worst.lasting == name.startswith("slow from the start") * (name == "slow from the start")


def test_what_is_over_costs_nothing_and_what_it_cost_is_not_forgotten():
    for rounds in ([U, U, S, U], [TWO, TWO, SLOW_LINK, TWO], [TWO, TWO, SLOW_LINK, at((0.1, 0.1), link=0.03)]):
        detector, _ = watched(rounds[:3], 8)
        lost, (before,) = detector.lost, detector.active.values()
        (ended,) = detector.observe(rounds[3], 8)
        assert ended is before
        assert (ended.relieved, ended.cost, detector.lost, ended.lost) == ("recovered", 0.0, lost, lost)
        assert (detector.active, detector.worst) == ({}, NOBODY)
        assert lost > 0


@pytest.mark.parametrize(("elapsed", "earlier"), [(8, False), (9, True), (40, True)])
def test_the_begin_is_not_known_where_it_was_not_timed(elapsed, earlier):
    detector, _ = watched([U, U], 8)
    (found,) = detector.observe(S, elapsed)
    (ended,) = detector.observe(U, 8)
    assert (found.ago, found.earlier, ended.earlier) == (8, earlier, earlier)
    detector, _ = watched([U, U], 8)
    (found,) = detector.observe(mixed(U.rows(slice(2)), S.rows(slice(6))), elapsed)
    assert (found.ago, found.earlier) == (6, False), "two timed steps came before"
    scattered = [S] * 2 + [at((0.1, 0.1, x)).rows(slice(1)) for x in (0.19, 0.21) * 2]
    detector, _ = watched([U, U], 8)
    (found,) = detector.observe(mixed(U.rows(slice(2)), *[one.rows(slice(1)) for one in scattered]), 8)
    assert found.ago == 6, "steps that scatter about the slow time are all slow"


# what rounds are judged by


@given(seeds, st.integers(4, 19), st.sampled_from([1, 3]), st.integers(0, 8))
def test_the_newest_half_of_the_steps_at_the_last_split_is_judged(seed, count, accumulation, before):
    rng, chosen = np.random.default_rng(seed), StragglerSettings()
    data, forward, backward, optimizer, overlapped, last, step = rng.uniform(0.09, 0.1, (7, count, 3))
    sizes = np.where(np.arange(count)[:, None] < min(before, count - 1), 5.0, 8.0) * np.ones(3)
    first = rng.uniform(0, 1, (count, 3)) * backward
    seen = StepObservations(sizes, forward, backward, first, overlapped, last, step, data, optimizer)
    judged = RoundTimes.of(seen, accumulation, chosen)
    own = count - min(before, count - 1)
    newest = range(count - min(own, max(4, math.ceil(own / 2))), count)
    phases = [np.median([accumulation * x[i] for i in newest], axis=0) for x in (data, forward, backward, optimizer)]
    busy = np.array([accumulation * (data + forward + backward + optimizer)[i] for i in newest])
    link = [[min(overlapped[i]), min(last[i])] for i in newest]
    t_o, t_u = np.median(link, axis=0)
    begins = np.median([busy[j] - backward[i] + first[i] for j, i in enumerate(newest)], axis=0)
    compute = np.median(busy, axis=0)

    def error(rows):
        return 1.2533 * 1.4826 * np.median(abs(rows - np.median(rows, axis=0)), axis=0) / len(rows) ** 0.5

    np.testing.assert_allclose(judged.times, np.array(phases).T)
    np.testing.assert_allclose(judged.compute, compute)
    np.testing.assert_allclose(judged.error, error(busy))
    np.testing.assert_allclose(judged.asks, np.maximum(compute, begins + t_o) + t_u)
    assert judged.sync_error == pytest.approx(error(np.sum(link, axis=1)))
    shortest = compute.max() + np.median([min(last[i]) for i in newest])
    assert judged.step == pytest.approx(max(np.median([step[i] for i in newest]), shortest))
    unknown = replace(seen, step_time=np.nan * step)
    assert RoundTimes.of(unknown, accumulation, chosen).step == pytest.approx(shortest)
    assert judged.sizes.tolist() == [8.0] * 3


def test_the_link_is_what_the_last_worker_sees_after_its_last_gradient():
    zero, backward = np.zeros((4, 2)), np.full((4, 2), 0.1)
    wait = np.tile([0.3, 0.02], (4, 1))
    ends = np.tile([[[0.12, 0.35, np.nan]] * 2], (4, 1, 1))  # an earlier bucket may hold the link
    for waits, buckets, expected in ((wait, None, 0.02), (wait, np.nan * ends, 0.02), (zero + 0.01, ends, 0.25)):
        seen = StepObservations(zero + 8, zero, backward, zero, zero, waits, zero, bucket_ends=buckets)
        assert exposed_link(seen) == pytest.approx([expected] * 4)
    assert exposed_link(StepObservations.empty(2)).shape == (0,)


def expected_at(size, known):
    """The largest time that grows with the size: on a line between known sizes, in proportion beyond them."""
    if not known:
        return math.nan
    low, high = min(known), max(known)
    return (
        known[high] * size / high
        if size > high
        else np.interp(max(size, low), sorted(known), [known[x] for x in sorted(known)])
    )


@given(seeds)
def test_the_past_of_a_worker_is_a_slow_mean_at_each_size_and_a_bound_at_others(seed):
    rng, chosen = np.random.default_rng(seed), StragglerSettings()
    past, known, size, rounds, held, spread = Past(1, 1, chosen), {}, 0.0, 0, 0.0, chosen.first_deviation**2
    mean = math.nan

    def widened(square, weight):
        return max(spread + weight * (min(square, 9 * spread) - spread), chosen.min_deviation**2)

    for _ in range(25):
        new = float(rng.choice([4, 8, 12, 20]))
        if not size or rng.random() < 0.2 and new != size:
            known |= {size: mean} if rounds else {}
            size, rounds, mean = new, int(new in known), expected_at(new, known)
            past.resize(np.array([size]))
        assert past.expected[0, 0] == pytest.approx(mean, nan_ok=True)
        assert past.tried.tolist() == [rounds > 0]
        time, usual, suspicious = size * rng.lognormal(0, 0.1), rng.random() < 0.8, rng.random() < 0.3
        past.learn(np.array([[time]]), np.array([usual]), np.array([suspicious]))
        off = np.nan_to_num((time / mean - 1) ** 2)
        waits = usual and suspicious and not held
        if usual and not suspicious and held:  # that was the noise of a single round
            spread = widened(held, chosen.weight)
        held = off if waits else 0.0
        rounds += usual and not waits
        if usual and not waits and rounds > 1:
            weight = max(1 / (rounds + 1), chosen.weight)
            spread, mean = widened(off, weight), mean + weight * (time - mean)
        elif usual and not waits:
            mean = time
        assert past.spread[0] == pytest.approx(spread)
        if rng.random() < 0.05:
            past.forget([0], np.array([[time]]))
            known, rounds, mean = {}, 1, time


# closed loop: a training whose split follows its policy, with one fault on the way

PER_SAMPLE, FIXED = np.array([0.0, 0.001, 0.002, 0.0]), np.array([0.0005, 0.002, 0.002, 0.003])


class Training:
    """On a clock of its own; times are lognormal, and the all-reduce of each of four buckets follows its gradients."""

    def __init__(self, seed, phase=None):
        self.draw = np.random.default_rng([seed, 0 if phase is None else len(phase)])
        self.workers = n = int(self.draw.integers(2, 9))
        self.total = int(self.draw.integers(8, 40)) * n
        self.base = self.draw.uniform(0.3, 3) * self.draw.uniform(1, self.draw.choice([1.0001, 4.0]), n)[:, None]
        self.jitter, self.wire = self.draw.uniform(0.005, 0.05), self.draw.uniform(0.001, 0.02) / 4
        self.sizes, self.planner, self.detector = np.full(n, self.total // n), PerfModelPlanner(), StragglerDetector(n)
        self.phase, self.rank = phase, LINK if phase == "link" else int(self.draw.integers(n))
        self.begins = int(self.draw.integers(40, 100)) if phase else 10**9
        self.ends, self.factor, self.step, self.events = 10**9, self.draw.uniform(1.4, 3), 0, []

    def times(self):
        busy = self.base * (PER_SAMPLE * self.sizes[:, None] + FIXED)
        times, wire = busy * np.exp(self.jitter * self.draw.standard_normal(busy.shape)), np.full(4, self.wire)
        wire *= np.exp(self.jitter * self.draw.standard_normal())
        if self.begins <= self.step < self.ends:
            more = (self.factor - 1) * busy.sum(axis=1)
            if self.phase == "link":
                wire[-1] += 0.4 * more.max()
            else:
                times[self.rank, PHASES.index(self.phase)] += more.max()
        data, forward, backward, optimizer = times.T
        ready = (data + forward + optimizer)[:, None] + backward[:, None] * [0.3, 0.5, 0.8, 1.0]
        end, done = 0.0, []
        for bucket, seconds in zip(ready.T, wire, strict=True):
            end = max(end, bucket.max()) + seconds
            done.append(end)
        done = np.array(done)
        waits = done - np.maximum(ready, [0.0, *done[:-1]])
        self.step += 1
        row = self.sizes, forward, backward, 0.3 * backward, waits[:, :-1].sum(axis=1), waits[:, -1]
        ends = (done - (data + forward + optimizer)[:, None]).T
        return np.stack([*row, np.full(self.workers, end), data, optimizer, *ends], axis=1)

    def round(self):
        count = int(self.draw.integers(5, 14))
        seen = StepObservations.from_array(np.stack([self.times() for _ in range(count)]).astype(float))
        self.events += [(self.step, one.rank, one.phase, one.relieved) for one in self.detector.observe(seen, count)]
        context = PlanContext(self.total, tuple(map(str, range(self.workers))), (1,) * self.workers)
        done = self.planner.decide(seen, BatchPlan(int(self.sizes.sum()), tuple(map(int, self.sizes))), context)
        self.planner = done.planner
        if done.proposal is not None:
            self.sizes = np.array(done.proposal.plan.local_batch_sizes)

    def run(self, steps):
        end = self.step + steps
        while self.step < end:
            self.round()
        return self


@pytest.mark.parametrize("phase", [*PHASES, "link"])
def test_a_fault_is_found_with_its_rank_and_phase_and_its_end(phase, seed):
    training = Training(seed, phase)
    training.run(training.begins - 14)
    assert training.events == []
    training.run(40)
    (step, *found), *_ = training.events
    assert found == [training.rank, phase, ""]
    assert training.begins < step < training.begins + 28
    training.ends = training.step
    training.run(40)
    assert {rank for _, rank, *_ in training.events} == {training.rank}
    assert [one for one in training.events if one[3]]
    assert training.detector.worst == NOBODY
    assert training.detector.lost > 0


def test_quiet_trainings_have_no_straggler(seed):
    assert Training(seed).run(200).events == []
