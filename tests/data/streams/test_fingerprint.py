"""Checksums of samples: equal for equal samples, different for others, whatever they are made of."""

import numpy as np
import pytest
import torch

from lightning_hetero.data.streams.fingerprint import fingerprint


class Thing:
    pass


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.tensor(1), torch.tensor(2)),
        (np.arange(3), np.arange(1, 4)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        ({"text": "a"}, {"text": "b"}),
        ({"text": "a"}, {"name": "a"}),
        (("a", 1), ("a", 2)),
        (b"ab", b"ac"),
        (None, True),
    ],
)
def test_equal_for_equal_samples_only(sample, other):
    assert fingerprint([sample]) == fingerprint([sample]) != fingerprint([other])


def test_objects_count_by_their_class():
    assert fingerprint([Thing()]) == fingerprint([Thing()]) != 0
    assert fingerprint([torch.zeros(0)]) == 0
