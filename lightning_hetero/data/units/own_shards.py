"""Steps over loaders that yield each rank's own data: how many there are, and which batches only keep pace.

Every rank runs as many steps as the one with the most batches. A rank that has run out repeats its last batch with
weight 0: it takes part in every average, and adds nothing to it. So no batch is lost, and none counts twice.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning_hetero.data.rows import rows_of
from lightning_hetero.data.streams.fingerprint import fingerprint
from lightning_hetero.data.units.orders import SeededUnits

__all__ = ["OwnBatches", "OwnShards", "counted_rows"]

log = logging.getLogger("lightning_hetero")


class OwnShards:
    """Steps of one rank over its own loader. Ranks whose first batches are the same are warned of.

    Args:
        gather: returns a value of every rank, in their order; called by all of them.
        length: returns the batches of the loader's coming epoch; ``None`` if it has no length.
        rows: returns the samples of a batch.
        start: ``(epoch, step)`` at which a run resumes.
        warn: says what may be wrong with the data.

    Attributes:
        steps: steps of an epoch, the same on every rank.

    Raises:
        ValueError: if a loader has no length or no batches.

    Example:
        >>> shards = OwnShards(lambda own: [own, 3], lambda: 2)
        >>> [(len(batch), shards.rows_at(0, step)) for step, batch in enumerate(shards.batches(iter(["ab", "c"])))]
        [(2, 1), (1, 1), (1, 0)]
    """

    def __init__(
        self,
        gather: Callable[[Any], list[Any]],
        length: Callable[[], int | None],
        rows: Callable[[Any], int] = lambda batch: 1,
        start: tuple[int, int] = (0, 0),
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._gather, self._length, self._count, self.start, self._warn = gather, length, rows, start, warn
        self._rows: dict[tuple[int, int], int] = {}
        self._compared = False
        self.epoch = start[0]
        self.steps = 0
        self.agree(self.epoch)

    def agree(self, epoch: int) -> None:
        """Agree on the steps of an epoch; collective.

        Raises:
            ValueError: if a rank's loader has no length or no batches; every rank raises it.
        """
        if epoch != self.epoch:
            self._rows = {}
        self.epoch = epoch
        lengths = self._gather(self._length())
        for rank, length in enumerate(lengths):
            if not length:
                what = "has no length (__len__)" if length is None else "has no batches"
                raise ValueError(
                    f"shard='mine': the train loader of rank {rank} {what}, so that ranks cannot agree on the number "
                    "of steps. Give every rank at least one batch and a loader with a length."
                )
        self.steps = max(lengths)

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch: those of the loader, then its last one until all ranks are done."""
        epoch, first, batch = self.epoch, self.start[1] if self.epoch == self.start[0] else 0, None
        for step in range(self.steps):
            following = next(given, _END)
            batch = batch if following is _END else following
            if not self._compared:
                self._compare(batch)
            self._rows[epoch, step] = 0 if following is _END else self._count(batch)
            if step >= first:
                yield batch

    def _compare(self, batch: Any) -> None:
        """Warn if ranks begin with the same batch; a collective call."""
        self._compared = True
        begins = self._gather(fingerprint([batch]))
        same = [rank for rank, crc in enumerate(begins) if begins.count(crc) > 1]
        if same:
            self._warn(
                f"shard='mine': ranks {', '.join(map(str, same))} begin with the same batch: they seem to train on the "
                "same samples, in the same order. Give each rank data of its own, or leave shard out (shard='whole' "
                "with use_distributed_sampler=False) to have the data split."
            )

    def rows_at(self, epoch: int, step: int) -> int:
        """Return the samples of this rank's batch at a step that count."""
        return self._rows.get((epoch, step), 0)


class OwnBatches:
    """Batch sampler of a rank's own loader, drawn an epoch at a time, so that its batches' samples are known.

    Args:
        order: batches of each epoch, which depend on the epoch alone.
        epoch: returns the running epoch.

    Example:
        >>> from lightning_hetero.data.units.orders import SeededUnits
        >>> batches = OwnBatches(SeededUnits([[0, 1], [2]], seed=0), lambda: 0)
        >>> list(batches), [batches.rows_of_next() for _ in range(2)]
        ([[0, 1], [2]], [2, 1])
    """

    def __init__(self, order: SeededUnits, epoch: Callable[[], int]) -> None:
        self._order, self._epoch = order, epoch
        self._rows: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        units = self._order.units(self._epoch())
        self._rows = deque(map(len, units))
        return iter(units)

    def __len__(self) -> int:
        return len(self._order.units(self._epoch()))

    def rows_of_next(self) -> int:
        """Return the samples of the next batch; each is asked for once, in order."""
        return self._rows.popleft()


_END = object()


def counted_rows(weighted: bool) -> Callable[[Any], int]:
    """Return how the samples of a batch are counted.

    Args:
        weighted: whether the user's ``weight_fn`` counts, so that a batch only has to be told from a repeated one.
    """
    return (lambda batch: 1) if weighted else rows_of
