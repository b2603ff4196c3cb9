"""Loaders as streams: what they yield, how large their batches are, what they cannot be."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero.data.streams.buffers import SampleBuffer
from lightning_hetero.data.streams.source import Drawing, SampleStream
from tests.streams import Batches, Loader, Numbered, Sharded, Sized


class Counting(DataLoader):
    """A loader of a class of its own, as streaming libraries have them."""

    opened = 0

    def __iter__(self):
        self.opened += 1
        yield from super().__iter__()


def joined(samples):
    return [index for _, _, index in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_single_samples_and_stays_as_it_is(workers):
    loader = Counting(Numbered(range(7)), 3, num_workers=workers, collate_fn=joined, drop_last=True)
    stream = SampleStream(loader, "mine")
    buffer = stream.buffer()
    for chunk in stream.open(0):
        buffer.put(chunk)
    assert sorted(buffer.batch(buffer.take(7))) == list(range(7))
    assert (stream.batch_size, stream.drop_last, stream.num_samples()) == (3, True, None)
    assert list(loader) == [[0, 1, 2], [3, 4, 5]] if workers == 0 else True
    assert loader.collate_fn is joined


def test_the_loader_s_own_class_iterates():
    stream = SampleStream(Counting(Numbered(range(7)), 3), "whole")
    list(stream.open(0))
    assert stream._raw.opened == 1


@pytest.mark.parametrize("loader", [Loader(range(9)), DataLoader(Batches(range(9)), None)])
def test_the_first_batch_says_how_large_batches_are(loader):
    stream = SampleStream(loader, "mine")
    assert (stream.batch_size, stream.drop_last, stream.num_samples()) == (3, False, None)
    assert SampleStream(loader, "mine", divided_by=3).batch_size == 1


def test_a_stream_has_no_length_but_its_dataset_may_have_one():
    stream = SampleStream(DataLoader(Sized(range(7)), 4), "mine", divided_by=2)
    assert (stream.num_samples(), stream.batch_size) == (7, 2)
    with pytest.raises(TypeError, match="length of a stream is not known"):
        len(stream)


def test_batches_that_a_dataset_makes_are_not_counted_as_samples():
    class Counted(Batches):
        def __len__(self):
            return 3

    assert SampleStream(DataLoader(Counted(range(9)), None), "mine").num_samples() is None


def test_an_empty_loader_of_batches_has_no_batch_size():
    assert SampleStream(Loader([]), "mine").batch_size == 0


class Epochs(Numbered):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_a_pass_tells_the_dataset_its_epoch():
    data = Epochs(range(3))
    SampleStream(DataLoader(data, 2), "mine").open(5)
    assert data.epoch == 5


@pytest.mark.parametrize(
    ("loader", "shard", "message"),
    [
        (DataLoader(Numbered([1]), 2), "own", "shard='own' is not one of 'mine', 'whole', 'claim'"),
        (DataLoader(Numbered([1]), 2), "claim", "DataLoader over Numbered. Give such a dataset"),
        (DataLoader(Sharded([1]), None), "claim", "a DataLoader with a batch_size"),
        (Loader([1]), "claim", "got Loader over NoneType"),
    ],
)
def test_what_cannot_be_shared_in_that_way_is_refused(loader, shard, message):
    with pytest.raises(ValueError, match=message):
        SampleStream(loader, shard)


def test_only_claimed_shards_can_be_claimed():
    with pytest.raises(TypeError, match="shard='mine' claims no shards"):
        SampleStream(DataLoader(Sharded([1]), 2), "mine").claims.begin()


def test_drawing_keeps_an_error_and_skips_what_is_there():
    def broken():
        yield [1, 2]
        raise OSError("gone")

    drawing = Drawing(broken, SampleBuffer(list))
    drawing.fill(5)
    assert (type(drawing.error), drawing.ended, len(drawing.buffer)) == (OSError, False, 2)
    drawing = Drawing(lambda: iter([[i] for i in range(10)]), SampleBuffer(list))
    drawing.skip(4, chunk=3)
    drawing.fill(1)
    assert drawing.buffer.peek(1) == [4]
    drawing.skip(20)
    assert (drawing.ended, len(drawing.buffer)) == (True, 0)


def test_batches_are_pinned_where_the_loader_pins_them(monkeypatch):
    stream = SampleStream(DataLoader(Numbered(range(3)), 2, pin_memory=True), "mine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", lambda batch: ("pinned", batch))
    buffer = stream.buffer()
    buffer.put(next(stream._raw.__iter__()))
    assert buffer.batch(buffer.take(1))[0] == "pinned"
