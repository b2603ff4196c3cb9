"""What the ranks measure: its form, its metrics, and each part of a step in its own field through every front end."""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import default_collate

from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.metrics import plan_metrics
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from tests import timed
from tests.counted import CountedTime
from tests.ranks import run_ranks
from tests.timed import FORWARD, LAYER, UPDATE

COUNT = len(StepObservations.FIELDS)


@pytest.mark.parametrize(("buckets", "features"), [(0, 0), (2, 0), (2, 3)])
def test_observations_go_through_an_array(buckets, features):
    values = np.random.default_rng(0).random((5, 3, COUNT + buckets + features))
    seen = StepObservations.from_array(values, features)
    for i, name in enumerate(StepObservations.FIELDS):
        np.testing.assert_array_equal(getattr(seen, name), values[:, :, i])
    np.testing.assert_array_equal(seen.bucket_ends, values[:, :, COUNT : COUNT + buckets])
    np.testing.assert_array_equal(seen.work, values[:, :, COUNT + buckets :])
    np.testing.assert_array_equal(seen.compute, seen.data_wait + seen.forward + seen.optimizer + seen.backward)
    assert (seen.num_steps, seen.rows(slice(3, None)).bucket_ends.tolist()) == (5, seen.bucket_ends[3:].tolist())
    split = replace(seen, local_batch_sizes=np.array([[1, 2, 3]] * 2 + [[1, 3, 2]] + [[1, 2, 3]] * 2))
    assert [(sizes.tolist(), own.start, own.stop) for sizes, own in split.splits()] == [
        ([1, 2, 3], 0, 2),
        ([1, 3, 2], 2, 3),
        ([1, 2, 3], 3, 5),
    ]
    assert StepObservations.empty(3).splits() == []


SHAPES = [(COUNT, shape) for shape in ((5, 3), (5, 2, 4), (3,))] + [(COUNT + 1, (5, 2, 4))]


@pytest.mark.parametrize(("place", "shape"), [*((i, s) for i in range(COUNT) for s in ((4,), (4, 3), (5, 2))), *SHAPES])
def test_observations_of_different_shapes_are_refused(place, shape):
    arrays = [np.zeros((5, 3))] * COUNT + [np.zeros((5, 3, 0))] * 2
    arrays[place] = np.zeros(shape)
    with pytest.raises(ValueError, match="shape"):
        StepObservations(*arrays)


MODELS = {
    "time model": ClusterTimeModel.fit,
    "link model": Computing.of,
    "planner": lambda seen: PerfModelPlanner().observe(seen, PlanContext(12, ("a", "b"), (1, 1))).times,
}


@pytest.mark.parametrize("model", MODELS)
def test_to_a_model_it_is_all_one_what_a_step_outside_of_its_backward_pass_is_made_of(model):
    sizes = np.array([[4.0, 8.0], [8.0, 4.0]] * 2)
    seconds, zeros = sizes / 64 + 0.25, np.zeros((4, 2))
    whole = StepObservations(sizes, seconds, seconds, seconds / 2, zeros, zeros, zeros)
    parts = replace(whole, forward=seconds / 4, data_wait=seconds / 4, optimizer=seconds / 2)
    of = MODELS[model]
    assert of(parts) == of(whole) != of(replace(whole, forward=seconds / 2))


# metrics

PLAN = BatchPlan(8, (6, 2))


def steps(step_time):
    compute = np.array([[0.3, 0.1], [0.1, 0.1], [0.3, 0.1], [9.0, 0.1]])
    zeros = np.zeros_like(compute)
    return StepObservations(zeros + 4, compute, zeros, zeros, zeros, zeros, np.array(step_time)[:, None] + zeros)


@pytest.mark.parametrize(
    ("step_time", "accumulation", "found"),
    [
        ([0.5] * 4, 1, (0.5, 0.6)),
        ([0.5] * 4, 2, (0.5, 0.2)),
        ([0.5] * 4, 3, (0.5, 0.0)),
        ([0.5, math.nan, 0.5, math.nan], 1, (0.5, 0.6)),
        ([math.nan] * 4, 1, None),
        ([0.0] * 4, 1, None),
    ],
)
def test_metrics_of_steps_and_of_their_prediction(step_time, accumulation, found):
    metrics = plan_metrics(steps(step_time), PLAN, 0.5, accumulation, error=0.1)
    sizes = {"hetero/total_batch_size": 8.0, "hetero/local_batch_size/rank0": 6.0, "hetero/local_batch_size/rank1": 2.0}
    expected = {**sizes, "hetero/predicted_step_time": 0.5, "hetero/predicted_step_time_error": 0.1}
    assert plan_metrics(StepObservations.empty(2), PLAN, 0.5, error=0.1) == expected
    assert plan_metrics(StepObservations.empty(2), PLAN, None, error=0.1) == sizes
    expected |= {"hetero/compute_time/rank0": 0.3, "hetero/compute_time/rank1": 0.1}
    if found:
        expected |= dict(zip(("hetero/step_time", "hetero/idle_fraction"), found, strict=True))
    assert metrics == pytest.approx(expected)
    assert plan_metrics(steps(step_time), PLAN, None, rows=(5.5, 2.5))["hetero/local_batch_size/rank1"] == 2.5


# measured

DATA = 1.0
TAKEN = (time, "perf_counter"), (async_ops, "async_all_reduce"), (async_ops, "async_all_gather"), (dist, "barrier")


class Counted(CountedTime):
    """Counts exactly what was spent; gradients travel in no time to speak of."""

    def __init__(self, rank):
        super().__init__(rank, rate=1e12)

    def spend(self, seconds):
        self.now += seconds

    def updated(self):
        pass

    def collate(self, rows):
        self.spend(DATA)
        return default_collate(rows)


@dataclass(frozen=True)
class Step:
    """How often a step does what: ``passes`` and ``updates`` of each batch, ``batches`` of a step."""

    passes: int = 1
    updates: float = 1.0
    batches: int = 1
    how: tuple = ()


TRAININGS = {
    "lightning": (
        Step(how=(("module", timed.Automatic),)),
        Step(updates=0.5, batches=2, how=(("accumulate", 2),)),
        Step(passes=2, updates=2, how=(("module", timed.Manual),)),
    ),
    "fabric": (Step(),),
    "accelerate": (Step(),),
}


def train(rank, front_end):
    with pytest.MonkeyPatch.context() as patch:
        for place, name in TAKEN:  # by the counted clock
            patch.setattr(place, name, getattr(place, name))
        counted = Counted(rank)
        run = getattr(timed, front_end)
        return [run(counted, counted.collate, **dict(one.how)) for one in TRAININGS[front_end]]


@pytest.mark.parametrize("front_end", TRAININGS)
def test_each_part_of_a_step_is_found_in_its_own_field(front_end):
    """Of an accumulation window of two batches, each has one half of the only update."""
    for results in run_ranks(train, 2, front_end):
        for one, seen in zip(TRAININGS[front_end], results, strict=True):
            assert seen.num_steps >= 3
            parts = {
                "data_wait": DATA,
                "forward": FORWARD * one.passes,
                "backward": 2 * LAYER * one.passes,
                "optimizer": UPDATE * one.updates,
                "first_bucket": LAYER,
            }
            for name, seconds in parts.items():
                np.testing.assert_allclose(getattr(seen, name), seconds, atol=0.01, err_msg=name)
            np.testing.assert_allclose(
                seen.bucket_ends, np.broadcast_to([LAYER, 2 * LAYER], seen.bucket_ends.shape), atol=0.01
            )
            assert (seen.first_bucket < seen.bucket_ends[:, :, 0]).all()
            step = one.batches * (DATA + (FORWARD + 2 * LAYER) * one.passes + UPDATE * one.updates)
            np.testing.assert_allclose(seen.step_time[1:], step, atol=0.01)
