"""Times of a round: medians of its newest steps at one split."""

import numpy as np
import pytest

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.stragglers.round_times import PHASES, RoundTimes, exposed_link
from lightning_hetero.core.stragglers.settings import StragglerSettings

SETTINGS = StragglerSettings()


def observed(rows):
    """Observations of rows ``(size, data, forward, backward, optimizer, sync, step)``, shape (steps, workers, 7)."""
    rows = np.asarray(rows, dtype=float)
    size, data, forward, backward, optimizer, sync, step = np.moveaxis(rows, 2, 0)
    zero = np.zeros_like(size)
    return StepObservations(
        size, forward, backward, backward, zero, sync, step, data, optimizer, (backward + sync)[:, :, None]
    )


def steps(count, workers=2, seed=0):
    generator = np.random.default_rng(seed)
    rows = generator.uniform(0.01, 0.1, (count, workers, 7))
    rows[:, :, 0] = 8
    return rows


@pytest.mark.parametrize("count", range(4, 20))
def test_the_newest_half_is_judged_and_four_steps_at_least(count):
    rows = steps(count)
    judged = RoundTimes.of(observed(rows), 1, SETTINGS)
    newest = rows[count - max(4, -(-count // 2)) :]
    assert judged.times == pytest.approx(np.median(newest[:, :, 1:5], axis=0))
    assert judged.compute == pytest.approx(np.median(newest[:, :, 1:5].sum(axis=2), axis=0))
    link = newest[:, :, 5].min(axis=1)
    assert judged.step == pytest.approx(max(np.median(newest[:, :, 6]), judged.compute.max() + np.median(link)))
    assert judged.rows == pytest.approx(rows[:, :, 1:5].sum(axis=2))
    deviation = np.median(np.abs(newest[:, :, 1:5].sum(axis=2) - judged.compute), axis=0)
    assert judged.error == pytest.approx(1.2533 * 1.4826 * deviation / len(newest) ** 0.5)


def test_only_the_last_split_is_judged():
    rows = steps(12)
    rows[:7, :, 0] = 5
    judged = RoundTimes.of(observed(rows), 1, SETTINGS)
    assert judged.sizes.tolist() == [8, 8]
    assert len(judged.rows) == 5
    assert judged.times == pytest.approx(np.median(rows[-4:, :, 1:5], axis=0))


def test_a_step_has_all_its_micro_batches():
    rows = steps(8)
    one, three = (RoundTimes.of(observed(rows), n, SETTINGS) for n in (1, 3))
    assert three.times == pytest.approx(3 * one.times)
    assert three.error == pytest.approx(3 * one.error)
    assert three.sync == pytest.approx(one.sync)


def test_phases_are_in_their_order():
    rows = steps(6)
    rows[:, :, 1:5] = [1.0, 2.0, 3.0, 4.0]
    assert RoundTimes.of(observed(rows), 1, SETTINGS).times.tolist() == [[1, 2, 3, 4]] * 2
    assert PHASES == ("data", "forward", "backward", "optimizer")


def test_the_link_is_what_the_last_worker_sees():
    rows = steps(5)
    rows[:, :, 5] = [0.3, 0.02]
    assert exposed_link(observed(rows)) == pytest.approx([0.02] * 5)


def test_buckets_that_end_after_the_backward_pass_count():
    """An earlier bucket may hold the link when the last gradient is ready."""
    zero, size = np.zeros((4, 2)), np.full((4, 2), 8.0)
    backward = np.full((4, 2), 0.1)
    ends = np.tile([[[0.12, 0.35, np.nan], [0.12, 0.35, np.nan]]], (4, 1, 1))
    seen = StepObservations(size, zero, backward, zero, zero, zero + 0.01, zero, zero, zero, ends)
    assert exposed_link(seen) == pytest.approx([0.25] * 4)


def test_since_when_a_worker_is_slower():
    rows = steps(10)
    rows[:, :, 1:5] = 0.01
    rows[6:, 1, 3] = 0.2
    judged = RoundTimes.of(observed(rows), 1, SETTINGS)
    assert judged.steps_since(1, 0.1) == 4
    assert judged.steps_since(0, 0.1) == 0
    assert judged.steps_since(1, 0.01) == 10


def test_unknown_step_times_leave_the_shortest_possible_one():
    rows = steps(6)
    rows[:, :, 6] = np.nan
    judged = RoundTimes.of(observed(rows), 1, SETTINGS)
    assert judged.step == pytest.approx(judged.compute.max() + np.median(rows[-4:, :, 5].min(axis=1)))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_the_step_that_each_worker_alone_asks_for(seed, accumulation):
    """It ends with its own last bucket, or with the last of all buckets if these begin with its first one."""
    draw = np.random.default_rng(seed)
    count, workers = 10, 4
    data, forward, backward, first, optimizer, overlapped, last = draw.uniform(0.01, 0.1, (7, count, workers))
    size, first = np.full((count, workers), 8.0), first * backward
    seen = StepObservations(size, forward, backward, first, overlapped, last, forward, data, optimizer)
    judged, alone = RoundTimes.of(seen, accumulation, SETTINGS), []
    t_o, t_u = (np.median([min(row) for row in rows[-5:]]) for rows in (overlapped, last))
    for rank in range(workers):
        micro = [(data + forward + backward + optimizer)[row, rank] for row in range(count - 5, count)]
        busy = accumulation * np.array(micro)
        begins = busy - backward[-5:, rank] + first[-5:, rank]  # of the last micro-batch, which alone is synchronized
        alone.append(max(np.median(busy) + t_u, np.median(begins) + t_o + t_u))
    assert judged.sync == pytest.approx([t_o, t_u])
    assert judged.asks == pytest.approx(alone)
    assert judged.asked(0.0, 0.0) == pytest.approx(judged.compute)
    whole = np.array([min(a) + min(b) for a, b in zip(overlapped, last, strict=True)])[-5:]
    deviation = np.median(np.abs(whole - np.median(whole)))
    assert judged.sync_error == pytest.approx(1.2533 * 1.4826 * deviation / 5**0.5)


def test_without_bucket_ends_the_least_wait_for_the_last_bucket_is_the_links():
    zero, wait = np.zeros((4, 2)), np.tile([0.3, 0.02], (4, 1))
    for ends in (None, np.full((4, 2, 3), np.nan)):
        seen = StepObservations(zero + 8, zero, zero + 0.1, zero, zero, wait, zero, zero, zero, ends)
        assert exposed_link(seen) == pytest.approx([0.02] * 4)


def test_a_last_split_of_few_steps_is_judged_by_these_alone():
    rows = steps(12)
    rows[:10, :, 0] = 5
    judged = RoundTimes.of(observed(rows), 1, SETTINGS)
    assert judged.times == pytest.approx(np.median(rows[10:, :, 1:5], axis=0))


def test_all_micro_batches_count_for_since_when_a_worker_is_slower():
    judged = RoundTimes.of(observed(steps(8)), 3, SETTINGS)
    assert judged.rows == pytest.approx(3 * observed(steps(8)).compute)


def test_a_step_that_takes_longer_than_its_parts_is_taken_as_measured():
    rows = steps(6)
    rows[:, :, 6] = 2.0
    rows[-1, :, 6] = 9.0
    assert RoundTimes.of(observed(rows), 1, SETTINGS).step == 2.0
