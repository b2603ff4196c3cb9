"""What the ranks measure: its form, and what models make of its parts.

Measured through every front end: tests/timing/test_front_ends.py; metrics: tests/decisions/test_policies.py.
"""

from dataclasses import replace

import numpy as np
import pytest
from torch.utils.data import default_collate

from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from tests import timed
from tests.counted import CountedTime
from tests.equations.clusters import context
from tests.ranks import run_ranks
from tests.timed import FORWARD, LAYER, UPDATE

COUNT = len(StepObservations.FIELDS)


@pytest.mark.parametrize(("buckets", "features"), [(0, 0), (2, 3)])
def test_observations_go_through_an_array(buckets, features):
    values = np.random.default_rng(0).random((5, 3, COUNT + buckets + features))
    seen = StepObservations.from_array(values, features)
    for i, name in enumerate(StepObservations.FIELDS):
        np.testing.assert_array_equal(getattr(seen, name), values[:, :, i])
    np.testing.assert_array_equal(seen.bucket_ends, values[:, :, COUNT : COUNT + buckets])
    np.testing.assert_array_equal(seen.work, values[:, :, COUNT + buckets :])
    np.testing.assert_array_equal(seen.compute, seen.data_wait + seen.forward + seen.optimizer + seen.backward)
    split = replace(seen, local_batch_sizes=np.array([[1, 2, 3]] * 2 + [[1, 3, 2]] + [[1, 2, 3]] * 2))
    found = [(sizes.tolist(), own.start, own.stop) for sizes, own in split.splits()]
    assert found == [([1, 2, 3], 0, 2), ([1, 3, 2], 2, 3), ([1, 2, 3], 3, 5)]


@pytest.mark.parametrize("place", range(COUNT + 2))
def test_observations_of_different_shapes_are_refused(place):
    arrays = [np.zeros((5, 3))] * COUNT + [np.zeros((5, 3, 0))] * 2
    arrays[place] = np.zeros((5, 2, 4))
    with pytest.raises(ValueError, match="shape"):
        StepObservations(*arrays)


def test_to_a_model_it_is_all_one_what_a_step_outside_of_its_backward_pass_is_made_of():
    sizes = np.array([[4.0, 8.0], [8.0, 4.0]] * 2)
    seconds, zeros = sizes / 64 + 0.25, np.zeros((4, 2))
    whole = StepObservations(sizes, seconds, seconds, seconds / 2, zeros, zeros, zeros)
    parts = replace(whole, forward=seconds / 4, data_wait=seconds / 4, optimizer=seconds / 2)
    for of in (ClusterTimeModel.fit, Computing.of, lambda seen: PerfModelPlanner().observe(seen, context(12, 2)).times):
        assert of(parts) == of(whole) != of(replace(whole, forward=seconds / 2))


class Counted(CountedTime):
    """Counts exactly what was spent; gradients travel in no time to speak of."""

    def spend(self, seconds):
        self.now += seconds

    def updated(self):
        pass


def _by_hand(rank):
    return timed.lightning(Counted(rank, rate=1e12), default_collate, module=timed.Manual)


def test_a_step_of_two_optimizers_has_the_parts_of_both():
    for seen in run_ranks(_by_hand, 2):
        parts = {"forward": 2 * FORWARD, "backward": 4 * LAYER, "optimizer": 2 * UPDATE, "first_bucket": LAYER}
        found = {part: np.median(getattr(seen, part)) for part in parts}
        assert found == pytest.approx(parts, abs=0.01)
