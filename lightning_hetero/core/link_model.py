"""Whether compression pays: bytes over a measured link against the measured cost of selection (performance of a step).

The part of a step that is not computing is predicted for the dense sum and for block top-k at each density; compression
is worth it only where its part is the shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.compressors import VALUE_DTYPES

__all__ = ["CompressionChoice", "LinkMeasurement", "choose_density", "pack_bytes"]

ALLOWANCE = 1.1
"""A denser message is preferred while the predicted time is within 10 % of the shortest."""

WORTH = 0.5
"""Compression has to halve the exchange at least: it costs samples, and predictions err."""


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


@dataclass(frozen=True)
class CompressionChoice:
    """What to do, and the predictions that it rests on.

    Args:
        density: of block top-k, ``None`` for the dense sum.
        dense_seconds: predicted seconds of the dense sum.
        seconds: predicted seconds of block top-k at each density.
    """

    density: float | None
    dense_seconds: float
    seconds: tuple[tuple[float, float], ...]

    def describe(self) -> str:
        """One line for the log."""
        chosen = "dense sums" if self.density is None else f"block top-k at density {self.density:g}"
        listing = ", ".join(f"{density:g}: {1e3 * seconds:.3g} ms" for density, seconds in self.seconds)
        return f"{chosen}, because dense takes {1e3 * self.dense_seconds:.3g} ms a step and densities {listing}"


def pack_bytes(numel: int, density: float, world_size: int, value_dtype: str = "bfloat16") -> float:
    """Bytes of one rank's message, blocks of 16: ``density / N`` of the blocks, values and 2 bytes of index each.

    Example:
        >>> pack_bytes(1_600_000, 0.01, 2)
        17000.0
    """
    blocks = numel / 16 * density / (1 if density >= 1 else world_size)
    return blocks * (VALUE_DTYPES[value_dtype] + 2)


def choose_density(
    measured: LinkMeasurement, densities: Sequence[float], value_dtype: str = "bfloat16"
) -> CompressionChoice:
    """The densest of the fastest: dense sums unless compression is predicted to halve the exchange.

    Among densities within 10 % of the shortest predicted time, the largest: more of the gradient at the same price.

    Example:
        >>> thin = LinkMeasurement(1e-3, 12.5e6, 0.01, world_size=2, numel=10_000_000)
        >>> choose_density(thin, [0.001, 0.01, 0.1]).density
        0.001
        >>> thick = LinkMeasurement(1e-4, 5e9, 0.5, world_size=2, numel=10_000_000)
        >>> choose_density(thick, [0.001, 0.01, 0.1]).density is None
        True
    """
    seconds = tuple((d, measured.compressed_seconds(d, value_dtype)) for d in sorted(densities))
    shortest = min(s for _, s in seconds)
    chosen = max(d for d, s in seconds if s <= ALLOWANCE * shortest)
    dense = measured.dense_seconds
    return CompressionChoice(chosen if dict(seconds)[chosen] <= WORTH * dense else None, dense, seconds)
