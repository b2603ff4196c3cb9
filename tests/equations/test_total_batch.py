"""The policy of the total batch (C sec. 4): what a decision may change, by how much, and when."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.goodput import TotalSettings
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from tests.equations import clusters
from tests.equations.clusters import line_workers, measure

WORKERS = line_workers(0.001, 0.003, fixed=0.01)
UNKNOWN, NOTHING = RunningNoiseScale(), StepObservations.empty(2)


def noise(phi, scatter=0.0, steps=1):
    """A noise scale of which so many steps were seen, each off by a share."""
    scale, rng = RunningNoiseScale(horizon=1e9), np.random.default_rng(0)
    for off in scatter * rng.standard_normal(steps):
        scale = scale.update(trace=phi * (1 + off), global_sq_norm=1 + phi / 40, total_batch_size=40)
    return scale


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


def test_what_every_decision_keeps_to(seed):
    rng, slow_link = np.random.default_rng(seed), replace(WORKERS, t_u=0.02)
    totals = set()
    for _ in range(25):
        most, accumulation = int(rng.integers(2, 2000)), int(rng.integers(1, 5))
        least = min(most, int(rng.integers(1, 500)))
        high = None if rng.random() < 0.4 else tuple(rng.integers(1, 60, 2).tolist())
        sizes = tuple(np.minimum(rng.integers(1, 300, 2), high or 300).tolist())
        fields = {"min_total_batch_size": least, "hysteresis": 0.0, "initial_total": sum(sizes) * accumulation}
        begins, total = bool(rng.random() < 0.5), sum(sizes) * accumulation
        before = naive(most, **fields) if rng.random() < 0.3 else planner(most, slow_link, **fields)
        conditions = {"max_local": high, "accumulation": accumulation, "epoch_begins": begins}
        phi = float(rng.choice([0.0, 1.0, 30.0, 1e3, 1e6]))
        whole, split, decision = decided(before, sizes, phi, seen(sizes, slow_link), **conditions)
        totals.add(whole / total)
        assert all(1 <= b <= top for b, top in zip(split, high or (5000, 5000), strict=True))
        assert begins or decision.planner.accumulation == accumulation
        if whole != total:
            assert max(round(total / 2), least) <= whole <= min(2 * total, most)
            assert not begins or high is None or decision.planner.accumulation == math.ceil(whole / sum(high))
            assert decision.planner.steps == 0
    assert min(totals) < 1 < max(totals)


def test_the_total_doubles_or_halves_at_most_unless_the_noise_scale_is_certain():
    assert decided(planner(), (30, 10), 1e6)[0] == 80
    assert decided(planner(), (30, 10), 0.0)[0] == 20
    far, *_ = decided(planner(total_settings=TotalSettings(max_growth=4.0)), (30, 10), 1e6)
    assert far == 160
    sure, doubtful, unsure = (noise(2000.0, *known) for known in ((0.01, 400), (0.05, 60), (0.3, 60)))
    whole, _, decision = decided(planner(), (30, 10), sure)
    best = max(decision.planner.table, key=lambda candidate: candidate.goodput).total_batch_size
    assert best > 120
    assert whole == pytest.approx(best, rel=0.25)
    assert decided(planner(), (30, 10), doubtful)[0] == 80, "two standard errors lower, no more would pay"
    assert decided(planner(), (30, 10), unsure)[0] <= 80
    assert decided(planner(hysteresis=0.1), (30, 10), sure)[0] == 80, "12 %; the best one gains 4 % over that"


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
    slight = decided(planner(hysteresis=0.0), (30, 10), 68.0)
    assert slight[0] != 40
    assert not slight[2].soon


def test_steps_pass_between_two_changes():
    state = planner(min_steps=20, steps=0)
    for observed, expected in ((8, 40), (16, 40), (20, 80)):
        total, split, decision = decided(state, (30, 10), 1e6, seen((30, 10), times=observed - state.steps))
        assert total == expected
        state = decision.planner
    assert decided(state, split, 1e6, seen(split, times=19))[0] == 80
    assert decided(state, split, 1e6, seen(split, times=20))[0] > 80


@pytest.mark.parametrize("start", [naive, planner])
@pytest.mark.parametrize("phi", [None, UNKNOWN])
def test_while_noise_or_the_first_total_is_unknown_only_the_split_changes(start, phi):
    for before, scale in ((start(), phi), (start(initial_total=None), 1e6)):
        total, split, decision = decided(before, (20, 20), scale, seen((20, 20)), epoch_begins=True)
        assert total == 40
        assert split[0] > 25
        assert decision.planner.steps == 108
        assert decision.error > 0


def test_bounds_of_the_total_and_of_the_workers():
    assert decided(planner(60), (30, 10), 1e6)[0] == 60
    assert decided(planner(min_total_batch_size=32), (30, 10), 0.0)[0] == 32
    slow_link = planner(workers=replace(WORKERS, t_u=1.0), initial_total=28)
    assert decided(slow_link, (20, 8), 1e6, max_local=(30, 10))[:2] == (40, (30, 10))
    assert decided(planner(), (20, 20), 0.0, min_local=(20, 6))[1] == (20, 6)


def test_repeated_decisions_settle_at_a_total_as_good_as_the_best_with_its_best_split():
    state, sizes, visited = planner(), (30, 10), []
    for _ in range(8):
        total, sizes, decision = decided(replace(state, steps=100), sizes, 3000.0, seen(sizes))
        state = decision.planner
        visited.append(total)
    assert len(set(visited[4:])) == 1
    assert 40 < total < 4096

    def true_goodput(b):
        return b / solve_optperf(WORKERS, b).step_time / (3000.0 + b)

    assert true_goodput(total) > 0.95 * max(true_goodput(b) for b in range(40, 4096, 8))
    assert WORKERS.step_time(sizes) < 1.02 * solve_optperf(WORKERS, total).step_time
    doubled = decided(planner(), (20, 20), 1e6)[2].proposal.plan
    assert doubled.step_time == pytest.approx(WORKERS.step_time(doubled.local_batch_sizes), rel=0.05)
    assert doubled.step_time_error > 0


def test_a_worker_that_slows_down_has_another_total_and_split():
    """Also where candidates are kept from one decision to the next."""
    slower = line_workers(0.001, 0.012, fixed=0.01)
    kept = decided(planner(steps=0), (30, 10), 300.0)[2].planner
    anew = replace(kept, solved=type(kept.solved)())
    found = [decided(replace(one, steps=100), (30, 10), 300.0, seen((30, 10), slower, 30)) for one in (kept, anew)]
    assert found[0][:2] == found[1][:2]
    assert found[0][1][0] / found[0][1][1] > 5


# while workers have been seen at one size only, a larger total tells the constant part of a step


@pytest.mark.parametrize(
    ("phi", "expected"),
    [(1e6, 60), (61.0, 60), (0.0, 50)],  # (61 + 40) / (61 + 60) = 0.835, 40 / 50 = 0.8
)
def test_one_size_known_is_explored_and_wastes_a_fifth_of_the_samples_at_most(phi, expected):
    total, _, decision = decided(naive(), (20, 20), phi, seen((20, 20)))
    assert abs(total - expected) <= 0.06 * expected
    assert (decision.planner.steps, decision.soon) == (0, True)
    assert phi == 1e6 or (phi + 40) / (phi + total) >= 0.8
    wastes = [decided(naive(total_settings=TotalSettings(max_probe_waste=w)), (20, 20), 1.0, seen((20, 20)))[0]
              for w in (0.0, 0.5)]  # fmt: skip
    assert wastes[0] < 40 < wastes[1]


def test_exploring_goes_below_where_there_is_no_room_above_and_not_at_all_where_there_is_none():
    assert abs(decided(naive(40), (20, 20), 1e6, seen((20, 20)))[0] - 27) <= 2
    assert decided(naive(initial_total=3), (2, 1), 0.0, seen((2, 1)))[:2] == (2, (1, 1))
    assert decided(naive(40, min_total_batch_size=40), (20, 20), 1e6, seen((20, 20)))[0] == 40
    held = naive()  # by its bound at 4 samples, whatever the total: then the noise decides
    for sizes in ((4, 20), (4, 36)):
        held = held.decide(seen(sizes), plan(*sizes), context(sum(sizes))).planner
    assert decided(replace(held, steps=100), (4, 36), 0.0, max_local=(4, 400))[0] == 20


# micro-batches


def test_the_number_of_micro_batches_changes_only_when_an_epoch_begins():
    slow_link = planner(workers=replace(WORKERS, t_u=1.0))
    assert decided(slow_link, (20, 20), 1e6, max_local=(20, 20))[2].proposal is None
    total, split, decision = decided(slow_link, (20, 20), 1e6, max_local=(20, 20), epoch_begins=True)
    assert (total, split, decision.planner.accumulation) == (80, (20, 20), 2)
    two, bounds = planner(initial_total=42, accumulation=2), {"max_local": (40, 40), "accumulation": 2}
    total, split, decision = decided(two, (14, 7), 0.0, **bounds)
    assert (decision.planner.accumulation, 10 <= sum(split) <= 11) == (2, True)
    total, split, decision = decided(two, (14, 7), 0.0, epoch_begins=True, min_local=(10, 5), **bounds)
    assert (decision.planner.accumulation, total) == (1, 21)
    for most in (43, 61, 79):  # an odd total is no sum of two equal micro-batches
        known = planner(most, replace(WORKERS, t_u=0.5), min_total_batch_size=40, hysteresis=0.0)
        assert decided(known, (20, 20), 1e6, max_local=(20, 20), epoch_begins=True)[0] == most - 1


def test_a_limit_of_micro_batches_holds_where_no_bounds_are_known_and_a_window_is_one_step():
    workers = ClusterTimeModel((NodeTimeModel(1e-3, 0.01, 0, 0), NodeTimeModel(3e-3, 0.01, 0, 0)), 1.0, 0.1, 0.0)
    known = {"accumulation": 2, "epoch_begins": True}
    before = planner(workers=workers, accumulation=2, micro_batch_limit=20)
    total, split, decision = decided(before, (14, 6), 1e6, **known)
    assert (total, decision.planner.accumulation) == (80, 4)
    window = workers.accumulated(4)  # all but the last micro-batch are computing alone: a slow link counts once
    assert window.step_time(split) <= 1.02 * solve_optperf(window, 20).step_time
    assert decision.proposal.plan.step_time == pytest.approx(window.step_time(split), rel=0.05)
    free = decided(planner(workers=workers, accumulation=2), (14, 6), 1e6, **known)
    assert (free[0], free[2].planner.accumulation) == (80, 1)


def test_what_was_learned_comes_back_and_settings_are_those_of_the_new_run():
    before = planner(micro_batch_limit=64, accumulation=2, steps=7)
    after = GoodputPlanner(100, hysteresis=0.2, min_steps=7).loaded(before.state_dict())
    assert (after.max_total_batch_size, after.hysteresis, after.min_steps) == (100, 0.2, 7)
    assert (after.steps, after.accumulation, after.initial_total, after.micro_batch_limit) == (7, 2, 40, 64)
    assert after.initial(context(48)) == before.initial(context(48)) is not None
    assert naive().initial(context(48)) is None
    assert after.predict(plan(30, 10), context(40)) == pytest.approx(WORKERS.step_time((30, 10)), rel=0.05)
