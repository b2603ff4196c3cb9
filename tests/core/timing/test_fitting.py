"""``gamma``, ``t_o`` and ``t_u`` from what workers measure of their steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.perf_model import PerfModelPlanner, PlanContext
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, steps_that_tell
from lightning_hetero.core.timing.link_times import Level, LinkTimes
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.time_posterior import TimePosterior
from lightning_hetero.core.timing.times import EstimatorSettings

moderate = settings(max_examples=150, deadline=None, derandomize=True)


def test_gamma_weighs_workers_by_inverse_variance():
    # shares of worker 0: 0.2, 0.3, 0.4 (median 0.3, deviation 0.1); of worker 1: 0.5, 0.52, 0.54 (0.52, 0.02)
    first = np.array([[0.2, 0.50], [0.3, 0.52], [0.4, 0.54]])
    weight = [1 / ((1.4826 * spread) ** 2 + 1e-6) for spread in (0.1, 0.02)]
    expected = (0.3 * weight[0] + 0.52 * weight[1]) / sum(weight)
    assert estimate_gamma(first, np.ones((3, 2))) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.5115, abs=1e-3)


def test_an_odd_step_does_not_move_gamma():
    first = 0.3 + 0.01 * np.array([[-2.0], [-1.0], [-1.0], [0.0], [1.0], [1.0], [2.0]])
    first[0] = 0.95
    assert estimate_gamma(first, np.ones((7, 1))) == pytest.approx(0.3, abs=0.011)


@moderate
@given(st.integers(0, 2**32 - 1))
def test_gamma_is_a_share(seed):
    rng = np.random.default_rng(seed)
    assert 0 <= estimate_gamma(2 * rng.random((4, 3)), rng.random((4, 3)) * rng.integers(0, 2, (4, 3))) <= 1


def test_network_times_are_those_of_whoever_waits_least():
    overlapped = np.array([[0.9, 0.2, 0.5], [0.3, 0.8, 0.4], [0.25, 0.7, 0.6]])
    last = np.array([[0.03, 0.4, 0.1], [0.05, 0.02, 0.1], [0.4, 0.4, 9.0]])
    assert estimate_sync_times(overlapped, last) == (0.25, 0.03)


# which steps tell t_o


def chain(rng, workers, buckets, noise, *, balance, accumulation=1, seconds=(0.001, 0.2)):
    """A step, bucket by bucket: what workers measure, and what the link takes for all buckets but the last."""
    n, gamma, wire = accumulation, rng.uniform(0.05, 0.4), rng.uniform(*seconds) / buckets
    usual = np.ones((2, workers)) if balance else rng.uniform(0.5, 1.5, (2, workers))
    a, p = usual * [[0.3], [1.0]] * np.exp(noise * rng.standard_normal((2, workers)))
    share = gamma + (1 - gamma) * np.arange(buckets) / (buckets - 1)
    ready = (n * a + (n - 1) * p)[:, None] + p[:, None] * share
    end, waits = -np.inf, np.empty((workers, buckets))
    for j in range(buckets):
        begin = np.maximum(ready[:, j], end)
        end = max(ready[:, j].max(), end) + wire
        waits[:, j] = end - begin
    rows = (np.ones(workers), a, p, gamma * p, waits[:, :-1].sum(axis=1), waits[:, -1], np.ones(workers))
    return StepObservations(*(row[None] for row in rows)), wire * (buckets - 1), wire


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("balance", [True, False])
def test_steps_that_tell_have_the_links_own_time(balance, accumulation):
    """To a tenth; the others have more, up to several times as much."""
    rng, told, more = np.random.default_rng(0), 0, []
    for _ in range(2000):
        seen, t_o, t_u = chain(
            rng, int(rng.integers(2, 9)), int(rng.integers(2, 20)), 0.1, balance=balance, accumulation=accumulation
        )
        assert seen.last_sync.min() == pytest.approx(t_u)
        least = seen.overlapped_sync.min()
        if steps_that_tell(seen, accumulation)[0]:
            told += 1
            assert t_o - 1e-12 <= least <= 1.1 * t_o
        else:
            more.append(least / t_o)
    assert told > 500
    assert max(more) > 2
    assert min(more) > 1 - 1e-9


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_link_that_is_busy_until_the_end_always_tells(accumulation):
    """Whoever is the last with its first bucket, and with its last one."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        seen, t_o, _ = chain(rng, 6, 12, 0.1, balance=True, accumulation=accumulation, seconds=(9.0, 12.0))
        assert steps_that_tell(seen, accumulation).all()
        assert seen.overlapped_sync.min() == pytest.approx(t_o)


def looks(tells, slower=1.0):
    """Steps of two workers on a link that takes 0.2 s; where they do not tell, both wait for each other."""
    steps = len(tells)
    ones, busy = np.ones((steps, 2)), np.array(tells)[:, None]
    late_first, late_last = np.tile([1.2, 1.0], (steps, 1)), np.tile([1.0, 1.5], (steps, 1))
    waits = np.where(busy, [0.6, 0.2], [0.9, 0.8]) * slower
    backward = np.where(busy, [1.0, 1.7], late_last)
    return StepObservations(
        ones, np.where(busy, [1.0, 1.1], late_first), backward, 0.2 * ones, waits, 0.1 * ones, 2 * ones
    )


def test_what_both_wait_is_a_bound_until_a_step_tells():
    never, half = looks([False] * 8), looks([True, False] * 4)
    assert steps_that_tell(half).tolist() == [True, False] * 4
    link = LinkTimes().observe(never)
    assert link.at(2)[0] == pytest.approx(0.8)
    assert link.error(2) > 0.3
    link = link.observe(half)
    assert link.at(2)[0] == pytest.approx(0.2, rel=0.05)
    assert link.error(2) < 0.02, "the scatter is that of the steps that tell"
    assert link.observe(never).at(2)[0] == pytest.approx(0.2, rel=0.05)


def test_one_step_is_no_jump_and_many_are():
    link = LinkTimes()
    for _ in range(8):
        link = link.observe(looks([True] * 8))
    assert link.observe(looks([True] + [False] * 7, slower=5.0)).at(2)[0] < 0.3
    assert link.observe(looks([True] * 8, slower=5.0)).at(2)[0] == pytest.approx(1.0)
    never_jumps = EstimatorSettings(link_jump=1e9)
    assert link.observe(looks([True] * 8, slower=5.0), settings=never_jumps).at(2)[0] < 0.9
    alone = LinkTimes().observe(looks([True] + [False] * 7))
    assert alone.error(2) > 0.02, "one step says little"


def test_all_that_estimates_a_link_goes_by_the_steps_that_tell():
    seen = looks([True, False, False] * 4)
    last = 0.1 / (0.1 + 0.2)
    assert Computing.of(seen).last == pytest.approx(last)
    assert ClusterTimeModel.fit(seen).t_o == pytest.approx(0.2)
    context = PlanContext(2, ("a", "b"), (1, 1))
    assert PerfModelPlanner().observe(seen, context).link.at(2)[0] == pytest.approx(0.2)


def test_planners_count_the_micro_batches_of_a_step_and_have_the_settings_of_the_estimator():
    rng, context = np.random.default_rng(0), PlanContext(6, tuple("abcdef"), (1,) * 6, accumulation=3)
    found, slower = (
        chain(rng, 6, 12, 0.1, balance=True, accumulation=3, seconds=at) for at in ((2.0, 2.0), (15.0, 15.0))
    )
    assert not steps_that_tell(found[0]).all()
    planner = PerfModelPlanner(TimePosterior(settings=EstimatorSettings(link_jump=1e9))).observe(found[0], context)
    assert planner.link.error(6) < 0.2 * found[1]
    for _ in range(3):
        planner = planner.observe(found[0], context)
    assert planner.link.at(6)[0] == pytest.approx(found[1])
    many = StepObservations(*(np.repeat(getattr(slower[0], name), 8, axis=0) for name in StepObservations.FIELDS))
    assert planner.observe(many, context).link.at(6)[0] < 0.95 * slower[1]
    assert PerfModelPlanner(link=planner.link).observe(many, context).link.at(6)[0] == pytest.approx(slower[1])


def test_who_is_last_with_all_of_a_step_tells_though_its_backward_pass_is_short():
    ones = np.ones((1, 2))
    seen = StepObservations(ones, [[3.0, 1.0]] * ones, [[1.0, 1.5]] * ones, 0.2 * ones, [[0.2, 2.5]] * ones, ones, ones)
    assert steps_that_tell(seen).all()


def test_who_is_last_along_with_others_is_last():
    ones = np.ones((1, 3))
    seen = StepObservations(ones, ones, [[1.0, 1.0, 1.2]] * ones, 0.2 * ones, [[0.5, 0.5, 0.3]] * ones, ones, ones)
    assert steps_that_tell(seen).all()


def test_where_no_step_tells_the_least_of_all_is_nearest():
    overlapped, last = (
        np.array([[0.9, 0.5], [0.4, 0.7], [0.6, 0.8]]),
        np.array([[0.03, 0.4], [0.05, 0.02], [0.4, 0.04]]),
    )
    assert estimate_sync_times(overlapped, last, np.array([False, False, False])) == (0.4, 0.03)
    assert estimate_sync_times(overlapped, last, np.array([True, False, True])) == (0.55, 0.03)


def test_a_link_that_hides_behind_computing_is_not_taken_for_a_slow_one():
    """Sixteen workers that finish together, give or take 8 %: what they wait for each other is no time of the link."""
    rng, link = np.random.default_rng(0), LinkTimes()
    for _ in range(12):
        steps = []
        rng_of_round = np.random.default_rng(rng.integers(1 << 30))
        for _ in range(8):
            part, t_o, _ = chain(np.random.default_rng(5), 16, 18, 0.0, balance=True)
            a = part.forward * np.exp(0.08 * rng_of_round.standard_normal((1, 16)))
            p = part.backward * np.exp(0.08 * rng_of_round.standard_normal((1, 16)))
            gamma = float(part.first_bucket[0, 0] / part.backward[0, 0])
            share = gamma + (1 - gamma) * np.arange(18) / 17
            ready, end, waits = a[0][:, None] + p[0][:, None] * share, -np.inf, np.zeros(16)
            for j in range(17):
                begin = np.maximum(ready[:, j], end)
                end = max(ready[:, j].max(), end) + t_o / 17
                waits += end - begin
            steps.append((part.local_batch_sizes, a, p, gamma * p, waits[None], part.last_sync, part.step_time))
        link = link.observe(StepObservations(*(np.concatenate(x) for x in zip(*steps, strict=True))))
    assert link.at(16)[0] == pytest.approx(t_o, rel=0.1)


def test_a_bound_lowers_what_is_known_and_never_raises_it():
    known = Level(0.5, 0.01)
    assert known.below(0.8) == Level(0.5, pytest.approx(0.01 + 0.01**2))
    assert 0.3 < known.below(0.3).value < 0.5
    assert Level().below(0.8).value == 0.8
    assert Level().below(0.8).variance >= 0.25
    assert Level(0.5, 0.0001).below(0.05).value > 0.05, "one look is not believed at once"
