"""Batches that a loader or its dataset makes: their rows are counted, cut and joined, and each goes to one rank."""

from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.data.rows import BatchRows, concat_batches, rows_by, rows_of, slice_batch
from lightning_hetero.data.streams.buffers import RowBuffer
from lightning_hetero.data.units.own_shards import counted_rows
from lightning_hetero.data.units.pieces import PiecesDataset, pieces_of

Pair = namedtuple("Pair", "x y")
CONSTANT = {"classes": list("abcdefghijklm"), "size": (224,) * 13, "sets": defaultdict(list, {"k": 1})}


class Encoding(dict):
    """As transformers' BatchEncoding: a mapping of a class of its own, with attributes."""

    kind = "encoding"


STRUCTURES = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "list": lambda x: [x, x.float()],
    "nested": lambda x: (x, {"y": x}, [x, [str(i) for i in x.tolist()]]),
    "named tuple": lambda x: Pair(x, x + 1),
    "texts": lambda x: [str(i) for i in x.tolist()],
    "scalar tensors": lambda x: {"x": x, "values": list(x)},
    "dicts": lambda x: (x, [{"key": i, "box": torch.zeros(i + 1)} for i in x.tolist()]),
    "own mapping": lambda x: Encoding(x=x, names=[str(i) for i in x.tolist()]),
    "constants": lambda x: {"x": x, "name": "train", "step": torch.tensor(3), "none": None, **CONSTANT},
}


@pytest.mark.parametrize("name", STRUCTURES)
@given(cuts=st.sets(st.integers(1, 11), max_size=4), seed=st.integers(0, 99))
def test_rows_that_are_cut_and_joined_are_the_batch(name, cuts, seed):
    make, ends = STRUCTURES[name], [0, *sorted(cuts), 12]
    batch, rows = make(torch.arange(12)), BatchRows()
    assert rows.count(batch) == 12
    parts = [slice_batch(batch, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    assert [rows_of(part) for part in parts] == np.diff(ends).tolist()
    joined = concat_batches(parts)
    assert repr(joined) == repr(batch)
    assert type(joined) is type(batch)
    buffer, sizes = RowBuffer(rows), np.random.default_rng(seed).permutation(np.diff(ends)).tolist()
    for part in parts:
        buffer.put(part)
    for first, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        assert len(buffer) == 12 - first
        expected = repr(slice_batch(batch, first, first + size))
        assert repr(buffer.batch(buffer.peek(size))) == repr(buffer.batch(buffer.take(size))) == expected
    assert len(buffer) == 0


def test_what_is_constant_stays_and_attributes_of_a_mapping_with_it():
    whole = concat_batches([STRUCTURES["constants"](torch.arange(5))] * 2)
    assert [len(whole[key]) for key in ("x", "classes", "size")] == [10, 13, 13]
    batch = Encoding(x=torch.arange(3))
    batch.kind = "mine"
    assert slice_batch(batch, 0, 2).kind == concat_batches([batch, batch]).kind == "mine"


IMAGES = [torch.full((channels, 2, 2), float(i)) for i, channels in enumerate((3, 1, 3, 3, 1))]


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1], [image[:1] for image in IMAGES]])
def test_a_function_that_cuts_tells_how_the_rows_are_counted(images):
    assert rows_by(images, lambda batch, start, stop: batch[start:stop]) == len(images)
    pair = [torch.zeros(len(images), 4), torch.zeros(len(images))]
    assert rows_by(pair, lambda batch, start, stop: [part[start:stop] for part in batch]) == len(images)
    with pytest.raises(TypeError, match="slice_fn"):
        rows_by({"x": IMAGES[0]}, lambda batch, start, stop: batch)


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda: slice_batch([torch.zeros(3), torch.zeros(2)], 0, 1), ValueError, "slice_fn"),
        (lambda: slice_batch([torch.zeros(3), object()], 0, 1), TypeError, "slice_fn"),
        (lambda: concat_batches([torch.zeros(2, 3), torch.zeros(2, 4)]), ValueError, "concat_fn"),
        (lambda: concat_batches([[torch.zeros(2), object()]] * 2), TypeError, "concat_fn"),
        (lambda: rows_of(object()), TypeError, "object"),
        (lambda: RowBuffer(BatchRows()).put(torch.tensor(1.0)), TypeError, "Tensor"),
        (lambda: counted_rows(False)(object()), TypeError, "object"),
        (lambda: PiecesDataset([IMAGES], list, BatchRows())[pieces_of([0], (1, 1), 0)], ValueError, "slice_fn"),
    ],
)
def test_what_has_no_rows_or_cannot_be_cut_or_joined_is_refused(act, error, says):
    with pytest.raises(error, match=says):
        act()


# datasets that yield batches: each rank loads pieces of them


def items_of(rows):
    ends = np.cumsum(rows)
    return [torch.arange(end - n, end) for n, end in zip(rows, ends, strict=True)]


plans = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(sum)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), plans, st.integers(1, 4))
def test_every_row_goes_to_one_rank_and_no_rank_has_too_few_to_run(rows, sizes, least):
    dataset, loaded = PiecesDataset(items_of(rows), lambda item: item, BatchRows()), []
    for rank, size in enumerate(sizes):
        try:
            count, part = dataset[pieces_of(range(len(rows)), sizes, rank, least)]
        except ValueError as error:
            assert "min_local_batch_size" in str(error)  # noqa: PT017
            assert min(rows) < least
            return
        assert size or count == 0
        assert count == 0 or count >= least
        assert len(part) >= least
        loaded += part[:count].tolist()
    assert sorted(loaded) == list(range(sum(rows)))


def padded(parts):
    return nn.utils.rnn.pad_sequence([row for part in parts for row in part], batch_first=True)


def test_functions_of_the_user_cut_and_join_what_is_padded():
    rows = BatchRows(lambda batch, start, stop: batch[start:stop], padded)
    dataset = PiecesDataset([torch.ones(3, 2), torch.ones(3, 4)], lambda item: item, rows)
    loaded = [dataset[pieces_of(range(2), (4, 2), rank)] for rank in (0, 1)]
    assert [count for count, _ in loaded] == [4, 2]
    assert sum(int(part[:count].sum()) for count, part in loaded) == 3 * 2 + 3 * 4
