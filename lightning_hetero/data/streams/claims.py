"""Shards of a dataset that ranks claim one after another, each shard once: who reads faster reads more of them.

A counter that all ranks share gives a shard to whoever asks first. Each sample carries its shard and its place there:
a rank knows up to where it has trained on each shard, and a later run goes on there with any number of ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["ClaimLedger", "ClaimedShards", "Counter", "claim_order", "claimable"]

FINISHED = -1
"""Stands for the place in a shard that was trained on to its end."""


class Counter(Protocol):
    """Numbers that all ranks and their loader workers share, each given once."""

    def numbers(self, key: str, worker: int, workers: int) -> Iterator[int]:
        """Yield the numbers under a key that nobody else has got.

        Args:
            key: what is counted.
            worker: loader worker that asks, from 0 on.
            workers: number of loader workers, at least 1.
        """


class TaggedSample(NamedTuple):
    """A sample with its shard, its place in it, and whether it is the last one there."""

    shard: int
    place: int
    last: bool
    sample: Any


def claimable(dataset: Any) -> bool:
    """Return whether shards of a dataset can be opened one by one."""
    count = getattr(dataset, "num_shards", None)
    opens = callable(getattr(dataset, "open_shard", None)) or callable(getattr(dataset, "shard", None))
    return isinstance(count, int) and count > 0 and opens


def claim_order(shards: int, epoch: int, progress: Mapping[int, int] | None = None) -> list[tuple[int, int]]:
    """Return the shards of an epoch in the order in which they are claimed, each with its first sample.

    Args:
        shards: number of shards.
        epoch: epoch, which gives the order.
        progress: samples that were trained on before, by shard; such shards come first, finished ones not at all.

    Example:
        >>> sorted(claim_order(3, 0))
        [(0, 0), (1, 0), (2, 0)]
        >>> claim_order(3, 0, {1: 5, 0: FINISHED})
        [(1, 5), (2, 0)]
    """
    order = torch.randperm(shards, generator=torch.Generator().manual_seed(epoch)).tolist()
    known = dict(progress or {})
    begun = [(shard, known[shard]) for shard in order if known.get(shard, 0) > 0]
    return begun + [(shard, 0) for shard in order if known.get(shard, 0) == 0]


class ClaimedShards(IterableDataset[TaggedSample]):
    """Samples of the shards that this process claims, one shard after another.

    Args:
        dataset: has ``num_shards`` and ``open_shard(index)`` or, as :class:`datasets.IterableDataset`,
            ``shard(num_shards=, index=)``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._counter: Counter | None = None
        self._key, self._epoch = "", 0
        self._order: list[tuple[int, int]] = []

    def begin(self, counter: Counter, key: str, epoch: int, order: Sequence[tuple[int, int]]) -> None:
        """Claim shards of this order from now on, under a key that no earlier pass has used."""
        self._counter, self._key, self._epoch, self._order = counter, key, epoch, list(order)

    def __iter__(self) -> Iterator[TaggedSample]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._counter is None:
            raise RuntimeError("the shards were iterated before a pass began; call begin() first.")
        for number in self._counter.numbers(self._key, worker, workers):
            if number >= len(self._order):
                return
            yield from self._read(*self._order[number])

    def _read(self, shard: int, first: int) -> Iterator[TaggedSample]:
        """Yield the samples of a shard from ``first`` on; the last one is known only when no other follows."""
        held: TaggedSample | None = None
        for place, sample in enumerate(self._opened(shard)):
            if place < first:
                continue
            if held is not None:
                yield held
            held = TaggedSample(shard, place, False, sample)
        if held is not None:
            yield held._replace(last=True)

    def _opened(self, shard: int) -> Iterable[Any]:
        if callable(getattr(self.dataset, "open_shard", None)):
            opened: Iterable[Any] = self.dataset.open_shard(shard)
            return opened
        part = self.dataset.shard(num_shards=self.dataset.num_shards, index=shard)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(self._epoch)
        return _unsplit(part)

    @staticmethod
    def samples_of(tagged: Sequence[TaggedSample]) -> list[Any]:
        """Return the samples without their tags."""
        return [one.sample for one in tagged]


def _unsplit(part: Iterable[Any]) -> Iterator[Any]:
    """Begin a single shard as outside a loader worker: in one, datasets divide their shards among workers once more."""
    module = torch.utils.data._utils.worker
    info, module._worker_info = module._worker_info, None
    try:
        iterator = iter(part)
        first = list(islice(iterator, 1))
    finally:
        module._worker_info = info
    return chain(first, iterator)


class ClaimLedger:
    """Progress of this rank on each shard, step by step.

    Args:
        kept: steps of which the way there is kept, so that the state of each of them can be told.

    Example:
        >>> ledger = ClaimLedger()
        >>> ledger.note(0, [TaggedSample(4, 0, False, "a"), TaggedSample(4, 1, True, "b")])
        >>> ledger.before(0), ledger.before(1)
        ({}, {4: -1})
    """

    def __init__(self, kept: int = 1024) -> None:
        self._folded: dict[int, int] = {}
        self._steps: deque[tuple[int, dict[int, int]]] = deque()
        self._kept = kept

    def begin(self, progress: Mapping[int, int]) -> None:
        """Begin a pass with what was trained on before it."""
        self._folded = dict(progress)
        self._steps.clear()

    def note(self, step: int, taken: Sequence[TaggedSample]) -> None:
        """Note the samples of a step."""
        self._steps.append((step, {one.shard: FINISHED if one.last else one.place + 1 for one in taken}))
        while len(self._steps) > self._kept:
            self._folded.update(self._steps.popleft()[1])

    def before(self, step: int) -> dict[int, int]:
        """Return the samples that the steps before ``step`` have trained on, by shard."""
        progress = dict(self._folded)
        for number, taken in self._steps:
            if number < step:
                progress.update(taken)
        return progress
