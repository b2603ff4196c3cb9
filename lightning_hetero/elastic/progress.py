"""Progress of one rank in the running mega-batch: its batch, its updates and samples, its time."""

import time

from lightning_hetero.data.mega_batch import MegaBatch

__all__ = ["MegaBatchProgress"]


class MegaBatchProgress:
    """Batch that this rank has claimed, and its updates and samples since the last merge.

    Example:
        >>> progress = MegaBatchProgress()
        >>> progress.begin(0, MegaBatch.at(0, samples=8, size=8, batch_sizes=(4,)), first=range(0, 4))
        >>> progress.draw(), progress.finish_batch().stop, progress.position, progress.updates
        (range(0, 4), 8, (0, 4), 1)
    """

    def __init__(self) -> None:
        self.position = (0, 0)
        self.epoch_over = False
        self.mega: MegaBatch | None = None
        self.span: range | None = None
        self.opened = self.updates = self.samples = 0
        self._drawn = False
        self._began = 0.0

    def next_name(self) -> str:
        """Return a name for another mega-batch, the same on all ranks."""
        self.opened += 1
        return str(self.opened)

    def move_to(self, position: tuple[int, int]) -> None:
        """Move to an epoch and a sample of it."""
        self.position = position

    def begin(self, epoch: int, mega: MegaBatch, *, first: range) -> None:
        """Begin a mega-batch with the batch reserved for this rank."""
        self.position, self._drawn, self.epoch_over = (epoch, mega.start), False, False
        self.span, self.mega = first, mega
        self.updates = self.samples = 0
        self._began = time.perf_counter()

    def end_epoch(self, epoch: int, position: int) -> None:
        """End an epoch: no batch is left."""
        self.position, self._drawn, self.span, self.epoch_over = (epoch, position), False, None, True

    def draw(self) -> range | None:
        """Return the samples of the claimed batch, ``None`` at the end of the epoch.

        Raises:
            RuntimeError: if the previous batch was not trained on yet.
        """
        if self._drawn and self.span is not None:
            raise RuntimeError(
                "a batch was drawn before the one before it was trained on, so that batches would be claimed ahead of "
                "their training. Set num_workers=0 on the train DataLoader, and call end_batch() after each batch."
            )
        self._drawn = True
        return self.span

    def finish_batch(self) -> MegaBatch:
        """Count the drawn batch as trained on, and return the mega-batch.

        Raises:
            RuntimeError: if none was drawn.
        """
        if self.mega is None or self.span is None or not self._drawn:
            raise RuntimeError("end_batch() was called with no batch drawn; iterate the loader that shard() is for.")
        self.updates, self.samples = self.updates + 1, self.samples + len(self.span)
        self.position, self._drawn = (self.position[0], self.span.stop), False
        return self.mega

    def claimed(self, span: range | None) -> None:
        """Set the next batch; ``None`` if the mega-batch has none left."""
        self.span = span

    @property
    def busy_seconds(self) -> float:
        """Seconds since the first batch of the mega-batch."""
        return time.perf_counter() - self._began
