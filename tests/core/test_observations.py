"""What the ranks measured, in one form: shapes, and what the models take of it."""

from dataclasses import fields, replace

import numpy as np
import pytest

from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel

COUNT = len(StepObservations.FIELDS)


@pytest.mark.parametrize("buckets", [0, 2])
def test_observations_go_through_an_array(buckets):
    values = np.random.default_rng(0).random((5, 3, COUNT + buckets))
    obs = StepObservations.from_array(values)
    assert tuple(field.name for field in fields(obs)) == (*StepObservations.FIELDS, "bucket_ends", "work")
    assert obs.num_steps == 5
    np.testing.assert_array_equal(np.stack([getattr(obs, name) for name in obs.FIELDS], axis=-1), values[:, :, :COUNT])
    np.testing.assert_array_equal(obs.bucket_ends, values[:, :, COUNT:])
    np.testing.assert_array_equal(obs.compute, obs.data_wait + obs.forward + obs.optimizer + obs.backward)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (5, 2)])
@pytest.mark.parametrize("place", range(COUNT))
def test_observations_have_one_shape(place, shape):
    arrays = [np.zeros((5, 3))] * COUNT
    arrays[place] = np.zeros(shape)
    with pytest.raises(ValueError, match="one shape"):
        StepObservations(*arrays)


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 4), (3,)])
def test_bucket_ends_have_one_more_dimension(shape):
    with pytest.raises(ValueError, match=r"bucket_ends must have the shape \(steps, workers, buckets\).*got \("):
        StepObservations(*[np.zeros((5, 3))] * COUNT, np.zeros(shape))


@pytest.mark.parametrize(
    "model",
    [
        ClusterTimeModel.fit,
        Computing.of,
        lambda seen: PerfModelPlanner().observe(seen, PlanContext(12, ("a", "b"), (1, 1))).times,
    ],
    ids=["time model", "link model", "planner"],
)
def test_to_a_model_it_is_all_one_what_a_step_outside_of_its_backward_pass_is_made_of(model):
    """The split has to balance the sum of waiting for data, forward and optimizer."""
    sizes = np.array([[4.0, 8.0], [8.0, 4.0], [4.0, 8.0], [8.0, 4.0]])
    seconds, zeros = sizes / 64 + 0.25, np.zeros((4, 2))
    whole = StepObservations(sizes, seconds, seconds, seconds / 2, zeros, zeros, zeros)
    parts = replace(whole, forward=seconds / 4, data_wait=seconds / 4, optimizer=seconds / 2)
    assert model(parts) == model(whole)
    assert model(parts) != model(replace(whole, forward=seconds / 2))
