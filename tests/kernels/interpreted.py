"""The tests of all backends with Triton's kernels, and a few of these kernels alone; `test_triton.py` runs this file.

With `TRITON_INTERPRET=1` they are interpreted on a CPU; without, they run natively on a GPU:
``python -m pytest tests/kernels/interpreted.py``.
"""

import os

os.environ["KERNELS"] = "triton"  # before the tests are imported

import pytest
import torch
from torch import nn

from lightning_hetero.compression.triton_gpu import encode_kernels
from lightning_hetero.compression.triton_gpu import warmup as encoder_warmup
from lightning_hetero.optim.sparse import warmup as optimizer_warmup
from tests.kernels.backends import DEVICE, VALUES
from tests.kernels.test_encoders import (  # noqa: F401
    test_a_gradient_that_is_not_finite_enters_no_residual,
    test_a_malformed_bitmap_is_refused_by_name_and_nothing_is_applied,
    test_a_malformed_message_is_refused_by_name_and_nothing_is_applied,
    test_a_parameter_without_a_gradient_is_held_back,
    test_a_step_is_the_definitions,
    test_a_step_that_another_rank_gives_up_is_taken_back,
    test_another_density_takes_the_residual_along,
    test_messages_of_all_ranks_are_added_up_in_their_order,
    test_ties_zeros_and_a_wide_range,
)
from tests.kernels.test_sparse_optimizers import (  # noqa: F401
    KINDS,
    test_every_backend_takes_the_same_steps_bit_by_bit,
    test_parameters_of_one_launch_move_as_each_of_its_own_would,
    test_steps_of_other_types_are_the_same_too,
)


@pytest.mark.parametrize(("values", "hold"), list(zip(VALUES, (False, True, False), strict=True)))
def test_all_kernels_are_tried_before_training(values, hold):
    encoder_warmup.warm(16, values, 2, DEVICE, {torch.float32, torch.bfloat16}, hold=hold)


@pytest.mark.parametrize("name", ["pick", "pack"])
def test_kernels_that_compute_something_else_are_found_before_training(monkeypatch, name):
    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    monkeypatch.setattr(encode_kernels, name, Nothing())
    with pytest.raises((RuntimeError, ValueError), match="expected|refused"):
        encoder_warmup.warm(16, "float32", 2, DEVICE, {torch.float32}, hold=False)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_an_optimizer_are_tried_before_training(kind):
    ours, _, arguments = KINDS[kind]
    parameters = [nn.Parameter(torch.ones(5, dtype=dtype, device=DEVICE)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = ours(parameters, **arguments)
    optimizer_warmup.warm(optimizer.sparse, 16, DEVICE)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_a_step_that_comes_out_wrong_is_found_before_training():
    optimizer = KINDS["sgd"][0]([nn.Parameter(torch.ones(5, device=DEVICE))], lr=float("inf"))
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer_warmup.warm(optimizer.sparse, 16, DEVICE)
