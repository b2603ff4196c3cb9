"""A profile says how long a device takes, and refuses what cannot be."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.simulate import DeviceProfile

TRACES = st.dictionaries(st.integers(0, 60), st.floats(0.1, 10), max_size=6)


def profile(**given):
    return DeviceProfile(**{"q": 0.001, "s": 0.01, "k": 0.002, "m": 0.02, **given})


def factors(count, seed=0, **given):
    return np.array(list(islice(profile(**given).times(seed), count)))


@pytest.mark.parametrize("deviation", [0.03, 0.5])
def test_jitter_has_mean_1_and_the_deviation_given(deviation):
    found = factors(40_000, jitter=deviation)
    assert found.mean(axis=0) == pytest.approx(1.0, abs=4 * deviation / 200)
    assert found.std(axis=0) == pytest.approx(deviation, rel=0.06)
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.03


@pytest.mark.parametrize("passes", [1, 5, 8])
def test_a_round_shares_a_factor(passes):
    found = factors(80, round_jitter=0.2, round_passes=passes)
    rounds = found[:, 0].reshape(-1, passes)
    assert (rounds == rounds[:, :1]).all()
    assert len(set(rounds[:, 0])) == 80 // passes
    assert (found[:, 0] == found[:, 1]).all()


def test_the_seed_alone_decides():
    given = {"jitter": 0.1, "round_jitter": 0.1}
    assert (factors(50, 3, **given) == factors(50, 3, **given)).all()
    assert (factors(50, 3, **given) != factors(50, 4, **given)).all()


def test_jitter_and_slowdown_multiply():
    given = {"jitter": 0.1, "round_jitter": 0.2}
    slowed = factors(30, **given, slowdown={10: 3.0})
    assert slowed == pytest.approx(factors(30, **given) * np.where(np.arange(30) < 10, 1.0, 3.0)[:, None])


@given(TRACES, st.integers(0, 80))
def test_a_slowdown_holds_until_the_next(trace, passage):
    expected = 1.0
    for at in sorted(trace):
        if at <= passage:
            expected = trace[at]
    assert profile(slowdown=trace).slowdown_at(passage) == expected


@given(TRACES, st.integers(0, 80))
def test_a_gradual_slowdown_is_a_polygon(trace, passage):
    corners = sorted({0: 1.0, **trace}.items())
    expected = np.interp(passage, [at for at, _ in corners], [factor for _, factor in corners])
    assert profile(slowdown=trace, gradual=True).slowdown_at(passage) == pytest.approx(expected)


def test_pairs_of_a_slowdown_may_come_in_any_order():
    assert profile(slowdown=[(9, 2.0), (3, 5.0)]) == profile(slowdown={3: 5.0, 9: 2.0})


def test_a_profile_can_be_a_key():
    assert len({profile(slowdown={3: 2.0}), profile(slowdown={3: 2.0})}) == 1


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"q": -1.0}, ValueError, "q=-1.0"),
        ({"m": "fast"}, TypeError, "m='fast'"),
        ({"k": float("nan")}, ValueError, "k=nan"),
        ({"memory": 0}, ValueError, "memory=0"),
        ({"memory": 1.5}, TypeError, "memory=1.5"),
        ({"jitter": -0.1}, ValueError, "jitter=-0.1"),
        ({"round_passes": 0}, ValueError, "round_passes=0"),
        ({"slowdown": {5: 0.0}}, ValueError, r"slowdown\[5\]=0.0"),
        ({"slowdown": {-5: 2.0}}, ValueError, "slowdown={-5: 2.0}"),
        ({"slowdown": {1.5: 2.0}}, TypeError, "slowdown={1.5: 2.0}"),
        ({"slowdown": 3.0}, TypeError, "slowdown=3.0"),
        ({"slowdown": [(1, 2.0), (1, 3.0)]}, ValueError, "a pass twice"),
        ({"gradual": 1}, TypeError, "gradual=1"),
        ({"name": 3}, TypeError, "name=3"),
    ],
)
def test_what_cannot_be_is_named(wrong, error, says):
    with pytest.raises(error, match=says):
        profile(**wrong)


@pytest.mark.parametrize("seed", [-1, 0.5])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        profile().times(seed)


def test_a_batch_is_no_smaller_than_none():
    with pytest.raises(ValueError, match="batch_size=-1"):
        DeviceProfile(0.001, 0.01, 0.002, 0.01).seconds(-1)
