"""Workers are told apart from the link that they share."""

import numpy as np
import pytest

from lightning_hetero.core.arrivals import arrival_differences, own_arrivals


def test_arrivals_are_compared_only_between_steps_that_follow_each_other():
    thin = np.array([[0.32, 0.35], [0.36, 0.31]] * 3)  # by turns one and the other comes last, 10 ms apart
    fast = thin - 0.3
    assert arrival_differences(np.concatenate([thin, fast])) == {(0, 1): pytest.approx(0.01)}
    apart = np.concatenate([np.tile(thin[:1], (9, 1)), np.tile(fast[1:2], (9, 1))])
    assert arrival_differences(apart) == {}, "a link that became faster was taken for a worker"
    assert arrival_differences(np.full((9, 2), np.nan)) == {}


def test_a_link_that_stalls_for_a_step_is_not_taken_for_a_worker():
    """Of three steps in which another worker came last than before, the stall is in two, with the same sign."""
    stalled = np.array([[0.02, 0.03], [0.02, 0.03], [5.03, 5.02], [0.02, 0.03], [0.03, 0.02], [0.03, 0.02]])
    assert arrival_differences(stalled[[0, 1, 3, 4, 5]]) == {}
    assert arrival_differences(stalled) == {}
    turns = np.array([[0.02, 0.03], [0.05, 0.04]] * 3)  # the second one takes 20 ms longer
    assert arrival_differences(np.insert(turns, 3, [5.05, 5.04], axis=0)) == {(0, 1): pytest.approx(-0.02)}


def test_own_arrivals_fit_all_pairs():
    found = own_arrivals({0: 0.1, 7: 5.0}, {(0, 1): -0.2, (1, 2): 0.1, (0, 2): -0.1})
    assert found[7] == 5.0
    assert [found[i] - found[0] for i in (1, 2)] == pytest.approx([0.2, 0.1], abs=1e-5)
    blended = own_arrivals({0: 0.0, 1: 0.0}, {(0, 1): 0.1})
    assert blended[0] - blended[1] == pytest.approx(0.03)
