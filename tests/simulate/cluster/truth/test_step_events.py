"""Events of a step against their transcription in loops, on random inputs."""

import numpy as np
import pytest

from lightning_hetero.simulate.cluster.truth.step_events import StepTimes, bucket_times


def transcribed(a, p, shares, seconds):
    """One step: a bucket leaves when the last worker has it and the link is free."""
    free, ends = 0.0, []
    for share, takes in zip(shares, seconds, strict=True):
        there = max(own_a + own_p * share for own_a, own_p in zip(a, p, strict=True))
        free = max(free, there) + takes
        ends.append(free)
    return ends


def seen_by(worker, a, p, shares, ends):
    """Synchronization of the buckets before the last, and of the last, as one worker's timer sees it."""
    waited = []
    for j, end in enumerate(ends):
        begins = a[worker] + p[worker] * shares[j]
        waited.append(end - (begins if j == 0 else max(begins, ends[j - 1])))
    return sum(waited[:-1]), waited[-1]


@pytest.mark.parametrize("seed", range(4))
def test_events_are_those_of_the_rule(seed):
    rng = np.random.default_rng(seed)
    for _ in range(500):
        steps, workers, buckets = rng.integers(1, 4), rng.integers(1, 7), rng.integers(1, 6)
        a, p = rng.exponential(1.0, (2, steps, workers))
        shares = np.sort(rng.random(buckets))
        seconds = rng.exponential(rng.choice([0.0, 0.1, 1.0]), (steps, buckets))
        done = bucket_times(a, p, shares, seconds)
        rows = StepTimes(np.ones(workers), a, p, shares, done).observed()
        for t in range(steps):
            ends = transcribed(a[t], p[t], shares, seconds[t])
            np.testing.assert_allclose(done[t], ends, rtol=1e-12)
            for i in range(workers):
                own = rows.overlapped_sync[t, i], rows.last_sync[t, i]
                np.testing.assert_allclose(own, seen_by(i, a[t], p[t], shares, ends), rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(rows.bucket_ends[t, i], np.array(ends) - a[t, i])


def test_rows_are_those_of_the_newest_steps():
    a, p = np.arange(1.0, 7.0).reshape(3, 2), np.ones((3, 2))
    shares, seconds = np.array([0.5, 1.0]), np.zeros((3, 2))
    times = StepTimes(np.array([3.0, 1.0]), a, p, shares, bucket_times(a, p, shares, seconds))
    rows = times.observed(1)
    assert rows.num_steps == 2
    assert rows.forward.tolist() == a[1:].tolist()
    assert rows.first_bucket.tolist() == [[0.5, 0.5]] * 2
    assert rows.step_time.tolist() == [[5.0, 5.0], [7.0, 7.0]]
    np.testing.assert_allclose(times.idle, [[1 / 3, 0], [1 / 5, 0], [1 / 7, 0]])


def test_a_noisy_first_bucket_is_one_of_the_measurement_only():
    a, p = np.ones((1, 2)), np.ones((1, 2))
    shares = np.array([0.5, 1.0])
    done = bucket_times(a, p, shares, np.zeros((1, 2)))
    exact, noisy = (
        StepTimes(np.ones(2), a, p, shares, done, first).observed() for first in (None, 2.0 * np.ones((1, 2)))
    )
    np.testing.assert_allclose(noisy.first_bucket, 2 * exact.first_bucket)
    np.testing.assert_allclose(noisy.step_time, exact.step_time)


def test_rows_have_the_samples_that_ran():
    """A worker that is left out runs its minimum, whose time says what it takes."""
    a, p, shares = np.ones((2, 2)), np.ones((2, 2)), np.ones(1)
    done = bucket_times(a, p, shares, np.zeros((2, 1)))
    times = StepTimes(np.array([6.0, 1.0]), a, p, shares, done, planned=np.array([6.0, 0.0]))
    assert times.observed().local_batch_sizes.tolist() == [[6.0, 1.0]] * 2
    assert times.planned.tolist() == [6.0, 0.0]
