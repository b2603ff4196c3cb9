"""Figures of a simulation's result, on steps that are given."""

from math import inf

import numpy as np
import pytest

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
