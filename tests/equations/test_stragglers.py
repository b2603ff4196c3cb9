"""Stragglers are found in every phase, with the right rank and cost, and none where nothing is wrong."""

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
FEW = "2x .01 .01 .01 | .01 .01 .05 -> 2 forward"
LINKED = "2x .1 .1 link=.01 | .1 .1 link=.06 -> -1 link"
HALF = "@10,10,4"
SCATTER = " | ".join([".1 .1 .102 | .1 .1 .098"] * 10)
SCENES = {
    "it recovers": f"{SLOW} | .1 .1 .2 | .1 .1 .1 -> 2 forward recovered",
    "its share falls": f"{SLOW} | .12 .12 .12 @9,9,6 -> 2 forward split | 2x .12 .12 .12 @9,9,6",
    "it saves more than its share explains": f"{FEW} | .015 .014 .002 @12,11,1 -> 2 forward recovered",
    "others have more to do than it": f"{FEW} | .015 .014 .043 @12,11,1 | .045 .044 .043 @12,11,1 -> 2 forward others",
    "it recovers at its new share": f"{FEW} | .015 .014 .043 @12,11,1 | .015 .014 .012 @12,11,1 -> 2 forward recovered",
    "a share explains seven tenths of its part": f"{SLOW} | .1 .1 .072 {HALF} -> 2 forward split",
    "and no less": f"{SLOW} | .1 .1 .068 {HALF} -> 2 forward recovered",
    "half of its excess is left at the new share": f"{SLOW} | .1 .1 .1265 {HALF}",
    "less is left": f"{SLOW} | .1 .1 .123 {HALF} -> 2 forward split",
    "it is over within a round": "2x .1 .1 .1 | .1 .1 .3 steps=20 + .1 .1 .1 steps=9",
    "it begins within a round": "2x .1 .1 .1 | .1 .1 .1 steps=20 + .1 .1 .3 steps=6 -> 2 forward",
    "it begins in the last steps": "8x .1 .1 .1 | .1 .1 .1 steps=5 + .1 .1 .2 steps=3 -> 2 forward | .1 .1 .2",
    "nobody waits for it": "2x .2 .1 | 4x .2 .19",
    "all slow down": "2x .1 .1 .1 | 3x .2 .2 .2",
    "two at once": "2x .1 .1 .1 | .1 .2 .3 -> 1 forward, 2 forward",
    "others get more to do": f"{SLOW} | .2 .2 .2 @16,16,8 -> 2 forward others",
    "it costs half of the least": f"{SLOW} | .193 .193 .2 @16,16,8",
    "a faster worker": "2x .1 .1 .1 | 3x .1 .1 .05",
    "slow from the start": f"{LASTING} | 2x .1 .1 .3",
    "slow from the start by a tenth of the step": "2x .1 .12 | .1 .12 -> 1 forward",
    "by less": "3x .1 .109",
    "three rounds after a change of the split": ".1 .1 .3 | 3x .1 .1 .3 @9,8,7 | .1 .1 .3 @9,8,7 -> 2 forward",
    "the split changes all the time": " | ".join(f".1 .1 .3 @{8 + i},8,{8 - i}" for i in range(6)),
    "the split relieves it": f"{LASTING} | .13 .13 .13 {HALF} -> 2 forward split",
    "it costs half of what makes it one": "2x .1 .1 .3 link=0 | .1 .1 .3 link=0 -> 2 forward | .1 .1 .1054 link=0",
    "less": "2x .1 .1 .3 link=0 | .1 .1 .3 link=0 -> 2 forward | .1 .1 .1051 link=0 -> 2 forward recovered",
    "over, and slow again": f"{LASTING} | .1 .1 .1 -> 2 forward recovered | .1 .1 .3 -> 2 forward",
    "slower still": f"{LASTING} | .1 .1 .3 data=0,0,.4 -> 2 data, 2 forward slower | .1 .1 .3 -> 2 data recovered"
    " | .1 .1 .3 | .1 .1 .3 -> 2 forward",
    "at another size": f"{LASTING} | 4x .1 .1 .3 @9,8,7 | .1 .1 .36 @9,8,7 -> 2 forward, 2 forward slower",
    "others become slower than before": f"{LASTING} | 5x .15 .15 .3",
    "the slowest of all that become slower": "2x .1 .1 .1 | .15 .15 .3 -> 2 forward",
    "most of it is over": f"{SLOW} | .1 .1 .14",
    "four steps are judged": ".1 .1 .1 | .1 .1 .2 steps=4 -> 2 forward",
    "three are not": "4x .1 .1 .3 steps=3",
    "one worker": ".1 | .3",
    "within what is assumed at first": ".1 .1 .1 | .1 .1 .11",
    "doubt about an untried size": "2x .1 .1 .1 | .1 .1 .138 @8,7,9",
    "beyond the doubt": "2x .1 .1 .1 | .1 .1 .15 @8,7,9 -> 2 forward",
    "no doubt at a known size": "2x .1 .1 .1 | .1 .1 .12 -> 2 forward",
    "steps that scatter widely": "2x .1 .1 .1 | .1 .1 .1 ~ .1 .1 .2",
    "a suspicious round does not teach": "10x .1 .1 .1 | .1 .1 .104 | .1 .1 .1057 -> 2 forward",
    "a suspicious level that lasts is learned": "10x .1 .1 .1 | 12x .1 .1 .104 | .1 .1 .1085",
    "steps that scatter, far enough": "10x .1 .1 .1 | .1 .1 .185 ~ .1 .1 .215 -> 2 forward",
    "a link that scatters, far enough": "10x .01 .01 link=.1 | .01 .01 link=.18 ~ .01 .01 link=.22 -> -1 link",
    "rounds that scatter widen what is usual": f"{SCATTER} | .1 .1 .107",
    "and no more than they scatter": f"{SCATTER} | .1 .1 .115 -> 2 forward",
    "all-reduces limit the step": "2x backward=.1,.1,.1 overlapped=.3 | 2x backward=.1,.1,.15 overlapped=.3"
    " | backward=.1,.1,.6 overlapped=.3 -> 2 backward",
    "a short backward pass hides less": "2x backward=.1,.01 overlapped=.05 last=.001"
    " | backward=.1,.01 overlapped=.05 last=.001 data=0,.2 -> 1 data",
    "a slower link": f"{LINKED} | .1 .1 link=.06 | .1 .1 link=.01 -> -1 link recovered",
    "a link slow from a new split on": "2x backward=.1,.1 overlapped=.05"
    " | backward=.08,.12 @6,10 overlapped=.25 -> -1 link"
    " | backward=.08,.12 @6,10 overlapped=.05 -> -1 link recovered",
    "a link within its deviations": "2x .01 .01 link=.1 | .01 .01 link=.108",
    "a link that scatters": "2x .01 .01 link=.1 | .01 .01 link=.1 ~ .01 .01 link=.2",
    "a hidden link": "2x backward=.1,.1 overlapped=.01 | backward=.1,.1 overlapped=.06",
    "a link that recovers in part": f"{LINKED} | .1 .1 link=.03 -> -1 link recovered",
    "a suspicious round of the link": "10x .01 .01 link=.1 | .01 .01 link=.1035 | .01 .01 link=.1063 -> -1 link",
    "and a confirmed one": "14x .01 .01 link=.1 | .01 .01 link=.104 | .01 .01 link=.2 -> -1 link"
    " | .01 .01 link=.1 -> -1 link recovered | .01 .01 link=.1071 -> -1 link",
    "workers learn while the link is slow": f"{LINKED} | 3x .1 .1 @7,9 link=.06 | .1 .125 @7,9 link=.06 -> 1 forward",
    "a slow link lowers no bound": "2x .1 .1 link=.01 | .1 .1 link=.03 -> -1 link | .1 .1325 @7,9 link=.03",
    "nor does being slow from the start": "2x .1 .1 .115 | .1 .1 .115 -> 2 forward | .1 .1 .145 @8,7,9",
    **{f"slow from the start in {p}": f"2x {p}=.1,.12,.3 | {p}=.1,.12,.3 -> 2 {p}" for p in PHASES},
    **{
        f"twice the samples explain a longer {scaled} pass, and no {fixed}": f"2x {busy} | {busy} -> 2 {fixed}"
        for scaled in ("forward", "backward")
        for fixed in ("data", "optimizer")
        for busy in [f"@8,8,16 {scaled}=.1,.1,.22 {fixed}=.1,.1,.13"]
    },
}


@pytest.mark.parametrize("name", SCENES)
def test_who_is_named_when_and_how_it_ends(name):
    _, found, expected = watched(SCENES[name])
    assert found == expected


COSTS = {  # cost and excess of the worst, seconds lost, steps since its begin
    "what the others wait": ("2x .1 .15 .1 | 2x .1 .15 .2", 10, 0.05, 0.1, 0.05 * 18, 8),
    "the slower of two": ("2x .1 .1 .1 | .1 .2 .3", 10, 0.2, 0.2, 0.2 * 8, 8),
    "no more steps than there were": (SLOW, 5, 0.1, 0.1, 0.1 * 5, 8),
    "rounds too short to judge": (f"{SLOW} | .1 .1 .2 steps=3", 8, 0.1, 0.1, 0.1 * 16, 8),
    "slow from the start": ("3x .1 .12 .3", 8, 0.18, 0.18, 0.18 * 8, 8),
    "and slower": (f"{LASTING} | .1 .1 .3 data=0,0,.4", 8, 0.6, 0.4, 8 * 0.8, 8),
    "when others became slower, too": ("2x .1 .1 .1 | .1 .1 .3 | .15 .15 .3", 8, 0.15, 0.2, 8 * 0.35, 8),
    "beyond the all-reduces": (
        "2x backward=.1,.1,.1 overlapped=.3 | backward=.1,.1,.6 overlapped=.3", 8, 0.28, 0.5, 0.28 * 8, 8,
    ),
    "the newest steps": ("2x .1 .1 .1 | .1 .1 .1 steps=2 + .1 .1 .2 steps=6", 8, 0.1, 0.1, 0.1 * 6, 6),
    "steps about the slow time": ("2x .1 .1 .1 | .1 .1 .1 steps=2 + .1 .1 .19 ~ .1 .1 .21", 8, 0.1, 0.1, 0.7, 7),
    "the link": (f"{LINKED} | .1 .1 link=.11 | .1 .1 link=.04", 8, 0.03, 0.05, 8 * 0.18, 8),
    "all all-reduces": (
        "2x backward=.1,.1 overlapped=.09 last=.01 | backward=.1,.1 overlapped=.13 last=.05", 8, 0.08, 0.08, 0.64, 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_what_a_straggler_costs_and_since_when(name):
    scene, steps, cost, excess, lost, ago = COSTS[name]
    detector, *_ = watched(scene.replace(" -> 2 forward", ""), steps)
    worst = detector.active[detector.worst]
    assert (worst.cost, worst.excess, worst.ago, detector.lost) == pytest.approx((cost, excess, ago, lost))
    assert worst.lasting == (name == "slow from the start")


@pytest.mark.parametrize("scene", [f"{SLOW} | .1 .1 .1", f"{LINKED} | .1 .1 link=.01", f"{LINKED} | .1 .1 link=.03"])
def test_what_is_over_costs_nothing_and_what_it_cost_is_not_forgotten(scene):
    *before, last = scene.split(" | ")
    detector, *_ = watched(" | ".join(before), 8)
    lost, (known,) = detector.lost, detector.active.values()
    (ended,) = detector.observe(look(last), 8)
    assert ended is known
    assert (ended.relieved, ended.cost, detector.lost, ended.lost) == ("recovered", 0.0, lost, lost)
    assert (detector.active, detector.worst) == ({}, NOBODY)
    assert lost > 0
    assert detector.observe(StepObservations.empty(3), 0) == []


@pytest.mark.parametrize(("elapsed", "earlier"), [(8, False), (9, True), (40, True)])
def test_the_begin_is_not_known_where_it_was_not_timed(elapsed, earlier):
    detector, *_ = watched("2x .1 .1 .1", 8)
    (found,) = detector.observe(look(".1 .1 .2"), elapsed)
    (ended,) = detector.observe(look(".1 .1 .1"), 8)
    assert (found.ago, found.earlier, ended.earlier) == (8, earlier, earlier)
    detector, *_ = watched("2x .1 .1 .1", 8)
    (found,) = detector.observe(look(".1 .1 .1 steps=2 + .1 .1 .2 steps=6"), elapsed)
    assert (found.ago, found.earlier) == (6, False), "two timed steps came before"


# what rounds are judged by


def test_the_link_is_what_the_last_worker_sees_after_its_last_gradient():
    zero, backward = np.zeros((4, 2)), np.full((4, 2), 0.1)
    wait = np.tile([0.3, 0.02], (4, 1))
    ends = np.tile([[[0.12, 0.35, np.nan]] * 2], (4, 1, 1))  # an earlier bucket may hold the link
    for waits, buckets, expected in ((wait, None, 0.02), (wait, np.nan * ends, 0.02), (zero + 0.01, ends, 0.25)):
        seen = StepObservations(zero + 8, zero, backward, zero, zero, waits, zero, bucket_ends=buckets)
        assert exposed_link(seen) == pytest.approx([expected] * 4)
    assert exposed_link(StepObservations.empty(2)).shape == (0,)


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
