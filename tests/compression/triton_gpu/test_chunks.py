"""Chunks of buckets: every element once, and 16 bytes at a time where that is possible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.compression import Layout
from lightning_hetero.compression.triton_gpu.chunks import BucketChunks


def made(sizes, size=3, block=16):
    slots = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block).slots
    return BucketChunks(block, size, torch.device("cpu"), slots), slots


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_every_element_of_a_bucket_is_in_one_chunk(sizes, itemsize):
    chunks, slots = made(sizes)
    taken, blocks = torch.zeros(sum(sizes)), torch.zeros(sum(slot.padded for slot in slots) // 16)
    for part in chunks.of(slots, itemsize):
        assert part.unit in (1, 16 // itemsize)
        assert part.grid == (len(part.table),)
        for begin, left, first, count, number in part.table.tolist():
            taken[begin * part.unit : (begin + left) * part.unit] += 1
            blocks[first : first + count] += 1
            assert slots[number].start <= 16 * first < slots[number].start + slots[number].padded
            assert 0 < count <= 3
    assert (taken == 1).all()
    assert (blocks == 1).all()


def test_what_begins_or_ends_between_two_units_is_in_a_table_of_its_own():
    chunks, slots = made((64, 3, 64))
    whole, rest = chunks.of(slots, 4)
    assert (whole.unit, rest.unit) == (4, 1)
    assert whole.table[:, 4].unique().tolist() == [0]
    assert rest.table[:, 4].unique().tolist() == [1, 2], "the third begins at element 67"


def test_tables_are_made_once_for_each_bucket_and_type():
    chunks, slots = made((64, 3))
    first = chunks.of(slots, 4)
    assert chunks.of(list(slots), 4) is first
    assert chunks.of(slots, 2) is not first
    assert chunks.of(slots[:1], 4) is not first
    assert chunks.of(slots[1:], 4)[0].table[:, 4].tolist() == [1]


@pytest.mark.parametrize("sizes", [(), (0,)])
def test_a_bucket_without_elements_has_no_chunk(sizes):
    chunks, slots = made(sizes)
    assert chunks.of(slots, 4) == []
