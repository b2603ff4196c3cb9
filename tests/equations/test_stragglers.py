"""Stragglers are found in every phase, with the right rank and cost, and none where nothing is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.stragglers.detector import LINK, NOBODY, StragglerDetector
from lightning_hetero.core.stragglers.round_times import PHASES, exposed_link

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


def look(text):
    """``.1 .1 .2 @8,8,4 link=.01 steps=6``: seconds of each worker, sizes, and what else :func:`at` takes.

    ``+`` joins steps to one round, and ``~`` takes every second step of one and of another look.
    """
    if "~" in text:
        one, other = map(look, text.split("~"))
        return mixed(*((one, other)[i % 2].rows(slice(i, i + 1)) for i in range(8)))
    if "+" in text:
        return mixed(*map(look, text.split("+")))
    seconds, more = [], {}
    for word in text.split():
        name, is_named, values = word.partition("=")
        if word.startswith("@"):
            more["sizes"] = [float(x) for x in word[1:].split(",")]
        elif is_named:
            numbers = [float(x) for x in values.split(",")]
            more[name] = int(values) if name == "steps" else numbers if len(numbers) > 1 else numbers[0]
        else:
            seconds.append(float(word))
    return at(**({"forward": seconds} if seconds else {}), **more)


def watched(scene, steps=10):
    """A detector, and the events of each round of ``2x look | look -> events``, found and expected."""
    rounds = []
    for part in scene.split(" | "):
        text, _, events = part.partition(" -> ")
        times, is_several, one = text.partition("x ")
        rounds += [(look(one if is_several else text), events)] * (int(times) if is_several else 1)
    detector, found = StragglerDetector(rounds[0][0].forward.shape[1]), []
    for seen, _ in rounds:
        events = detector.observe(seen, steps)
        found.append(", ".join(sorted(f"{one.rank} {one.phase} {one.relieved}".strip() for one in events)))
    return detector, found, [events for _, events in rounds]


SLOW = "2x .1 .1 .1 | .1 .1 .2 -> 2 forward"
LASTING = "2x .1 .1 .3 | .1 .1 .3 -> 2 forward"
LINKED = "2x .1 .1 link=.01 | .1 .1 link=.06 -> -1 link"
SCENES = {
    # its own past
    "it recovers": f"{SLOW} | .1 .1 .2 | .1 .1 .1 -> 2 forward recovered",
    "its share falls": f"{SLOW} | .12 .12 .12 @9,9,6 -> 2 forward split | 2x .12 .12 .12 @9,9,6",
    "it saves more than its share explains": "2x .01 .01 .01 | .01 .01 .05 -> 2 forward"
    " | .015 .014 .002 @12,11,1 -> 2 forward recovered",
    "half of its excess is left at the new share": f"{SLOW} | .1 .1 .1265 @10,10,4",
    "less is left": f"{SLOW} | .1 .1 .123 @10,10,4 -> 2 forward split",
    "others get more to do": f"{SLOW} | .2 .2 .2 @16,16,8 -> 2 forward others",
    "it is over within a round": "2x .1 .1 .1 | .1 .1 .3 steps=20 + .1 .1 .1 steps=9",
    "it begins within a round": "2x .1 .1 .1 | .1 .1 .1 steps=20 + .1 .1 .3 steps=6 -> 2 forward",
    "nobody waits for it": "2x .2 .1 | 4x .2 .19",
    "all slow down": "2x .1 .1 .1 | 3x .2 .2 .2",
    "two at once": "2x .1 .1 .1 | .1 .2 .3 -> 1 forward, 2 forward",
    "three steps are no round": "4x .1 .1 .3 steps=3",
    "one worker": ".1 | .3",
    # slower from the start
    "slow from the start by a tenth of the step": "2x .1 .12 | .1 .12 -> 1 forward",
    "three rounds after a change of the split": ".1 .1 .3 | 3x .1 .1 .3 @9,8,7 | .1 .1 .3 @9,8,7 -> 2 forward",
    "the split relieves it": f"{LASTING} | .13 .13 .13 @10,10,4 -> 2 forward split",
    "over, and slow again": f"{LASTING} | .1 .1 .1 -> 2 forward recovered | .1 .1 .3 -> 2 forward",
    "slower still": f"{LASTING} | .1 .1 .3 data=0,0,.4 -> 2 data, 2 forward slower | .1 .1 .3 -> 2 data recovered"
    " | .1 .1 .3 | .1 .1 .3 -> 2 forward",
    # what is within the noise
    "doubt about an untried size": "2x .1 .1 .1 | .1 .1 .138 @8,7,9",
    "steps that scatter, far enough": "10x .1 .1 .1 | .1 .1 .185 ~ .1 .1 .215 -> 2 forward",
    "rounds that scatter widen what is usual": f"{' | '.join(['.1 .1 .102 | .1 .1 .098'] * 10)} | .1 .1 .107",
    # phases, and what all-reduces hide
    "all-reduces limit the step": "2x backward=.1,.1,.1 overlapped=.3 | 2x backward=.1,.1,.15 overlapped=.3"
    " | backward=.1,.1,.6 overlapped=.3 -> 2 backward",
    "twice the samples explain a longer pass, and no longer loading": "2x @8,8,16 backward=.1,.1,.22 data=.1,.1,.13"
    " | @8,8,16 backward=.1,.1,.22 data=.1,.1,.13 -> 2 data",
    **{f"slow from the start in {p}": f"2x {p}=.1,.12,.3 | {p}=.1,.12,.3 -> 2 {p}" for p in PHASES},
    # the link
    "a slower link": f"{LINKED} | .1 .1 link=.06 | .1 .1 link=.01 -> -1 link recovered",
    "a link that recovers in part": f"{LINKED} | .1 .1 link=.03 -> -1 link recovered",
    "a link slow from a new split on": "2x backward=.1,.1 overlapped=.05"
    " | backward=.08,.12 @6,10 overlapped=.25 -> -1 link"
    " | backward=.08,.12 @6,10 overlapped=.05 -> -1 link recovered",
    "workers learn while the link is slow": f"{LINKED} | 3x .1 .1 @7,9 link=.06 | .1 .125 @7,9 link=.06 -> 1 forward",
}


@pytest.mark.parametrize("name", SCENES)
def test_who_is_named_when_and_how_it_ends(name):
    _, found, expected = watched(SCENES[name])
    assert found == expected


COSTS = {  # cost and excess of the worst, seconds lost, steps since its begin
    "what the others wait": ("2x .1 .15 .1 | 2x .1 .15 .2", 10, 0.05, 0.1, 0.05 * 18, 8),
    "slow from the start": ("3x .1 .12 .3", 8, 0.18, 0.18, 0.18 * 8, 8),
    "when others became slower, too": ("2x .1 .1 .1 | .1 .1 .3 | .15 .15 .3", 8, 0.15, 0.2, 8 * 0.35, 8),
    "beyond the all-reduces": (
        "2x backward=.1,.1,.1 overlapped=.3 | backward=.1,.1,.6 overlapped=.3", 8, 0.28, 0.5, 0.28 * 8, 8,
    ),
    "the link": (f"{LINKED} | .1 .1 link=.11 | .1 .1 link=.04", 8, 0.03, 0.05, 8 * 0.18, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_what_a_straggler_costs_and_since_when(name):
    scene, steps, cost, excess, lost, ago = COSTS[name]
    detector, *_ = watched(scene.replace(" -> 2 forward", ""), steps)
    worst = detector.active[detector.worst]
    assert (worst.cost, worst.excess, worst.ago, detector.lost) == pytest.approx((cost, excess, ago, lost))
    assert worst.lasting == (name == "slow from the start")


@pytest.mark.parametrize(("scene", "last"), [(SLOW, ".1 .1 .1"), (LINKED, ".1 .1 link=.03")])
def test_what_is_over_costs_nothing_and_what_it_cost_is_not_forgotten(scene, last):
    detector, *_ = watched(scene, 8)
    lost, (known,) = detector.lost, detector.active.values()
    (ended,) = detector.observe(look(last), 8)
    assert ended is known
    assert (ended.relieved, ended.cost, detector.lost, ended.lost) == ("recovered", 0.0, lost, lost)
    assert (detector.active, detector.worst, lost > 0) == ({}, NOBODY, True)


@pytest.mark.parametrize(("elapsed", "earlier"), [(8, False), (9, True)])
def test_the_begin_is_not_known_where_it_was_not_timed(elapsed, earlier):
    detector, *_ = watched("2x .1 .1 .1", 8)
    (found,) = detector.observe(look(".1 .1 .2"), elapsed)
    (ended,) = detector.observe(look(".1 .1 .1"), 8)
    assert (found.ago, found.earlier, ended.earlier) == (8, earlier, earlier)
    (found,) = detector.observe(look(".1 .1 .1 steps=2 + .1 .1 .2 steps=6"), elapsed)
    assert (found.ago, found.earlier) == (6, False), "two timed steps came before"


# what rounds are judged by


def test_the_link_is_what_the_last_worker_sees_after_its_last_gradient():
    zero = np.zeros((4, 2))
    seen = StepObservations(zero + 8, zero, zero + 0.1, zero, zero, zero + [0.3, 0.02], zero)
    assert exposed_link(seen) == pytest.approx([0.02] * 4)
    ends = np.tile([[[0.12, 0.35, np.nan]] * 2], (4, 1, 1))  # an earlier bucket may hold the link
    assert exposed_link(replace(seen, bucket_ends=ends)) == pytest.approx([0.25] * 4)


# closed loop: a training whose split follows its policy, with one fault on the way

PER_SAMPLE, FIXED = np.array([0.0, 0.001, 0.002, 0.0]), np.array([0.0005, 0.002, 0.002, 0.003])


class Training:
    """On a clock of its own, with lognormal times."""

    def __init__(self, seed, phase=None):
        self.draw = np.random.default_rng([seed, 0 if phase is None else len(phase)])
        self.workers = n = int(self.draw.integers(2, 9))
        self.total = int(self.draw.integers(8, 40)) * n
        self.base = self.draw.uniform(0.3, 3) * self.draw.uniform(1, self.draw.choice([1.0001, 4.0]), n)[:, None]
        self.jitter, self.link = self.draw.uniform(0.005, 0.05), self.draw.uniform(0.001, 0.02)
        self.sizes, self.planner, self.detector = np.full(n, self.total // n), PerfModelPlanner(), StragglerDetector(n)
        self.phase, self.rank = phase, LINK if phase == "link" else int(self.draw.integers(n))
        self.begins = int(self.draw.integers(40, 100)) if phase else 10**9
        self.ends, self.factor, self.step, self.events = 10**9, self.draw.uniform(1.4, 3), 0, []

    def one(self):
        busy = self.base * (PER_SAMPLE * self.sizes[:, None] + FIXED)
        times = busy * np.exp(self.jitter * self.draw.standard_normal(busy.shape))
        link = self.link * np.exp(self.jitter * self.draw.standard_normal())
        if self.begins <= self.step < self.ends:
            more = (self.factor - 1) * busy.sum(axis=1).max()
            if self.phase == "link":
                link += 0.4 * more
            else:
                times[self.rank, PHASES.index(self.phase)] += more
        self.step += 1
        return at(**dict(zip(PHASES, times.T, strict=True)), sizes=self.sizes, link=link, steps=1)

    def round(self):
        count = int(self.draw.integers(5, 14))
        seen = mixed(*(self.one() for _ in range(count)))
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
