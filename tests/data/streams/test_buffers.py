"""Samples and rows that wait for a step."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.data.rows import BatchRows
from lightning_hetero.data.streams.buffers import RowBuffer, SampleBuffer

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
    whole = BatchRows().join([make(0), make(4), make(8)])
    assert type(whole) is type(make(0))
    buffer = RowBuffer(BatchRows())
    for first in (0, 4, 8):
        buffer.put(make(first))
    assert len(buffer) == 12
    assert repr(buffer.batch(buffer.peek(5))) == repr(BatchRows().cut(whole, 0, 5))
    assert repr(buffer.batch(buffer.take(5))) == repr(BatchRows().cut(whole, 0, 5))
    assert repr(buffer.batch(buffer.take(2))) == repr(BatchRows().cut(whole, 5, 7))
    assert repr(buffer.batch(buffer.take(5))) == repr(BatchRows().cut(whole, 7, 12))
    assert len(buffer) == 0


def test_empty_batches_are_left_out():
    buffer = RowBuffer(BatchRows())
    buffer.put(torch.zeros(0, 2))
    buffer.put(torch.zeros(2, 2))
    assert (len(buffer), len(buffer.take(2))) == (2, 1)


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", {"x": torch.zeros(3), "y": torch.zeros(2)}])
def test_what_has_no_rows_is_refused(batch):
    with pytest.raises((TypeError, ValueError), match="cannot be counted|Give slice_fn"):
        RowBuffer(BatchRows()).put(batch)


def test_a_row_keeps_what_belongs_to_it():
    """Batches as WebDataset makes them: one dict for each row beside the tensors."""
    buffer = RowBuffer(BatchRows())
    for first in (0, 4):
        rows = range(first, first + 4)
        buffer.put((torch.arange(first, first + 4), [{"key": i, "box": torch.zeros(i)} for i in rows]))
    for number in (3, 2, 3):
        x, meta = buffer.batch(buffer.take(number))
        assert [one["key"] for one in meta] == x.tolist()


def test_functions_cut_and_join_what_is_padded():
    rows = BatchRows(
        lambda batch, start, stop: batch[start:stop],
        lambda parts: nn.utils.rnn.pad_sequence([row for part in parts for row in part], batch_first=True),
    )
    buffer = RowBuffer(rows)
    buffer.put(torch.ones(3, 2))
    buffer.put(torch.ones(3, 4))
    assert [buffer.batch(buffer.take(n)).shape for n in (2, 2, 2)] == [(2, 2), (2, 4), (2, 4)]
