"""What the all-reduce takes: ``gamma``, ``t_o``, ``t_u`` (C eq. 12), round after round, and each worker's own part."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, steps_that_tell
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.sync_skew import last_bucket_differences, likely_offsets, per_worker_offsets
from lightning_hetero.core.timing.times import EstimatorSettings

seeds = st.integers(0, 2**32 - 1)

# one round


@given(seeds, st.integers(1, 9), st.integers(1, 5))
def test_gamma_is_weighted_by_inverse_variance_with_medians(seed, steps, workers):
    rng = np.random.default_rng(seed)
    first, backward = 1.5 * rng.random((steps, workers)), rng.random((steps, workers)) * rng.integers(0, 2)
    above = below = 0.0
    for worker in range(workers):
        shares = [min(f / max(p, 1e-12), 1.0) for f, p in zip(first[:, worker], backward[:, worker], strict=True)]
        middle = np.median(shares)
        weight = 1 / ((1.4826 * np.median([abs(share - middle) for share in shares])) ** 2 + 1e-6)
        above, below = above + middle * weight, below + weight
    assert estimate_gamma(first, backward) == pytest.approx(above / below)
    assert 0 <= above / below <= 1


def test_network_times_are_those_of_whoever_waits_least():
    overlapped = np.array([[0.9, 0.2, 0.5], [0.3, 0.8, 0.4], [0.25, 0.7, 0.6]])
    last = np.array([[0.03, 0.4, 0.1], [0.05, 0.02, 0.1], [0.4, 0.4, 9.0]])
    for tells, t_o in ((None, 0.25), ([True, True, False], 0.25), ([False, True, False], 0.3), ([False] * 3, 0.2)):
        found = estimate_sync_times(overlapped, last, tells if tells is None else np.array(tells))
        assert found == (t_o, 0.03), "the median over steps, and the least where none tells"


def chain(rng, workers, buckets, *, balance, accumulation=1, seconds=(0.001, 0.2), steps=1, noise=0.1):
    """Steps, bucket by bucket: what workers measure, and what the link takes for all buckets but the last."""
    n, gamma, wire = accumulation, rng.uniform(0.05, 0.4), rng.uniform(*seconds) / buckets
    usual = np.ones((2, workers)) if balance else rng.uniform(0.5, 1.5, (2, workers))
    rows = []
    for _ in range(steps):
        a, p = usual * [[0.3], [1.0]] * np.exp(noise * rng.standard_normal((2, workers)))
        ready = (n * a + (n - 1) * p)[:, None] + p[:, None] * (gamma + (1 - gamma) * np.linspace(0, 1, buckets))
        end, waits = -np.inf, np.empty((workers, buckets))
        for j in range(buckets):
            begin = np.maximum(ready[:, j], end)
            end = max(ready[:, j].max(), end) + wire
            waits[:, j] = end - begin
        rows.append((np.ones(workers), a, p, gamma * p, waits[:, :-1].sum(axis=1), waits[:, -1], np.ones(workers)))
    return StepObservations(*map(np.array, zip(*rows, strict=True))), wire * (buckets - 1), wire


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("balance", [True, False])
def test_steps_that_tell_have_the_links_own_time_and_the_others_have_more(balance, accumulation, seed):
    rng, ratios = np.random.default_rng(seed), {True: [], False: []}
    for _ in range(150):
        count, buckets = int(rng.integers(2, 9)), int(rng.integers(2, 20))
        seen, t_o, t_u = chain(rng, count, buckets, balance=balance, accumulation=accumulation)
        assert seen.last_sync.min() == pytest.approx(t_u)
        ratios[bool(steps_that_tell(seen, accumulation)[0])].append(seen.overlapped_sync.min() / t_o)
    assert min(*ratios[True], *ratios[False]) > 1 - 1e-9
    assert len(ratios[True]) > 35
    assert np.quantile(ratios[True], 0.95) < 1.1 < max(ratios[False])
    busy, t_o, _ = chain(rng, 6, 12, balance=True, accumulation=accumulation, seconds=(9.0, 12.0), steps=50)
    assert steps_that_tell(busy, accumulation).all(), "a link that is busy until the end tells, whoever is last"
    np.testing.assert_allclose(busy.overlapped_sync.min(axis=1), t_o)


def test_who_is_last_with_first_and_last_bucket_tells():
    ones = np.ones((1, 3))
    alone = [[3.0, 1.0, 1.0]], [[1.0, 1.5, 1.2]], [[0.2, 2.5, 2.5]]  # though its backward pass is short
    together = ones, [[1.0, 1.2, 1.2]], [[0.5, 0.5, 0.3]]
    for a, p, waits in (alone, together):
        assert steps_that_tell(StepObservations(ones, a * ones, p * ones, 0.2 * ones, waits * ones, ones, ones)).all()


def looks(tells, slower=1.0):
    """Steps of two workers on a link that takes 0.2 s; where they do not tell, both wait for each other."""
    steps = len(tells)
    ones, busy = np.ones((steps, 2)), np.array(tells)[:, None]
    a, p = np.where(busy, [1.0, 1.1], [1.2, 1.0]), np.where(busy, [1.0, 1.7], [1.0, 1.5])
    waits = np.where(busy, [0.6, 0.2], [0.9, 0.8]) * slower
    return StepObservations(ones, a, p, 0.2 * ones, waits, 0.1 * ones, 2 * ones)


def test_all_that_estimates_a_link_goes_by_the_steps_that_tell():
    seen, context = looks([True, False, False] * 4), PlanContext(2, ("a", "b"), (1, 1))
    assert Computing.of(seen).last == pytest.approx(0.1 / (0.1 + 0.2))
    assert ClusterTimeModel.fit(seen).t_o == pytest.approx(0.2)
    assert PerfModelPlanner().observe(seen, context).link.at(2)[0] == pytest.approx(0.2)


def test_planners_count_the_micro_batches_of_a_step_and_have_the_settings_of_the_estimator():
    rng, context = np.random.default_rng(0), PlanContext(6, tuple("abcdef"), (1,) * 6, accumulation=3)
    usual, slower = (chain(rng, 6, 12, balance=True, accumulation=3, seconds=(at, at), steps=8) for at in (2.0, 15.0))
    never = EstimatorSettings(link_jump=1e9)
    planner = PerfModelPlanner(TimePosterior(settings=never)).observe(usual[0], context)
    expected = LinkTimes().observe(usual[0], 3, never)
    assert planner.link == expected != LinkTimes().observe(usual[0], 1, never)
    assert planner.observe(slower[0], context).link == expected.observe(slower[0], 3, never)
    assert PerfModelPlanner(link=planner.link).observe(slower[0], context).link.at(6)[0] == pytest.approx(slower[1])


# round after round: a scalar Kalman filter per number, that follows jumps, and upper bounds where no step tells


def followed(level, seen, variance, scale, chosen, jumps=True):
    value, known = level
    noise, before = variance + chosen.link_rounds**2, known + chosen.link_walk**2
    off = (seen - value) / scale
    if math.isinf(known) or (jumps and abs(off) > chosen.link_jump * math.sqrt(before + noise)):
        return seen, noise
    gain = before / (before + noise)
    return value + gain * (seen - value), (1 - gain) * before


def by_median(level, values, chosen):
    middle = np.median(values)
    jitter = min(1.4826 * np.median(np.abs(values - middle)) / middle, 1.0)
    few = len(values) < chosen.link_few_steps
    variance = 1.5 * (max(jitter, chosen.link_jitter) if few else jitter) ** 2 / len(values)
    return followed(level, middle, variance, max(level[0], middle), chosen, not few)


def bounded(level, bound, chosen):
    if math.isinf(level[1]):
        return bound, chosen.link_bound_error**2
    if bound >= level[0]:
        return level[0], level[1] + chosen.link_walk**2
    return followed(level, bound, chosen.link_jitter**2, max(level[0], bound), chosen, jumps=False)


def next_link(link, seen, accumulation, chosen):
    """``{"gamma": level, "sync": {workers: [t_o, t_u]}}`` after a round."""
    steps, workers = seen.forward.shape
    gamma = estimate_gamma(seen.first_bucket, seen.backward)
    tells = steps_that_tell(seen, accumulation, chosen)
    t_o, t_u = link["sync"].get(workers, [(0.0, math.inf)] * 2)
    waits, last = seen.overlapped_sync.min(axis=1), seen.last_sync.min(axis=1)
    sigma = math.sqrt(t_o[1] + chosen.link_walk**2 + 1.5 * chosen.link_jitter**2 / steps + chosen.link_rounds**2)
    fell = math.isfinite(sigma) and 1 - np.median(waits) / t_o[0] > chosen.link_jump * sigma
    if tells.sum() < chosen.link_few_steps <= steps and fell:
        t_o = bounded((0.0, math.inf), np.median(waits), chosen)
    else:
        t_o = by_median(t_o, waits[tells], chosen) if tells.any() else bounded(t_o, waits.min(), chosen)
    sync = link["sync"] | {workers: [t_o, by_median(t_u, last, chosen)]}
    return {"gamma": followed(link["gamma"], gamma, 0.01 / steps, 1.0, chosen), "sync": sync}


def of_state(state):
    level = lambda pair: (pair[0], math.inf if pair[1] is None else pair[1])  # noqa: E731
    sync = {int(n): list(map(level, both)) for n, both in state["sync"].items()}
    return {"gamma": level(state["gamma"]), "sync": sync}


def flat(link):
    return [*link["gamma"], *(x for n in sorted(link["sync"]) for pair in link["sync"][n] for x in pair)]


OTHER = EstimatorSettings(
    link_walk=0.05, link_rounds=0.03, link_jitter=0.2, link_bound_error=0.3, link_few_steps=5, link_jump=3.0
)


@given(seeds, st.sampled_from([EstimatorSettings(), OTHER]))
def test_levels_are_followed_as_by_a_kalman_filter_with_jumps_and_bounds(seed, chosen):
    rng, link = np.random.default_rng(seed), LinkTimes()
    expected = {"gamma": (0.0, math.inf), "sync": {}}
    for _ in range(8):
        slower, steps = float(rng.choice([1.0, 1.0, 1.05, 0.3, 0.85, 3.0])), int(rng.choice([1, 3, 4, 8, 14]))
        if rng.random() < 0.5:
            seen = looks(rng.random(steps) < rng.choice([0.0, 0.2, 1.0]), slower)
        else:
            wire = (0.2 * slower, 0.3 * slower)
            seen, *_ = chain(rng, int(rng.choice([2, 5])), 6, balance=True, seconds=wire, steps=steps)
        accumulation = int(rng.choice([1, 3]))
        expected = next_link(expected, seen, accumulation, chosen)
        link = link.observe(seen, accumulation, chosen)
        assert flat(of_state(link.state_dict())) == pytest.approx(flat(expected), rel=1e-9)
    assert LinkTimes.from_state_dict(json.loads(json.dumps(link.state_dict()))) == link
    for n, ((t_o, t_o_variance), (t_u, t_u_variance)) in expected["sync"].items():
        assert link.at(n) == pytest.approx((t_o, t_u))
        assert link.error(n) == pytest.approx(math.sqrt(t_o**2 * t_o_variance + t_u**2 * t_u_variance))


def link_of(times):
    """Times that are known, by the number of workers."""
    return LinkTimes.from_state_dict({"gamma": [0.2, 0.0], "sync": {n: [[t, 0.0], [u, 0.0]] for n, (t, u) in times}})


def test_a_link_that_hides_behind_computing_is_not_taken_for_a_slow_one(seed):
    """Sixteen workers that finish together, give or take 8 %: what they wait for each other is no time of the link."""
    rng, link = np.random.default_rng(seed), LinkTimes()
    for _ in range(12):
        seen, t_o, _ = chain(rng, 16, 18, balance=True, seconds=(0.1, 0.1), steps=8, noise=0.08)
        link = link.observe(seen)
    assert link.at(16)[0] == pytest.approx(t_o, rel=0.1)


@given(seeds)
def test_another_number_of_workers_follows_the_ring_by_non_negative_least_squares(seed):
    """``latency (n - 1) + transfer (n - 1) / n``; of one number of workers, only the transfer is known."""
    rng = np.random.default_rng(seed)
    seen = sorted(rng.choice(np.arange(2, 40), int(rng.integers(1, 5)), replace=False).tolist())
    times = rng.uniform(0, 1, (len(seen), 2)) * np.array(seen)[:, None] ** rng.choice([-1.0, 0.0, 1.0, 2.0])
    link = link_of([(1, (0.0, 0.0)), *zip(seen, times.tolist(), strict=True)])
    for which in (0, 1):
        basis = np.array([[n - 1 if len(seen) > 1 else 0.0, (n - 1) / n] for n in seen])
        latency, transfer = nnls(basis, times[:, which])[0]
        assert link.at(41)[which] == pytest.approx(latency * 40 + transfer * 40 / 41)
    assert link.at(1) == (0.0, 0.0)
    assert link.error(41) == pytest.approx(sum(link.at(41))), "all of it is uncertain, and no more than that"


def test_nothing_is_known_of_a_link_that_nobody_used():
    assert not LinkTimes()
    assert LinkTimes().error(3) == math.inf
    with pytest.raises(ValueError, match="no synchronisation"):
        LinkTimes().at(3)
    assert link_of([(1, (0.0, 0.0))]).at(4) == (0.0, 0.0), "workers that ran alone say nothing of it"


# each worker's own part of the last bucket's all-reduce


def differences(last):
    return {pair: round(difference, 9) for pair, (difference, _) in last_bucket_differences(np.array(last)).items()}


THIN = [[0.32, 0.35], [0.36, 0.31]] * 3  # by turns one and the other comes last, 10 ms apart
TURNS = [[0.02, 0.03], [0.05, 0.04]] * 3  # the second one takes 20 ms longer
LATE, EARLY = [[0.02, 0.03]], [[0.03, 0.02]]
PAIRS = {
    "turns": (THIN, {(0, 1): 0.01}),
    "a link that became faster between turns": (THIN + (np.array(THIN) - 0.3).tolist(), {(0, 1): 0.01}),
    "no turns on a link that became faster": (THIN[:1] * 9 + [[0.06, 0.01]] * 9, {}),
    "two turns": (TURNS[:3], {}),
    "three turns": (TURNS[:4], {(0, 1): -0.02}),
    "a stall within turns": (TURNS[:3] + [[5.05, 5.04]] + TURNS[3:], {(0, 1): -0.02}),
    "a stall in two of three turns": (LATE * 2 + [[5.03, 5.02]] + LATE + EARLY * 2, {}),
    "steps that the link bounds": ([[0.05, 0.05], *LATE, [0.02, 0.021]] * 6, {}),
    "nothing finite": (np.full((9, 2), np.nan), {}),
    "one worker": (np.ones((9, 1)), {}),
    "three workers": (
        [[1.0, 2.0, 2.0], [3.0, 1.5, 3.0], [4.0, 4.0, 1.75]] * 4,
        {(0, 1): -0.5, (1, 2): -0.25, (0, 2): -0.75},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_workers_are_compared_between_successive_steps_in_which_another_came_last(name):
    last, expected = PAIRS[name]
    assert differences(last) == expected


@given(seeds, st.floats(0, 0.3))
def test_each_workers_part_is_the_normal_posterior_of_all_pairs(seed, scale):
    rng = np.random.default_rng(seed)
    walk = (EstimatorSettings().skew_walk * scale) ** 2
    known = {w: (rng.normal(), 10 ** rng.uniform(-4, 0)) for w in range(5) if rng.random() < 0.7}
    pairs = {(i, j): (rng.normal(), 10 ** rng.uniform(-4, 0)) for i in range(4) for j in range(i) if rng.random() < 0.6}
    found = per_worker_offsets(known, {pair[::-1]: value for pair, value in pairs.items()}, scale)
    taking = sorted({worker for pair in pairs for worker in pair})
    assert found.keys() == known.keys() | set(taking)
    for worker in known.keys() - set(taking):
        assert found[worker] == pytest.approx((known[worker][0], known[worker][1] + walk)), "it is less certain"
    prior = [(known[w][0], known[w][1] + walk) if w in known else (0.0, scale**2) for w in taking]
    rows = [np.eye(len(taking))[taking.index(j)] - np.eye(len(taking))[taking.index(i)] for i, j in pairs]
    rows = np.array([*np.eye(len(taking)), *rows])
    values = np.array([*(value for value, _ in prior), *(value for value, _ in pairs.values())])
    errors = [variance + 1e-18 for _, variance in prior] + [v + 1e-4 * walk + 1e-18 for _, v in pairs.values()]
    root = 1 / np.sqrt(errors)
    if not taking or scale < 1e-4:
        return
    best, *_ = np.linalg.lstsq(rows * root[:, None], values * root, rcond=None)
    inner = np.linalg.inv((rows * root[:, None]).T @ (rows * root[:, None]))
    apart = np.eye(len(taking)) - 1 / len(taking)  # what is common to all is the link's
    for row, worker in enumerate(taking):
        assert found[worker] == pytest.approx((best[row], (apart @ inner @ apart)[row, row]), rel=1e-5, abs=1e-9)


@given(seeds, st.floats(0.01, 1.0))
def test_a_part_counts_by_the_probability_that_there_is_one(seed, scale):
    rng = np.random.default_rng(seed)
    known = {worker: (0.3 * rng.normal(), 10 ** rng.uniform(-4, 0)) for worker in (0, 2, 3)}
    expected, variances = np.zeros(5), np.zeros(5)
    for worker, (own, variance) in known.items():
        # for a part stands a normal prior as wide as the link's time; its exponent is taken for 0
        odds = 0.02 / 0.98 * math.sqrt(variance / (scale**2 + variance)) * math.exp(min(own**2 / variance / 2, 600.0))
        share = odds / (1 + odds)
        expected[worker], variances[worker] = share * own, share**2 * variance
    found, spread = likely_offsets(known, 5, scale)
    np.testing.assert_allclose(found, expected - min(expected.min(), 0.0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(spread, variances, rtol=1e-9)
