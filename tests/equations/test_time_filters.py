"""What is known of workers' speeds: a bank of Kalman filters (C sec. 4.5); smoothed times of one split (D III-C)."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.step_times import SmoothingSettings, StepTimes
from lightning_hetero.core.timing.times import EstimatorSettings

seeds = st.integers(0, 2**32 - 1)
THETA = np.array([[0.0004, 0.004, 0.0008, 0.003], [0.0008, 0.008, 0.0016, 0.003], [0.002, 0.005, 0.004, 0.006]])
NAMES, SPLIT = ("a", "b", "c"), (30, 20, 10)


def steps(theta, sizes, count=8, rng=None, noise=0.0, factor=1.0):
    """What workers measure in some steps at one split."""
    b = np.broadcast_to(np.asarray(sizes, dtype=float), (count, len(theta)))
    q, s, k, m = theta.T
    a, p = (q * b + s) * factor, (k * b + m) * factor
    if rng is not None:
        a, p = (x * np.exp(noise * rng.standard_normal(b.shape) - noise**2 / 2) for x in (a, p))
    zeros = np.zeros_like(b)
    return StepObservations(b, a, p, zeros, zeros, zeros, zeros)


def seconds(theta, sizes):
    q, s, k, m = np.asarray(theta).T
    return (q + k) * np.asarray(sizes, float) + s + m


def seen(*looks, posterior=None, names=NAMES):
    posterior = TimePosterior() if posterior is None else posterior
    for look in looks:
        posterior = posterior.observe(look, names)
    return posterior


def known(posterior, sizes=SPLIT):
    return seconds(posterior.times(NAMES).mean, sizes)


# the bank of filters, one worker and one filter after another, with whole matrices


def relative_variance(sums, chosen):
    squares, count = sums[:, :2], sums[:, 2:3]
    own = squares / np.maximum(count, 0.5)
    usual = np.minimum(own, 4 * np.median(own, axis=0) + 1e-12)
    prior, enough = chosen.jitter_steps, chosen.own_jitter_steps
    shared = ((usual * count).sum(axis=0) + prior * chosen.jitter**2) / (count.sum() + prior)
    return (squares + enough * shared) / (count + enough)


def summarised(sums, a, p, chosen):
    """Mean times of a round without odd steps, their relative variance, and the sums of jitter; worker by worker."""
    count, usual = len(a), np.sqrt(relative_variance(sums, chosen))
    dropped = math.ceil(0.1 * count) if count > 2 else 0
    free, y, squares, odd = max(count - 1 - 1.5 * dropped, 0.0), [], [], []
    for i in range(len(sums)):
        rare = sums[i, 2] >= chosen.own_jitter_steps and sums[i, 3] <= 0.1 * sums[i, 4]
        limits = [(1 + chosen.odd * usual[i, j]) * np.median(x[:, i]) if rare else np.inf for j, x in enumerate((a, p))]
        odd.append(sum((x > limits[0]) | (z > limits[1]) for x, z in zip(a[:, i], p[:, i], strict=True)))
        kept = [np.minimum(x[:, i], limit) for x, limit in zip((a, p), limits, strict=True)]
        kept = [np.minimum(x, np.sort(x)[count - 1 - dropped]) for x in kept]
        mean = np.array([x.mean() for x in kept])
        y.append(np.maximum(mean, max(chosen.least_part * mean.sum(), 1e-9)))
        squares.append([((x - x.mean()) ** 2).sum() / z**2 for x, z in zip(kept, y[-1], strict=True)])
    y, squares = np.array(y), np.array(squares)
    others = np.median(squares, axis=0) / max(free, 0.5)
    before = np.where(sums[:, 2:3] >= chosen.own_jitter_steps, usual**2, others)
    squares = np.minimum(squares, 9 * np.maximum(before, others) * max(free, 0.5))
    fade = np.minimum(1.0, chosen.jitter_memory / np.maximum(sums[:, 4:] + count, 1.0))
    sums = fade * (sums + np.column_stack([squares, np.full(len(y), free), odd, np.full(len(y), count)]))
    variance = np.maximum(relative_variance(sums, chosen), chosen.wide * squares / max(free, 0.5))
    return y, np.maximum(variance, 1e-6) / count, sums


def possible(mean, covariance):
    return -0.5 * (np.minimum(mean, 0.0) ** 2 / np.maximum(np.diag(covariance), 1e-300)).sum()


def updated(mean, covariance, h, noise, off):
    """Kalman's update, its log likelihood, and the squared standard errors."""
    inner = h @ covariance @ h.T + noise
    gain, squared = covariance @ h.T @ np.linalg.inv(inner), off @ np.linalg.solve(inner, off)
    mean, after = mean + gain @ off, covariance - gain @ h @ covariance
    return mean, after, -0.5 * (squared + np.log(np.linalg.det(inner))), squared


def blended(weights, means, covariances):
    mean = sum(w * m for w, m in zip(weights, means, strict=True))
    terms = zip(weights, means, covariances, strict=True)
    return mean, sum(w * (c + np.outer(m - mean, m - mean)) for w, m, c in terms)


def first(b, y, variance, rho, chosen):
    """Time in proportion to the size, with a fixed share of 0 and its deviation."""
    covariance, fixed = np.zeros((4, 4)), chosen.fixed_share**2
    for part in (0, 1):
        line = fixed * np.outer([1 / b, -1], [1 / b, -1])
        line[0, 0] += (variance[part] + rho**2) / b**2
        covariance[2 * part : 2 * part + 2, 2 * part : 2 * part + 2] = y[part] ** 2 * line
    covariance[0, 2] = covariance[2, 0] = rho**2 * y[0] * y[1] / b**2
    return np.array([y[0] / b, 0, y[1] / b, 0]), covariance


def stepped(mean, covariance, b, y, variance, rho, walk, elapsed, chosen):
    h, theta = np.array([[b, 1, 0, 0], [0, 0, b, 1.0]]), np.maximum(mean, 0.0)
    size = np.array([y[0] / b, y[0], y[1] / b, y[1]])
    covariance = covariance + elapsed / 8 * walk**2 * np.outer(theta, theta)
    covariance = covariance + elapsed / 8 * np.diag((chosen.shape_walk * walk * size) ** 2)
    scale = np.clip(h @ mean, y / 2, 2 * y)
    noise, off = rho**2 * np.outer(scale, scale) + np.diag(variance * scale**2), y - h @ mean
    stays, after, level, squared = updated(mean, covariance, h, noise, off)
    level += possible(stays, after) - possible(mean, covariance) + math.log1p(-chosen.jump_probability)
    if squared - 2 * possible(stays, after) <= chosen.gate:
        return stays, after, level, 0.0
    theta = np.maximum(theta, 1e-3 * size)
    wide = covariance + chosen.jump**2 * np.outer(theta, theta) + np.diag((chosen.reshape * size) ** 2)
    jumps, inner, likely, _ = updated(mean, wide, h, noise, off)
    likely += possible(jumps, inner) - possible(mean, wide) + math.log(chosen.jump_probability)
    top = max(level, likely)
    chance = math.exp(likely - top) / (math.exp(level - top) + math.exp(likely - top))
    mean, covariance = blended((1 - chance, chance), (stays, jumps), (after, inner))
    return mean, covariance, top + math.log(math.exp(level - top) + math.exp(likely - top)), chance


def weighed(weight, likelihood, chosen):
    """Bayes' rule with one factor per filter that all workers share, by expectation maximization."""
    likely = np.exp(np.maximum(likelihood - likelihood.max(axis=0), -8.0))
    usual, factor = chosen.prior_workers * weight.mean(axis=1), np.ones(len(weight))
    for _ in range(5):
        after = weight * factor[:, None] * likely
        after = after / after.sum(axis=0)
        factor = (after.sum(axis=1) + usual) / (weight.sum(axis=1) + usual)
    return np.maximum(after, 1e-100)


def next_state(state, names, b, a, p, elapsed, chosen):
    """State by worker after one split of a round, and who jumped."""
    filters, prior = range(len(chosen.walks)), np.array(chosen.prior) / sum(chosen.prior)

    def usual(weights):
        count = chosen.prior_workers
        return (sum(weights, np.zeros(len(prior))) + count * prior) / (len(weights) + count)

    at_first = usual([one["weight"] for one in state.values()])
    sums = np.array([state[name]["scatter"] if name in state else np.zeros(5) for name in names])
    y, variance, sums = summarised(sums, a, p, chosen)
    single = np.sqrt((relative_variance(sums, chosen) * y**2).sum(axis=1)) / y.sum(axis=1)
    old = [i for i, name in enumerate(names) if name in state]
    others, found, levels, jumps = usual([state[names[i]]["weight"] for i in old]), {}, {}, {}
    for i, name in enumerate(names):
        rho = [share * single[i] + 0.001 for share in chosen.rounds]
        if i not in old:
            bank, weight = [first(b[i], y[i], variance[i], rho[f], chosen) for f in filters], at_first
        else:
            one = state[name]
            mean, covariance, weight = (np.array(one[key]) for key in ("mean", "covariance", "weight"))
            if elapsed:
                middle = blended(weight, mean, covariance)
                stays, comes = (1 - chosen.switch) * weight, chosen.switch * others
                weight = stays + comes
                parts = zip(stays / weight, mean, covariance, strict=True)
                bank = [blended((own, 1 - own), (m, middle[0]), (c, middle[1])) for own, m, c in parts]
            else:
                bank = list(zip(mean, covariance, strict=True))
            at = b[i], y[i], variance[i]
            walked = [stepped(*bank[f], *at, rho[f], chosen.walks[f], elapsed, chosen) for f in filters]
            bank, levels[i], jumps[i] = [x[:2] for x in walked], [x[2] for x in walked], [x[3] for x in walked]
        low, high = state[name]["seen"] if i in old else (b[i], b[i])
        mean, covariance = (np.array(x) for x in zip(*bank, strict=True))
        found[name] = {"mean": mean, "covariance": covariance, "weight": weight, "scatter": sums[i]}
        found[name]["seen"] = [min(low, b[i]), max(high, b[i])]
    if old:
        weights = weighed(
            np.array([found[names[i]]["weight"] for i in old]).T, np.array([levels[i] for i in old]).T, chosen
        )
        for i, weight in zip(old, weights.T, strict=True):
            found[names[i]]["weight"] = weight
    return {**state, **found}, {names[i] for i in old if found[names[i]]["weight"] @ jumps[i] > 0.5}


OTHER = EstimatorSettings(
    walks=(0.001, 0.05), rounds=(0.2, 0.6), prior=(3.0, 1.0), prior_workers=2.0, switch=0.1, fixed_share=0.5,
    jump_probability=0.01, jump=0.8, reshape=0.1, jitter=0.1, jitter_steps=3.0, wide=0.8, odd=3.0, jitter_memory=20.0,
    own_jitter_steps=4.0, shape_walk=0.3, gate=3.0,
)  # fmt: skip


@given(seeds, st.sampled_from([EstimatorSettings(), OTHER]))
def test_the_posterior_is_that_of_a_bank_of_kalman_filters_with_jumps(seed, chosen):
    rng, posterior, expected = np.random.default_rng(seed), TimePosterior(settings=chosen), {}
    theta = {name: THETA[i % 3] * np.exp(0.3 * rng.standard_normal(4)) for i, name in enumerate("abcd")}
    for _ in range(6):
        names = tuple(rng.permutation(list("abcd"))[: int(rng.integers(1, 5))].tolist())
        theta = {name: one * (rng.choice([0.5, 3.0]) if rng.random() < 0.1 else 1.0) for name, one in theta.items()}
        true, looks = np.array([theta[name] for name in names]), []
        for odd in range(int(rng.integers(1, 3))):  # one or two splits in a round
            sizes, noise = 2 * rng.integers(2, 50, len(names)) + odd, rng.choice([0.02, 0.1])
            looks.append(steps(true, sizes, int(rng.integers(1, 13)), rng, noise))
            looks[-1].forward[rng.random(looks[-1].forward.shape) < 0.05] *= 4.0
        given = float(rng.integers(1, 30)) if rng.random() < 0.7 else None
        jumped, elapsed = set(), given or sum(look.num_steps for look in looks)
        for look in looks:
            b = look.local_batch_sizes[0]
            expected, more = next_state(expected, names, b, look.forward, look.backward, elapsed, chosen)
            jumped, elapsed = jumped | more, 0.0
        fields = [np.concatenate([getattr(look, name) for look in looks]) for name in StepObservations.FIELDS]
        posterior = posterior.observe(StepObservations(*fields), names, given)
        found = posterior.state_dict()
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            size = np.sqrt(np.einsum("fii->fi", one["covariance"])) + 1e-12
            off = (np.array(found[name]["covariance"]) - one["covariance"]) / size[:, :, None] / size[:, None, :]
            np.testing.assert_allclose(off, 0.0, atol=1e-5)
            np.testing.assert_allclose((np.array(found[name]["mean"]) - one["mean"]) / size, 0.0, atol=1e-5)
            for key in ("weight", "scatter", "seen"):
                np.testing.assert_allclose(found[name][key], one[key], rtol=1e-5, atol=1e-9)
        assert posterior.jumped == jumped
    names = posterior.names
    times, weights = posterior.times(names), np.array([expected[name]["weight"] for name in names])
    scatter = np.array([expected[name]["scatter"] for name in names])
    np.testing.assert_allclose(times.jitter, np.sqrt(relative_variance(scatter, chosen)), rtol=1e-5)
    np.testing.assert_allclose(times.probability, weights.mean(axis=0), rtol=1e-5)
    walks = np.array(chosen.walks)
    moving = 2 * times.probability[walks > 4 * walks.min()].sum() - 1
    assert times.moving == pytest.approx(max(moving, 0.0), abs=1e-6)
    assert posterior.sizes_seen(names).tolist() == [expected[name]["seen"] for name in names]


@given(seeds)
def test_no_coefficient_is_negative_and_the_others_are_what_they_are_given_that(seed):
    """The mixture of all filters, conditioned on zeros for coefficients that were below; in whatever order."""
    rng, state = np.random.default_rng(seed), {}
    for name in map(str, range(12)):
        root = rng.normal(size=(2, 4, 4)) * 10.0 ** rng.uniform(-2, 0, (2, 4, 1))
        one = {
            "mean": rng.normal(size=(2, 4)),
            "covariance": root @ root.swapaxes(1, 2),
            "weight": rng.dirichlet([1, 1]),
        }
        state[name] = {**one, "scatter": [0.0] * 5, "seen": [1.0, 1.0]}
    times = TimePosterior.from_state_dict(state, OTHER).times(tuple(state))
    assert (times.mean >= 0).all()
    for one, found, inner in zip(state.values(), times.mean, times.covariance, strict=True):
        mean, covariance = blended(one["weight"], one["mean"], one["covariance"])
        zero, scale = found == 0.0, np.sqrt(np.diag(covariance))
        weight = covariance[:, zero] @ np.linalg.inv(covariance[np.ix_(zero, zero)])
        np.testing.assert_allclose((found - mean + weight @ mean[zero]) / scale, 0.0, atol=1e-6)
        left = (inner - covariance + weight @ covariance[zero]) / np.outer(scale, scale)
        np.testing.assert_allclose(left, 0.0, atol=1e-6)


# what it finds, whatever it is made of


def test_one_size_goes_through_the_origin_and_two_give_the_line():
    once = seen(steps(THETA, (16, 16, 16))).times(NAMES).mean
    assert once[:, [1, 3]].max() == 0.0
    np.testing.assert_allclose(seconds(once, (16, 16, 16)), seconds(THETA, (16, 16, 16)), rtol=1e-12)
    twice = seen(*[steps(THETA, sizes) for sizes in ((16, 16, 16), (48, 24, 8)) * 4])
    np.testing.assert_allclose(twice.times(NAMES).mean, THETA, rtol=0.03, atol=2e-4)


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_errors_are_what_they_say(noise, seed):
    """Of a hundred workers and fifteen rounds at two splits, off by about one standard error."""
    rng = np.random.default_rng(seed)
    theta, names = np.repeat(THETA, 34, axis=0), tuple(f"w{i}" for i in range(102))
    posterior, split = TimePosterior(), rng.integers(20, 60, 102)
    for look in range(15):
        at = split if look < 8 else split + 10
        posterior = posterior.observe(steps(theta, at, 8, rng, noise), names)
        times = posterior.times(names)
        found, error = times.seconds(at.astype(float))
        off = (found - seconds(theta, at)) / error
        assert look < 3 or (0.5 < off.std() < 1.4 and abs(off).max() < 8)
    assert np.sqrt((times.jitter**2).mean()) == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.3, 3.0])
def test_a_jump_is_followed_at_once_named_and_keeps_the_shape_of_the_line(factor, seed):
    rng = np.random.default_rng(seed)
    posterior = seen(*[steps(THETA, sizes, 8, rng, 0.02) for sizes in (SPLIT, (15, 30, 20)) * 6 + (SPLIT,)])
    assert posterior.jumped == frozenset()
    slower = THETA * np.array([1.0, factor, 1.0])[:, None]
    posterior = seen(steps(slower, SPLIT, 8, rng, 0.02), posterior=posterior)
    np.testing.assert_allclose(known(posterior), seconds(slower, SPLIT), rtol=0.06)
    assert posterior.jumped == {"b"}
    posterior = seen(steps(slower, SPLIT, 8, rng, 0.02), posterior=posterior)
    np.testing.assert_allclose(known(posterior, (15, 10, 5)), seconds(slower, (15, 10, 5)), rtol=0.15)


def test_speeds_that_walk_are_followed_and_then_forgotten(seed):
    rng, posterior, x, lost = np.random.default_rng(seed), TimePosterior(), np.zeros(3), []
    for _ in range(70):
        x = 0.98 * x + 0.04 * rng.standard_normal(3)
        now = THETA * np.exp(x)[:, None]
        posterior = seen(steps(now, SPLIT, 8, rng, 0.02), posterior=posterior)
        lost.append(known(posterior) / seconds(now, SPLIT) - 1)
    assert np.sqrt(np.mean(np.square(lost[10:]))) < 0.02
    assert posterior.times(NAMES).moving > 0.5
    posterior = seen(*[steps(THETA, SPLIT, 8, rng, 0.02) for _ in range(60)], posterior=posterior)
    assert posterior.times(NAMES).moving == 0.0
    np.testing.assert_allclose(known(posterior), seconds(THETA, SPLIT), rtol=0.015)


def test_a_few_odd_steps_do_not_move_it_and_many_are_the_workers_pace(seed):
    rng = np.random.default_rng(seed)
    posterior = seen(*[steps(THETA, SPLIT, 8, rng, 0.02) for _ in range(6)])
    look = steps(THETA, SPLIT, 8, rng, 0.02)
    look.forward[[2, 5], 1] *= 3.0
    look.backward[[2, 5], 1] *= 3.0
    np.testing.assert_allclose(known(seen(look, posterior=posterior)), seconds(THETA, SPLIT), rtol=0.03)
    for _ in range(20):
        look = steps(THETA, SPLIT, 12, rng, 0.02)
        look.backward[rng.permutation(12)[:4], 1] *= 3.0
        posterior = seen(look, posterior=posterior)
    q, s, k, m = THETA[1]
    assert known(posterior)[1] == pytest.approx(q * 20 + s + (k * 20 + m) * (1 + 2 * 4 / 12), rel=0.12)


@given(seeds)
def test_whatever_is_measured_leaves_it_sound(seed):
    """Seconds twelve digits apart are more than a covariance can tell; it stays one nevertheless."""
    rng, posterior = np.random.default_rng(seed), TimePosterior()
    scale, wild = 10 ** rng.uniform(-7, 3), rng.random() < 0.5
    for _ in range(10):
        count = int(rng.integers(1, 33))
        b = np.broadcast_to(rng.integers(0, 1000, 3).astype(float), (count, 3))
        a, p = rng.random((2, count, 3)) * (10 ** rng.uniform(-7, 3, 3) if wild else scale)
        nothing, zeros = rng.random((2, 3)) < 0.3, np.zeros_like(b)
        look = StepObservations(b, a * ~nothing[0], p * (nothing[0] | ~nothing[1]), *[zeros] * 4)
        posterior = seen(look, posterior=posterior)
        times = posterior.times(NAMES)
        variances = np.einsum("nii->ni", times.covariance)
        assert min(times.mean.min(), variances.min()) >= 0
        assert np.isfinite(times.mean).all()
        size = np.where(variances > 0, np.sqrt(variances), np.inf)
        assert wild or np.linalg.eigvalsh(times.covariance / size[:, :, None] / size[:, None, :]).min() > -1e-3
        np.testing.assert_allclose(times.probability.sum(), 1.0)


# whom it knows, and its state


def test_workers_that_are_not_at_hand_are_kept_and_unknown_ones_are_like_the_nearest_capacity():
    posterior = seen(*[steps(THETA, sizes) for sizes in ((16, 16, 16), (48, 24, 8)) * 4])
    all_known, before = posterior.times(NAMES), posterior
    posterior = posterior.observe(steps(THETA[[2, 0]], (8, 24)), ("c", "a"))
    assert posterior.names == NAMES
    assert posterior.knows(("b", "a")) > posterior.knows(("b", "d"))
    np.testing.assert_array_equal(posterior.times(("b",)).mean, all_known.mean[1:2])
    times = before.times(("a", "b", "c", "d", "e"), (4.0, 2.0, 1.0, 2.2, 4.0))
    np.testing.assert_array_equal(times.mean[:3], all_known.mean)
    np.testing.assert_allclose(times.mean[3:], [all_known.mean[1] / 1.1, all_known.mean[0]])
    expected = 0.5**2 * np.outer(times.mean[3], times.mean[3]) + np.diag((0.1 * times.mean[3]) ** 2)
    np.testing.assert_allclose(times.covariance[3], expected)
    alike = before.times(("d", "a", "b", "c"))
    np.testing.assert_allclose(alike.mean[0], all_known.mean.mean(axis=0), err_msg="the mean, of several")
    with pytest.raises(KeyError, match="none of the workers"):
        TimePosterior().times(NAMES)
    assert TimePosterior().observe(StepObservations.empty(3), NAMES) == TimePosterior()


def test_the_state_goes_through_json_and_observing_changes_nothing_in_place():
    rng = np.random.default_rng(7)
    posterior = seen(*[steps(THETA, sizes, 8, rng, 0.05) for sizes in ((16, 16, 16), (48, 24, 8)) * 2])
    state = json.dumps(posterior.state_dict())
    back, look = TimePosterior.from_state_dict(json.loads(state)), steps(THETA, (20, 20, 10), 8, rng, 0.05)
    assert back == posterior != replace(posterior, settings=OTHER)
    assert back.observe(look, NAMES) == posterior.observe(look, NAMES) != back
    assert json.dumps(posterior.state_dict()) == state
    assert TimePosterior.from_state_dict(json.loads(state), OTHER) == TimePosterior(settings=OTHER), "other filters"


@pytest.mark.parametrize("key", ["mean", "covariance", "weight", "scatter", "seen"])
def test_a_state_of_another_shape_or_without_numbers_is_refused(key):
    state = seen(steps(THETA, (16, 16, 16))).state_dict()
    first = np.asarray(state["a"][key])
    for wrong in (first.ravel()[:-1], first + np.nan, first + np.inf, first[None], "text", None, [[1.0], 2.0]):
        if key == "weight" and len(wrong if isinstance(wrong, str | list) else np.atleast_1d(wrong)) != len(first):
            continue  # that is another number of filters
        with pytest.raises((ValueError, TypeError)):
            TimePosterior.from_state_dict({name: {**one, key: wrong} for name, one in state.items()})


# smoothed times of one split: the mean while nothing changes, the moving average when something does


@given(seeds, st.sampled_from([SmoothingSettings(), SmoothingSettings(5, 12, 2.0, 2.0)]), st.floats(0.5, 0.95))
def test_smoothed_times_are_those_of_loops(seed, chosen, decay):
    rng, times = np.random.default_rng(seed), StepTimes(settings=chosen)
    logs = []
    for _ in range(2):  # at two splits: the noise is remembered, and nothing else
        mean = moving = rows = None
        for count in range(1, int(rng.integers(3, 40))):
            row = np.array([0.1, 3.0]) * np.exp(0.1 * rng.standard_normal(2))
            times = times.observe(row, decay=decay)
            if rows is None:
                mean, moving, weights, steps, rows = row, row, 1.0, 1, [row]
            else:
                logs.append(abs(np.log(row) - np.log(rows[-1])))
                share, part = max(1 - decay, 1 / count), max(1 / (steps + 1), 1 / chosen.longest_mean_steps)
                moving, weights = (1 - share) * moving + share * row, (1 - share) ** 2 * weights + share**2
                mean, steps = (1 - part) * mean + part * row, min(steps + 1, chosen.longest_mean_steps)
                rows.append(row)
            recent = np.array(logs[-chosen.noise_steps :]).reshape(-1, 2)
            noise = np.zeros(2)
            if len(recent):
                usual = np.minimum(recent, chosen.outlier_ratio * np.median(recent, axis=0)).mean(axis=0)
                noise = usual / 1.128 * (1 + 2 / len(recent))  # of the difference of two normal values
            assert times.best == pytest.approx(mean)
            assert times.noise == pytest.approx(noise)
            assert times.errors == pytest.approx(noise / math.sqrt(steps))
            apart = weights - 1 / steps  # the mean holds the steps of the moving average
            left = abs(np.log(moving / mean)) > chosen.leaving_errors * noise * math.sqrt(max(apart, 0.0)) + 1e-9
            changed = apart > 1e-9 and left.any()
            now = times.current()
            assert now.best == pytest.approx(moving if changed else mean)
            assert now.steps == (max(round(1 / weights), 1) if changed else steps)
            if changed:
                times, mean, steps = now, moving, now.steps
        times = times.restarted()
        assert times.best.tolist() == []
