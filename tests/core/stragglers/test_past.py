"""What a worker is expected to take, from what it took before at this and at other sizes."""

import numpy as np
import pytest

from lightning_hetero.core.stragglers.past import Past, largest_expected
from lightning_hetero.core.stragglers.settings import StragglerSettings

SETTINGS = StragglerSettings()
NOBODY, BOTH = np.zeros(2, dtype=bool), np.ones(2, dtype=bool)


def learned(*rounds, past=None):
    past = past or Past(2, 1, SETTINGS)
    for sizes, times in rounds:
        past.resize(np.array(sizes, dtype=float))
        past.learn(np.array(times, dtype=float)[:, None], BOTH, NOBODY)
    return past


@pytest.mark.parametrize("seed", range(30))
def test_affine_times_never_exceed_what_is_expected(seed):
    generator = np.random.default_rng(seed)
    slope, fixed = generator.uniform(0, 1, 2)
    sizes = generator.choice(np.arange(1, 60), size=int(generator.integers(1, 5)), replace=False)
    known = {float(size): np.array([slope * size + fixed]) for size in sizes}
    for size in range(1, 80):
        expected = float(largest_expected(float(size), known)[0])
        assert slope * size + fixed <= expected + 1e-12
        if len(known) > 1 and min(sizes) <= size <= max(sizes):
            assert slope * size + fixed == pytest.approx(expected)


def test_a_size_that_was_run_before_is_known():
    past = learned(((8, 8), (1.0, 2.0)), ((12, 4), (1.5, 1.5)))
    past.resize(np.array([8.0, 4.0]))
    assert past.expected[:, 0].tolist() == [1.0, 1.5]
    assert past.tried.tolist() == [True, True]


def test_a_new_size_is_bounded_and_not_known():
    past = learned(((8, 8), (1.0, 2.0)))
    past.resize(np.array([12.0, 4.0]))
    assert past.expected[:, 0].tolist() == [1.5, 2.0]
    assert past.tried.tolist() == [False, False]


def test_the_first_times_at_a_size_are_taken_as_they_are():
    past = learned(((8, 8), (1.0, 2.0)), ((12, 4), (1.2, 1.1)))
    assert past.expected[:, 0].tolist() == [1.2, 1.1]


def test_means_follow_slowly():
    past = learned(*[((8, 8), (1.0, 1.0))] * 10, ((8, 8), (2.0, 1.0)))
    assert past.expected[:, 0].tolist() == pytest.approx([1.2, 1.0])


def test_deviations_of_rounds_widen_what_is_usual():
    generator = np.random.default_rng(0)
    noisy = [((8, 8), (1.0 + 0.1 * generator.standard_normal(), 1.0)) for _ in range(60)]
    past = learned(*noisy)
    assert 0.05 < past.spread[0] ** 0.5 < 0.2
    assert past.spread[1] ** 0.5 == pytest.approx(SETTINGS.min_deviation)


def test_one_round_widens_it_by_a_bounded_factor():
    past = learned(*[((8, 8), (1.0, 1.0))] * 30)
    before = past.spread.copy()
    past.learn(np.array([[50.0], [1.0]]), BOTH, NOBODY)
    assert past.spread[0] <= 9 * before[0]


def test_a_suspicious_round_waits_for_the_next_one():
    past = learned(*[((8, 8), (1.0, 1.0))] * 10)
    suspicious = np.array([True, False])
    past.learn(np.array([[1.5], [1.0]]), BOTH, suspicious)
    assert past.expected[0, 0] == 1.0
    before = past.spread[0]
    past.learn(np.array([[1.0], [1.0]]), BOTH, NOBODY)  # it was a single round
    assert past.expected[0, 0] == 1.0
    assert past.spread[0] > before


def test_a_second_suspicious_round_is_learned():
    past = learned(*[((8, 8), (1.0, 1.0))] * 10)
    suspicious = np.array([True, False])
    for _ in range(2):
        past.learn(np.array([[1.5], [1.0]]), BOTH, suspicious)
    assert past.expected[0, 0] == pytest.approx(1.1)


def test_stragglers_do_not_change_their_past():
    past = learned(*[((8, 8), (1.0, 1.0))] * 10)
    past.learn(np.array([[5.0], [1.0]]), np.array([False, True]), NOBODY)
    assert past.expected[:, 0].tolist() == [1.0, 1.0]


def test_after_a_lasting_change_a_worker_begins_anew():
    past = learned(((8, 8), (1.0, 1.0)), ((12, 4), (1.5, 0.5)))
    past.forget([0], np.array([[9.0], [9.0]]))
    assert past.expected[:, 0].tolist() == [9.0, 0.5]
    past.resize(np.array([8.0, 8.0]))
    assert past.expected[:, 0].tolist() == [9.0, 1.0]  # of worker 0 only the new level is known
