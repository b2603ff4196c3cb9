"""What the host makes of a status: an outcome, or the error of a malformed message, once."""

import pytest
import torch

from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.triton_gpu.status import (
    FAULTS,
    VERSION_SHIFT,
    StatusReadback,
    faults,
    status_length,
)


def readback(codes, blocks, flags, verdict):
    status = torch.tensor([*codes, *blocks, *flags, verdict], dtype=torch.int32)
    assert len(status) == status_length(len(codes))
    return StatusReadback(status, len(codes))


def test_an_outcome_is_told_once_for_each_step():
    read = readback([0, 0], [3, 4], [0, 0], 0)
    assert read.outcome() is None
    read.start(step=7, bucket=0)
    assert read.outcome() == Outcome(7, False, 7)
    assert read.outcome() is None


def test_a_step_that_was_left_out_has_no_blocks():
    read = readback([0, 0], [3, 4], [0, 1], 1)
    read.start(step=2, bucket=0)
    assert read.outcome() == Outcome(2, True, 0)


def test_the_first_rank_whose_message_is_malformed_is_named():
    read = readback([0, 16 | 64, 1], [3, 0, 0], [0, 0, 0], 2)
    read.start(step=5, bucket=1)
    words = f"rank 1, bucket 1, step 5 is refused: {FAULTS[16]}; {FAULTS[64]}"
    with pytest.raises(ValueError, match=words):
        read.outcome()
    assert read.outcome() is None


def test_the_version_of_another_message_is_told():
    assert "version 2 of the message format" in faults(1 | (2 << VERSION_SHIFT))
    assert "no message of this program" in faults(1)
    assert [faults(code) for code in FAULTS if code > 1] == [text for code, text in FAULTS.items() if code > 1]
