"""Merging on the host: the reference's sum, and nothing of it where a message is malformed."""

import pytest
import torch

from lightning_hetero.compression import Pack, merge
from tests.compression.host.test_encoder import made, step_of
from tests.compression.messages import FAULTS, nothing_is_applied, written


def test_merge_is_that_of_the_reference_and_is_cleared():
    enc, _ = made([100], 0.3)
    packs = [Pack(torch.tensor(i), torch.randn(len(i), 16)) for i in ([0, 2, 6], [2, 5])]
    enc.merge(packs)
    assert torch.equal(enc.merged, merge(packs, 7))
    enc.finish()
    assert enc.merged.abs().sum() == 0


def test_a_message_that_comes_twice_is_refused():
    """Rank 0's in the row of rank 1 as well, as a faulty link or a wrong row would bring it."""
    form, message, _ = written()
    enc, _ = made([64], 1.0)
    enc.form = form
    with pytest.raises(ValueError, match=r"rank 1, bucket 0, step 7 is refused: sender and bucket is \(0, 0\)"):
        enc.read(torch.stack([message, message]), step=7)


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_applied_if_one_message_is_malformed(fault):
    enc, message = made([100], 0.3)
    step_of(enc, message, [torch.randn(100)], 1.0)
    nothing_is_applied(enc, written()[0], fault)
