"""Time of each worker by its batch size: a line, what was measured beside it, and a level that moves.

A worker's two times, outside of and in the backward pass, are learned at the sizes at which it ran. A line through
these points (C eq. 3) predicts other sizes. Real times are no line: GPU kernels run in tiles, caches overflow. So a
size that was measured often enough counts as measured, and between two of them the time is interpolated.

Speeds change in two ways. A *jump* (another process begins) is a round far off what the same size took: it scales all
points. A *drift* (heat, a walk of the clock) shows where the newest rounds predict the next one better than the average
of all: then a level with a short memory scales the whole curve, and points beside the line are not believed, since each
was measured at another speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords

Array = npt.NDArray[np.float64]

STILL, MOVING = 400.0, 5.0
"""Steps over which the times of a steady worker are averaged, and the level of a drifting one."""
SIZES = 10
"""Sizes of each worker that are remembered; the one that counts least makes room for a new one."""
JITTER, JITTER_STEPS = 0.05, 8.0
"""Relative noise of single steps before any was measured; steps from which on a worker's own outweighs that of all."""
MEMORY = 256.0
"""Steps over which the noise of single steps is averaged."""
FAR = 0.4
"""Share by which a step that counts as an event is longer than the median at least."""
RARE = 0.1
"""Share of a worker's steps up to which far longer ones are events, and not its pace."""
USUAL = 0.8
"""Elasticity of a step's time in its samples, before any worker ran at a second size."""
WEIGHT = 0.5
"""Workers for which that assumption counts, among those that showed theirs."""
FIXED_SHARE = 0.35
"""Standard deviation of that elasticity from worker to worker, as the fit of a line assumes."""
CURVATURE = 0.05
"""Relative standard deviation of a worker's times around its line."""
UNSEEN = 0.25
"""Share of the usual elasticity that comes back below the sizes that were seen."""
OFF_LINE = 0.01
"""Relative distance of a time from its line that more steps do not reduce, in the fit of the line."""
JUMP, MIN_JUMP = 5.0, 0.08
"""Change of a speed that counts as a jump: in standard errors of a round, and at least, as a logarithm."""
MIN_NEW = 0.4
"""The same at a new size, beyond what the sizes around it took."""
MIN_STRETCH = 4
"""Steps at one speed, within one round, that show a jump in the middle of it."""
DRIFT_ODDS = 3.0
"""Logarithm of the odds against a drift, before anything was measured."""
MOST_EVIDENCE = 3.0
"""Logarithm of the odds that a single round adds or takes at most."""


@checked_keywords
@dataclass(frozen=True, eq=False)
class WorkerTimes:
    """Times of workers by size; replaced, never changed in place.

    Args:
        names: hardware identity of each worker.
        size: sizes at which it ran, 0 for none yet, shape ``(workers, SIZES)``.
        steps: steps at each, fading, same shape.
        seconds: mean seconds outside of and in backward at each, shape ``(workers, SIZES, 2)``.
        squares: sum of squared relative deviations of single steps, and their degrees of freedom, shape ``(workers,
            2)``.
        odd: far too long steps, and all steps, same shape.
        level: logarithm of the newest speed's times over those of all points, shape ``(workers,)``.
        drift: logarithm of the odds that the level predicts better than the points alone, shape ``(workers,)``.
        jumped: whether a speed jumped in the newest round, shape ``(workers,)``.

    Example:
        >>> times = WorkerTimes.of(("a", "b"))
        >>> for size in (10.0, 20.0):
        ...     b = np.full(2, size)
        ...     times = times.observe(b, np.tile(0.001 * b + 0.01, (8, 1)), np.tile(0.002 * b, (8, 1)), 8)
        >>> times.parts(np.array([15.0, 40.0])).round(3).tolist()
        [[0.025, 0.03], [0.05, 0.08]]
    """

    names: tuple[str, ...]
    size: Array
    steps: Array
    seconds: Array
    squares: Array
    odd: Array
    level: Array
    drift: Array
    jumped: npt.NDArray[np.bool_]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, WorkerTimes) and self.names == other.names
        return same and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, names: Sequence[str]) -> "WorkerTimes":
        """Return the times of workers that were never observed."""
        points, pairs, none = np.zeros((len(names), SIZES, 2)), np.zeros((len(names), 2)), np.zeros(len(names))
        size = points[..., 0]
        return cls(tuple(names), size, size, points, pairs, pairs, none, none, none > 0)

    def select(self, names: Sequence[str]) -> "WorkerTimes":
        """Return the times of these workers, in this order; of new ones as of workers never observed."""
        if self.names == tuple(names):
            return self
        whole = self._joined(WorkerTimes.of([name for name in names if name not in self.names]))
        place = {name: i for i, name in enumerate(whole.names)}
        rows = [place[name] for name in names]
        return replace(self, names=tuple(names), **{name: getattr(whole, name)[rows] for name in _ARRAYS})

    def merge(self, newer: "WorkerTimes") -> "WorkerTimes":
        """Return the times of all workers, those of the newer ones replaced or added."""
        if self.names == newer.names:
            return newer
        return self.select([name for name in self.names if name not in newer.names])._joined(newer)

    def _joined(self, more: "WorkerTimes") -> "WorkerTimes":
        both = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in _ARRAYS}
        return WorkerTimes((*self.names, *more.names), **both)

    def guessed(self, capacities: Sequence[float] = ()) -> "WorkerTimes":
        """Return the times with those of the worker most alike for each that was never observed.

        Args:
            capacities: open-loop capacity of each worker (peak FLOP/s); the nearest are most alike, and the mean of
                their times per sample is scaled by the ratio. Equal by default.
        """
        new, old = np.flatnonzero(~self.known), np.flatnonzero(self.known)
        if not len(new):
            return self
        power = np.log(np.array(capacities or [1.0] * len(self.names)))
        samples = np.maximum((self.steps * self.size).sum(axis=1), 1e-9)
        pace = (self.steps * self.seconds.sum(axis=2)).sum(axis=1) / samples
        found = {name: getattr(self, name).copy() for name in _ARRAYS}
        for i in new:
            apart = np.abs(power[old] - power[i])
            like = old[apart <= apart.min() + 0.01]
            for array in found.values():
                array[i] = array[like[0]]
            found["seconds"][i] *= (pace[like] * np.exp(power[like] - power[i])).mean() / pace[like[0]]
            found["steps"][i] *= 0.01  # little is known of it: as if it had run a hundredth of the steps
        return replace(self, **found)

    # what is known

    @cached_property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which workers were observed."""
        return np.asarray(self.steps.sum(axis=1) > 0)

    @cached_property
    def jitter(self) -> Array:
        """Relative standard deviation of single steps: each worker's own where known, else that of all."""
        squares, free = self.squares.T
        shared = (squares.sum() + JITTER**2) / (free.sum() + 1.0)
        return np.asarray(np.sqrt((squares + JITTER_STEPS * shared) / (free + JITTER_STEPS)) + 1e-3)

    @cached_property
    def drifting(self) -> Array:
        """Probability of each worker that its speed drifts; many that do make it likelier for the others."""
        odds = self.drift + 0.5 * min(len(self.drift), 4) * max(float(self.drift.mean()), 0.0) - DRIFT_ODDS
        return np.asarray(1.0 / (1.0 + np.exp(-odds)))

    @cached_property
    def _fitted(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return a point on each worker's lines, their slopes, the usual elasticity, and the variance of their own.

        Elasticities are those of a size at that point: 1 without a fixed part of the time, 0 if all of it is fixed.
        """
        there = self.steps > 0
        noise = self.jitter[:, None] ** 2 / np.maximum(self.steps, 1e-9) + OFF_LINE**2
        # a drift shows each size at another speed, up and down by what its level is beyond luck: a worker that slows
        # and is given less seems to take as long for any size
        astray = np.maximum(self.level**2 - self.jitter**2 / MOVING, 0.0)
        noise += (4.0 * self.drifting * astray)[:, None]
        weight = np.where(there, 1.0 / noise, 0.0)
        every = np.maximum(weight.sum(axis=1), 1e-12)
        size = np.maximum((weight * self.size).sum(axis=1) / every, 1e-9)
        seconds = np.maximum((weight[..., None] * self.seconds).sum(axis=1) / every[:, None], 1e-12)
        off_size = self.size / size[:, None] - 1.0
        off_seconds = self.seconds / seconds[:, None] - 1.0
        information = (weight * off_size**2).sum(axis=1)
        product = (weight[..., None] * off_size[..., None] * off_seconds).sum(axis=1)
        prior = 1.0 / FIXED_SHARE**2
        # the same model runs on all of them: what some showed of its fixed part holds for those seen at one size
        sure = (information / (information + prior))[:, None]
        own = np.clip(product / np.maximum(information, 1e-12)[:, None], 0.0, 1.2)  # some curves are bent up
        usual = ((sure * own).sum(axis=0) + WEIGHT * USUAL) / (sure.sum() + WEIGHT)
        elasticity = np.clip((product + prior * usual) / (information + prior)[:, None], 0.0, 1.0)
        return size, seconds, elasticity * seconds / size[:, None], usual, 1.0 / (information + prior)

    @cached_property
    def curves(self) -> tuple[Array, Array]:
        """Times of each worker by size, as points between and beyond which they are straight.

        Sizes, rising from 0, shape ``(points, workers)``, and seconds, not falling, shape ``(2, points, workers)``.
        """
        size, seconds, slope, usual, _ = self._fitted
        there = self.steps > 0
        # a worker that ran at fewer sizes than others repeats its greatest one
        point = np.where(there, np.arange(SIZES), self.size.argmax(axis=1)[:, None])
        point = point[:, there.any(axis=0)]
        steps, at = (np.take_along_axis(one, point, 1) for one in (self.steps, self.size))
        measured = np.maximum(np.take_along_axis(self.seconds, point[..., None], 1), 1e-12)
        noise = self.jitter[:, None] ** 2 / np.maximum(steps, 1e-9)
        believed = CURVATURE**2 / (CURVATURE**2 + noise) * (1.0 - self.drifting[:, None])

        def line_at(sizes: Array) -> Array:
            return np.maximum(seconds[:, None] + slope[:, None] * (sizes - size[:, None])[..., None], 1e-12)

        line = line_at(at)
        times = line * (measured / line) ** believed[..., None]
        order = np.argsort(at, axis=1, kind="stable")
        at, times = np.take_along_axis(at, order, 1), np.take_along_axis(times, order[..., None], 1)
        # below the least size, a part of the usual elasticity comes back: no curve is as flat down to nothing
        elasticity = np.minimum(slope * at[:, :1] / times[:, 0], 1.0)
        elasticity += UNSEEN * np.maximum(usual - elasticity, 0.0)
        at_zero = times[:, 0] * np.maximum(1.0 - elasticity, 1e-3)
        far = 2.0 * at[:, -1:] + 1.0
        beyond = times[:, -1] + slope * (far - at[:, -1:]) * (times[:, -1] / line_at(at[:, -1:])[:, 0])
        at = np.concatenate([np.zeros((len(at), 1)), at, far], axis=1)
        times = np.concatenate([at_zero[:, None], times, beyond[:, None]], axis=1)
        times = np.maximum.accumulate(times, axis=1) * np.exp(self.drifting * self.level)[:, None, None]
        return np.ascontiguousarray(at.T), np.ascontiguousarray(times.T)

    def parts(self, sizes: Array) -> Array:
        """Return the seconds outside of and in backward at these sizes, shape ``(workers, 2)``."""
        at, times = self.curves
        return np.stack([interpolated(at, phase, sizes) for phase in times], axis=1)

    def lines(self, sizes: Array) -> Array:
        """Return the rows ``q``, ``s``, ``k``, ``m`` of C eq. 3 that meet the times at these sizes, ``(workers, 4)``.

        They have the slopes of the fitted lines, which hold over a wide range of sizes.
        """
        size, seconds, slope, _, _ = self._fitted
        line = np.maximum(seconds + slope * (sizes - size)[:, None], 1e-12)
        scale = self.parts(sizes) / line
        slopes, fixed = scale * slope, scale * np.maximum(seconds - slope * size[:, None], 0.0)
        return np.stack([slopes[:, 0], fixed[:, 0], slopes[:, 1], fixed[:, 1]], axis=1)

    def errors(self, sizes: Array) -> Array:
        """Return the relative standard errors of the times at these sizes, shape ``(workers,)``."""
        variance, (size, _, _, _, elasticity) = self.jitter**2, self._fitted
        here = np.where(self.size == sizes[:, None], self.steps, 0.0).sum(axis=1)
        by_point = np.where(here > 0, variance / np.maximum(here, 1.0), np.inf)
        by_line = variance / np.maximum(self.steps.sum(axis=1), 1.0) + 0.5 * CURVATURE**2
        by_line += elasticity * (sizes / size - 1.0) ** 2
        by_level = self.drifting**2 * variance / (2.0 * MOVING)
        return np.asarray(np.sqrt(np.minimum(by_point, by_line) + by_level))

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values by hardware identity, fit for any checkpoint."""
        return {name: {k: getattr(self, k)[i].tolist() for k in _KEPT} for i, name in enumerate(self.names)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WorkerTimes":
        """Return the times restored from :meth:`state_dict`.

        Raises:
            ValueError: if an array has another shape, or a number is not finite.
        """
        empty = cls.of(tuple(state))
        found: dict[str, Any] = {k: np.array([worker[k] for worker in state.values()], dtype=float) for k in _KEPT}
        for name, array in found.items() if state else ():
            shape = getattr(empty, name).shape
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} of a worker has to be finite numbers, {shape[1:]} of them")
        return replace(empty, **found) if state else empty

    # learning

    def observe(self, sizes: Array, outside: Array, backward: Array, elapsed: float) -> "WorkerTimes":
        """Return the times after some steps at one split.

        Args:
            sizes: samples of each worker.
            outside: seconds outside of backward, shape ``(steps, workers)``.
            backward: seconds in backward, same shape.
            elapsed: steps since the round before.
        """
        count, workers = outside.shape
        step = np.maximum(outside + backward, 1e-9)
        middle = np.median(step, axis=0)
        far = step > middle * (1.0 + np.maximum(4.0 * self.jitter, FAR))
        event = far & (self.odd[:, 0] + far.sum(axis=0) <= RARE * np.maximum(self.odd[:, 1] + count, 20.0))
        shorter = np.where(event, middle / step, 1.0)
        step = step * shorter
        phases = (np.maximum(phase * shorter, 1e-9) for phase in (outside, backward))
        pace = np.stack([phase.mean(axis=0) for phase in phases], axis=1)
        off = np.abs(step / middle - 1.0)
        off = np.minimum(off, 4.0 * np.maximum(1.4826 * np.median(off, axis=0), 1e-4))
        free = count - 1.0 if count > 2 else 0.0
        now = replace(
            self,
            odd=_faded(self.odd, far.sum(axis=0), count),
            squares=_faded(self.squares, (off**2).sum(axis=0) * (free > 0), free),
            jumped=np.zeros(workers, dtype=bool),
        )
        if self.known.any():
            now = now._follow(sizes, pace.sum(axis=1), middle, count, self.parts(sizes).sum(axis=1))
            pace *= np.where(now.jumped, middle / pace.sum(axis=1), 1.0)[:, None]
        size, steps, seconds = now.size.copy(), now.steps * np.exp(-elapsed / STILL), now.seconds.copy()
        again, slot = now._slots(sizes)
        at = np.arange(workers), np.where(again, slot, steps.argmin(axis=1))
        total = steps[at] * again + count
        new = pace * np.exp(-now.drifting * now.level)[:, None]
        seconds[at] += (count / total)[:, None] * (new - seconds[at])
        size[at], steps[at] = sizes, total
        return replace(now, size=size, steps=steps, seconds=seconds)

    def _slots(self, sizes: Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return which workers have run at these sizes, and the place of these sizes."""
        same = self.size == sizes[:, None]
        return same.any(axis=1), same.argmax(axis=1)

    def _follow(self, sizes: Array, pace: Array, middle: Array, count: int, predicted: Array) -> "WorkerTimes":
        """Return the times with level, drift and jumps after a round, before its point is added.

        Args:
            sizes: samples of each worker.
            pace: its mean seconds of a step.
            middle: its median seconds of a step.
            count: steps of the round.
            predicted: seconds of a step by the curves.
        """
        variance, each = self.jitter**2, np.arange(len(sizes))
        again, slot = self._slots(sizes)
        level = self.drifting * self.level
        expected = np.where(again, self.seconds[each, slot].sum(axis=1), predicted * np.exp(-level))
        off = np.where(self.known, np.log(pace / expected), 0.0)
        # of two predictions, the average of all steps and the newest level, which was closer
        seen = np.maximum(np.where(again, self.steps[each, slot], self.steps.sum(axis=1)), 1.0)
        weight = 1.0 - np.exp(-count / MOVING)
        bent = np.where(again, 0.0, CURVATURE**2) + 1e-6  # at a new size, times are no line
        by_points = variance * (1.0 / count + 1.0 / seen) + bent
        by_level = variance / count * (1.0 + weight / (2.0 - weight)) + bent
        odds = 0.5 * (off**2 / by_points - (off - self.level) ** 2 / by_level - np.log(by_level / by_points))
        drift = np.clip(self.drift + self.known * np.clip(odds, -MOST_EVIDENCE, MOST_EVIDENCE), -8.0, 8.0)
        follow = weight * np.where(again, 1.0, self.drifting)  # at a new size, it may be the line that is off
        # some steps of the round may have been at the speed before: then only the median tells how far it jumped
        far = np.where(self.known, np.log(middle / expected), 0.0)
        beyond = np.stack([off, far]) - level
        least = np.maximum(JUMP * np.sqrt(by_points), MIN_JUMP)
        # at a new size, time can only be expected; but more samples than ever took less, or fewer took more, by a jump
        there, taken = self.steps > 0, self.seconds.sum(axis=2)
        low = np.where(there & (self.size < sizes[:, None]), taken, 0.0).max(axis=1)
        high = np.where(there & (self.size > sizes[:, None]), taken, np.inf).min(axis=1)
        now = middle * np.exp(-level)
        implausible = (now < np.exp(-MIN_NEW) * low) | (now > np.exp(MIN_NEW) * high)
        jumped = np.where(again, np.maximum(beyond.min(axis=0), -beyond.max(axis=0)) > least, implausible)
        return replace(
            self,
            drift=drift,
            jumped=jumped,
            level=np.where(jumped, 0.0, self.level + follow * (off - self.level)),
            seconds=self.seconds * np.where(jumped, np.exp(far), 1.0)[:, None, None],
            steps=np.where(jumped[:, None], np.minimum(self.steps, 4.0), self.steps),
        )


_ARRAYS = tuple(f.name for f in fields(WorkerTimes) if f.name != "names")
_KEPT = _ARRAYS[:-1]  # all but jumped, which is of the newest round only


def _faded(sums: Array, more: Array, steps: float) -> Array:
    """Return sums with more added, faded to what a memory holds; the last column counts steps."""
    total = sums + np.stack([more, np.full(len(more), float(steps))], axis=1)
    return np.asarray(total * np.minimum(1.0, MEMORY / np.maximum(total[:, 1:], 1.0)))


def interpolated(at: Array, times: Array, sizes: Array) -> Array:
    """Return each worker's time at a size, by the points of its curve."""
    (x, dx), (y, dy) = stretches(at, sizes, at, times)
    return np.asarray(y + dy * (sizes - x) / np.maximum(dx, 1e-12))


def stretches(rows: Array, values: Array | float, *of: Array) -> list[tuple[Array, Array]]:
    """Return where the stretches begin within which values lie, and how far they reach.

    Args:
        rows: rising, of each worker, shape ``(points, workers)``.
        values: of each worker, or of all.
        of: what to return at those points and up to the next ones, shape ``(points, workers)``.
    """
    points, workers = rows.shape
    place = np.clip((values >= rows).sum(axis=0, dtype=np.int8) - 1, 0, points - 2).astype(np.intp)
    first = place * workers + np.arange(workers)
    begin = [one.ravel().take(first) for one in of]
    return [(x, one.ravel().take(first + workers) - x) for x, one in zip(begin, of, strict=True)]


def since_jump(step: Array) -> int:
    """Return the first step of a round since a speed last jumped within it; 0 if none did.

    Args:
        step: seconds, shape ``(steps, workers)``.
    """
    if len(step) < 2 * MIN_STRETCH:
        return 0
    newest, older = step[-MIN_STRETCH:], step[:-MIN_STRETCH]
    now = np.median(newest, axis=0)
    noise = 1.4826 * np.median(np.abs(np.diff(step, axis=0)), axis=0) / 2.0**0.5
    near = np.maximum(0.2 * now, 5.0 * noise)
    steady = (np.abs(newest - now) <= near).all(axis=0)  # odd steps are no speed
    far = steady & (np.abs(older - now) > near)
    stretch = np.lib.stride_tricks.sliding_window_view(far, MIN_STRETCH, axis=0).all(axis=-1)
    ends = np.flatnonzero(np.asarray(stretch).any(axis=1))
    return int(ends[-1]) + MIN_STRETCH if len(ends) else 0
