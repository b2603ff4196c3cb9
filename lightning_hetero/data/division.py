"""Division of a global batch among ranks by something else than the number of samples."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lightning_hetero.core.batching.plan import BatchPlan

__all__ = ["Division", "Parts"]


class Parts(NamedTuple):
    """Samples of a global batch, divided among ranks.

    Args:
        indices: dataset indices of each rank; together they are those of the global batch.
        work: features of each rank's work, equally many for all; see
            :class:`~lightning_hetero.data.step_share.StepShare`.
    """

    indices: tuple[list[int], ...]
    work: tuple[tuple[float, ...], ...]


class Division(Protocol):
    """Division of each global batch: a pure function, so that all ranks divide alike without a message."""

    @property
    def features(self) -> int:
        """Number of features by which it describes the work of a rank."""

    def divide(self, samples: Sequence[int], sizes: Sequence[int], plan: BatchPlan) -> Parts:
        """Divide the samples of a global batch.

        Args:
            samples: dataset indices of the global batch, in the order of the epoch.
            sizes: samples that each rank gets by the plan; they sum to ``len(samples)``. A rank with 0 gets none.
            plan: the plan that holds at this step.
        """

    def fingerprint(self) -> int:
        """Return a number equal on ranks that divide alike."""
