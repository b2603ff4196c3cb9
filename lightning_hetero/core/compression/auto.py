"""Choice between the dense all-reduce and block top-k at each density, by predicted time to accuracy.

Step times follow the time model (C eq. 7). In a dense all-reduce, all buckets but the last can overlap with the
backward pass; selection and messages of block top-k begin after it and overlap with nothing. Where gradients may be
stale, all-reduces and messages overlap with a whole step of computing; selection does not. Each step time is multiplied
by the extra samples that its density costs (S eq. 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.compression.objective import density_penalty, time_to_accuracy
from lightning_hetero.core.compression.settings import VALUE_DTYPES
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.rounded import rounded
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, steps_that_tell

__all__ = ["CompressionChoice", "Computing", "LinkMeasurement", "choose_density", "pack_bytes"]


@checked_keywords
@dataclass(frozen=True)
class Computing:
    """Computing times of a step, of the slowest worker; zeros if nothing is known.

    Args:
        whole: seconds of load, forward, backward and update, ``a + P``.
        begun: of these, seconds before the first gradients are ready, ``a + gamma P``.
        last: share of a dense all-reduce that begins only after the backward pass, ``t_u / (t_o + t_u)``, 0 to 1.

    Example:
        >>> Computing.of(StepObservations.empty(2))
        Computing(whole=0.0, begun=0.0, last=1.0)
    """

    whole: float = 0.0
    begun: float = 0.0
    last: float = 1.0

    @classmethod
    def of(cls, seen: StepObservations) -> "Computing":
        """Estimate from observed steps with dense all-reduces, medians over steps.

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
        t_o, t_u = estimate_sync_times(seen.overlapped_sync, seen.last_sync, steps_that_tell(seen))
        whole, begun = np.median(seen.compute, axis=0), np.median(seen.outside_backward + gamma * seen.backward, axis=0)
        return cls(float(whole.max()), float(begun.max()), t_u / (t_o + t_u) if t_o + t_u > 0 else 1.0)


@dataclass(frozen=True)
class LinkMeasurement:
    """Measurements before training, the slowest rank's values.

    Args:
        latency: seconds of an exchange of a few bytes, ``>= 0``.
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
        """Seconds of the dense all-reduce: ``2 (N - 1) / N`` times the gradient's bytes, in ``2 (N - 1)`` rounds."""
        n = self.world_size
        return 2 * (n - 1) * self.latency + 2 * (n - 1) / n * self.numel * self.element_size / self.rate

    def message_seconds(self, density: float, value_dtype: str = "bfloat16") -> float:
        """Return the seconds of one message of block top-k to each other rank."""
        sent = (self.world_size - 1) * pack_bytes(self.numel, density, self.world_size, value_dtype)
        return self.latency + sent / self.rate

    def compressed_seconds(self, density: float, value_dtype: str = "bfloat16") -> float:
        """Return the seconds of block top-k: selection and messages."""
        return self.encode + self.message_seconds(density, value_dtype)

    def dense_step(self, computing: Computing, *, stale: bool = False) -> float:
        """Return the seconds of a step with the dense all-reduce: ``max(a + P + t_u, a + gamma P + t_o + t_u)``.

        Args:
            computing: of the step.
            stale: whether gradients may be stale: ``max(a + P, t_o + t_u)``.

        Example:
            >>> link = LinkMeasurement(latency=0.0, rate=1e6, encode=0.01, world_size=2, numel=1_000_000)
            >>> link.dense_step(Computing(3.0, 1.0, 0.5)), link.dense_step(Computing(3.0, 1.0, 0.5), stale=True)
            (5.0, 4.0)
        """
        exchange = self.dense_seconds
        if stale:
            return max(computing.whole, exchange)
        return max(computing.whole + computing.last * exchange, computing.begun + exchange)

    def compressed_step(self, density: float, value_dtype: str, computing: Computing, *, stale: bool = False) -> float:
        """Return the seconds of a step with block top-k.

        Args:
            density: share of all blocks that all ranks together send, above 0, to 1.
            value_dtype: type of values on the wire.
            computing: of the step.
            stale: whether gradients may be stale: the next step then computes and selects while they are in flight.

        Example:
            >>> link = LinkMeasurement(latency=0.0, rate=1e6, encode=0.01, world_size=2, numel=1_600_000)
            >>> [link.compressed_step(0.01, "bfloat16", Computing(0.02), stale=stale) for stale in (False, True)]
            [0.047, 0.03]
        """
        if stale:
            return max(computing.whole + self.encode, self.message_seconds(density, value_dtype))
        return computing.whole + self.compressed_seconds(density, value_dtype)


@dataclass(frozen=True)
class CompressionChoice:
    """Choice of a density, and the predictions that it rests on.

    Args:
        density: of block top-k, ``None`` for the dense all-reduce.
        dense_seconds: predicted seconds of a step with the dense all-reduce.
        seconds: predicted seconds of a step with block top-k at each density.
        computing: of these, seconds of computing.
        stale: whether all-reduces and messages may be in flight while the next step computes.

    Example:
        >>> CompressionChoice(0.01, 0.4, ((0.01, 0.1),), 0.05).describe().partition(",")[0]
        'block top-k at density 0.01'
    """

    density: float | None
    dense_seconds: float
    seconds: tuple[tuple[float, float], ...]
    computing: float = 0.0
    stale: bool = False

    def describe(self) -> str:
        """Return one line for the log."""
        chosen = "dense sums" if self.density is None else f"block top-k at density {self.density:g}"
        listing = ", ".join(
            f"{density:g}: {rounded(1e3 * seconds)} ms x {1.0 + density_penalty(density):.3g}"
            for density, seconds in self.seconds
        )
        meanwhile = " and hides what is sent" if self.stale else ""
        return (
            f"{chosen}, because dense takes {rounded(1e3 * self.dense_seconds)} ms a step and densities {listing}, "
            f"of which computing{meanwhile} takes {rounded(1e3 * self.computing)} ms"
        )


def pack_bytes(numel: int, density: float, world_size: int, value_dtype: str = "bfloat16") -> float:
    """Return the bytes of one message, blocks of 16: ``density / N`` of them, values and 2 bytes of index each.

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
    *,
    stale: bool = False,
    min_gain: float = 1.05,
) -> CompressionChoice:
    """Return the density of least ``(1 + g(density)) step(density)``; the dense all-reduce unless that gains 5 %.

    ``g`` is :func:`~lightning_hetero.core.compression.objective.density_penalty`, the cost of a density over a whole
    training. Staleness does not count: the user chose it, and dense gradients may be stale as well.

    Args:
        measured: of the link.
        densities: candidates, each above 0, to 1.
        value_dtype: type of values on the wire.
        computing: of a step.
        stale: whether gradients may be stale: then all-reduces and messages overlap with computing.
        min_gain: least ratio of dense to compressed time at which to compress, because predictions err.

    Example:
        >>> slow = LinkMeasurement(1e-3, 12.5e6, 0.01, world_size=2, numel=10_000_000)
        >>> choose_density(slow, [0.001, 0.01, 0.1]).density
        0.001
        >>> choose_density(slow, [0.001, 0.01, 0.1], computing=Computing(0.2, 0.1, 0.01), stale=True).density
        0.1
        >>> choose_density(slow, [0.001, 0.01, 0.1], computing=Computing(10.0, 1.0, 0.01)).density is None
        True
        >>> fast = LinkMeasurement(1e-4, 5e9, 0.5, world_size=2, numel=10_000_000)
        >>> choose_density(fast, [0.001, 0.01, 0.1]).density is None
        True
    """
    seconds = tuple((d, measured.compressed_step(d, value_dtype, computing, stale=stale)) for d in sorted(densities))
    dense = measured.dense_step(computing, stale=stale)
    objective, density = min((time_to_accuracy(1, s, density_penalty(d)), -d) for d, s in seconds)
    best = -density if min_gain * objective <= dense else None
    return CompressionChoice(best, dense, seconds, computing.whole, stale)
