"""Loss and accuracy of classifiers with many labels a sample, from logits of all classes and labels in CSR form."""

from typing import Any

import torch
from torch.nn import functional
from torchmetrics import Metric

__all__ = ["PrecisionAtOne", "multilabel_cross_entropy"]


def multilabel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_rows: torch.Tensor) -> torch.Tensor:
    """Return the softmax cross entropy against a uniform target over each sample's labels, averaged over samples.

    ``-1/n sum_i 1/|Y_i| sum_{l in Y_i} log softmax(z_i)_l``; a sample with no label adds 0.

    Args:
        logits: ``(n, classes)``.
        labels: labels of all samples, one after the other.
        label_rows: sample that each label belongs to.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        >>> round(multilabel_cross_entropy(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])).item(), 4)
        0.6931
    """
    counts = torch.bincount(label_rows, minlength=len(logits))
    terms = functional.log_softmax(logits, dim=1)[label_rows, labels]
    return -(terms / counts[label_rows]).sum() / len(logits)


class PrecisionAtOne(Metric):
    """Share of samples whose highest logit is one of their labels (top-1 precision).

    Example:
        >>> metric = PrecisionAtOne()
        >>> metric.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> metric.compute().item()
        0.5
    """

    full_state_update = False
    hits: torch.Tensor
    total: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor, label_rows: torch.Tensor) -> None:
        """Count a batch.

        Args:
            logits: ``(n, classes)``.
            labels: labels of all samples, one after the other.
            label_rows: sample that each label belongs to.
        """
        self.hits += (logits.argmax(dim=1)[label_rows] == labels).sum()  # a label occurs once in a sample
        self.total += len(logits)

    def compute(self) -> torch.Tensor:
        """Return hits over samples."""
        return self.hits.double() / self.total
