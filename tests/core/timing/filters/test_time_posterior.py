"""The estimator of time models: exact where it can be, calibrated where it cannot, and never stuck in the past."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.filters import time_posterior
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.step_jitter import relative_variance, summarise_round
from lightning_hetero.core.timing.times import EstimatorSettings

THETA = np.array([[0.0004, 0.004, 0.0008, 0.003], [0.0008, 0.008, 0.0016, 0.003], [0.002, 0.005, 0.004, 0.006]])
NAMES = ("a", "b", "c")


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
    q, s, k, m = theta.T
    return (q + k) * np.asarray(sizes, float) + s + m


def seen(*looks, posterior=None, names=NAMES):
    posterior = TimePosterior() if posterior is None else posterior
    for look in looks:
        posterior = posterior.observe(look, names)
    return posterior


# one filter is the Kalman filter


def plain(walk=0.01, shared=0.3):
    return EstimatorSettings(walks=(walk,), rounds=(shared,), prior=(1.0,), switch=0.0, jump_probability=1e-300)


def by_matrices(looks, theta_count, walk, share):
    """The filter of the module's text with whole matrices, one worker after another."""
    out = []
    for i in range(theta_count):
        mean = cov = None
        for j, (b, y, n, sigma, scatter) in enumerate(looks):
            shared = share * np.sqrt((scatter[i] * y[i] ** 2).sum()) / y[i].sum() + 0.001
            h = np.array([[b[i], 1, 0, 0], [0, 0, b[i], 1.0]])
            if j == 0:
                mean = np.array([y[i, 0] / b[i], 0, y[i, 1] / b[i], 0])
                cov = np.zeros((4, 4))
                for f in (0, 1):
                    t2, fixed = y[i, f] ** 2, 0.35**2
                    line = np.array([[1 / b[i] ** 2, -1 / b[i]], [-1 / b[i], 1.0]]) * t2 * fixed
                    cov[2 * f : 2 * f + 2, 2 * f : 2 * f + 2] = line
                    cov[2 * f, 2 * f] += t2 * (sigma[i, f] / n + shared**2) / b[i] ** 2
                cov[0, 2] = cov[2, 0] = shared**2 * y[i, 0] * y[i, 1] / b[i] ** 2
                continue
            theta = np.maximum(mean, 0.0)
            size = np.array([y[i, 0] / b[i], y[i, 0], y[i, 1] / b[i], y[i, 1]])
            cov = cov + walk**2 * n / 8 * np.outer(theta, theta) + np.diag((0.1 * walk * size) ** 2) * n / 8
            expected = h @ mean
            scale = np.clip(expected, y[i] / 2, 2 * y[i])
            noise = shared**2 * np.outer(scale, scale) + np.diag(sigma[i] / n * scale**2)
            gain = cov @ h.T @ np.linalg.inv(h @ cov @ h.T + noise)
            mean, cov = mean + gain @ (y[i] - expected), (np.eye(4) - gain @ h) @ cov
        out.append((mean, cov))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_one_filter_is_the_kalman_filter_of_whole_matrices(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    posterior, looks = TimePosterior(settings=plain()), []

    def spy(scatter, forward, backward, settings):
        y, variance, after = summarise_round(scatter, forward, backward, settings)
        looks.append((b, y, len(forward), variance * len(forward), relative_variance(after, settings)))
        return y, variance, after

    monkeypatch.setattr(time_posterior, "summarise_round", spy)
    for _ in range(6):
        b = rng.integers(4, 100, 3).astype(float)
        posterior = posterior.observe(steps(THETA, b, int(rng.integers(2, 12)), rng, 0.05), NAMES)
    for i, (mean, cov) in enumerate(by_matrices(looks, 3, 0.01, 0.3)):
        np.testing.assert_allclose(posterior.mean[0, i], mean, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(posterior.covariance[0, i], cov, rtol=1e-5, atol=1e-6 * abs(cov).max())


# what it finds


def test_one_size_goes_through_the_origin():
    mean = seen(steps(THETA, (16, 16, 16))).times(NAMES).mean
    assert mean[:, [1, 3]].max() == 0.0
    np.testing.assert_allclose(seconds(mean, (16, 16, 16)), seconds(THETA, (16, 16, 16)), rtol=1e-12)


def test_two_sizes_give_the_line():
    posterior = seen(*[steps(THETA, sizes) for sizes in ((16, 16, 16), (48, 24, 8)) * 4])
    np.testing.assert_allclose(posterior.times(NAMES).mean, THETA, rtol=0.03, atol=2e-4)


@pytest.mark.parametrize("noise", [0.02, 0.08, 0.15])
def test_errors_are_what_they_say(noise):
    """Over a hundred workers and twenty rounds at two splits, off by about one standard error."""
    rng = np.random.default_rng(0)
    theta = np.repeat(THETA, 34, axis=0)
    names = tuple(f"w{i}" for i in range(len(theta)))
    posterior, split = TimePosterior(), rng.integers(20, 60, len(theta))
    for look in range(20):
        at = split if look < 10 else split + 10
        posterior = posterior.observe(steps(theta, at, 8, rng, noise), names)
        found, error = posterior.times(names).seconds(at.astype(float))
        off = (found - seconds(theta, at)) / error
        if look > 2:
            assert 0.5 < off.std() < 1.3
            assert abs(off).max() < 6


def test_a_round_at_another_size_leaves_what_is_known_of_the_first():
    """What a point at one size and one at another accuse each other of does not grow."""
    rng = np.random.default_rng(1)
    posterior = TimePosterior()
    for look in range(60):
        factor = 1.0 if look < 10 or look > 40 else 1.02 ** (look - 10 if look <= 25 else 40 - look)
        sizes = (16, 16, 16) if look % 2 else (40, 20, 10)
        posterior = posterior.observe(steps(THETA, sizes, 8, rng, 0.02, factor), NAMES)
    for sizes in ((16, 16, 16), (40, 20, 10)):
        np.testing.assert_allclose(seconds(posterior.times(NAMES).mean, sizes), seconds(THETA, sizes), rtol=0.04)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.3, 3.0])
def test_a_jump_is_followed_at_once_and_named(factor):
    rng = np.random.default_rng(2)
    posterior = seen(*[steps(THETA, (30, 20, 10), 8, rng, 0.02) for _ in range(10)])
    assert posterior.jumped == frozenset()
    slower = THETA * np.array([1.0, factor, 1.0])[:, None]
    posterior = posterior.observe(steps(slower, (30, 20, 10), 8, rng, 0.02), NAMES)
    found = seconds(posterior.times(NAMES).mean, (30, 20, 10))
    np.testing.assert_allclose(found, seconds(slower, (30, 20, 10)), rtol=0.05)
    assert posterior.jumped == frozenset({"b"})


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("factor", [1 / 3, 1 / 1.5, 1.3, 3.0])
def test_a_jump_while_the_size_changes_is_not_taken_for_a_negative_constant_part(factor, noise):
    """The time at the running size is right two rounds later at the latest, whatever sizes were seen before."""
    for seed in (90, 112, 142, 87):  # these went wrong by up to 80 standard errors
        rng = np.random.default_rng(seed)
        theta = THETA * np.exp(0.5 * rng.standard_normal(THETA.shape)) * (rng.random(THETA.shape) < 0.8) + 1e-6
        b, posterior = rng.integers(20, 200, 3).astype(float), TimePosterior()
        for _ in range(3):
            b = np.maximum(np.round(b * np.exp(rng.uniform(-1, 1, 3))), 1.0)
            posterior = seen(*[steps(theta, b, 8, rng, noise) for _ in range(3)], posterior=posterior)
        b = np.maximum(np.round(b * np.exp(rng.uniform(-1.5, 1.5, 3))), 1.0)
        theta = theta * np.array([factor, 1.0, 1.0])[:, None]
        posterior = seen(*[steps(theta, b, 8, rng, noise) for _ in range(3)], posterior=posterior)
        found, error = posterior.times(NAMES).seconds(b)
        np.testing.assert_allclose(found, seconds(theta, b), rtol=0.03 + 0.5 * noise)
        assert (abs(found - seconds(theta, b)) < 5 * error).all()


# what workers share


def test_what_holds_for_most_workers_counts_for_each():
    """Rounds that scatter by a tenth are told from single steps that do by many workers sooner than by one."""
    rng = np.random.default_rng(0)
    found = {}
    for workers in (1, 40):
        theta, names = np.repeat(THETA[:1], workers, axis=0), tuple(f"w{i}" for i in range(workers))
        posterior = TimePosterior()
        for _ in range(12):
            factor = np.exp(0.05 * rng.standard_normal(workers))
            look = steps(theta * factor[:, None], (30,) * workers, 8, rng, 0.05)
            posterior = posterior.observe(look, names)
        together = posterior.weight.mean(axis=1)
        found[workers] = together[1] + together[2]  # rounds that share as much as single steps scatter, or half of it
    assert found[40] > found[1] + 0.1


def test_a_jump_keeps_the_shape_of_the_line():
    """A worker that is three times as slow is so at every size."""
    rng = np.random.default_rng(3)
    looks = [steps(THETA, sizes, 8, rng, 0.02) for sizes in ((30, 20, 10), (15, 30, 20)) * 6]
    posterior = seen(*looks, *[steps(3 * THETA, (30, 20, 10), 8, rng, 0.02)] * 2)
    found = seconds(posterior.times(NAMES).mean, (15, 10, 5))
    np.testing.assert_allclose(found, seconds(3 * THETA, (15, 10, 5)), rtol=0.12)


def test_a_few_odd_steps_do_not_move_it():
    rng = np.random.default_rng(4)
    posterior = seen(*[steps(THETA, (30, 20, 10), 8, rng, 0.02) for _ in range(6)])
    look = steps(THETA, (30, 20, 10), 8, rng, 0.02)
    look.forward[[2, 5], 1] *= 3.0
    look.backward[[2, 5], 1] *= 3.0
    found = seconds(posterior.observe(look, NAMES).times(NAMES).mean, (30, 20, 10))
    np.testing.assert_allclose(found, seconds(THETA, (30, 20, 10)), rtol=0.02)


def test_odd_steps_that_go_on_are_the_workers_pace():
    """A quarter of the steps waits for a quota: in the long run they count as long as they take."""
    rng = np.random.default_rng(5)
    posterior = seen(*[steps(THETA, (30, 20, 10), 8, rng, 0.02) for _ in range(6)])
    for _ in range(20):
        look = steps(THETA, (30, 20, 10), 12, rng, 0.02)
        look.backward[rng.permutation(12)[:4], 1] *= 3.0
        posterior = posterior.observe(look, NAMES)
    q, s, k, m = THETA[1]
    mean = q * 20 + s + (k * 20 + m) * (1 + 2 * 4 / 12)
    assert seconds(posterior.times(NAMES).mean, (30, 20, 10))[1] == pytest.approx(mean, rel=0.12)


def test_speeds_that_walk_are_followed_and_then_forgotten():
    rng = np.random.default_rng(6)
    posterior, x = TimePosterior(), np.zeros(3)
    lost = []
    for _ in range(100):
        x = 0.98 * x + 0.04 * rng.standard_normal(3)
        now = THETA * np.exp(x)[:, None]
        posterior = posterior.observe(steps(now, (30, 20, 10), 8, rng, 0.02), NAMES)
        lost.append(seconds(posterior.times(NAMES).mean, (30, 20, 10)) / seconds(now, (30, 20, 10)) - 1)
    assert np.sqrt(np.mean(np.square(lost[10:]))) < 0.02
    assert posterior.times(NAMES).probability @ posterior.times(NAMES).walks > 0.015
    assert posterior.times(NAMES).moving > 0.8
    for _ in range(60):
        posterior = posterior.observe(steps(THETA, (30, 20, 10), 8, rng, 0.02), NAMES)
    times = posterior.times(NAMES)
    assert times.probability @ times.walks < 0.005
    assert times.moving == 0.0
    np.testing.assert_allclose(seconds(times.mean, (30, 20, 10)), seconds(THETA, (30, 20, 10)), rtol=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_coefficients_are_finite_and_never_negative(seed):
    rng = np.random.default_rng(seed)
    posterior = TimePosterior()
    for _ in range(12):
        count = int(rng.integers(1, 33))
        b = np.broadcast_to(rng.integers(1, 1000, 3).astype(float), (count, 3))
        a, p = rng.random((2, count, 3)) * 10 ** rng.uniform(-7, 3)
        zeros = np.zeros_like(b)
        posterior = posterior.observe(StepObservations(b, a, p * (seed % 3 > 0), zeros, zeros, zeros, zeros), NAMES)
        times = posterior.times(NAMES)
        assert (times.mean >= 0).all()
        assert np.isfinite(times.mean).all()
        assert (np.diagonal(times.covariance, axis1=1, axis2=2) >= 0).all()
        np.testing.assert_allclose(posterior.weight.sum(axis=0), 1.0)


@pytest.mark.parametrize(
    "chosen",
    [
        {"switch": 0.0, "jump_probability": 1e-9},
        {"switch": 1.0},
        {"prior_workers": 0.0},
        {"prior": (1.0, 0.0, 0.0, 0.5, 0.0)},
    ],
)
def test_settings_at_the_ends_of_their_ranges_leave_it_sound(chosen):
    """A filter that predicts worse for hundreds of rounds, or that nobody expects, counts next to nothing."""
    rng, posterior = np.random.default_rng(3), TimePosterior(settings=EstimatorSettings(**chosen))
    for look in range(180):
        moved = 1.1 ** np.sin(look / 3)
        posterior = posterior.observe(steps(THETA, (30, 20, 10), 4, rng, 0.02, moved), NAMES)
    np.testing.assert_allclose(posterior.weight.sum(axis=0), 1.0)
    found = seconds(posterior.times(NAMES).mean, (30, 20, 10))
    np.testing.assert_allclose(found, seconds(THETA, (30, 20, 10)) * moved, rtol=0.05)


def test_the_longer_ago_the_round_before_the_more_counts_the_newest():
    """Speeds walk in all steps that passed, observed or not."""
    rng, sizes = np.random.default_rng(5), (30, 20, 10)
    looks = [steps(THETA, sizes, 8, rng, 0.02) for _ in range(10)]
    known = seen(*looks, posterior=TimePosterior(settings=plain(shared=3.0)))
    newest = steps(THETA, sizes, 8, rng, 0.02, factor=1.1)
    found = [
        (seconds(known.observe(newest, NAMES, elapsed).times(NAMES).mean, sizes) / seconds(THETA, sizes)).mean()
        for elapsed in (None, 8, 80, 8000)
    ]
    assert found[0] == found[1] < found[2] - 0.01 < found[3] - 0.02
    assert found[3] == pytest.approx(1.1, abs=0.015)


# who it is about


@pytest.mark.parametrize("seed", range(8))
def test_parts_that_come_down_to_nothing_and_back_leave_it_sound(seed):
    """Seconds twelve digits apart are more than a covariance can tell; it stays one nevertheless."""
    rng, posterior = np.random.default_rng(seed), TimePosterior()
    for _ in range(40):
        look = steps(THETA, rng.integers(1, 50, 3), int(rng.choice([1, 2, 8])), rng, 0.02, factor=1e3)
        nothing = rng.random((2, 3)) < 0.3
        look = replace(look, forward=look.forward * ~nothing[0], backward=look.backward * (nothing[0] | ~nothing[1]))
        posterior = posterior.observe(look, NAMES)
        times = posterior.times(NAMES)
        for covariance in (posterior.covariance.reshape(-1, 4, 4), times.covariance):
            assert np.isfinite(covariance).all()
            size = np.sqrt(np.einsum("nii->ni", covariance)) + 1e-300
            assert np.linalg.eigvalsh(covariance / size[:, :, None] / size[:, None, :]).min() > -1e-3


def test_workers_that_are_not_at_hand_are_kept():
    posterior = seen(steps(THETA, (16, 16, 16)))
    before = posterior.times(("b",)).mean
    posterior = posterior.observe(steps(THETA[[2, 0]], (8, 24)), ("c", "a"))
    assert posterior.names == NAMES
    np.testing.assert_array_equal(posterior.times(("b",)).mean, before)
    assert posterior.sizes_seen(NAMES).tolist() == [[16, 24], [16, 16], [8, 16]]


def test_a_worker_of_which_nothing_is_known_is_like_the_one_of_the_nearest_capacity():
    posterior = seen(*[steps(THETA, sizes) for sizes in ((16, 16, 16), (48, 24, 8)) * 4])
    known = posterior.times(NAMES)
    times = posterior.times(("a", "b", "c", "d"), (4.0, 2.0, 1.0, 2.2))
    np.testing.assert_array_equal(times.mean[:3], known.mean)
    np.testing.assert_allclose(times.mean[3], known.mean[1] / 1.1)
    at = np.full(4, 16.0)
    found, error = times.seconds(at)
    assert error[3] / found[3] > 0.3 > 0.05 > (error / found)[:3].max()


def test_nothing_is_known_of_anybody():
    with pytest.raises(KeyError, match="none of the workers"):
        TimePosterior().times(NAMES)
    assert TimePosterior().observe(StepObservations.empty(3), NAMES) == TimePosterior()


# state


def test_state_goes_through_json_and_goes_on_the_same():
    rng = np.random.default_rng(7)
    posterior = seen(*[steps(THETA, sizes, 8, rng, 0.05) for sizes in ((16, 16, 16), (48, 24, 8)) * 2])
    back = TimePosterior.from_state_dict(json.loads(json.dumps(posterior.state_dict())))
    assert back == posterior
    look = steps(THETA, (20, 20, 10), 8, rng, 0.05)
    assert back.observe(look, NAMES) == posterior.observe(look, NAMES)
    assert back != posterior.observe(look, NAMES)


def test_state_of_other_filters_is_learned_anew():
    state = seen(steps(THETA, (16, 16, 16))).state_dict()
    assert TimePosterior.from_state_dict(state, plain()) == TimePosterior(settings=plain())


@pytest.mark.parametrize("key", ["mean", "covariance", "weight", "scatter", "seen"])
def test_state_of_another_shape_or_without_numbers_is_an_error(key):
    state = seen(steps(THETA, (16, 16, 16))).state_dict()
    first = np.asarray(state["a"][key])
    for wrong in (first.ravel()[:-1], first + np.nan, first + np.inf, first[None], "text", None, [[1.0], 2.0]):
        other = {name: {**one, key: wrong} for name, one in state.items()}
        if key == "weight" and len(wrong if isinstance(wrong, str | list) else np.atleast_1d(wrong)) != len(first):
            continue  # that is another number of filters
        with pytest.raises((ValueError, TypeError)):
            TimePosterior.from_state_dict(other)


def test_observing_leaves_the_posterior_as_it_was():
    posterior = seen(steps(THETA, (16, 16, 16)))
    copy = replace(posterior, **{n: getattr(posterior, n).copy() for n in ("mean", "covariance", "weight", "jitter")})
    posterior.observe(steps(THETA, (48, 24, 8)), NAMES)
    assert posterior == copy
