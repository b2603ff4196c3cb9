"""Record of a mega-batch and its merge, as one value for logs, metrics and tests."""

from dataclasses import dataclass

__all__ = ["MergeRecord"]


@dataclass(frozen=True)
class MergeRecord:
    """Record of a mega-batch and of what followed; equal on all ranks but for the clocks.

    Args:
        epoch: epoch of the mega-batch.
        position: samples of the epoch that are done.
        batch_sizes: of each rank in it.
        updates: of each rank in it.
        samples: trained on by each rank in it.
        weights: of the replicas in the merge.
        perturbed: whether the weights were perturbed.
        busy: seconds of each rank from the first batch to the end of its last.
        end: whether a rank has asked to end the training, see :meth:`ElasticEngine.request_end`.
        lost: ranks whose replicas were not finite, so that nothing of them was kept.
    """

    epoch: int
    position: int
    batch_sizes: tuple[int, ...]
    updates: tuple[int, ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...]
    perturbed: bool
    busy: tuple[float, ...]
    end: bool = False
    lost: tuple[int, ...] = ()

    def describe(self) -> str:
        """Describe the merge in one line for the log."""
        weights = ", ".join(f"{weight:.3f}" for weight in self.weights)
        return f"updates {list(self.updates)} in batches of {list(self.batch_sizes)}, weights [{weights}]" + (
            ", perturbed" if self.perturbed else ""
        )
