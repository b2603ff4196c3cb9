"""Streams of numbered samples, as users write them, and what ranks saw of them."""

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.helpers import Points

SAMPLES = 73


class Numbered(IterableDataset):
    """The samples of these indices in order, shared by the loader's workers."""

    def __init__(self, indices, fails_at=None):
        self.indices, self.fails_at, self.points = list(indices), fails_at, Points(SAMPLES)

    def __iter__(self):
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, len(self.indices), every):
            if place == self.fails_at:
                raise OSError("the archive ends here")
            yield self.points[self.indices[place]]


class Sized(Numbered):
    def __len__(self):
        return len(self.indices)


class Batches(IterableDataset):
    """Batches that the dataset makes itself, of three samples each."""

    def __init__(self, indices):
        self.indices, self.points = list(indices), Points(SAMPLES)

    def __iter__(self):
        for first in range(0, len(self.indices), 3):
            own = torch.tensor(self.indices[first : first + 3])
            yield {"x": self.points.x[own], "y": self.points.y[own], "index": own}


class Loader:
    """A loader of no class of torch's, which yields batches."""

    def __init__(self, indices):
        self.batches = Batches(indices)

    def __iter__(self):
        return iter(self.batches)


class Shards:
    """Files of unequal length, as a dataset offers them to be claimed."""

    def __init__(self, lengths):
        self.lengths, self.points = list(lengths), Points(SAMPLES)

    @property
    def num_shards(self):
        return len(self.lengths)

    def open_shard(self, index):
        first = sum(self.lengths[:index])
        return (self.points[i] for i in range(first, first + self.lengths[index]))


class Sharded(Shards, IterableDataset):
    def __iter__(self):
        for index in range(self.num_shards):
            yield from self.open_shard(index)


def thirds(rank):
    """Indices of a rank whose streams have different lengths."""
    return range(45) if rank == 0 else range(45, SAMPLES)


def taken(results, epoch=0):
    """All samples that ranks counted in an epoch, in order."""
    return sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)


def sizes_of(results, epoch=0):
    """Samples of every rank in each step of an epoch."""
    ranks = [[len(indices) for e, _, indices in r["seen"] if e == epoch] for r in results]
    assert len({len(steps) for steps in ranks}) == 1, "ranks ran different numbers of steps"
    return list(zip(*ranks, strict=True))
