"""Mega-batches whose batches are claimed one by one: the samples of each claim, and the sampler of the claims.

A mega-batch is a stretch of the epoch's order. Its first batches are reserved, one for each rank, so that every rank
makes at least one update. Ranks claim the rest by a counter that only grows. The samples of a claim follow from the
counter's value alone, so ranks need not know each other's claims, and no sample is given twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import Sampler

from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.data.index_stream import IndexStream

__all__ = ["ClaimedBatchSampler", "MegaBatch"]


@checked_keywords
@dataclass(frozen=True, slots=True)
class MegaBatch:
    """Positions ``start`` to ``stop`` of an epoch's order, of which ``firsts`` are reserved.

    Args:
        start: position of its first sample.
        stop: position after its last sample.
        firsts: samples of each rank's reserved batch, ``>= least`` each.
        least: fewest samples of a batch; a smaller remainder joins the batch before.

    Example:
        >>> mega = MegaBatch.at(0, samples=20, size=12, batch_sizes=(4, 2))
        >>> mega.first(1), mega.claimed(0, 4), mega.claimed(4, 4), mega.claimed(6, 4)
        (range(4, 6), range(6, 10), range(10, 12), None)
    """

    start: int
    stop: int
    firsts: tuple[int, ...]
    least: int = 1

    @classmethod
    def at(cls, position: int, *, samples: int, size: int, batch_sizes: Sequence[int], least: int = 1) -> "MegaBatch":
        """Return the mega-batch that begins at a position of an epoch.

        The rest of the epoch after it joins it if that is too small for a batch on every rank. If the mega-batch is
        smaller than one batch of every rank together, the reserved batches share it in proportion.

        Args:
            position: first sample.
            samples: samples of the epoch, at least ``least`` for each rank.
            size: samples of a full mega-batch.
            batch_sizes: batch size of each rank.
            least: fewest samples of a batch.

        Raises:
            ValueError: if the rest of the epoch cannot give every rank a batch.
        """
        stop = min(position + size, samples)
        if samples - stop < least * len(batch_sizes):
            stop = samples
        total = stop - position
        firsts = tuple(batch_sizes)
        if total < sum(firsts):
            firsts = proportional_sizes(total, firsts, min_local=least)
        rest = total - sum(firsts)
        return cls(position, stop, (*firsts[:-1], firsts[-1] + rest) if rest < least else firsts, least)

    def first(self, rank: int) -> range:
        """Return the positions of a rank's reserved batch."""
        start = self.start + sum(self.firsts[:rank])
        return range(start, start + self.firsts[rank])

    def claimed(self, offset: int, size: int) -> range | None:
        """Return the positions of the batch claimed with the counter at ``offset``; ``None`` if all are taken."""
        start = self.start + sum(self.firsts) + offset
        if self.stop - start < self.least:
            return None
        stop = min(start + size, self.stop)
        return range(start, self.stop if self.stop - stop < self.least else stop)


@checked_keywords
class ClaimedBatchSampler(Sampler[list[int]]):
    """Batches that this rank claims from each epoch; their number is not known in advance.

    Args:
        stream: order of the samples of each epoch.
        take: ``take(epoch, first)`` returns the positions of the next batch, ``None`` at the end of the epoch;
            ``first`` is true at the first draw of an iteration.
        expected: batches of an epoch if all ranks took equally many, for progress bars and schedules.

    Example:
        >>> from lightning_hetero.data.index_stream import PermutationStream
        >>> spans = iter([range(0, 2), range(4, 5), None])
        >>> stream = PermutationStream(6, shuffle=False, seed=0)
        >>> list(ClaimedBatchSampler(stream, lambda epoch, first: next(spans), 3))
        [[0, 1], [4]]
    """

    def __init__(self, stream: IndexStream, take: Callable[[int, bool], range | None], expected: int) -> None:
        self.stream, self._take, self.expected = stream, take, expected
        self.epoch = 0

    @property
    def sampler(self) -> "ClaimedBatchSampler":
        """The object on which frameworks call ``set_epoch``: this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch at the next ``iter``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.expected

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        order = self.stream.indices(epoch)
        span = self._take(epoch, True)
        while span is not None:
            yield list(order[span.start : span.stop])
            span = self._take(epoch, False)
