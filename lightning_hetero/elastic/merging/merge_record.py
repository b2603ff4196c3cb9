"""Record of a mega-batch and its merge, as one value for logs, metrics and tests."""

from dataclasses import dataclass

__all__ = ["MergeRecord"]


@dataclass(frozen=True)
class MergeRecord:
    """Record of a mega-batch and of its merge; equal on all ranks.

    Args:
        epoch: epoch of the mega-batch.
        position: samples of the epoch that are done.
        batch_sizes: batch size of each rank in the mega-batch.
        updates: updates of each rank in it.
        samples: samples that each rank trained on in it.
        weights: weight of each replica in the merge.
        perturbed: whether the weights were perturbed.
        busy: seconds of each rank from its first batch to the end of its last, by its own clock.
        end: whether a rank has asked to end the training, see :meth:`ElasticEngine.request_end`.
        lost: ranks whose replicas were not finite; nothing of them was kept.
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
