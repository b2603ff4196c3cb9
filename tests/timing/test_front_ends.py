"""What a step takes on a device that works behind the host's back, through every front end, against what is true.

What a planner balances is ``a + P``: it has to be the step that the device takes, whatever the host waits for.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests import timed
from tests.ranks import run_ranks
from tests.timed import FORWARD, LAYER, UPDATE
from tests.timing.fake_device import SUM, FakeDevice, Source

BACKWARD = 2 * LAYER
STEP = FORWARD + BACKWARD + UPDATE
COPY = 0.5
LAUNCHES = 0.02
"""Seconds within which the host's own time lies, which is in no part."""


@dataclass(frozen=True)
class Case:
    """A training; ``data`` and ``more`` for each rank, and what is found in each field where it is not the usual."""

    data: tuple[float, float]
    source: dict = field(default_factory=dict)
    loop: dict = field(default_factory=dict)
    more: tuple[float, float] = (0.0, 0.0)
    data_wait: tuple[float, float] = (0.0, 0.0)
    forward: tuple[float, float] = (FORWARD, FORWARD)
    optimizer: float = UPDATE
    step: float = STEP


def cases(front_end):
    """Accelerate copies a batch before it takes the next one, and others when they have it."""
    ahead = front_end == "accelerate"
    host = {"data_wait": (1.0 + COPY,) * 2} if ahead else {"forward": (FORWARD + COPY,) * 2}
    return {
        "the loader is hidden behind the device": Case((16.0, 16.0)),
        "the loader is exposed": Case((25.0, 25.0), data_wait=(25.0 - STEP,) * 2, step=25.0),
        "the copy blocks": Case((1.0, 1.0), {"copy": COPY}, step=STEP + COPY + ahead, **host),
        "a barrier in the step": Case(
            (5.0, 5.0), loop={"waits": True}, more=(0.0, 3.0), forward=(FORWARD, FORWARD + 3.0), step=STEP + 3.0
        ),
        "counts of a rank whose loader is exposed": Case(
            (1.0, 25.0), loop={"weight_fn": lambda batch: len(batch[0])}, data_wait=(0.0, 25.0 - STEP), step=25.0
        ),
        "two batches in a step": Case(
            (13.0, 13.0), loop={"accumulate": 2}, optimizer=UPDATE / 2, step=2 * (FORWARD + BACKWARD) + UPDATE
        ),
    }


def _train(rank, front_end):
    found, seen = cases(front_end), {}
    with pytest.MonkeyPatch.context() as patch:
        device = FakeDevice().install(patch)
        for name, case in found.items():
            device.begin()
            loop = {"last": name == list(found)[-1]} if front_end == "accelerate" else {}
            source = Source(device, case.data[rank], **case.source)
            watched = getattr(timed, front_end)(device, source, more=case.more[rank], **case.loop, **loop)
            seen[name] = watched, np.diff(device.steps)
    return seen


@pytest.mark.parametrize("front_end", ["lightning", "fabric", "accelerate"])
def test_each_part_of_a_step_on_a_device_that_is_behind_the_host(front_end):
    results = run_ranks(_train, 2, front_end, timeout=240)
    for name, case in cases(front_end).items():
        for rank, result in enumerate(results):
            seen, steps = result[name]
            assert seen.num_steps >= 3, name
            truth = {
                "data_wait": case.data_wait[rank],
                "forward": case.forward[rank],
                "backward": BACKWARD,
                "optimizer": case.optimizer,
                "first_bucket": LAYER,
            }
            found = {part: np.median(getattr(seen, part)[:, rank]) for part in truth}
            assert found == pytest.approx(truth, abs=LAUNCHES), f"{name}, rank {rank}"
            assert np.median(steps) == pytest.approx(case.step, rel=0.01), name
            if case.more[rank] == max(case.more) and case.data[rank] == max(case.data):  # the others wait for this one
                own = case.loop.get("accumulate", 1) * np.median(seen.compute[:, rank])
                assert own == pytest.approx(np.median(steps), rel=0.01), name
                np.testing.assert_allclose(seen.bucket_ends[:, rank, 0], LAYER + SUM, atol=LAUNCHES)
