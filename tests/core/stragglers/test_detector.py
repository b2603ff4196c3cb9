"""Stragglers are found in every phase, with the right rank, and none where nothing is wrong."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.stragglers.detector import LINK, NOBODY, StragglerDetector
from lightning_hetero.core.stragglers.round_times import PHASES

PER_SAMPLE = np.array([0.0, 0.001, 0.002, 0.0])
FIXED = np.array([0.0005, 0.002, 0.002, 0.003])


class Training:
    """A training whose split follows its policy, with one fault from a step on; times are lognormal."""

    def __init__(self, seed, *, fault=True, equal=False, planned=True):
        draw = self.draw = np.random.default_rng(seed)
        self.workers = n = int(draw.integers(2, 9))
        self.total = int(draw.integers(8, 40)) * n
        speed = np.ones(n) if equal else draw.uniform(1, 4, n)
        self.base = draw.uniform(0.3, 3) * speed[:, None]
        self.jitter, self.link = draw.uniform(0.005, 0.05), draw.uniform(0.001, 0.02)
        self.sizes = np.full(n, self.total // n)
        self.at = int(draw.integers(60, 200)) if fault else 10**9
        self.rank, self.phase = int(draw.integers(n)), int(draw.integers(5))
        self.factor = draw.uniform(1.3, 3)
        self.planner = PerfModelPlanner() if planned else None
        self.detector, self.step, self.events = StragglerDetector(n), 0, []

    def busy(self):
        return self.base * (PER_SAMPLE * self.sizes[:, None] + FIXED)

    def rows(self, count):
        """Rows of the next steps."""
        for _ in range(count):
            times = self.busy() * np.exp(self.jitter * self.draw.standard_normal((self.workers, 4)))
            link = self.link * np.exp(self.jitter * self.draw.standard_normal())
            if self.step >= self.at and self.phase < 4:
                times[self.rank, self.phase] += (self.factor - 1) * self.busy()[self.rank].sum()
            elif self.step >= self.at:
                link += (self.factor - 1) * 0.2 * self.busy().sum(axis=1).max()
            total = times.sum(axis=1)
            step = total.max() + link
            zeros = np.zeros(self.workers)
            yield np.stack(
                [
                    *(self.sizes, times[:, 1], times[:, 2], 0.3 * times[:, 2], zeros, step - total),
                    *(zeros + step, times[:, 0], times[:, 3], times[:, 2] + step - total),
                ],
                axis=1,
            )
            self.step += 1

    def round(self):
        count = int(self.draw.integers(5, 14))
        seen = StepObservations.from_array(np.stack([*self.rows(count)]).astype(float))
        self.events += [(self.step, one) for one in self.detector.observe(seen, count)]
        if self.planner is not None:
            context = PlanContext(self.total, tuple(map(str, range(self.workers))), (1,) * self.workers)
            done = self.planner.decide(seen, BatchPlan(int(self.sizes.sum()), tuple(map(int, self.sizes))), context)
            self.planner = done.planner
            if done.proposal is not None:
                self.sizes = np.array(done.proposal.plan.local_batch_sizes)

    def run(self, steps=300):
        while self.step < steps and (not self.events or self.step < self.at + 60):
            self.round()
        return self

    @property
    def truth(self):
        return (self.rank, PHASES[self.phase]) if self.phase < 4 else (LINK, "link")


def test_faults_in_every_phase_are_found_and_named():
    """At least 99 of 100, as the right rank and phase, and not before they began."""
    outcomes = Counter()
    for seed in range(100):
        training = Training(seed, equal=seed % 2 == 0).run()
        if not training.events:
            outcomes["missed"] += 1
            continue
        step, first = training.events[0]
        outcomes["right" if (first.rank, first.phase) == training.truth else "wrong"] += 1
        assert step > training.at
        assert first.lost > 0
    assert outcomes["right"] >= 99, outcomes


@pytest.mark.parametrize("equal", [True, False])
def test_quiet_runs_have_no_straggler(equal):
    for seed in range(20):
        assert not Training(seed, fault=False, equal=equal).run().events, seed


def steady(compute, *, sizes=8, link=0.001, steps=8, phase=1):
    """Observations without jitter, in which workers take these times in one phase."""
    compute = np.tile(np.asarray(compute, dtype=float), (steps, 1))
    zeros, step = np.zeros_like(compute), compute.max(axis=1, keepdims=True) + link
    sizes = zeros + sizes
    fields = dict.fromkeys(("data", "forward", "backward", "optimizer"), zeros)
    fields[PHASES[phase]] = compute
    return StepObservations(
        *(sizes, fields["forward"], fields["backward"], zeros, zeros, step - compute, zeros + step),
        fields["data"],
        fields["optimizer"],
    )


def watched(*rounds, steps=10):
    detector, events = StragglerDetector(len(rounds[0].local_batch_sizes[0])), []
    for one in rounds:
        events.append([(e.rank, e.phase, e.relieved) for e in detector.observe(one, steps)])
    return detector, events


USUAL = steady((0.1, 0.1, 0.1))


def test_a_worker_that_recovers_is_no_straggler_any_more():
    slow = steady((0.1, 0.1, 0.2))
    detector, events = watched(USUAL, USUAL, slow, slow, USUAL)
    assert events == [[], [], [(2, "forward", "")], [], [(2, "forward", "recovered")]]
    assert not detector.active
    assert detector.worst == NOBODY


def test_a_worker_whose_share_falls_is_relieved_by_the_split():
    slow, after = steady((0.1, 0.1, 0.2)), steady((0.12, 0.12, 0.12), sizes=np.array([9, 9, 6]))
    detector, events = watched(USUAL, USUAL, slow, after, after, after)
    assert events == [[], [], [(2, "forward", "")], [(2, "forward", "split")], [], []]


def test_a_worker_that_saves_more_than_its_share_explains_has_recovered():
    """Sizes 8 -> 1 with a delay of 40 ms that is over: not even in proportion would it take as little."""
    slow, small = steady((0.01, 0.01, 0.05)), np.array([12, 11, 1])
    still, over = (steady((0.015, 0.014, last), sizes=small) for last in (0.043, 0.002))
    usual = steady((0.01, 0.01, 0.01))
    _, events = watched(usual, usual, slow, over)
    assert events[3] == [(2, "forward", "recovered")]
    _, events = watched(usual, usual, slow, still, steady((0.045, 0.044, 0.043), sizes=np.array([12, 11, 1])))
    assert events[3:] == [[], [(2, "forward", "others")]]
    _, events = watched(usual, usual, slow, still, steady((0.015, 0.014, 0.012), sizes=small))
    assert events[4] == [(2, "forward", "recovered")], "the same share as when it was slow"


def test_the_begin_is_not_known_where_it_was_not_timed():
    for elapsed, earlier in ((8, False), (9, True), (40, True)):
        detector, _ = watched(USUAL, USUAL, steps=8)
        (found,) = detector.observe(steady((0.1, 0.1, 0.2)), elapsed)
        assert (found.ago, found.earlier) == (8, earlier)
        (ended,) = detector.observe(USUAL, 8)
        assert (ended.relieved, ended.earlier) == ("recovered", earlier)
    detector, _ = watched(USUAL, USUAL, steps=8)
    mixed = np.concatenate([_table(USUAL)[:2], _table(steady((0.1, 0.1, 0.2)))[:6]])
    (found,) = detector.observe(StepObservations.from_array(mixed), 40)
    assert (found.ago, found.earlier) == (6, False), "two timed steps came before"


def test_a_round_in_which_a_worker_recovers_shows_no_straggler():
    """20 slow steps and 12 that are not: it is over; the newest half of the round was mostly slow."""
    mixed = np.concatenate([_table(steady((0.1, 0.1, 0.3), steps=20)), _table(steady((0.1, 0.1, 0.1), steps=9))])
    assert watched(USUAL, USUAL, StepObservations.from_array(mixed))[1][2] == []
    slow = np.concatenate([_table(steady((0.1, 0.1, 0.1), steps=20)), _table(steady((0.1, 0.1, 0.3), steps=6))])
    assert watched(USUAL, USUAL, StepObservations.from_array(slow))[1][2] == [(2, "forward", "")]


def test_what_it_costs_is_what_the_others_wait():
    slow = steady((0.1, 0.15, 0.2))
    detector, events = watched(steady((0.1, 0.15, 0.1)), steady((0.1, 0.15, 0.1)), slow)
    (straggler,) = detector.active.values()
    assert straggler.cost == pytest.approx(0.05)
    assert straggler.excess == pytest.approx(0.1)
    assert straggler.lost == pytest.approx(0.05 * 8)  # eight steps were timed, all of them slow
    detector.observe(slow, 10)
    assert straggler.lost == pytest.approx(0.05 * 18)
    assert detector.lost == pytest.approx(straggler.lost)


def test_a_slower_worker_that_nobody_waits_for_is_none():
    _, events = watched(steady((0.2, 0.1)), steady((0.2, 0.1)), *[steady((0.2, 0.19))] * 4)
    lasting = [event for round_ in events[2:] for event in round_]
    assert not lasting


def test_when_all_slow_down_none_is_to_blame():
    _, events = watched(USUAL, USUAL, *[steady((0.2, 0.2, 0.2))] * 3)
    assert not any(events)


def test_two_stragglers_at_once_are_both_named():
    slow = steady((0.1, 0.2, 0.3))
    detector, events = watched(USUAL, USUAL, slow)
    assert sorted(events[2]) == [(1, "forward", ""), (2, "forward", "")]
    assert detector.worst == 2
    assert detector.lost == pytest.approx(0.2 * 8)  # steps wait for the slower one


def test_when_others_get_more_to_do_the_straggler_is_one_no_more():
    more = steady((0.2, 0.2, 0.2), sizes=np.array([16, 16, 8]))
    _, events = watched(USUAL, USUAL, steady((0.1, 0.1, 0.2)), more)
    assert events[3] == [(2, "forward", "others")]


@pytest.mark.parametrize("phase", range(4))
def test_a_worker_that_was_slower_from_the_start_is_named_after_three_rounds(phase):
    slow = steady((0.1, 0.12, 0.3), phase=phase)
    detector, events = watched(*[slow] * 5)
    assert events == [[], [], [(2, PHASES[phase], "")], [], []]
    assert detector.active[2].lasting
    assert detector.active[2].cost == pytest.approx(0.18)


def test_a_lasting_straggler_that_is_relieved_ends():
    slow = steady((0.1, 0.1, 0.3))
    _, events = watched(slow, slow, slow, steady((0.13, 0.13, 0.13), sizes=np.array([10, 10, 4])))
    assert events[3] == [(2, "forward", "split")]


def test_a_lasting_straggler_that_becomes_slower_still_is_named_again_with_its_phase():
    slow, slower = steady((0.1, 0.1, 0.3)), _with(steady((0.1, 0.1, 0.3)), data_wait=(0.0, 0.0, 0.4))
    detector, events = watched(slow, slow, slow, slower, slower, slow, slow, slow, slow)
    assert events[2:6] == [
        [(2, "forward", "")],
        [(2, "forward", "slower"), (2, "data", "")],
        [],
        [(2, "data", "recovered")],
    ]
    assert sum(events[6:], []) == [(2, "forward", "")], "slow as from the start"
    assert detector.lost == pytest.approx((8 + 8 + 10) * 0.2 + (8 + 10) * 0.6), "what it cost before is not forgotten"


def test_a_worker_costs_nothing_where_the_all_reduces_limit_the_step():
    """All-reduces of 0.3 s begin with the first bucket, so that 50 ms more of the backward pass cost nothing."""
    usual, slow, slower = (linked((0.1, 0.1, last), overlapped=0.3) for last in (0.1, 0.15, 0.6))
    detector, events = watched(usual, usual, slow, slow, slower)
    assert events == [[], [], [], [], [(2, "backward", "")]]
    assert detector.active[2].cost == pytest.approx(0.6 - 0.32), "0.32 s without it"


def test_the_link_is_not_to_blame_if_a_short_backward_pass_hides_less_of_it():
    """Rank 1 loads for 0.2 s, has its first bucket after the others have ended, and hides 10 ms of the all-reduces."""
    usual = linked((0.1, 0.01), overlapped=0.05)
    slow = _with(usual, data_wait=(0.0, 0.2))
    _, events = watched(usual, usual, slow)
    assert events[2] == [(1, "data", "")]


def test_a_link_that_becomes_slow_with_a_change_of_the_split_is_named():
    usual = linked((0.1, 0.1), overlapped=0.05)
    slow = linked((0.08, 0.12), overlapped=0.25, sizes=np.array([6, 10]))
    detector, events = watched(usual, usual, slow, linked((0.08, 0.12), overlapped=0.05, sizes=np.array([6, 10])))
    assert events[2:] == [[(LINK, "link", "")], [(LINK, "link", "recovered")]]
    assert detector.lost == pytest.approx(8 * (0.12 * 0.2 + 0.25 - 0.12))


def test_changes_of_the_split_restart_the_count_of_lasting_stragglers():
    rounds = [steady((0.1, 0.1, 0.3), sizes=np.array([8 + i, 8, 8 - i])) for i in range(6)]
    _, events = watched(*rounds)
    assert not any(events)


def test_a_slower_link_is_named_and_its_recovery():
    usual, slow = steady((0.1, 0.1), link=0.01), steady((0.1, 0.1), link=0.06)
    detector, events = watched(usual, usual, slow, slow, usual)
    assert events == [[], [], [(LINK, "link", "")], [], [(LINK, "link", "recovered")]]
    assert detector.lost == pytest.approx(0.05 * (8 + 10))


def test_a_faster_worker_is_no_event():
    _, events = watched(USUAL, USUAL, *[steady((0.1, 0.1, 0.05))] * 3)
    assert not any(events)


def test_few_steps_are_not_judged():
    detector = StragglerDetector(3)
    for _ in range(3):
        assert detector.observe(steady((0.1, 0.1, 0.3), steps=3), 3) == []
    assert not detector.active


def test_one_worker_makes_nobody_wait():
    assert StragglerDetector(1).observe(steady((0.1,)), 8) == []


def test_no_steps_are_no_event():
    assert StragglerDetector(2).observe(StepObservations.empty(2), 0) == []


def test_a_fault_in_the_last_steps_of_a_round_is_found_in_the_next():
    """The round in which it begins must not teach that it is usual."""
    usual, slow = steady((0.1, 0.1)), steady((0.1, 0.2))
    mixed = StepObservations.from_array(
        np.concatenate([_table(usual)[:5], _table(slow)[:3]]),
    )
    _, events = watched(*[usual] * 8, mixed, slow)
    assert (1, "forward", "") in events[8] + events[9]


def test_the_worst_is_the_one_that_costs_most():
    assert watched(USUAL, USUAL, steady((0.1, 0.3, 0.2)))[0].worst == 1


def test_four_steps_are_judged():
    assert watched(USUAL, steady((0.1, 0.1, 0.2), steps=4))[1][1] == [(2, "forward", "")]


def test_rounds_too_short_to_judge_cost_as_much():
    slow = steady((0.1, 0.1, 0.2))
    detector, _ = watched(USUAL, USUAL, slow, steps=8)
    detector.observe(steady((0.1, 0.1, 0.2), steps=3), 3)
    assert detector.lost == pytest.approx(0.1 * 11)


def test_no_more_steps_are_charged_than_there_were():
    detector, _ = watched(USUAL, USUAL)
    detector.observe(steady((0.1, 0.1, 0.2)), 5)
    assert detector.lost == pytest.approx(0.1 * 5)


def test_doubt_about_an_untried_size_is_a_share_of_what_is_expected():
    sizes = np.array([8, 7, 9])  # 0.1125 s are expected of rank 2
    for last, found in ((0.138, []), (0.15, [(2, "forward", "")])):
        assert watched(USUAL, USUAL, steady((0.1, 0.1, last), sizes=sizes))[1][2] == found, last
    assert watched(USUAL, USUAL, steady((0.1, 0.1, 0.12)))[1][2] == [(2, "forward", "")], "no doubt at a known size"


def test_a_round_whose_steps_scatter_widely_names_nobody():
    rows = _table(steady((0.1, 0.1, 0.2)))
    rows[::2] = _table(USUAL)[::2]
    assert watched(USUAL, USUAL, StepObservations.from_array(rows))[1][2] == []


def test_a_straggler_with_a_new_share_lasts_while_half_of_its_excess_does():
    """Sizes 8 -> 4 leave 50 ms of 100 ms in proportion; half of it is less than the doubt about the new size."""
    sizes, slow = np.array([10, 10, 4]), steady((0.1, 0.1, 0.2))
    for last, ended in ((0.1265, []), (0.123, [(2, "forward", "split")])):
        assert watched(USUAL, USUAL, slow, steady((0.1, 0.1, last), sizes=sizes))[1][3] == ended, last


def test_steps_that_scatter_about_the_slow_time_are_all_slow():
    rows = _table(USUAL)
    rows[2::2], rows[3::2] = (_table(steady((0.1, 0.1, last)))[2::2] for last in (0.19, 0.21))
    detector, _ = watched(USUAL, USUAL)
    (found,) = detector.observe(StepObservations.from_array(rows), 8)
    assert found.ago == 6


def test_a_suspicious_round_does_not_teach_what_is_usual():
    _, events = watched(*[USUAL] * 10, steady((0.1, 0.1, 0.104)), steady((0.1, 0.1, 0.1057)))
    assert events[10:] == [[], [(2, "forward", "")]]


def test_a_straggler_that_costs_half_of_the_least_lasts_and_no_cost_is_negative():
    detector, _ = watched(USUAL, USUAL, steady((0.1, 0.1, 0.2)))
    sizes = np.array([16, 16, 8])
    assert detector.observe(steady((0.193, 0.193, 0.2), sizes=sizes), 8) == []
    (ended,) = detector.observe(steady((0.205, 0.205, 0.2), sizes=sizes), 8)
    assert (ended.relieved, ended.cost) == ("others", 0.0)


def test_a_lasting_straggler_lasts_while_it_costs_half_of_what_makes_it_one():
    """It begins at 10 % of the step and ends below 5 %."""
    slow = steady((0.1, 0.1, 0.3), link=0.0)
    for last, ended in ((0.1054, []), (0.1051, [(2, "forward", "recovered")])):
        assert watched(slow, slow, slow, steady((0.1, 0.1, last), link=0.0))[1][3] == ended, last


def test_a_lasting_straggler_that_recovers_is_found_at_once_when_it_is_slow_again():
    slow = steady((0.1, 0.1, 0.3))
    detector, events = watched(slow, slow, slow, USUAL, slow)
    assert events[2:] == [[(2, "forward", "")], [(2, "forward", "recovered")], [(2, "forward", "")]]
    assert not detector.active[2].lasting


def test_three_rounds_after_a_change_of_the_split_name_a_lasting_straggler():
    first, then = steady((0.1, 0.1, 0.3)), steady((0.1, 0.1, 0.3), sizes=np.array([9, 8, 7]))
    assert [bool(one) for one in watched(first, *[then] * 4)[1]] == [False] * 4 + [True]


def test_a_lasting_straggler_is_dated_to_the_first_step_of_the_round():
    detector, _ = watched(*[steady((0.1, 0.12, 0.3))] * 2)
    (found,) = detector.observe(steady((0.1, 0.12, 0.3)), 8)
    assert (found.ago, found.cost, found.excess) == (8, pytest.approx(0.18), pytest.approx(0.18))


@pytest.mark.parametrize("scaled", ["forward", "backward"])
@pytest.mark.parametrize(("fixed", "phase"), [("data_wait", "data"), ("optimizer", "optimizer")])
def test_only_passes_grow_with_the_share_of_a_lasting_straggler(scaled, fixed, phase):
    """Twice the samples explain 0.2 of 0.22 s of a pass, and nothing of 0.13 s beside 0.1 s."""
    times = {"forward": 0.0, scaled: (0.1, 0.1, 0.22), fixed: (0.1, 0.1, 0.13)}
    slow = _with(steady((0.35, 0.35, 0.35), sizes=np.array([8, 8, 16])), **times)
    assert watched(*[slow] * 3)[1][2] == [(2, phase, "")]


def test_a_link_that_scatters_or_costs_nothing_is_not_named():
    usual = steady((0.01, 0.01), link=0.1)
    assert not any(watched(usual, usual, steady((0.01, 0.01), link=0.108))[1]), "within its deviations"
    rows = _table(steady((0.01, 0.01), link=0.2))
    rows[::2] = _table(usual)[::2]
    assert not any(watched(usual, usual, StepObservations.from_array(rows))[1])
    hidden = [linked((0.1, 0.1), overlapped=seconds) for seconds in (0.01, 0.01, 0.06)]
    assert not any(watched(*hidden)[1])


def test_a_link_straggler_is_followed_until_less_than_half_of_its_excess_is_left():
    usual, slow, slower, less = (steady((0.1, 0.1), link=link) for link in (0.01, 0.06, 0.11, 0.04))
    detector, _ = watched(usual, usual)
    (found,) = detector.observe(slow, 8)
    assert (found.ago, found.excess) == (8, pytest.approx(0.05))
    assert detector.observe(slower, 8) == detector.observe(less, 8) == []
    assert detector.lost == pytest.approx(8 * (0.05 + 0.1 + 0.03))
    (ended,) = detector.observe(usual, 8)
    assert (ended.relieved, ended.cost, detector.active) == ("recovered", 0.0, {})
    assert detector.observe(usual, 8) == []


def test_a_suspicious_round_does_not_teach_what_is_usual_of_the_link():
    links = [*[0.1] * 10, 0.1035, 0.1063]
    assert watched(*[steady((0.01, 0.01), link=link) for link in links])[1][10:] == [[], [(LINK, "link", "")]]


def test_a_suspicious_round_that_a_slow_link_confirms_is_no_noise_of_the_link():
    """What names the link is the same after it was slow as before: only rounds that are not confirmed are noise."""
    rounds = [steady((0.01, 0.01), link=link) for link in (*[0.1] * 14, 0.104, 0.2, 0.1, 0.1071)]
    begin, end = [(LINK, "link", "")], [(LINK, "link", "recovered")]
    assert watched(*rounds)[1][14:] == [[], begin, end, begin]


def test_all_all_reduces_count_for_the_link():
    usual, slow = (_with(linked((0.1, 0.1), overlapped=o), last_sync=u) for o, u in ((0.09, 0.01), (0.13, 0.05)))
    detector, _ = watched(usual, usual)
    (found,) = detector.observe(slow, 8)
    assert found.excess == pytest.approx(0.08)


def test_the_slowest_is_a_straggler_still_when_all_others_become_slower():
    """It takes 0.3 s, and the others 0.15 s: they wait as long as it takes more, however slow they were before."""
    slow, now = steady((0.1, 0.1, 0.3)), steady((0.15, 0.15, 0.3))
    for rounds in ([slow] * 3, [USUAL, USUAL, slow]):
        detector, events = watched(*rounds, *[now] * 5)
        assert events[2:] == [[(2, "forward", "")], *[[]] * 5]
        assert detector.active[2].cost == pytest.approx(0.15)
    assert watched(USUAL, USUAL, now)[1][2] == [(2, "forward", "")], "not three rounds later"


def test_phase_and_begin_follow_from_all_phases():
    usual = _with(steady((0.2, 0.2)), forward=0.1, backward=0.1)
    rows = _table(_with(usual, data_wait=(0.0, 0.05)))
    rows[:2] = _table(usual)[:2]
    detector, _ = watched(usual, usual)
    (found,) = detector.observe(StepObservations.from_array(rows), 8)
    assert (found.rank, found.phase, found.ago) == (1, "data", 6)


def test_a_worker_is_not_named_within_the_deviations_assumed_at_first():
    assert watched(USUAL, steady((0.1, 0.1, 0.11)))[1] == [[], []]


def test_a_lasting_straggler_learns_what_is_usual_at_another_size():
    first, sizes = steady((0.1, 0.1, 0.3)), np.array([9, 8, 7])
    then, slower = (steady((0.1, 0.1, last), sizes=sizes) for last in (0.3, 0.36))
    assert watched(*[first] * 3, *[then] * 4, slower)[1][7] == [(2, "forward", "slower"), (2, "forward", "")]


def test_workers_learn_what_is_usual_while_the_link_is_slow():
    usual, slow = (steady((0.1, 0.1), link=link) for link in (0.01, 0.06))
    resized, worker = (steady((0.1, last), link=0.06, sizes=np.array([7, 9])) for last in (0.1, 0.125))
    _, events = watched(usual, usual, slow, *[resized] * 3, worker)
    assert events[2:] == [[(LINK, "link", "")], [], [], [], [(1, "forward", "")]]


def test_neither_the_link_nor_a_lasting_straggler_lowers_what_names_a_worker():
    usual, sizes = steady((0.1, 0.1), link=0.01), np.array([7, 9])
    worker = steady((0.1, 0.1325), link=0.03, sizes=sizes)
    assert watched(usual, usual, steady((0.1, 0.1), link=0.03), worker)[1][2:] == [[(LINK, "link", "")], []]
    lasting, larger = steady((0.1, 0.1, 0.115)), steady((0.1, 0.1, 0.145), sizes=np.array([8, 7, 9]))
    assert watched(*[lasting] * 3, larger)[1][2:] == [[(2, "forward", "")], []]


def test_a_straggler_far_beyond_its_past_lasts_though_most_of_its_excess_is_over():
    assert watched(USUAL, USUAL, steady((0.1, 0.1, 0.2)), steady((0.1, 0.1, 0.14)))[1][3] == []


@pytest.mark.parametrize(("last", "how"), [(0.072, "split"), (0.068, "recovered")])
def test_a_share_explains_seven_tenths_of_its_part_and_no_less(last, how):
    after = steady((0.1, 0.1, last), sizes=np.array([10, 10, 4]))
    assert watched(USUAL, USUAL, steady((0.1, 0.1, 0.2)), after)[1][3] == [(2, "forward", how)]


@pytest.mark.parametrize(("last", "found"), [(0.12, [(1, "forward", "")]), (0.109, [])])
def test_a_lasting_straggler_costs_a_tenth_of_the_step(last, found):
    assert watched(*[steady((0.1, last))] * 3)[1][2] == found


def test_a_link_that_has_recovered_in_part_costs_nothing_more():
    usual, slow, less = (steady((0.1, 0.1), link=link) for link in (0.01, 0.06, 0.03))
    detector, _ = watched(usual, usual, slow)
    (ended,) = detector.observe(less, 8)
    assert (ended.relieved, ended.cost) == ("recovered", 0.0)


def linked(backward, *, overlapped, sizes=8, steps=8):
    """Observations of backward passes whose first bucket is ready after a fifth; all-reduces end with the link."""
    backward = np.tile(np.asarray(backward, dtype=float), (steps, 1))
    zeros, last = np.zeros_like(backward), np.full_like(backward, 0.001)
    end = np.maximum(0.2 * backward + overlapped, backward).max(axis=1, keepdims=True) + 0.001
    return StepObservations(
        zeros + sizes,
        zeros,
        backward,
        0.2 * backward,
        zeros + overlapped,
        last,
        zeros + end,
        bucket_ends=(zeros + end)[:, :, None],
    )


def _with(seen, **fields):
    """Observations with other times of some phases."""
    return replace(seen, **{name: np.zeros_like(seen.backward) + value for name, value in fields.items()})


def _table(seen):
    return np.stack([getattr(seen, name) for name in StepObservations.FIELDS], axis=2)
