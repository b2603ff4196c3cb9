"""Rows of all ranks, matched by the number of their step."""

import numpy as np
import pytest

from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_rows import FIELDS, common_steps, match_rows
from lightning_hetero.core.observations import StepObservations

WIDTH = 1 + FIELDS + 2
"""The number of the step, the fields, two buckets."""


def _table(steps):
    table = np.full((SETTINGS.max_steps, WIDTH), np.nan)
    for row, step in zip(table[SETTINGS.max_steps - len(steps) :], steps, strict=True):
        row[:] = [step, *(step * 20 + np.arange(11))]
    return table


def test_rows_are_matched_by_step_number():
    """The second rank's device has not reported step 6 yet, and its list begins earlier."""
    tables = np.stack([_table([4, 5, 6]), _table([3, 4, 5]), _table([2, 4, 5])])
    observations = match_rows(tables)
    assert observations.num_steps == 2
    for i, name in enumerate(StepObservations.FIELDS):
        np.testing.assert_array_equal(getattr(observations, name), [[80.0 + i] * 3, [100.0 + i] * 3])
    np.testing.assert_array_equal(observations.bucket_ends, [[[89.0, 90.0]] * 3, [[109.0, 110.0]] * 3])


@pytest.mark.parametrize("steps", [((4,), (5,), (4, 5)), ((4,), (), (4,)), ((), (), ())], ids=str)
def test_no_common_step_is_no_observation(steps):
    observations = match_rows(np.stack([_table(list(s)) for s in steps]))
    assert observations.num_steps == 0
    assert observations.forward.shape == (0, 3)
    assert observations.bucket_ends.shape == (0, 3, 2)


def test_the_work_of_a_step_stands_behind_its_buckets():
    tables = np.stack([_table([4, 5]), _table([4, 5])])
    observations = match_rows(tables, features=1)
    np.testing.assert_array_equal(observations.bucket_ends, [[[89.0]] * 2, [[109.0]] * 2])
    np.testing.assert_array_equal(observations.work, [[[90.0]] * 2, [[110.0]] * 2])


def transcribed(tables):
    """Steps that all ranks have, and their rows, found in loops over ranks and steps."""
    steps = sorted(set.intersection(*({float(s) for s in t[:, 0] if not np.isnan(s)} for t in tables)))
    rows = [[t[np.flatnonzero(t[:, 0] == step)[0], 1:] for t in tables] for step in steps]
    return steps, np.array(rows).reshape(len(steps), len(tables), tables.shape[2] - 1)


def drawn(rng, features):
    """Tables of some ranks, with rows in any place and any order, and NaN among the values."""
    tables = np.full((int(rng.integers(1, 5)), int(rng.integers(1, 13)), WIDTH + features), np.nan)
    for table in tables:
        steps = rng.permutation(np.flatnonzero(rng.random(15) < rng.choice([0.1, 0.5, 0.9, 1.0])))[: len(table)]
        places = rng.permutation(len(table))[: len(steps)]
        table[places, 0], table[places, 1:] = steps, rng.random((len(steps), table.shape[1] - 1))
        table[rng.random(len(table)) < 0.2, 7] = np.nan
    return tables


@pytest.mark.parametrize("seed", range(4))
def test_random_tables_are_matched_as_in_loops(seed):
    rng, found = np.random.default_rng(seed), 0
    for _ in range(200):
        features = int(rng.integers(0, 3))
        tables = drawn(rng, features)
        steps, values = transcribed(tables)
        assert common_steps(tables) == steps
        mine, expected = match_rows(tables, features), StepObservations.from_array(values, features)
        for name in (*StepObservations.FIELDS, "bucket_ends", "work"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name))
        found += len(steps)
    assert found > 300
