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
