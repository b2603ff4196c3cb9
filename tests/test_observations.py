"""What a step is made of, through every front end: what each part takes is given, in counted time, and found again."""

from dataclasses import dataclass

import numpy as np
import pytest
from torch.utils.data import default_collate

from tests import timed
from tests.counted import CountedTime
from tests.helpers import run_ranks
from tests.timed import FORWARD, LAYER, UPDATE

DATA = 1.0


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


def _lightning(rank):
    """One optimizer, a window of two batches, and two optimizers, one training after another."""
    counted = Counted(rank)
    return [
        timed.lightning(counted, counted.collate, module=module, accumulate=accumulate)
        for module, accumulate in ((timed.Automatic, 1), (timed.Automatic, 2), (timed.Manual, 1))
    ]


def _fabric(rank):
    counted = Counted(rank)
    return [timed.fabric(counted, counted.collate)]


def _accelerate(rank):
    counted = Counted(rank)
    return [timed.accelerate(counted, counted.collate)]


@dataclass(frozen=True)
class Training:
    """How often a step does what: ``passes`` and ``updates`` of each batch, ``batches`` of a step."""

    passes: int = 1
    updates: float = 1.0
    batches: int = 1

    def check(self, seen):
        parts = {
            "data_wait": DATA,
            "forward": FORWARD * self.passes,
            "backward": 2 * LAYER * self.passes,
            "optimizer": UPDATE * self.updates,
            "first_bucket": LAYER,
        }
        for name, seconds in parts.items():
            np.testing.assert_allclose(getattr(seen, name), np.full((seen.num_steps, 2), seconds), atol=0.01)
        ends = np.broadcast_to([LAYER, 2 * LAYER], (seen.num_steps, 2, 2))
        np.testing.assert_allclose(seen.bucket_ends, ends, atol=0.01)
        assert (seen.first_bucket < seen.bucket_ends[:, :, 0]).all()
        step = self.batches * (DATA + (FORWARD + 2 * LAYER) * self.passes + UPDATE * self.updates)
        np.testing.assert_allclose(seen.step_time[1:], step, atol=0.01)


@pytest.mark.parametrize(
    ("train", "trainings"),
    [
        (_lightning, (Training(), Training(updates=0.5, batches=2), Training(passes=2, updates=2))),
        (_fabric, (Training(),)),
        (_accelerate, (Training(),)),
    ],
    ids=["lightning", "fabric", "accelerate"],
)
def test_each_part_of_a_step_is_found_in_its_own_field(train, trainings):
    """Of an accumulation window of two batches, each has one half of the only update."""
    first, second = run_ranks(train, 2)
    for training, seen, other in zip(trainings, first, second, strict=True):
        assert seen.num_steps >= 3
        training.check(seen)
        training.check(other)
