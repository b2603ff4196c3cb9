"""Profile of a device: how long it computes for a batch (C eq. 3), its memory bound, its jitter and its slowdowns."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.step_time import NodeTimeModel
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["Device", "DeviceProfile"]

Array = npt.NDArray[np.float64]


class Device(Protocol):
    """Any device, by the time that it takes for a batch: with tiles, steps, limits of its memory bandwidth.

    Neither part may take less time for more samples: the optimum is searched for under that. A device may have
    ``memory``, the most samples of a batch, and a ``name``.
    """

    def times(self, batch_size: int) -> tuple[float, float]:
        """Return the seconds outside of the backward pass, and in it."""


@checked_keywords
@dataclass(frozen=True)
class DeviceProfile:
    """Time that a device takes for a batch of ``b`` samples (C eq. 3), with all that disturbs it.

    ``a = q b + s`` outside of the backward pass (load, forward, update), ``P = k b + m`` in it. In pass ``t``, both are
    multiplied by the slowdown at ``t``, by a factor for the round of passes that ``t`` belongs to, and each by a factor
    of its own. The factors are log-normal with mean 1 and depend on the seed only, so that an emulated and a simulated
    device with the same profile and seed take the same times.

    Args:
        q: seconds per sample outside of the backward pass, ``>= 0``.
        s: fixed seconds outside of the backward pass, ``>= 0``.
        k: seconds per sample in the backward pass, ``>= 0``.
        m: fixed seconds in the backward pass, ``>= 0``.
        memory: most samples of one batch that fit into memory, ``None`` for no bound.
        jitter: relative standard deviation of each time, ``>= 0``.
        round_jitter: relative standard deviation of a factor that all passes of a round share, ``>= 0``.
        round_passes: passes of such a round, ``>= 1``.
        slowdown: ``{pass: factor}``: from that pass on, the device takes ``factor`` times as long (above 0). A share of
            a half that is taken away in pass 100 and given back in pass 200 is ``{100: 2.0, 200: 1.0}``.
        gradual: whether the slowdown moves along straight lines from each given pass to the next (drift) instead of in
            steps. The factor is 1 in pass 0 if it is not given.
        name: of the device.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range; it is named.

    Example:
        >>> gpu = DeviceProfile(q=0.001, s=0.01, k=0.002, m=0.02, slowdown={100: 2.0}, name="a GPU")
        >>> round(gpu.seconds(10), 6), gpu.slowdown_at(99), gpu.slowdown_at(100)
        (0.06, 1.0, 2.0)
    """

    q: float
    s: float
    k: float
    m: float
    memory: int | None = None
    jitter: float = 0.0
    round_jitter: float = 0.0
    round_passes: int = 8
    slowdown: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    gradual: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("q", "s", "k", "m", "jitter", "round_jitter"):
            object.__setattr__(self, field, check_number(field, getattr(self, field), low=0.0))
        check_int("round_passes", self.round_passes, minimum=1)
        if self.memory is not None:
            check_int("memory", self.memory, minimum=1)
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string, such as 'A100'.")
        if not isinstance(self.gradual, bool):
            raise TypeError(f"gradual={self.gradual!r} must be True or False.")
        object.__setattr__(self, "slowdown", _checked_slowdown(self.slowdown))

    @property
    def model(self) -> NodeTimeModel:
        """Time model of the undisturbed device, as a planner would learn it."""
        return NodeTimeModel(self.q, self.s, self.k, self.m)

    def times(self, batch_size: int) -> tuple[float, float]:
        """Return ``a`` and ``P`` of the undisturbed device.

        Example:
            >>> DeviceProfile(q=0.5, s=1.0, k=1.0, m=2.0).times(4)
            (3.0, 6.0)
        """
        return self.q * batch_size + self.s, self.k * batch_size + self.m

    def seconds(self, batch_size: float) -> float:
        """Return ``a + P`` of the undisturbed device.

        Raises:
            ValueError: if the batch size is negative.
        """
        return self.model.compute_time(check_number("batch_size", batch_size, low=0.0))

    def slowdown_at(self, passage: int) -> float:
        """Return how many times as long the device takes in a pass, counted from 0, because of its slowdown."""
        at, factors = self._trace()
        last = bisect_right(at, passage) - 1
        if not self.gradual or last + 1 == len(at):
            return factors[last]
        part = (passage - at[last]) / (at[last + 1] - at[last])
        return factors[last] + part * (factors[last + 1] - factors[last])

    def _trace(self) -> tuple[list[int], list[float]]:
        trace = {0: 1.0, **dict(self.slowdown)}
        return list(trace), list(trace.values())

    def factors(self, seed: int = 0) -> Iterator[tuple[float, float]]:
        """Return an endless iterator of the factors on ``a`` and on ``P`` in each pass.

        Args:
            seed: of the random numbers, ``>= 0``; a different one for each device.

        Example:
            >>> factors = DeviceProfile(0.001, 0, 0.001, 0, slowdown={1: 2.0}).factors()
            >>> next(factors), next(factors)
            ((1.0, 1.0), (2.0, 2.0))
        """
        check_int("seed", seed, minimum=0)
        return self._times(np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1]))

    def _times(self, single: np.random.Generator, shared: np.random.Generator) -> Iterator[tuple[float, float]]:
        passage, of_round = 0, 1.0
        while True:
            if passage % self.round_passes == 0:
                of_round = float(_log_normal(shared.standard_normal(1), self.round_jitter)[0])
            now = self.slowdown_at(passage) * of_round
            forward, backward = now * _log_normal(single.standard_normal(2), self.jitter)
            yield float(forward), float(backward)
            passage += 1


def _log_normal(z: Array, deviation: float) -> Array:
    """Return log-normal factors of mean 1 and this relative standard deviation from standard normal numbers."""
    variance = np.log1p(deviation**2)
    return np.asarray(np.exp(z * np.sqrt(variance) - 0.5 * variance))


def _checked_slowdown(slowdown: object) -> tuple[tuple[int, float], ...]:
    """Return the pairs of pass and factor, in the order of passes."""
    try:
        pairs = list(slowdown.items() if isinstance(slowdown, Mapping) else slowdown)  # type: ignore[call-overload]
        found = {check_int("a pass of slowdown", at, minimum=0): factor for at, factor in pairs}
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"slowdown={slowdown!r} must map passes (0, 1, ...) to factors, as {{100: 2.0, 200: 1.0}} does: {error}"
        ) from None
    if len(found) < len(pairs):
        raise ValueError(f"slowdown={slowdown!r} gives a pass twice; give each once.")
    checked = {at: check_number(f"slowdown[{at}]", f, low=0.0, high=inf, include_low=False) for at, f in found.items()}
    return tuple(sorted(checked.items()))
