"""Figures of a simulation's result, on steps that are given."""

from math import inf

import numpy as np
import pytest

from lightning_hetero.simulate import ClusterSimulator, DeviceProfile
from lightning_hetero.simulate.cluster.result import Recorder, Stretch


def result(*stretches):
    """Result of some stretches, each of names, sizes, seconds, exact seconds and idle shares."""
    recorder, clock = Recorder(), 0.0
    for names, sizes, seconds, exact, idle in stretches:
        ends = clock + np.cumsum(seconds)
        clock = ends[-1]
        ones = np.ones(len(seconds))
        recorder.add(Stretch(names, sizes, np.array(seconds), np.array(exact), ones, ends, np.float32(idle)))
    return recorder.result()


def exact(*seconds):
    """Steps of one worker whose optimum is a second."""
    return result((("a",), (4,), seconds, seconds, [[0.0]] * len(seconds)))


@pytest.mark.parametrize(
    ("steps", "more", "first"),
    [
        ((2.0, 1.0, 1.2, 1.0, 1.0), {}, 1),
        ((2.0, 1.0, 1.2, 1.0, 1.0), {"for_good": True}, 3),
        ((2.0, 1.0, 1.2, 1.0, 1.0), {"since": 2}, 1),
        ((2.0, 1.0, 1.2, 1.0, 1.0), {"since": 2, "for_good": True}, 1),
        ((2.0, 1.0, 1.2), {"for_good": True}, inf),
        ((2.0, 1.2), {}, inf),
        ((1.0, 1.05), {"for_good": True}, 0),
    ],
)
def test_the_steps_until_the_optimum(steps, more, first):
    assert exact(*steps).first_within(0.05 + 1e-9, **more) == first


def test_shares_are_of_the_time_of_all_steps():
    found = exact(2.0, 1.0, 1.25)
    assert found.share_of_optimum == pytest.approx(3 / 4.25)
    assert found.share_since(1) == pytest.approx(2 / 2.25)


def test_columns_are_workers_and_long_steps_count_for_more():
    found = result(
        (("a", "b"), (3, 1), [1.0, 3.0], [1.0, 3.0], [[0.0, 0.5], [0.5, 0.0]]),
        (("b", "c"), (2, 2), [4.0], [4.0], [[0.25, 0.0]]),
    )
    assert found.names == ("a", "b", "c")
    assert found.sizes.tolist() == [[3, 1, 0], [3, 1, 0], [0, 2, 2]]
    np.testing.assert_array_equal(found.idle, [[0.0, 0.5, np.nan], [0.5, 0.0, np.nan], [np.nan, 0.25, 0.0]])
    np.testing.assert_allclose(found.idle_share, [1.5 / 4, 1.5 / 8, 0.0])
    assert found.samples.tolist() == [4, 8, 12]
    assert found.clock.tolist() == [1.0, 4.0, 8.0]


@pytest.mark.parametrize("step", [-1, 10, 99])
def test_a_share_is_that_of_steps_that_ran(step):
    result = ClusterSimulator([DeviceProfile(0.001, 0, 0.002, 0)] * 2, 20).run(10)
    with pytest.raises(ValueError, match=f"step={step}"):
        result.share_since(step)


def test_devices_that_take_no_time_lose_none():
    result = ClusterSimulator([DeviceProfile(0, 0, 0, 0)] * 2, 20).run(10)
    assert (result.share_of_optimum, result.first_within(0.01)) == (1.0, 0)
