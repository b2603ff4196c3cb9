"""Index streams: the order of an epoch's samples, the same on every rank and for any number of ranks."""

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["IndexStream", "PermutationStream", "SamplerStream", "seeded"]


class IndexStream(Protocol):
    """Order of the samples of each epoch, a pure function of the epoch."""

    def __len__(self) -> int:
        """Return the samples of an epoch."""

    def indices(self, epoch: int) -> Sequence[int]:
        """Return the dataset indices of an epoch in order."""

    def fingerprint(self) -> int:
        """Return a number equal on ranks whose streams are equal."""


@checked_keywords
class PermutationStream:
    """Shuffled or sequential order, in the permutation that ``DistributedSampler`` takes for the same seed and epoch.

    Args:
        num_samples: size of the dataset, ``>= 1``.
        shuffle: whether to shuffle.
        seed: base seed; epoch ``e`` uses ``seed + e``.

    Raises:
        ValueError: if the dataset is empty.

    Example:
        >>> list(PermutationStream(4, shuffle=False, seed=0).indices(0))
        [0, 1, 2, 3]
    """

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"the training dataset has {num_samples} samples; it needs at least one.")
        self.num_samples, self.shuffle, self.seed = num_samples, shuffle, seed

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, epoch: int) -> Sequence[int]:
        """Return the dataset indices of an epoch in order."""
        if not self.shuffle:
            return range(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order

    def fingerprint(self) -> int:
        """Return a number equal on ranks whose streams are equal."""
        return zlib.crc32(repr((self.num_samples, self.shuffle, self.seed)).encode())


@checked_keywords
class SamplerStream:
    """Order of an epoch from any sampler of the user, such as ``WeightedRandomSampler``.

    Its random numbers are seeded by ``(seed, epoch)``: all ranks draw the same order, and a resumed epoch draws it
    again. The global generators are restored. ``set_epoch`` is called if the sampler has it.

    Args:
        sampler: yields dataset indices; its length must be known.
        seed: base seed.

    Example:
        >>> from torch.utils.data import WeightedRandomSampler
        >>> stream = SamplerStream(WeightedRandomSampler([0.0, 1.0], 3), seed=0)
        >>> list(stream.indices(0)), len(stream)
        ([1, 1, 1], 3)
    """

    def __init__(self, sampler: Sampler[int], *, seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        generator = getattr(sampler, "generator", None)
        self._generator_seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        if len(self) < 1:
            raise ValueError(f"the sampler {type(sampler).__name__} yields {len(self)} samples; it needs at least one.")

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def indices(self, epoch: int) -> Sequence[int]:
        """Return the dataset indices of an epoch in order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if self._generator_seed is not None:
            self.sampler.generator.manual_seed(self._generator_seed + epoch)  # type: ignore[attr-defined]
        with seeded(self.seed + epoch):
            order = [int(index) for index in self.sampler]
        if len(order) != len(self):
            raise ValueError(
                f"the sampler {type(self.sampler).__name__} says that it has {len(self)} samples and yielded "
                f"{len(order)}. Make __len__ and __iter__ agree."
            )
        return order

    def fingerprint(self) -> int:
        """Return a number equal on ranks whose streams are equal: a checksum of the order of epoch 0."""
        return zlib.crc32(np.asarray(self.indices(0), dtype=np.int64).tobytes())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch, and restore their generators afterwards.

    Example:
        >>> with seeded(0):
        ...     first = random.random()
        >>> with seeded(0):
        ...     first == random.random()
        True
    """
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
