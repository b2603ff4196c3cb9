"""Posterior of the time models of all workers, which follows changing speeds.

Each worker has a Gaussian state ``theta = (q, s, k, m)`` of ``a = q b + s`` and ``P = k b + m`` (C eq. 3). At each sync
round a Kalman filter updates it from the mean times of the worker's steps:

``(a, P) = H(b) theta + noise``, ``R = diag(sigma_a^2 a^2, sigma_P^2 P^2) / steps + rho^2 (a, P)(a, P)^T``

``sigma`` is the measured noise of single steps. ``rho`` is the noise common to all steps of a sync round (another
process, a clock, a quota). Between rounds a speed walks: ``Q = omega^2 theta theta^T`` scales all four coefficients
together, which preserves the shape of a worker's line. ``rho`` and ``omega`` are unknown and differ from machine to
machine, so several pairs are filtered side by side and weighted by how well they predict (a bank of filters, weighted
by likelihood). Each filter also allows for a jump of the speed between two rounds. No coefficient is negative: the
likelihood penalizes updates that would make one so. Old observations fade through the growth of the covariance;
estimates are never rescaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.filters.filter_bank import (
    first_state,
    step_filters,
    switch_filters,
    usual_weight,
    weigh_filters,
)
from lightning_hetero.core.timing.filters.kalman import mixed, non_negative
from lightning_hetero.core.timing.step_jitter import relative_variance, summarise_round
from lightning_hetero.core.timing.times import EstimatorSettings, Times

__all__ = ["TimePosterior"]

Array = npt.NDArray[np.float64]
Rows = slice | list[int]

_ARRAYS = ("mean", "covariance", "weight", "jitter", "seen")
_BY_FILTER = ("mean", "covariance", "weight")  # first by filter, then by worker
_KEYS = {"jitter": "scatter"}  # names in checkpoints, where they differ


@dataclass(frozen=True, eq=False)
class TimePosterior:
    """Posterior of the speed of every piece of hardware; replaced, never changed in place.

    Args:
        names: hardware identities, in the order of the arrays' workers.
        mean: ``theta`` of each filter and worker, shape ``(filters, workers, 4)``.
        covariance: covariance of ``theta``, shape ``(filters, workers, 4, 4)``.
        weight: probability of each filter for each worker, by how well it has predicted, shape ``(filters, workers)``.
        jitter: fading sums of squared relative deviations of single steps outside of and in backward, their degrees of
            freedom, odd steps, and all steps, shape ``(workers, 5)``.
        seen: least and greatest size at which each worker was seen, shape ``(workers, 2)``.
        jumped: workers whose speed jumped before the newest round.
        settings: of the estimator.

    Example:
        >>> sizes = np.array([[10.0, 10.0], [20.0, 20.0]] * 4)
        >>> zeros = np.zeros_like(sizes)
        >>> seen = StepObservations(sizes, 0.01 + 0.001 * sizes, 0.002 * sizes, zeros, zeros, zeros, zeros)
        >>> times = TimePosterior().observe(seen, ("a", "b")).times(("a", "b"))
        >>> times.mean.round(3).tolist()[0]
        [0.001, 0.01, 0.002, 0.0]
    """

    names: tuple[str, ...] = ()
    mean: Array = field(default_factory=lambda: np.zeros((0, 0, 4)))
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0, 4, 4)))
    weight: Array = field(default_factory=lambda: np.zeros((0, 0)))
    jitter: Array = field(default_factory=lambda: np.zeros((0, 5)))
    seen: Array = field(default_factory=lambda: np.zeros((0, 2)))
    jumped: frozenset[str] = frozenset()
    settings: EstimatorSettings = EstimatorSettings()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimePosterior) or (self.names, self.settings) != (other.names, other.settings):
            return False
        pairs = ((getattr(self, name), getattr(other, name)) for name in _ARRAYS)
        return self.jumped == other.jumped and all(np.array_equal(x, y) for x, y in pairs)

    __hash__ = None  # type: ignore[assignment]

    def knows(self, names: Sequence[str]) -> bool:
        """Return whether all of these pieces of hardware were observed."""
        return self.names == tuple(names) or set(self.names).issuperset(names)

    def observe(
        self, observations: StepObservations, names: Sequence[str], elapsed: float | None = None
    ) -> "TimePosterior":
        """Return the posterior after one more sync round.

        Args:
            observations: steps of the round.
            names: hardware identity of each worker.
            elapsed: steps since the round before; by default those that were observed.
        """
        if observations.num_steps == 0:
            return self
        known = self._with(names)
        rows, steps = known._rows(names), float(elapsed or observations.num_steps)
        known = replace(known, jumped=frozenset())
        outside, backward = observations.outside_backward, observations.backward
        for split, own in observations.splits():
            known = known._round(rows, np.maximum(split, 1.0), outside[own], backward[own], steps)
            steps = 0.0
        return known

    def _rows(self, names: Sequence[str]) -> Rows:
        if self.names == tuple(names):
            return slice(None)
        index = {name: i for i, name in enumerate(self.names)}
        return [index[name] for name in names]

    def _with(self, names: Sequence[str]) -> "TimePosterior":
        """Return the posterior with empty entries for new workers."""
        known = set(self.names)
        new = [name for name in names if name not in known]
        if not new:
            return self
        count, filters = len(new), len(self.settings.walks)
        old = [self.mean, self.covariance, self.weight] if self.names else [
            np.zeros((filters, 0, 4)), np.zeros((filters, 0, 4, 4)), np.zeros((filters, 0))
        ]  # fmt: skip
        return replace(
            self,
            names=(*self.names, *new),
            mean=np.concatenate([old[0], np.zeros((filters, count, 4))], axis=1),
            covariance=np.concatenate([old[1], np.zeros((filters, count, 4, 4))], axis=1),
            weight=np.concatenate([old[2], np.tile(usual_weight(old[2], self.settings)[:, None], (1, count))], axis=1),
            jitter=np.concatenate([self.jitter, np.zeros((count, 5))]),
            seen=np.concatenate([self.seen, np.zeros((count, 2))]),
        )

    def _round(self, rows: Rows, sizes: Array, forward: Array, backward: Array, elapsed: float) -> "TimePosterior":
        """Return the posterior after the steps of a round at one split.

        Args:
            rows: the round's workers among the known ones.
            sizes: samples of each worker.
            forward: seconds outside of backward, shape ``(steps, workers)``.
            backward: seconds in backward, same shape.
            elapsed: steps since the round before; 0 for a further split of the same round.
        """
        settings = self.settings
        y, variance, jitter = summarise_round(self.jitter[rows], forward, backward, settings)
        single = np.sqrt((relative_variance(jitter, settings) * y**2).sum(axis=1)) / y.sum(axis=1)
        rounds = np.array(settings.rounds)[:, None] * single + 0.001  # resolution of clocks
        seen = self.seen[rows]
        new = seen[:, 1] == 0
        mean, covariance = self.mean[:, rows].copy(), self.covariance[:, rows].copy()
        weight = self.weight[:, rows].copy()
        jumped = np.zeros(len(sizes), dtype=bool)
        if new.any():
            mean[:, new], covariance[:, new] = first_state(sizes[new], y[new], variance[new], rounds[:, new], settings)
        if not new.all():
            part = slice(None) if not new.any() else ~new
            if elapsed:
                mean[:, part], covariance[:, part], weight[:, part] = switch_filters(
                    mean[:, part], covariance[:, part], weight[:, part], settings
                )
            mean[:, part], covariance[:, part], likelihood, jump = step_filters(
                mean[:, part],
                covariance[:, part],
                sizes[part],
                y[part],
                variance[part],
                rounds[:, part],
                elapsed,
                settings,
            )
            weight[:, part] = weigh_filters(weight[:, part], likelihood, settings)
            jumped[part] = (weight[:, part] * jump).sum(axis=0) > 0.5
        low, high = np.where(new, sizes, np.minimum(seen[:, 0], sizes)), np.maximum(seen[:, 1], sizes)
        filters = (self.mean, mean), (self.covariance, covariance), (self.weight, weight)
        mean, covariance, weight = _replaced((slice(None), rows), *filters)
        jitter, seen = _replaced(rows, (self.jitter, jitter), (self.seen, np.stack([low, high], axis=1)))
        names = self.jumped.union(np.array(self.names)[rows][jumped].tolist())
        return replace(self, mean=mean, covariance=covariance, weight=weight, jitter=jitter, seen=seen, jumped=names)

    def times(self, names: Sequence[str], capacities: Sequence[float] = ()) -> Times:
        """Return the time models of these workers.

        A worker never observed gets the model of the known worker with the nearest capacity (the mean, of several),
        scaled by the ratio of capacities, with a wide covariance.

        Args:
            names: hardware identities.
            capacities: open-loop capacity of each (peak FLOP/s); equal by default.

        Raises:
            KeyError: if none of them was ever observed.
        """
        if self.knows(names):
            return self._known_times(self._rows(names))
        at = {name: i for i, name in enumerate(self.names)}
        known = [i for i, name in enumerate(names) if name in at]
        if not known:
            raise KeyError(f"none of the workers {list(names)} was observed.")
        found = self._known_times([at.get(name, at[names[known[0]]]) for name in names])
        power = np.log(np.asarray(capacities if len(capacities) else np.ones(len(names)), dtype=float))
        for i in sorted(set(range(len(names))) - set(known)):
            apart = np.abs(power[known] - power[i])
            like = np.array(known)[apart <= apart.min() + 0.01]
            mean = (found.mean[like] * np.exp(power[like] - power[i])[:, None]).mean(axis=0)
            found.mean[i] = mean
            found.covariance[i] = self.settings.jump**2 * np.outer(mean, mean) + np.diag((0.1 * mean) ** 2)
        return found

    def _known_times(self, rows: Rows) -> Times:
        weight = self.weight[:, rows]
        mean, covariance = mixed(weight, self.mean[:, rows], self.covariance[:, rows])
        mean, covariance = non_negative(mean, covariance)
        jitter = np.sqrt(relative_variance(self.jitter[rows], self.settings))
        walks, probability = np.array(self.settings.walks), weight.mean(axis=1)
        walking = walks > 4.0 * walks.min()
        likelier = 2.0 * float(probability[walking].sum()) - 1.0  # P(speeds walk) - P(speeds stand still)
        return Times(mean, covariance, jitter, walks, probability, max(likelier, 0.0))

    def sizes_seen(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the least and greatest size at which each worker was seen, shape ``(workers, 2)``."""
        return np.asarray(self.seen[self._rows(names)], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values by hardware identity, fit for any checkpoint."""
        return {
            name: {
                "mean": self.mean[:, i].tolist(),
                "covariance": self.covariance[:, i].tolist(),
                "weight": self.weight[:, i].tolist(),
                _KEYS["jitter"]: self.jitter[i].tolist(),
                "seen": self.seen[i].tolist(),
            }
            for i, name in enumerate(self.names)
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], settings: EstimatorSettings | None = None) -> "TimePosterior":
        """Return the posterior restored from :meth:`state_dict`; an empty one if it had another number of filters.

        Raises:
            ValueError: if an array has another shape, or a number is not finite.
        """
        settings = settings or EstimatorSettings()
        known = {name: worker for name, worker in state.items() if len(worker["weight"]) == len(settings.walks)}
        if not known:
            return cls(settings=settings)
        arrays: dict[str, Any] = {
            name: np.array([worker[_KEYS.get(name, name)] for worker in known.values()], dtype=float)
            for name in _ARRAYS
        }
        filters, empty = (len(settings.walks),), cls()
        for name, array in arrays.items():
            shape = (filters if name in _BY_FILTER else ()) + getattr(empty, name).shape[1 + (name in _BY_FILTER) :]
            if array.shape[1:] != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} of a worker has to be finite numbers of shape {shape}")
        for key in _BY_FILTER:
            arrays[key] = np.ascontiguousarray(arrays[key].swapaxes(0, 1))
        return cls(tuple(known), **arrays, settings=settings)


def _replaced(at: Rows | tuple[slice, Rows], *pairs: tuple[Array, Array]) -> list[Array]:
    """Return copies of the arrays with the given values at ``at``."""
    copies = [np.array(array) for array, _ in pairs]
    for copy, (_, values) in zip(copies, pairs, strict=True):
        copy[at] = values
    return copies
