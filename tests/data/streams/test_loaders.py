"""Loaders with other batches: of their class, with all their attributes; and what is a stream."""

from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.config import HeteroConfig
from lightning_hetero.data.streams.loaders import is_stream, sample_stream, with_batches
from tests.streams import Loader, Numbered


class Kept(DataLoader):
    mark = "kept"


def test_loaders_keep_their_class_and_attributes():
    loader = Kept(Numbered(range(4)), 2)
    other = with_batches(loader, [["a"], ["b"], ["c"]])
    assert (list(other), len(other), other.mark, isinstance(other, Kept)) == ([["a"], ["b"], ["c"]], 3, "kept", True)
    assert isinstance(other.dataset, IterableDataset)
    assert len(list(loader)) == 2


def test_loaders_of_no_class_of_torch_s_keep_their_attributes():
    loader = Loader(range(4))
    other = with_batches(loader, [["a"], ["b"]])
    assert (list(other), len(other), other.batches) == ([["a"], ["b"]], 2, loader.batches)
    assert not hasattr(other, "__torch__")


def test_streams_are_told_from_data_with_indices():
    assert [is_stream(DataLoader(Numbered([1]), 2)), is_stream(Loader([1]))] == [True, True]
    assert [is_stream(DataLoader([1], 2)), is_stream(None), is_stream(3)] == [False, False, False]


def test_the_setting_counts_before_the_default_of_the_front_end():
    loader = DataLoader(Numbered([1]), 2)
    assert sample_stream(loader, HeteroConfig(), default="whole").shard == "whole"
    assert sample_stream(loader, HeteroConfig(shard="mine"), default="whole").shard == "mine"
