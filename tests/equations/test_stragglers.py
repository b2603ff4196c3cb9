"""Stragglers are found in every phase, with the right rank and cost, and none where nothing is wrong."""

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.stragglers.detector import LINK, StragglerDetector
from lightning_hetero.core.stragglers.round_times import PHASES

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
    """One round of several looks."""
    fields = [np.concatenate([getattr(look, name) for look in looks]) for name in StepObservations.FIELDS]
    return StepObservations(*fields, bucket_ends=np.concatenate([look.bucket_ends for look in looks]))


def look(text):
    """``.1 .1 .2 @8,8,4 link=.01 steps=6``: seconds of each worker, sizes, and what else :func:`at` takes."""
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


def watched(scene):
    """A detector, and the events of each round of ``2x look | look -> events``, found and expected."""
    rounds = []
    for part in scene.split(" | "):
        text, _, events = part.partition(" -> ")
        times, is_several, one = text.partition("x ")
        rounds += [(look(one if is_several else text), events)] * (int(times) if is_several else 1)
    detector, found = StragglerDetector(rounds[0][0].forward.shape[1]), []
    for seen, _ in rounds:
        events = detector.observe(seen, 10)
        found.append(", ".join(sorted(f"{one.rank} {one.phase} {one.relieved}".strip() for one in events)))
    return detector, found, [events for _, events in rounds]


SLOW = "2x .1 .1 .1 | .1 .1 .2 -> 2 forward"
LASTING = "2x .1 .1 .3 | .1 .1 .3 -> 2 forward"
LINKED = "2x .1 .1 link=.01 | .1 .1 link=.06 -> -1 link"
SCENES = {
    # its own past
    "it recovers": f"{SLOW} | .1 .1 .2 | .1 .1 .1 -> 2 forward recovered",
    "its share falls": f"{SLOW} | .12 .12 .12 @9,9,6 -> 2 forward split | 2x .12 .12 .12 @9,9,6",
    "nobody waits for it": "2x .2 .1 | 4x .2 .19",
    "all slow down": "2x .1 .1 .1 | 3x .2 .2 .2",
    "two at once": "2x .1 .1 .1 | .1 .2 .3 -> 1 forward, 2 forward",
    "one worker": ".1 | .3",
    # slower from the start
    "slow from the start by a tenth of the step": "2x .1 .12 | .1 .12 -> 1 forward",
    "three rounds after a change of the split": ".1 .1 .3 | 3x .1 .1 .3 @9,8,7 | .1 .1 .3 @9,8,7 -> 2 forward",
    "the split relieves it": f"{LASTING} | .13 .13 .13 @10,10,4 -> 2 forward split",
    # what is within the noise
    "rounds that scatter widen what is usual": f"{' | '.join(['.1 .1 .102 | .1 .1 .098'] * 10)} | .1 .1 .107",
    # phases, and what all-reduces hide
    "all-reduces limit the step": "2x backward=.1,.1,.1 overlapped=.3 | 2x backward=.1,.1,.15 overlapped=.3"
    " | backward=.1,.1,.6 overlapped=.3 -> 2 backward",
    "twice the samples explain a longer pass, and no longer loading": "2x @8,8,16 backward=.1,.1,.22 data=.1,.1,.13"
    " | @8,8,16 backward=.1,.1,.22 data=.1,.1,.13 -> 2 data",
    **{f"slow from the start in {p}": f"2x {p}=.1,.12,.3 | {p}=.1,.12,.3 -> 2 {p}" for p in PHASES},
    # the link
    "a slower link": f"{LINKED} | .1 .1 link=.06 | .1 .1 link=.01 -> -1 link recovered",
    "a link slow from a new split on": "2x backward=.1,.1 overlapped=.05"
    " | backward=.08,.12 @6,10 overlapped=.25 -> -1 link"
    " | backward=.08,.12 @6,10 overlapped=.05 -> -1 link recovered",
    "workers learn while the link is slow": f"{LINKED} | 3x .1 .1 @7,9 link=.06 | .1 .125 @7,9 link=.06 -> 1 forward",
}


@pytest.mark.parametrize("name", SCENES)
def test_who_is_named_when_and_how_it_ends(name):
    _, found, expected = watched(SCENES[name])
    assert found == expected


def test_a_straggler_costs_what_the_others_wait():
    detector, *_ = watched("2x .1 .15 .1 | 2x .1 .15 .2")
    worst = detector.active[detector.worst]
    assert (worst.cost, worst.excess, detector.lost) == pytest.approx((0.05, 0.1, 0.05 * 18))
    detector, *_ = watched(f"{LINKED} | .1 .1 link=.05")
    assert detector.active[LINK].cost == pytest.approx(0.04), "of the newest round"


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
    assert (training.rank, phase) not in {(one.rank, one.phase) for one in training.detector.active.values()}
    assert training.detector.lost > 0


def test_quiet_trainings_have_no_straggler(seed):
    assert Training(seed).run(200).events == []
