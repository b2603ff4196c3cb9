"""The convergence surrogate: what it learns of a known function, and which probe comes next."""

import numpy as np
import pytest

from lightning_hetero.core.compression.bayesian_search import (
    ConvergenceSurrogate,
    expected_improvement,
    profile_convergence,
)


def truth(rate, total):
    """Compression costs more the nearer it is to 1; the best batch is 100."""
    return 0.05 * -np.log10(1 - rate + 1e-3) + 0.1 * np.log2(total / 100) ** 2


class Probes:
    """Probe trainings with a known outcome."""

    def __init__(self, noise=0.0):
        self.calls, self.noise, self.rng = [], noise, np.random.default_rng(1)

    def __call__(self, rate, total, staleness):
        self.calls.append((rate, total, staleness))
        return 0.8 * (1 + truth(rate, total) * bool(staleness)) + self.noise * self.rng.normal()


def test_first_probe_is_the_one_compared_with_and_others_are_stale():
    probes = Probes()
    profile = profile_convergence(probes, min_total=20, max_total=500, probes=6)
    assert probes.calls[0] == (0.0, 260, 0)
    assert [staleness for *_, staleness in probes.calls[1:]] == [1] * 6
    assert profile.baseline == 0.8
    for (rate, total, extra), call in zip(profile.points, probes.calls[1:], strict=True):
        assert (rate, total) == call[:2]
        assert extra == pytest.approx(truth(rate, total))
        assert 0 <= rate <= 0.999
        assert 20 <= total <= 500


def test_thirty_probes_tell_where_the_best_batch_is_at_every_rate():
    probes = Probes(noise=0.004)
    surrogate = ConvergenceSurrogate(profile_convergence(probes, min_total=20, max_total=500, probes=30))
    totals = np.unique(np.geomspace(20, 500, 80).round())
    for rate in (0.1, 0.5, 0.9, 0.97):
        mean, deviation = surrogate.predict(rate, totals)
        best = totals[np.argmin(mean)]
        assert truth(rate, best) - truth(rate, 100) < 0.02
        assert (deviation > 0).all()
        assert surrogate.extra_loss(rate, 100) == pytest.approx(truth(rate, 100), abs=0.03)
    near = [abs(np.log2(total / 100)) < 1 for _, total, _ in probes.calls[-15:]]
    assert np.mean(near) > 0.9, "later probes do not look where an improvement is expected"
    rates = [rate for rate, *_ in probes.calls[1:]]
    assert np.histogram(rates, bins=4, range=(0, 1))[0].min() >= 3, "rates are not explored evenly"


def test_the_best_batch_of_each_rate_is_sought_also_where_no_batch_is_as_good_as_at_other_rates():
    """An improvement over the best probe of all rates would be expected nowhere at high rates."""
    seen = []

    def probe(rate, total, staleness):
        seen.append((rate, abs(np.log2(total / 100))))
        return 1.0 + staleness * (5 * rate + 0.1 * np.log2(total / 100) ** 2)

    profile_convergence(probe, min_total=20, max_total=500, probes=20)
    assert np.mean([away for rate, away in seen[-12:] if rate > 0.3]) < 0.5


def test_a_probe_that_diverges_is_a_bad_point_and_no_end():
    outcomes = iter([1.0, float("nan"), float("inf"), 1.5, 1e9, 1.2])
    profile = profile_convergence(lambda *_: next(outcomes), min_total=8, max_total=64, probes=5)
    assert [extra for *_, extra in profile.points] == pytest.approx([9.0, 9.0, 0.5, 9.0, 0.2])


@pytest.mark.parametrize("loss", [0.0, -1.0, float("nan")])
def test_without_a_baseline_there_is_no_profile(loss):
    with pytest.raises(ValueError, match="must be finite, above 0"):
        profile_convergence(lambda *_: loss, min_total=8, max_total=64)


def test_expected_improvement_against_sampling():
    rng = np.random.default_rng(0)
    draws = rng.normal(1.0, 0.5, 400_000)
    sampled = np.maximum(0.9 - draws, 0).mean()
    assert expected_improvement(np.array([1.0]), np.array([0.5]), 0.9)[0] == pytest.approx(sampled, rel=0.01)
