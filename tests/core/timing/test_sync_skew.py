"""Workers are told apart from the link that they share."""

import numpy as np
import pytest

from lightning_hetero.core.timing.sync_skew import last_bucket_differences, likely_offsets, per_worker_offsets


def seconds_of(last):
    return {pair: difference for pair, (difference, _) in last_bucket_differences(last).items()}


def test_arrivals_are_compared_only_between_steps_that_follow_each_other():
    thin = np.array([[0.32, 0.35], [0.36, 0.31]] * 3)  # by turns one and the other comes last, 10 ms apart
    fast = thin - 0.3
    assert seconds_of(np.concatenate([thin, fast])) == {(0, 1): pytest.approx(0.01)}
    apart = np.concatenate([np.tile(thin[:1], (9, 1)), np.tile(fast[1:2], (9, 1))])
    assert last_bucket_differences(apart) == {}, "a link that became faster was taken for a worker"
    assert last_bucket_differences(np.full((9, 2), np.nan)) == {}


@pytest.mark.parametrize(("steps", "compared"), [(3, False), (4, True)])
def test_three_turns_are_compared_and_two_are_not(steps, compared):
    last = np.array([[0.1, 0.2], [0.5, 0.3]] * 2)[:steps]
    assert (set(last_bucket_differences(last)) == {(0, 1)}) is compared


def test_a_link_that_stalls_for_a_step_is_not_taken_for_a_worker():
    """Of three steps in which another worker came last than before, the stall is in two, with the same sign."""
    stalled = np.array([[0.02, 0.03], [0.02, 0.03], [5.03, 5.02], [0.02, 0.03], [0.03, 0.02], [0.03, 0.02]])
    assert last_bucket_differences(stalled[[0, 1, 3, 4, 5]]) == {}
    assert last_bucket_differences(stalled) == {}
    turns = np.array([[0.02, 0.03], [0.05, 0.04]] * 3)  # the second one takes 20 ms longer
    assert seconds_of(np.insert(turns, 3, [5.05, 5.04], axis=0)) == {(0, 1): pytest.approx(-0.02)}


def test_where_all_wait_for_the_link_nobody_came_last():
    """Steps that the link bounds are slow ones, and all workers see the same of them."""
    bound = np.array([[0.05, 0.05], [0.02, 0.03], [0.02, 0.021]] * 6)
    bound[1::6] = [0.03, 0.02]
    assert all(abs(difference) < 0.005 for difference in seconds_of(bound).values())


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_scatter_of_the_link_is_no_workers_own(noise):
    """Estimates of equal workers stay within their errors, round after round."""
    rng, known, z = np.random.default_rng(0), {}, []
    for _ in range(60):
        late = rng.uniform(0.0, 0.05, (16, 4))
        link = 0.02 * np.exp(noise * rng.standard_normal((16, 1)))
        last = link + late.max(axis=1, keepdims=True) - late
        known = per_worker_offsets(known, last_bucket_differences(last), 0.02)
        z += [seconds / variance**0.5 for seconds, variance in known.values()]
    assert np.sqrt(np.mean(np.square(z))) < 1.5
    assert max(map(abs, z)) < 4.5


def test_own_arrivals_fit_all_pairs():
    exact = 1e-12
    pairs = {(0, 1): (-0.2, exact), (1, 2): (0.1, exact), (0, 2): (-0.1, exact)}
    found = per_worker_offsets({0: (0.1, 1e-6), 7: (5.0, 1.0)}, pairs, 0.3)
    assert found[7] == pytest.approx((5.0, 1.0), rel=1e-3)
    assert [found[i][0] - found[0][0] for i in (1, 2)] == pytest.approx([0.2, 0.1], abs=1e-3)


def test_what_is_known_counts_by_its_variance():
    known = {0: (0.0, 0.01), 1: (0.0, 0.01)}
    found = per_worker_offsets(known, {(0, 1): (0.1, 0.02)}, 0.0)
    assert found[0][0] - found[1][0] == pytest.approx(
        0.05
    )  # 0.02 of a difference that is known, and 0.02 of the new one
    assert found[0][1] == pytest.approx(0.005 / 2)  # of its distance from the mean of both


def test_what_is_known_of_a_worker_fades_where_nobody_takes_turns():
    """Who always comes last since is compared with nobody any more, and must not stay so for what was once seen."""
    known = {0: (0.1, 1e-4), 1: (-0.1, 1e-4)}
    assert likely_offsets(known, 2, 0.1)[0] == pytest.approx([0.2, 0.0], abs=1e-3)
    for _ in range(400):
        known = per_worker_offsets(known, {}, 0.1)
    assert max(likely_offsets(known, 2, 0.1)[0]) < 0.02


@pytest.mark.parametrize("workers", [2, 8, 100])
def test_scatter_makes_hardly_anybody_look_slow(workers):
    """Errors of half of what the link takes, of workers that have no part of their own."""
    found = 0.5 * np.random.default_rng(0).standard_normal((200, workers))
    found -= found.mean(axis=1, keepdims=True)
    likely = [likely_offsets({i: (x, 0.25) for i, x in enumerate(row)}, workers, 1.0)[0].max() for row in found]
    assert np.median(likely) < 0.25 * np.median(np.ptp(found, axis=1))
