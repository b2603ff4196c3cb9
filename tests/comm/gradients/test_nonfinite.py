"""Gradients that are not finite are found whatever their type, and lines in the log become rare."""

import logging
import math

import pytest
import torch

from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, all_finite, clear


def parameter(*values, dtype=torch.float32):
    p = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_value_is_found_among_all(bad, dtype):
    good = [parameter(1.0, -2.0), torch.nn.Parameter(torch.zeros(2)), parameter(3.0, dtype=torch.float64)]
    assert all_finite(good)
    assert not all_finite([*good, parameter(0.0, bad, dtype=dtype)])


def test_large_numbers_of_a_short_type_are_finite_though_their_sum_is_not_in_it():
    assert all_finite([parameter(6e4, 6e4, dtype=torch.float16)])


def test_without_gradients_there_is_nothing_that_is_not_finite():
    assert all_finite([torch.nn.Parameter(torch.zeros(2))])


def test_cleared_gradients_are_zero_and_missing_ones_stay_missing():
    bad, none = parameter(math.nan, 1.0), torch.nn.Parameter(torch.zeros(2))
    clear([bad, none])
    assert bad.grad.tolist() == [0.0, 0.0]
    assert none.grad is None


def test_lines_come_at_powers_of_two(caplog):
    dropped = DroppedSteps()
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        for step in range(10):
            dropped.add(step, "on rank 1")
    assert [record.args[0] for record in caplog.records] == [0, 1, 3, 7]
    assert dropped.count == 10
    assert "step 7 on rank 1" in caplog.messages[-1]
