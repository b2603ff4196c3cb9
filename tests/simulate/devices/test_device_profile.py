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


def test_the_seed_alone_decides():
    given = {"jitter": 0.1, "round_jitter": 0.1}
    assert (factors(50, 3, **given) == factors(50, 3, **given)).all()
    assert (factors(50, 3, **given) != factors(50, 4, **given)).all()


@given(TRACES, st.integers(0, 80))
def test_a_slowdown_holds_until_the_next(trace, passage):
    expected = 1.0
    for at in sorted(trace):
        if at <= passage:
            expected = trace[at]
    assert profile(slowdown=trace).slowdown_at(passage) == expected


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
