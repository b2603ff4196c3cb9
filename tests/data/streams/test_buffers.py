"""Samples and rows that wait for a step."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from lightning_hetero.data.streams.buffers import RowBuffer, SampleBuffer, join_rows, row_count, rows_of

Pair = namedtuple("Pair", "x y")


def test_samples_come_out_in_order_and_are_collated_at_last():
    buffer = SampleBuffer(torch.tensor)
    buffer.put([1, 2])
    buffer.put([3])
    assert (buffer.peek(2), len(buffer)) == ([1, 2], 3)
    assert buffer.batch(buffer.take(3)).tolist() == [1, 2, 3]
    assert len(buffer) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.arange(i, i + 4).reshape(4, 1),
        lambda i: np.arange(i, i + 4),
        lambda i: list("abcd"),
        lambda i: {"x": torch.arange(i, i + 4), "text": list("abcd"), "name": "same"},
        lambda i: (torch.arange(i, i + 4), [torch.ones(4, 2), ["a"] * 4]),
        lambda i: Pair(torch.arange(i, i + 4), torch.zeros(4)),
    ],
)
def test_rows_are_cut_and_joined_in_any_structure(make):
    whole = join_rows([make(0), make(4), make(8)])
    assert type(whole) is type(make(0))
    buffer = RowBuffer()
    for first in (0, 4, 8):
        buffer.put(make(first))
    assert len(buffer) == 12
    assert repr(buffer.batch(buffer.peek(5))) == repr(rows_of(whole, 0, 5))
    assert repr(buffer.batch(buffer.take(5))) == repr(rows_of(whole, 0, 5))
    assert repr(buffer.batch(buffer.take(2))) == repr(rows_of(whole, 5, 7))
    assert repr(buffer.batch(buffer.take(5))) == repr(rows_of(whole, 7, 12))
    assert len(buffer) == 0


def test_empty_batches_are_left_out():
    buffer = RowBuffer()
    buffer.put(torch.zeros(0, 2))
    buffer.put(torch.zeros(2, 2))
    assert (len(buffer), len(buffer.take(2))) == (2, 1)


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", {"x": torch.zeros(3), "y": torch.zeros(2)}])
def test_what_has_no_rows_is_refused(batch):
    with pytest.raises(ValueError, match="cannot be cut into batches of other sizes"):
        row_count(batch)
