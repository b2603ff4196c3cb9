"""Streams of the factors on all times of a step, those that each device's profile and seed give, for all at once."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_hetero.simulate.devices.device_profile import Device, DeviceProfile

__all__ = ["DisturbedFactors", "FactorStream", "Factors", "ProfileFactors"]

Array = npt.NDArray[np.float64]

BLOCK = 64
"""Passes that are drawn at a time."""


@dataclass(frozen=True)
class Factors:
    """Factors on the times of some steps.

    Args:
        slow: of each worker's speed, without jitter, shape ``(steps, workers)``: the optimum follows these.
        devices: on ``a`` and ``P`` of each worker, ``slow`` included, shape ``(steps, workers, 2)``.
        link: on the seconds of the all-reduces, shape ``(steps,)``.
        first: on the measured time until the first bucket, shape ``(steps, workers)``; ``None`` if it is exact.
    """

    slow: Array
    devices: Array
    link: Array
    first: Array | None = None


class FactorStream(Protocol):
    """Source of the factors of a run."""

    def take(self, steps: int) -> Factors:
        """Return the factors of the next steps."""

    def slow(self) -> Array:
        """Return the factor of each worker's speed in the next step, without jitter, as far as it is known."""

    def change(self, stay: Mapping[int, int], devices: Sequence[Device], seeds: Sequence[int]) -> None:
        """Go on with other devices.

        Args:
            stay: place of each device that stays, by its former one.
            devices: profiles of all devices from now on.
            seeds: seed of each of them if it is new.
        """


class ProfileFactors:
    """Factors of device profiles: the same numbers as their :meth:`~DeviceProfile.factors` with the same seeds.

    Other devices have none.

    Args:
        devices: profiles.
        seeds: seed of each device.
        link_jitter: relative standard deviation of the link's factor.
        link_seed: seed of the link.

    Example:
        >>> device = DeviceProfile(0.001, 0, 0.002, 0, jitter=0.1)
        >>> factors = ProfileFactors([device], [5]).take(1).devices[0, 0]
        >>> factors.tolist() == list(next(device.factors(5)))
        True
    """

    def __init__(
        self, devices: Sequence[Device], seeds: Sequence[int], link_jitter: float = 0.0, link_seed: int = 0
    ) -> None:
        self._streams = [_DeviceStream(device, seed) for device, seed in zip(devices, seeds, strict=True)]
        self._link_jitter, self._link = link_jitter, np.random.default_rng([link_seed, 2])

    def take(self, steps: int) -> Factors:
        """Return the factors of the next steps."""
        slow, devices = np.ones((steps, len(self._streams))), np.ones((steps, len(self._streams), 2))
        for i, stream in enumerate(self._streams):
            if not stream.constant:
                slow[:, i], devices[:, i] = stream.take(steps)
        link = np.ones(steps)
        if self._link_jitter:
            link = _log_normal(self._link.standard_normal(steps), self._link_jitter)
        return Factors(slow, devices, link)

    def slow(self) -> Array:
        """Return the slowdown of each device in its next pass."""
        return np.array([stream.slow for stream in self._streams])

    def change(self, stay: Mapping[int, int], devices: Sequence[Device], seeds: Sequence[int]) -> None:
        """Go on with other devices; arguments as for :meth:`FactorStream.change`."""
        kept = {there: self._streams[before] for before, there in stay.items()}
        pairs = enumerate(zip(devices, seeds, strict=True))
        self._streams = [kept[i] if i in kept else _DeviceStream(device, seed) for i, (device, seed) in pairs]


class DisturbedFactors:
    """Factors of another stream, times those that functions give for every step.

    Args:
        stream: that is disturbed.
        workers: number of workers.
        noise: returns the factors of a step on the times of the workers, shape ``(workers,)``, or on ``a`` and ``P`` of
            each, ``(workers, 2)``; called once a step, with random numbers, the step and the number of workers.
        slowdown: returns how many times as long each worker takes in a step, which the optimum follows.
        seed: of the random numbers.

    Example:
        >>> still = ProfileFactors([DeviceProfile(0.001, 0, 0.002, 0)] * 2, [0, 1])
        >>> stalls = DisturbedFactors(still, 2, noise=lambda rng, step, workers: [1.0, 3.0 if step == 1 else 1.0])
        >>> stalls.take(2).devices.tolist()
        [[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [3.0, 3.0]]]
    """

    def __init__(
        self,
        stream: FactorStream,
        workers: int,
        noise: Callable[[np.random.Generator, int, int], Any] | None = None,
        slowdown: Callable[[int], Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._stream, self._workers, self._noise, self._slowdown = stream, workers, noise, slowdown
        self._rng, self._step = np.random.default_rng([seed, 4]), 0

    def take(self, steps: int) -> Factors:
        """Return the factors of the next steps."""
        found, at = self._stream.take(steps), range(self._step, self._step + steps)
        slow = np.stack([self._slow(step) for step in at])
        noise = np.stack([self._noise_of(step) for step in at])
        self._step += steps
        return replace(found, slow=found.slow * slow, devices=found.devices * slow[:, :, None] * noise)

    def slow(self) -> Array:
        """Return the slowdown of each worker in the next step."""
        return self._stream.slow() * self._slow(self._step)

    def change(self, stay: Mapping[int, int], devices: Sequence[Device], seeds: Sequence[int]) -> None:
        """Go on with other devices; arguments as for :meth:`FactorStream.change`."""
        self._stream.change(stay, devices, seeds)
        self._workers = len(devices)

    def _slow(self, step: int) -> Array:
        given = 1.0 if self._slowdown is None else self._slowdown(step)
        return _checked_factors("slowdown", given, (self._workers,), step)

    def _noise_of(self, step: int) -> Array:
        given = np.asarray(1.0 if self._noise is None else self._noise(self._rng, step, self._workers), dtype=float)
        given = given[:, None] if given.ndim == 1 else given
        return _checked_factors("noise", given, (self._workers, 2), step)


def _checked_factors(name: str, given: Any, shape: tuple[int, ...], step: int) -> Array:
    """Return the factors that a function has given, in this shape.

    Raises:
        ValueError: if they are of another shape, or not finite and above 0.
    """
    found = np.asarray(given, dtype=float)
    with suppress(ValueError):  # another shape
        if (np.isfinite(found) & (found > 0)).all():
            return np.broadcast_to(found, shape)
    raise ValueError(
        f"{name} gives {given!r} for step {step}; it has to give finite factors above 0, one for each of {shape[0]} "
        "workers."
    )


class _DeviceStream:
    """Factors of one device, drawn in blocks."""

    def __init__(self, profile: Device, seed: int) -> None:
        if not isinstance(profile, DeviceProfile):
            self.constant = True
            return
        self.profile, self.constant = profile, not (profile.jitter or profile.round_jitter or profile.slowdown)
        if not self.constant:
            self._single, self._shared = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self._passage, self._rounds, self._drawn = 0, np.ones(0), np.ones((0, 2))

    @property
    def slow(self) -> float:
        """Slowdown of the next pass."""
        return 1.0 if self.constant else self.profile.slowdown_at(self._passage)

    def take(self, steps: int) -> tuple[Array, Array]:
        """Return the slowdown, and both factors, of the next passes."""
        slow, passages = _slowdowns(self.profile, self._passage, steps), self._passage + np.arange(steps)
        of_round = slow
        if self.profile.round_jitter:
            of_round = slow * self._of_rounds(passages // self.profile.round_passes)
        self._passage += steps
        return slow, of_round[:, None] * self._singles(steps)

    def _singles(self, steps: int) -> Array:
        if not self.profile.jitter:
            return np.ones((steps, 2))
        missing = steps - len(self._drawn)
        if missing > 0:
            z = self._single.standard_normal((-(-missing // BLOCK) * BLOCK, 2))
            self._drawn = np.concatenate([self._drawn, _log_normal(z, self.profile.jitter)])
        taken, self._drawn = self._drawn[:steps], self._drawn[steps:]
        return taken

    def _of_rounds(self, rounds: npt.NDArray[np.int64]) -> Array:
        missing = int(rounds[-1]) + 1 - len(self._rounds)
        if missing > 0:
            more = _log_normal(self._shared.standard_normal(missing), self.profile.round_jitter)
            self._rounds = np.concatenate([self._rounds, more])
        return self._rounds[rounds]


def _log_normal(z: Array, deviation: float) -> Array:
    """Return log-normal factors of mean 1 and this relative standard deviation from standard normal numbers."""
    variance = np.log1p(deviation**2)
    return np.asarray(np.exp(z * np.sqrt(variance) - 0.5 * variance))


def _slowdowns(profile: DeviceProfile, first: int, steps: int) -> Array:
    """Return :meth:`DeviceProfile.slowdown_at` of the passes from ``first`` on."""
    if not profile.slowdown:
        return np.ones(steps)
    trace = {0: 1.0, **dict(profile.slowdown)}
    at, factors = np.array(list(trace)), np.array(list(trace.values()))
    passages = first + np.arange(steps)
    last = np.searchsorted(at, passages, side="right") - 1
    if not profile.gradual:
        return np.asarray(factors[last])
    following = np.minimum(last + 1, len(at) - 1)
    part = (passages - at[last]) / np.maximum(at[following] - at[last], 1)
    return np.asarray(factors[last] + part * (factors[following] - factors[last]))
