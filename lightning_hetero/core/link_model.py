"""Whether compression pays: the predicted step with the dense sum against that with block top-k at each density.

Both are those of the time model (Cannikin, eq. 7). Of a dense sum, all buckets but the last can hide behind the
backward pass; selection and messages of block top-k begin when that is over, and hide behind nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.compressors import VALUE_DTYPES
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.time_model import estimate_gamma, estimate_sync_times

__all__ = ["CompressionChoice", "Computing", "LinkMeasurement", "choose_density", "pack_bytes"]

MARGIN = 1.05
"""Predictions err: compression has to gain 5 % of the step; a denser message is taken within 5 % of the shortest."""


@dataclass(frozen=True)
class Computing:
    """What is known of a step apart from the link, the slowest worker's values; zeros if nothing is.

    Args:
        whole: seconds of load, forward, backward and update, ``a + P``.
        begun: of these, seconds before the first gradients are ready, ``a + gamma P``.
        last: share of a dense sum that begins only behind the backward pass, ``t_u / (t_o + t_u)``, 0 to 1.

    Example:
        >>> Computing.of(StepObservations.empty(2))
        Computing(whole=0.0, begun=0.0, last=1.0)
    """

    whole: float = 0.0
    begun: float = 0.0
    last: float = 1.0

    @classmethod
    def of(cls, seen: StepObservations) -> "Computing":
        """From observed steps with dense sums, medians over steps.

        Example:
            >>> ones = np.ones((3, 2))
            >>> seen = StepObservations(8 * ones, 0.1 * ones, 0.4 * ones, 0.1 * ones, 0.3 * ones, 0.1 * ones, ones)
            >>> found = Computing.of(seen)
            >>> round(found.whole, 3), round(found.begun, 3), round(found.last, 3)
            (0.5, 0.2, 0.25)
        """
        if seen.num_steps == 0:
            return cls()
        gamma = estimate_gamma(seen.first_bucket, seen.backward)
        t_o, t_u = estimate_sync_times(seen.overlapped_sync, seen.last_sync)
        whole, begun = np.median(seen.compute, axis=0), np.median(seen.outside_backward + gamma * seen.backward, axis=0)
        return cls(float(whole.max()), float(begun.max()), t_u / (t_o + t_u) if t_o + t_u > 0 else 1.0)


@dataclass(frozen=True)
class LinkMeasurement:
    """What was measured before training, the slowest rank's values.

    Args:
        latency: seconds of an exchange of next to nothing, ``>= 0``.
        rate: bytes per second that a rank can send in an exchange, above 0.
        encode: seconds of error feedback, selection and merging for the whole model.
        world_size: ranks.
        numel: elements of the gradient.
        element_size: bytes of an element.

    Example:
        >>> LinkMeasurement(latency=0.001, rate=1e6, encode=0.01, world_size=2, numel=1_000_000).dense_seconds
        4.002
    """

    latency: float
    rate: float
    encode: float
    world_size: int
    numel: int
    element_size: int = 4

    @property
    def dense_seconds(self) -> float:
        """Seconds of the dense sum: ``2 (N - 1) / N`` times the gradient's bytes, in ``2 (N - 1)`` rounds."""
        n = self.world_size
        return 2 * (n - 1) * self.latency + 2 * (n - 1) / n * self.numel * self.element_size / self.rate

    def compressed_seconds(self, density: float, value_dtype: str = "bfloat16") -> float:
        """Seconds of block top-k: selection, and one message to each other rank."""
        sent = (self.world_size - 1) * pack_bytes(self.numel, density, self.world_size, value_dtype)
        return self.encode + self.latency + sent / self.rate

    def dense_step(self, computing: Computing) -> float:
        """Seconds of a step with the dense sum: ``max(a + P + t_u, a + gamma P + t_o + t_u)``."""
        exchange = self.dense_seconds
        return max(computing.whole + computing.last * exchange, computing.begun + exchange)

    def compressed_step(self, density: float, value_dtype: str, computing: Computing) -> float:
        """Seconds of a step with block top-k."""
        return computing.whole + self.compressed_seconds(density, value_dtype)


@dataclass(frozen=True)
class CompressionChoice:
    """What to do, and the predictions that it rests on.

    Args:
        density: of block top-k, ``None`` for the dense sum.
        dense_seconds: predicted seconds of a step with the dense sum.
        seconds: predicted seconds of a step with block top-k at each density.
        computing: of these, seconds of computing.

    Example:
        >>> CompressionChoice(0.01, 0.4, ((0.01, 0.1),), 0.05).describe().partition(",")[0]
        'block top-k at density 0.01'
    """

    density: float | None
    dense_seconds: float
    seconds: tuple[tuple[float, float], ...]
    computing: float = 0.0

    def describe(self) -> str:
        """One line for the log."""
        chosen = "dense sums" if self.density is None else f"block top-k at density {self.density:g}"
        listing = ", ".join(f"{density:g}: {1e3 * seconds:.3g} ms" for density, seconds in self.seconds)
        return (
            f"{chosen}, because dense takes {1e3 * self.dense_seconds:.3g} ms a step and densities {listing}, of which "
            f"computing takes {1e3 * self.computing:.3g} ms"
        )


def pack_bytes(numel: int, density: float, world_size: int, value_dtype: str = "bfloat16") -> float:
    """Bytes of one rank's message, blocks of 16: ``density / N`` of the blocks, values and 2 bytes of index each.

    Example:
        >>> pack_bytes(1_600_000, 0.01, 2)
        17000.0
    """
    blocks = numel / 16 * density / (1 if density >= 1 else world_size)
    return blocks * (VALUE_DTYPES[value_dtype] + 2)


def choose_density(
    measured: LinkMeasurement,
    densities: Sequence[float],
    value_dtype: str = "bfloat16",
    computing: Computing = Computing(),  # noqa: B008 - a value that never changes
) -> CompressionChoice:
    """The densest of the fastest: dense sums unless block top-k is predicted to make the step 5 % shorter.

    Among densities within 5 % of the shortest predicted step that are so, the largest: more of the gradient at the same
    price.

    Example:
        >>> thin = LinkMeasurement(1e-3, 12.5e6, 0.01, world_size=2, numel=10_000_000)
        >>> choose_density(thin, [0.001, 0.01, 0.1]).density
        0.001
        >>> choose_density(thin, [0.001, 0.01, 0.1], computing=Computing(10.0, 1.0, 0.01)).density is None
        True
        >>> thick = LinkMeasurement(1e-4, 5e9, 0.5, world_size=2, numel=10_000_000)
        >>> choose_density(thick, [0.001, 0.01, 0.1]).density is None
        True
    """
    seconds = tuple((d, measured.compressed_step(d, value_dtype, computing)) for d in sorted(densities))
    dense, shortest = measured.dense_step(computing), min(s for _, s in seconds)
    good = [d for d, s in seconds if s <= MARGIN * shortest and MARGIN * s <= dense]
    return CompressionChoice(max(good, default=None), dense, seconds, computing.whole)
