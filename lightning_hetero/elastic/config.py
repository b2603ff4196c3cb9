"""Settings of elastic averaging, checked in one place at construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.merging.rules import MERGES, MergeRule
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.validation import check_choice, check_int

__all__ = ["OWN_LOOP", "ElasticConfig"]

OWN_LOOP = (
    "Elastic averaging (hetero_elastic) is a strategy of Lightning's Trainer only: Fabric and Accelerate prepare a "
    "model for gradient averaging, which must not be there. In a loop of your own use "
    "lightning_hetero.elastic.ElasticEngine on the model as it is, see 'Fabric, Accelerate and plain loops' in "
    "docs/elastic.md"
)
"""Error text that names what to use without a trainer."""


@checked_keywords
@dataclass(frozen=True)
class ElasticConfig:
    """Settings of :class:`ElasticEngine`, equal on all ranks.

    Args:
        merge: merge rule, a name in :data:`~lightning_hetero.core.merging.rules.MERGES`.
        mega_batch_size: samples between two merges.
        mega_batch_batches: the same, counted in batches of the DataLoader's size of all ranks together; default 100.
        settings: keywords of :class:`~lightning_hetero.core.merging.settings.AdaptiveSettings` except
            ``max_batch_size``; if ``momentum`` is left out or ``None``, it follows from the local optimizers.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range, or the size is given twice.

    Example:
        >>> ElasticConfig().samples(batch_size=32, world_size=4)
        3200
    """

    merge: str = "adaptive"
    mega_batch_size: int | None = None
    mega_batch_batches: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("merge", self.merge, tuple(MERGES))
        if self.mega_batch_size is not None and self.mega_batch_batches is not None:
            raise ValueError(
                f"mega_batch_size={self.mega_batch_size} (samples) and mega_batch_batches={self.mega_batch_batches} "
                "say the same in two ways. Give one."
            )
        for name in ("mega_batch_size", "mega_batch_batches"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        least = self.settings.get("min_batch_size")
        self.adaptive(least if isinstance(least, int) and least > 0 else 1)

    def adaptive(self, max_batch_size: int) -> AdaptiveSettings:
        """Return the settings of Adaptive SGD with this largest batch size."""
        given = {name: value for name, value in self.settings.items() if name != "momentum" or value is not None}
        return AdaptiveSettings(max_batch_size=max_batch_size, **given)

    @property
    def momentum(self) -> float | None:
        """Momentum of the global model, ``None`` if it follows from the local optimizers."""
        return self.settings.get("momentum")

    @property
    def rule(self) -> MergeRule:
        """The merge rule."""
        return MERGES[self.merge]

    def samples(self, batch_size: int, world_size: int) -> int:
        """Return the samples of a mega-batch.

        Raises:
            ValueError: if the mega-batch is smaller than one batch for each rank.
        """
        samples = self.mega_batch_size or (self.mega_batch_batches or 100) * batch_size
        if samples < batch_size * world_size:
            given = "mega_batch_size" if self.mega_batch_size is not None else "mega_batch_batches"
            raise ValueError(
                f"{given}={getattr(self, given) or 100} is less than a batch of {batch_size} samples for each of "
                f"{world_size} workers. Give mega_batch_batches of at least {world_size}."
            )
        return samples
