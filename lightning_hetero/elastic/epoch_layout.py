"""Layout of a run's epochs: their samples, and the cut into mega-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data.mega_batch import MegaBatch
from lightning_hetero.elastic.config import ElasticConfig

__all__ = ["EpochLayout"]


@dataclass(frozen=True)
class EpochLayout:
    """Cut of each epoch into mega-batches; equal on all ranks.

    Args:
        samples: samples of an epoch.
        mega_samples: samples of a full mega-batch.
        least: fewest samples of a batch.
        world_size: number of ranks.
        settings: settings of Adaptive SGD, with the bounds of the batch sizes.

    Example:
        >>> layout = EpochLayout.of(ElasticConfig(mega_batch_size=8), 20, 2, world_size=2)
        >>> layout.steps_per_epoch, layout.steps_done((1, 8)), layout.mega_batch(16, (2, 1)).stop
        (5, 7, 20)
    """

    samples: int
    mega_samples: int
    least: int
    world_size: int
    settings: AdaptiveSettings

    @classmethod
    def of(
        cls,
        config: ElasticConfig,
        available: int,
        batch_size: int,
        world_size: int,
        *,
        drop_last: bool = False,
        least: int = 1,
        limit: int | float | None = None,
    ) -> "EpochLayout":
        """Return the layout of the epochs of a stream.

        Args:
            config: settings of elastic averaging.
            available: samples of the stream.
            batch_size: ``b_max``, with which every rank begins.
            world_size: number of ranks.
            drop_last: whether to drop the samples that do not fill a batch on every rank.
            least: fewest samples of a batch.
            limit: batches per rank of each epoch (a share of them, if a float); ``None`` for all.

        Raises:
            ValueError: if the data or the mega-batch cannot give every rank a batch.
        """
        total = batch_size * world_size
        samples = available // total * total if drop_last else available
        if limit is not None:
            batches = limit if isinstance(limit, int) else int(math.ceil(samples / total) * limit)
            samples = min(samples, batches * total)
        if samples < least * world_size:
            raise ValueError(
                f"{available} samples (drop_last={drop_last}) cannot give each of {world_size} workers a batch. "
                "Use fewer workers, more data or a smaller batch_size."
            )
        mega_samples, settings = config.samples(batch_size, world_size), config.adaptive(batch_size)
        assert settings.min_batch_size is not None
        low = min(max(settings.min_batch_size, least), batch_size)
        return cls(samples, mega_samples, least, world_size, replace(settings, min_batch_size=low))

    @property
    def total_batch_size(self) -> int:
        """Samples of a step in a synchronous run with equal batches."""
        return self.settings.max_batch_size * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of such a run in an epoch."""
        return math.ceil(self.samples / self.total_batch_size)

    def steps_done(self, position: tuple[int, int]) -> int:
        """Return the steps that such a run would have done up to a position.

        Args:
            position: epoch, and samples of it that were handed out.
        """
        epoch, done = position
        return epoch * self.steps_per_epoch + (
            self.steps_per_epoch if done >= self.samples else done // self.total_batch_size
        )

    def position_of(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the position after a step of such a run."""
        return epoch, min(step * self.total_batch_size, self.samples)

    def bounded(self, batch_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the batch sizes clipped to the bounds; ``b_max`` for all ranks if there is not one for each."""
        low, high = self.settings.min_batch_size, self.settings.max_batch_size
        assert low is not None
        known = batch_sizes if len(batch_sizes) == self.world_size else (high,) * self.world_size
        return tuple(min(max(size, low), high) for size in known)

    def mega_batch(self, position: int, batch_sizes: Sequence[int]) -> MegaBatch | None:
        """Return the mega-batch that begins at a position of an epoch; ``None`` at its end."""
        if position >= self.samples:
            return None
        return MegaBatch.at(
            position, samples=self.samples, size=self.mega_samples, batch_sizes=batch_sizes, least=self.least
        )
