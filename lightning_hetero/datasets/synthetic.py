"""Synthetic extreme classification: data with the shape of the real sets (Adaptive SGD, Table I), at any scale.

It keeps the features, classes, samples, mean non-zeros and mean labels per sample, and the wide variation of the latter
two, which makes batches irregular. It can be learned: each class has its own features, which its samples often have. It
is not real text, so the reachable accuracy says nothing about the real sets.
"""

from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.datasets.libsvm import SparseMultiLabelDataset

__all__ = ["AMAZON_670K", "DELICIOUS_200K", "SparseShape", "synthetic_multilabel"]


@checked_keywords
@dataclass(frozen=True)
class SparseShape:
    """Shape of a sparse multi-label data set.

    ``AMAZON_670K`` and ``DELICIOUS_200K`` are those of Adaptive SGD's experiments (A table 1); ``scaled`` makes a
    smaller one of the same kind.

    Args:
        features: number of columns.
        classes: number of different labels.
        train: training samples.
        test: test samples.
        features_per_sample: mean non-zeros of a sample.
        classes_per_sample: mean labels of a sample.
        spread: standard deviation of the logarithm of the non-zeros of a sample (log-normal).

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.

    Example:
        >>> shape = AMAZON_670K.scaled(0.01)
        >>> shape.features, shape.classes, shape.train, shape.features_per_sample
        (1359, 6700, 4904, 76)
    """

    features: int
    classes: int
    train: int
    test: int
    features_per_sample: float
    classes_per_sample: float
    spread: float = 0.7

    def __post_init__(self) -> None:
        for name in ("features", "classes", "train", "test"):
            check_int(name, getattr(self, name), minimum=1)
        check_number("features_per_sample", self.features_per_sample, low=1, high=self.features / 2)
        check_number("classes_per_sample", self.classes_per_sample, low=1, high=self.classes / 2)
        check_number("spread", self.spread, low=0)

    def scaled(self, scale: float) -> "SparseShape":
        """Scale features, classes and samples by a factor; samples keep their non-zeros and labels."""
        check_number("scale", scale, low=0, include_low=False)
        sizes = {name: max(1, int(scale * getattr(self, name))) for name in ("features", "classes", "train", "test")}
        return replace(self, **sizes)


AMAZON_670K = SparseShape(135_909, 670_091, 490_449, 153_025, 76, 5)
DELICIOUS_200K = SparseShape(782_585, 205_443, 196_606, 100_095, 302, 75)


def synthetic_multilabel(
    shape: SparseShape, *, seed: int = 0, signal: float = 0.6
) -> tuple[SparseMultiLabelDataset, SparseMultiLabelDataset]:
    """Draw the training and test set of a shape.

    Args:
        shape: sizes and means.
        seed: seed of all random numbers.
        signal: share of a sample's features that come from its classes; the rest is noise.

    Returns:
        Training set, test set.

    Example:
        >>> train, test = synthetic_multilabel(SparseShape(200, 20, 50, 10, 8, 2))
        >>> len(train), len(test), train.num_features, train.num_classes
        (50, 10, 200, 20)
    """
    rng = np.random.default_rng(seed)
    per_class = int(np.ceil(3 * shape.features_per_sample / shape.classes_per_sample))
    own = rng.integers(0, shape.features, size=(shape.classes, per_class))
    return _draw(shape, shape.train, own, signal, rng), _draw(shape, shape.test, own, signal, rng)


def _draw(
    shape: SparseShape, samples: int, own: np.ndarray, signal: float, rng: np.random.Generator
) -> SparseMultiLabelDataset:
    mean = np.log(shape.features_per_sample) - shape.spread**2 / 2  # so that the mean is features_per_sample
    nonzeros = np.clip(np.rint(rng.lognormal(mean, shape.spread, samples)), 1, shape.features // 2).astype(int)
    counts = np.clip(1 + rng.poisson(shape.classes_per_sample - 1, samples), 1, shape.classes)
    first = (shape.classes * rng.random(samples) ** 2).astype(int)  # some classes are much more frequent than others
    labels = [_near(c, n, shape.classes, rng) for c, n in zip(first, counts, strict=True)]
    rows = [
        _features(own[row].ravel(), n, signal, shape.features, rng) for row, n in zip(labels, nonzeros, strict=True)
    ]
    lengths = np.array([len(row) for row in rows])
    values = rng.random(lengths.sum()).astype(np.float32) + 0.5
    norms = np.sqrt(np.add.reduceat(values**2, np.concatenate([[0], np.cumsum(lengths)[:-1]])))
    return SparseMultiLabelDataset(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate(rows),
        values / np.repeat(norms, lengths),
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate(labels),
        shape.features,
        shape.classes,
    )


def _near(first: int, count: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a class and some of its neighbors: labels that occur together."""
    others = rng.permutation(min(2 * count, classes - 1))[: count - 1] + 1
    found: np.ndarray = (first + np.concatenate([[0], others]).astype(int)) % classes
    return found


def _features(own: np.ndarray, count: int, signal: float, features: int, rng: np.random.Generator) -> np.ndarray:
    """Draw distinct features, some of the classes' own, the rest of all; frequent ones have low numbers."""
    found = np.unique(rng.permutation(own)[: int(np.ceil(signal * count))])
    while len(found) < count:
        noise = (features * rng.random(count - len(found)) ** 2).astype(int)
        found = np.union1d(found, noise)
    return found
