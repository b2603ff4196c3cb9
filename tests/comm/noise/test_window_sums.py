"""Sums of squared norms: steps that are not finite on any rank are left out of all ranks' parts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.comm.noise.window_sums import NOISE_FIELDS, WindowSums, merge_parts, own_part
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.running import RunningNoiseScale

ESTIMATOR = window_estimator(((4,), (4,)), nested=True)  # both workers have the same coefficients


def add(sums, first, whole):
    """One step of two equal workers."""
    average = [torch.tensor(whole)]
    sums.add(ESTIMATOR.parts[0], ESTIMATOR.samples, [[torch.tensor(first)], average, average])


def test_what_is_taken_is_all_since_the_last_time():
    sums = WindowSums()
    add(sums, 0.5, 1.0)
    add(sums, 0.25, 2.0)
    twice = sums.take()
    assert (twice[2], twice[4], sums.steps) == (2.0, 2.0, 0)
    assert sums.take().tolist() == [0.0] * 5


def test_steps_that_wait_are_added_up_in_time_and_sums_are_the_same():
    many, one = WindowSums(), np.zeros(5)
    for step in range(WindowSums.max_waiting // 2):
        add(many, 0.5, 1.0 + step)
        alone = WindowSums()
        add(alone, 0.5, 1.0 + step)
        one += alone.take()
    np.testing.assert_allclose(many.take(), one, rtol=1e-12)


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all():
    ranks = [WindowSums(), WindowSums()]
    for rank, sums in enumerate(ranks):
        for step in range(3):
            add(sums, float("nan") if rank == 1 and step == 1 else 0.5, 1.0 + step)
    parts = np.array([sums.pack() for sums in ranks])
    assert parts.shape == (2, NOISE_FIELDS)
    everyone = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])  # which steps are finite, by rank
    answers = []
    for rank, sums in enumerate(ranks):
        sent = []

        def gather(values, sent=sent):
            sent.append(values)
            return everyone if len(sent) == 1 else np.array([values, values])

        answers.append(sums.reconcile(parts, SimpleNamespace(gather=gather))[rank])
    assert [answer[2] for answer in answers] == [2.0, 2.0]
    assert [answer[4] for answer in answers] == [3.0, 3.0]


def test_ranks_that_left_out_the_same_steps_send_nothing_more():
    sums = WindowSums()
    add(sums, 0.5, 1.0)
    parts = np.array([sums.pack(), sums.pack()])
    assert sums.reconcile(parts, control=None).tolist() == parts[:, :5].tolist()


@pytest.mark.parametrize("finite", [0.0, 2.0])
def test_steps_left_out_are_counted(finite):
    parts = np.array([[16.0, 6.0, finite, 8 * finite, 5.0]] * 2)
    merged = merge_parts(RunningNoiseScale(), parts)
    assert (merged.noise_scale is not None and not np.isnan(merged.noise_scale)) == bool(finite)
    assert merged.skipped == 5 - finite


def test_a_cut_interval_goes_to_another_number_of_ranks_with_the_same_sums():
    parts = [[6.0, 2.0, 3.0, 18.0, 3.0], [2.0, 4.0, 3.0, 18.0, 3.0]]
    for world_size in (1, 2, 3):
        shared = [own_part(parts, rank, world_size) for rank in range(world_size)]
        np.testing.assert_allclose(np.sum(shared, axis=0)[:2], np.sum(parts, axis=0)[:2])
        assert all(part[2:] == parts[0][2:] for part in shared)
