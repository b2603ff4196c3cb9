"""Estimate the time models of all workers as one posterior that follows speeds which move.

Each worker has the state ``theta = (q, s, k, m)`` of ``a = q b + s`` and ``P = k b + m`` (Cannikin, eq. 3), Gaussian,
updated at each sync round by the Kalman filter from the mean times of its steps:

``(a, P) = H(b) theta + noise``, ``R = diag(sigma_a^2 a^2, sigma_P^2 P^2) / steps + rho^2 (a, P)(a, P)^T``

``sigma`` is the scatter of single steps, measured. ``rho`` is what all steps of a sync round share (another process, a
clock, a quota). Between rounds a speed walks: ``Q = omega^2 theta theta^T`` scales all four coefficients together, so
that the shape of a worker's line survives. ``rho`` and ``omega`` are unknown and differ from machine to machine:
several pairs are filtered side by side, and how well each predicts says how much it counts (a bank of filters, weighted
by likelihood). Each filter also allows for a jump of the speed between two rounds. No coefficient is negative: what
would make one so is unlikely by as much. What no longer fits is forgotten by its weight in the covariance; nothing is
ever rescaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.kalman import gain_of, mixed, non_negative, possible, surprise, update
from lightning_hetero.core.timing.times import WALK_STEPS, EstimatorSettings, Times
from lightning_hetero.core.timing.winsorized_mean import WINSORIZED_SHARE, num_winsorized, winsorize_top

__all__ = ["TimePosterior"]

Array = npt.NDArray[np.float64]

_ARRAYS = ("mean", "covariance", "weight", "scatter", "seen")
MIN_PROBABILITY = 1e-100
"""Least probability of a filter: it may be as unlikely as one likes, but nothing divides by zero."""


@dataclass(frozen=True, eq=False)
class TimePosterior:
    """What is known of the speed of every piece of hardware; replaced, never changed in place.

    Args:
        names: hardware identities, in the order of the arrays' workers.
        mean: ``theta`` of each filter and worker, shape ``(filters, workers, 4)``.
        covariance: of these, shape ``(filters, workers, 4, 4)``.
        weight: probability of each filter for each worker, by how well it has predicted, shape ``(filters, workers)``.
        scatter: sums of squared relative deviations of single steps outside of and in backward, their degrees of
            freedom, odd steps, and all steps, shape ``(workers, 5)``; fading.
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
    scatter: Array = field(default_factory=lambda: np.zeros((0, 5)))
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
        """Whether all of these pieces of hardware were observed."""
        return self.names == tuple(names) or set(self.names).issuperset(names)

    def observe(
        self, observations: StepObservations, names: Sequence[str], elapsed: float | None = None
    ) -> "TimePosterior":
        """The posterior after one more sync round.

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
        for split, own in observations.splits():
            known = known._round(
                rows,
                np.maximum(split, 1.0),
                observations.outside_backward[own],
                observations.backward[own],
                steps,
            )
            steps = 0.0
        return known

    def _rows(self, names: Sequence[str]) -> Any:
        if self.names == tuple(names):
            return slice(None)
        index = {name: i for i, name in enumerate(self.names)}
        return [index[name] for name in names]

    def _with(self, names: Sequence[str]) -> "TimePosterior":
        """With room for workers that are new."""
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
            weight=np.concatenate([old[2], np.tile(self._usual(old[2])[:, None], (1, count))], axis=1),
            scatter=np.concatenate([self.scatter, np.zeros((count, 5))]),
            seen=np.concatenate([self.seen, np.zeros((count, 2))]),
        )

    def _round(self, rows: Any, sizes: Array, forward: Array, backward: Array, elapsed: float) -> "TimePosterior":
        """With the steps of a round at one split."""
        y, variance, scatter = self._summary(self.scatter[rows], forward, backward)
        single = np.sqrt((self._scatter(scatter) * y**2).sum(axis=1)) / y.sum(axis=1)
        rounds = np.array(self.settings.rounds)[:, None] * single + 0.001  # clocks
        seen = self.seen[rows]
        new = seen[:, 1] == 0
        mean, covariance = self.mean[:, rows].copy(), self.covariance[:, rows].copy()
        weight = self.weight[:, rows].copy()
        jumped = np.zeros(len(sizes), dtype=bool)
        if new.any():
            mean[:, new], covariance[:, new] = self._first(sizes[new], y[new], variance[new], rounds[:, new])
        if not new.all():
            part = slice(None) if not new.any() else ~new
            if elapsed:
                mean[:, part], covariance[:, part], weight[:, part] = self._switched(
                    mean[:, part], covariance[:, part], weight[:, part]
                )
            mean[:, part], covariance[:, part], likelihood, jump = self._update(
                mean[:, part], covariance[:, part], sizes[part], y[part], variance[part], rounds[:, part], elapsed
            )
            weight[:, part] = self._weighed(weight[:, part], likelihood)
            jumped[part] = (weight[:, part] * jump).sum(axis=0) > 0.5
        everyone = [np.array(x) for x in (self.mean, self.covariance, self.weight, self.scatter, self.seen)]
        everyone[0][:, rows], everyone[1][:, rows], everyone[2][:, rows] = mean, covariance, weight
        everyone[3][rows] = scatter
        low = np.where(new, sizes, np.minimum(seen[:, 0], sizes))
        everyone[4][rows] = np.stack([low, np.maximum(seen[:, 1], sizes)], axis=1)
        return replace(
            self,
            mean=everyone[0],
            covariance=everyone[1],
            weight=everyone[2],
            scatter=everyone[3],
            seen=everyone[4],
            jumped=self.jumped | {name for name, so in zip(np.array(self.names)[rows], jumped, strict=True) if so},
        )

    def _weighed(self, weight: Array, likelihood: Array) -> Array:
        """Probability of each filter after a round, by how well it has predicted each worker, and all of them.

        Rounds scatter and speeds walk for reasons that workers often share (a machine, a room, a kind of device). So a
        filter that has predicted most of them well counts more for each: a factor on each filter that all workers have
        in common, fitted to the round by expectation maximisation.
        """
        likely, count = np.exp(np.maximum(likelihood - likelihood.max(axis=0), -8.0)), self.settings.prior_workers
        before = weight.sum(axis=1) + count * weight.mean(axis=1)
        factor = np.ones(len(weight))
        for _ in range(5):
            after = weight * factor[:, None] * likely
            after /= after.sum(axis=0)
            factor = (after.sum(axis=1) + count * weight.mean(axis=1)) / before
        return np.asarray(np.maximum(after, MIN_PROBABILITY))

    def _summary(self, scatter: Array, forward: Array, backward: Array) -> tuple[Array, Array, Array]:
        """Mean times, their relative variance, and the scatter of single steps with this round."""
        count = len(forward)
        usual = np.sqrt(self._scatter(scatter))
        rare = (scatter[:, 2] >= self.settings.own_scatter_steps) & (scatter[:, 3] <= WINSORIZED_SHARE * scatter[:, 4])
        limits = [
            np.where(rare, (1.0 + self.settings.odd * usual[:, i]) * np.median(x, axis=0), np.inf)
            for i, x in enumerate((forward, backward))
        ]
        odd = ((forward > limits[0]) | (backward > limits[1])).sum(axis=0)
        a, p = winsorize_top(np.minimum(forward, limits[0])), winsorize_top(np.minimum(backward, limits[1]))
        y = np.stack([a.mean(axis=0), p.mean(axis=0)], axis=1)
        y = np.maximum(y, np.maximum(self.settings.least_part * y.sum(axis=1, keepdims=True), 1e-9))
        free = max(count - 1 - 1.5 * num_winsorized(count), 0.0)  # degrees of freedom: what is capped scatters less
        squares = np.stack([((x - x.mean(axis=0)) ** 2).sum(axis=0) for x in (a, p)], axis=1) / y**2
        others = np.median(squares, axis=0) / max(free, 0.5)
        before = np.where(scatter[:, 2:3] >= self.settings.own_scatter_steps, usual**2, others)
        squares = np.minimum(squares, 9.0 * np.maximum(before, others) * max(free, 0.5))
        steps = np.stack([np.full(len(y), free), odd, np.full(len(y), float(count))], axis=1)
        fade = np.minimum(1.0, self.settings.scatter_memory / np.maximum(scatter[:, 4:] + count, 1.0))
        scatter = fade * (scatter + np.concatenate([squares, steps], axis=1))
        wide = self.settings.wide * squares / max(free, 0.5)
        variance = np.maximum(np.maximum(self._scatter(scatter), wide), 1e-6) / count
        return y, variance, scatter

    def _scatter(self, scatter: Array) -> Array:
        """Squared relative scatter of single steps: each worker's own, as far as it is known, else that of all."""
        squares, steps = scatter[:, :2], scatter[:, 2:3]
        own = squares / np.maximum(steps, 0.5)
        usual = np.minimum(own, 4.0 * np.median(own, axis=0) + 1e-12)
        prior = self.settings.scatter_steps
        shared = ((usual * steps).sum(axis=0) + prior * self.settings.scatter**2) / (steps.sum() + prior)
        count = self.settings.own_scatter_steps
        return np.asarray((squares + count * shared) / (steps + count))

    def _first(self, b: Array, y: Array, variance: Array, rounds: Array) -> tuple[Array, Array]:
        """Workers seen for the first time: all of their time in proportion, give or take the fixed share."""
        count, filters = len(b), len(self.settings.walks)
        mean = np.zeros((filters, count, 4))
        mean[:, :, 0], mean[:, :, 2] = y[:, 0] / b, y[:, 1] / b
        covariance = np.zeros((filters, count, 4, 4))
        rounds = rounds**2
        fixed = self.settings.fixed_share**2
        for phase in (0, 1):
            i, t2 = 2 * phase, y[:, phase] ** 2
            covariance[:, :, i, i] = t2 * (fixed + variance[:, phase] + rounds) / b**2
            covariance[:, :, i + 1, i + 1] = t2 * fixed
            covariance[:, :, i, i + 1] = covariance[:, :, i + 1, i] = -t2 * fixed / b
        common = rounds * (y[:, 0] * y[:, 1] / b**2)
        covariance[:, :, 0, 2] += common
        covariance[:, :, 2, 0] += common
        return mean, covariance

    def _update(
        self, mean: Array, covariance: Array, b: Array, y: Array, variance: Array, rounds: Array, elapsed: float
    ) -> tuple[Array, Array, Array, Array]:
        """One step of each filter: mean, covariance, logarithm of the likelihood, and probability of a jump before."""
        walks = np.array(self.settings.walks)[:, None]
        theta = np.maximum(mean, 0.0)
        spread = (walks**2 * (elapsed / WALK_STEPS))[..., None, None]
        covariance = covariance + spread * (theta[..., :, None] * theta[..., None, :])
        diagonal = np.einsum("fnii->fni", covariance)
        size = np.stack([y[:, 0] / b, y[:, 0], y[:, 1] / b, y[:, 1]], axis=1)  # of a coefficient that is all there is
        diagonal += (self.settings.shape_walk * walks[..., None] * size) ** 2 * (elapsed / WALK_STEPS)
        gain = gain_of(covariance, b)  # P H^T, (filters, workers, 4, 2)
        expected = np.stack([mean[..., 0] * b + mean[..., 1], mean[..., 2] * b + mean[..., 3]], axis=-1)
        scale = np.clip(expected, y / 2.0, y * 2.0)
        noise = rounds[..., None, None] ** 2 * scale[..., :, None] * scale[..., None, :]
        noise[..., 0, 0] += variance[:, 0] * scale[..., 0] ** 2
        noise[..., 1, 1] += variance[:, 1] * scale[..., 1] ** 2
        off = y - expected
        stayed = update(mean, covariance, gain, noise, off, b)
        level = stayed[2] + possible(stayed[0], stayed[1]) - possible(mean, covariance)
        odd = surprise(gain, noise, off, b) - 2.0 * possible(stayed[0], stayed[1]) > self.settings.gate
        chance, jump = self.settings.jump_probability, np.zeros(odd.shape)
        if not odd.any():
            return stayed[0], stayed[1], level + np.log1p(-chance), jump
        at = np.nonzero(odd)
        b_at, theta_at = b[at[1]], np.maximum(theta[at], 1e-3 * size[at[1]])
        wide = covariance[at] + self.settings.jump**2 * theta_at[:, :, None] * theta_at[:, None, :]
        np.einsum("nii->ni", wide)[...] += (self.settings.reshape * size[at[1]]) ** 2
        jumped = update(mean[at], wide, gain_of(wide, b_at), noise[at], off[at], b_at)
        jumps = jumped[2] + possible(jumped[0], jumped[1]) - possible(mean[at], wide)
        logs = np.stack([level[at] + np.log1p(-chance), jumps + np.log(chance)])
        top = logs.max(axis=0)
        weight = np.exp(logs - top)
        level = level + np.log1p(-chance)
        level[at] = top + np.log(weight.sum(axis=0))
        weight /= weight.sum(axis=0)
        means, covariances = np.stack([stayed[0][at], jumped[0]]), np.stack([stayed[1][at], jumped[1]])
        stayed[0][at], stayed[1][at] = mixed(weight, means, covariances)
        jump[at] = weight[1]
        return stayed[0], stayed[1], level, jump

    def _usual(self, weight: Array) -> Array:
        """Probability of each filter for a worker, by what holds for the others, shape ``(filters,)``."""
        prior, count = np.maximum(self.settings.prior, MIN_PROBABILITY), max(self.settings.prior_workers, 1e-9)
        return np.asarray((weight.sum(axis=1) + count * prior / prior.sum()) / (weight.shape[1] + count))

    def _switched(self, mean: Array, covariance: Array, weight: Array) -> tuple[Array, Array, Array]:
        """The filters before another round: each may be right from now on for a worker that others have followed.

        Then it goes on from where those are (interacting multiple models; Blom and Bar-Shalom, 1988).
        """
        arrives = self.settings.switch * self._usual(weight)[:, None]
        stays = (1.0 - self.settings.switch) * weight
        after = stays + arrives
        own, other = stays / after, arrives / after
        all_mean, all_covariance = mixed(weight, mean, covariance)
        middle = own[..., None] * mean + other[..., None] * all_mean
        x, z = mean - middle, all_mean - middle
        inner = own[..., None, None] * (covariance + x[..., :, None] * x[..., None, :])
        inner += other[..., None, None] * (all_covariance + z[..., :, None] * z[..., None, :])
        return middle, inner, after

    def times(self, names: Sequence[str], capacities: Sequence[float] = ()) -> Times:
        """Time models of these workers.

        One that was never observed is taken for the known worker of the nearest capacity (the mean, of several), slower
        or faster by the ratio of both, and hardly anything is certain of it.

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

    def _known_times(self, rows: Any) -> Times:
        weight = self.weight[:, rows]
        mean, covariance = mixed(weight, self.mean[:, rows], self.covariance[:, rows])
        mean, covariance = non_negative(mean, covariance)
        scatter = np.sqrt(self._scatter(self.scatter[rows]))
        walks, probability = np.array(self.settings.walks), weight.mean(axis=1)
        walking = walks > 4.0 * walks.min()
        likelier = 2.0 * float(probability[walking].sum()) - 1.0  # than that speeds stand still
        return Times(mean, covariance, scatter, walks, probability, max(likelier, 0.0))

    def sizes_seen(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Least and greatest size at which each worker was seen, shape ``(workers, 2)``."""
        return np.asarray(self.seen[self._rows(names)], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint: by hardware, what is known of it."""
        return {
            name: {
                "mean": self.mean[:, i].tolist(),
                "covariance": self.covariance[:, i].tolist(),
                "weight": self.weight[:, i].tolist(),
                "scatter": self.scatter[i].tolist(),
                "seen": self.seen[i].tolist(),
            }
            for i, name in enumerate(self.names)
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], settings: EstimatorSettings | None = None) -> "TimePosterior":
        """What :meth:`state_dict` described; nothing where it was made with other filters."""
        settings = settings or EstimatorSettings()
        known = {name: worker for name, worker in state.items() if len(worker["weight"]) == len(settings.walks)}
        if not known:
            return cls(settings=settings)
        arrays: dict[str, Any] = {
            key: np.array([worker[key] for worker in known.values()], dtype=float) for key in _ARRAYS
        }
        for key in ("mean", "covariance", "weight"):  # by filter, then by worker
            arrays[key] = np.ascontiguousarray(arrays[key].swapaxes(0, 1))
        return cls(tuple(known), **arrays, settings=settings)
