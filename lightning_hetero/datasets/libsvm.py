"""Sparse samples with many labels each: libSVM files of extreme classification, batches in CSR form, never dense.

The files are those of the Extreme Classification Repository: an optional first line ``samples features classes``, then
``label,label,... feature:value feature:value ...`` with indices from 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["SparseBatch", "SparseMultiLabelDataset", "load_libsvm", "sparse_loader"]


class SparseBatch(NamedTuple):
    """Rows in CSR form, as ``EmbeddingBag`` takes them.

    Attributes:
        indices: feature of each non-zero, row after row.
        offsets: where each row begins in ``indices``.
        values: value of each non-zero.
        labels: labels of all rows, row after row.
        label_rows: row that each label belongs to.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    labels: torch.Tensor
    label_rows: torch.Tensor

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.offsets)


@checked_keywords
class SparseMultiLabelDataset(Dataset[SparseBatch]):
    """Samples of a CSR matrix with a list of labels each; ``dataset[i]`` is a batch of one.

    Args:
        indptr: start of each row in ``indices``, and the end, ``(n + 1,)``.
        indices: feature of each non-zero.
        values: value of each non-zero.
        label_indptr: start of each row in ``labels``, and the end, ``(n + 1,)``.
        labels: labels of all rows.
        num_features: number of columns.
        num_classes: number of different labels.

    Raises:
        ValueError: if the arrays do not fit each other, or an index is out of range.

    Example:
        >>> data = SparseMultiLabelDataset([0, 2, 3], [0, 4, 1], [1.0, 0.5, 2.0], [0, 1, 3], [7, 0, 2], 5, 8)
        >>> batch = data.__getitems__([1, 0])
        >>> batch.indices.tolist(), batch.offsets.tolist(), batch.labels.tolist(), batch.label_rows.tolist()
        ([1, 0, 4], [0, 1], [0, 2, 7], [0, 0, 1])
    """

    def __init__(
        self,
        indptr: npt.ArrayLike,
        indices: npt.ArrayLike,
        values: npt.ArrayLike,
        label_indptr: npt.ArrayLike,
        labels: npt.ArrayLike,
        num_features: int,
        num_classes: int,
    ) -> None:
        self.indptr, self.indices = np.asarray(indptr, dtype=np.int64), np.asarray(indices, dtype=np.int64)
        self.label_indptr, self.labels = np.asarray(label_indptr, dtype=np.int64), np.asarray(labels, dtype=np.int64)
        self.values = np.asarray(values, dtype=np.float32)
        self.num_features, self.num_classes = num_features, num_classes
        for name, start, found, limit in (
            ("features", self.indptr, self.indices, num_features),
            ("labels", self.label_indptr, self.labels, num_classes),
        ):
            if len(start) != len(self.indptr) or start[-1] != len(found):
                raise ValueError(
                    f"the {name} have {len(found)} entries for {len(start) - 1} rows that end at {start[-1]}, and "
                    f"there are {len(self.indptr) - 1} samples. Give one start per sample and the end."
                )
            if len(found) and not 0 <= found.min() <= found.max() < limit:
                raise ValueError(
                    f"{name} from {found.min()} to {found.max()} do not fit in {limit}. Indices begin at 0; give more "
                    f"{name}, or zero_based=False if the file counts from 1."
                )
        if len(self.values) != len(self.indices):
            raise ValueError(f"{len(self.values)} values for {len(self.indices)} non-zeros; give one for each.")

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def nonzeros(self) -> npt.NDArray[np.int64]:
        """Non-zero features of each sample."""
        return np.diff(self.indptr)

    def __getitem__(self, index: int) -> SparseBatch:
        return self.__getitems__([index])

    def __getitems__(self, rows: Sequence[int]) -> SparseBatch:
        """Return the rows as one batch; a ``DataLoader`` fetches whole batches this way."""
        chosen = np.asarray(rows, dtype=np.int64)
        taken, counts = _entries(self.indptr, chosen)
        labelled, label_counts = _entries(self.label_indptr, chosen)
        return SparseBatch(
            torch.from_numpy(self.indices[taken]),
            torch.from_numpy(np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)),
            torch.from_numpy(self.values[taken]),
            torch.from_numpy(self.labels[labelled]),
            torch.from_numpy(np.repeat(np.arange(len(chosen)), label_counts)),
        )


def _entries(
    indptr: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the entries of some rows, row after row, and the number of entries of each."""
    starts, counts = indptr[rows], indptr[rows + 1] - indptr[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within, counts


def _as_it_is(batch: Any) -> Any:
    return batch


def sparse_loader(dataset: SparseMultiLabelDataset, batch_size: int, **kwargs: Any) -> "DataLoader[SparseBatch]":
    """Make a ``DataLoader`` whose batches are :class:`SparseBatch`, each gathered by one call.

    Args:
        dataset: the samples.
        batch_size: samples of a batch.
        kwargs: arguments of ``DataLoader``.
    """
    return DataLoader(dataset, batch_size, collate_fn=_as_it_is, **kwargs)


def load_libsvm(
    path: str | Path, *, num_features: int | None = None, num_classes: int | None = None, zero_based: bool = True
) -> SparseMultiLabelDataset:
    """Read a libSVM file with several labels a sample, by scikit-learn's reader.

    Args:
        path: file, with or without the line ``samples features classes`` at its top.
        num_features: number of columns; by default that of the first line, else as many as the indices need.
        num_classes: number of labels; by default that of the first line, else the largest label that occurs plus 1.
        zero_based: whether feature indices begin at 0.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if the file is not in this format, or an index is out of range.
    """
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise ImportError("load_libsvm reads by scikit-learn; pip install scikit-learn.") from error
    with open(path, "rb") as file:
        first = file.readline().split()
        if len(first) == 3 and all(word.isdigit() for word in first):
            num_features, num_classes = num_features or int(first[1]), num_classes or int(first[2])
        else:
            file.seek(0)
        matrix, labels = load_svmlight_file(
            file, n_features=num_features, multilabel=True, zero_based=zero_based, dtype=np.float32
        )
    counts = [len(row) for row in labels]
    flat = np.fromiter((label for row in labels for label in row), dtype=np.int64, count=sum(counts))
    return SparseMultiLabelDataset(
        matrix.indptr,
        matrix.indices,
        matrix.data,
        np.concatenate([[0], np.cumsum(counts)]),
        flat,
        matrix.shape[1],
        num_classes or (int(flat.max()) + 1 if len(flat) else 1),
    )
