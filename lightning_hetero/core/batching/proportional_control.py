"""Proportional control of batch sizes without a time model (D sec. III-C, D eq. 4-5).

``delta b_i = -X_i (mu_i - mean(mu))`` with the throughput ``X_i = b_i / mu_i`` and ``mu_i`` the smoothed compute time
since the last change. A dead band, smoothing, bounds, and an upper bound learned where throughput fell after a rise
keep it stable. The paper's rule does not keep the total; here sizes are re-normalized to it.

The mean is taken over the workers that can still change. A worker held by a bound takes longer or shorter than the
others whatever they do, and would bias the error of every one of them. The dead band accounts for noise: a change needs
differences that exceed what jitter of the times produces by chance, see :mod:`lightning_hetero.core.timing.step_times`.

Differences from the paper: upper bounds are on trial, see :mod:`lightning_hetero.core.batching.learned_bound`. And a
size that reverses its direction takes half of the rule's step, and half of that at the next reversal, because where
times rise faster than sizes the whole step overshoots. Further steps in one direction, and slowly also decisions that
change nothing, restore the whole step. Where batches are so small that the rule would move less than a sample, the
slowest worker gives one to the fastest; that is taken back if it only exchanged their roles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.control_settings import CONTROL_DEFAULTS, ControlSettings
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.batching.learned_bound import LearnedBound, Operation, learn_bound
from lightning_hetero.core.timing.step_times import StepTimes

__all__ = ["ControllerState", "control", "smooth"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ControllerState:
    """State of the proportional controller; replaced, never changed in place.

    Args:
        local_batch_sizes: sizes that run now.
        times: step times of each worker since the last change.
        previous_sizes: sizes before the last change, empty if there was none.
        previous_throughput: ``X_i`` in samples per second before the last change.
        moves: last change of each size, in samples.
        gains: share of the rule's step that each size takes, 0 to 1; empty before the first change.
        bounds: upper bound learned for each worker, ``None`` for none; empty before the first decision.
        previous_errors: standard errors of ``previous_throughput``, as shares.
        coarse: whether noise made the last change less precise than the dead band; the next one may complete it.
        probes: whether the last change moved one unit although the rule wanted less.
        tried: sizes that ran since the rule last changed them, to none of which such a change leads back.
        kept: why the last decision changed nothing, ``None`` if it changed sizes.

    Example:
        >>> smooth(ControllerState((8, 8)), [0.5, 2.0]).throughput
        (16.0, 4.0)
    """

    local_batch_sizes: tuple[int, ...]
    times: StepTimes = StepTimes()
    previous_sizes: tuple[int, ...] = ()
    previous_throughput: tuple[float, ...] = ()
    moves: tuple[int, ...] = ()
    gains: tuple[float, ...] = ()
    bounds: tuple[LearnedBound | None, ...] = ()
    previous_errors: tuple[float, ...] = ()
    coarse: bool = False
    probes: bool = False
    tried: tuple[tuple[int, ...], ...] = ()
    kept: str | None = None

    @property
    def throughput(self) -> tuple[float, ...]:
        """``X_i = b_i / mu_i`` in samples per second."""
        return tuple(b / max(mu, 1e-9) for b, mu in zip(self.local_batch_sizes, self.times.mean, strict=True))


def smooth(state: ControllerState, compute_times: Sequence[float] | Array, *, decay: float = 0.9) -> ControllerState:
    """Add the compute times of one step to the :class:`~lightning_hetero.core.timing.step_times.StepTimes`.

    Args:
        state: state so far.
        compute_times: ``a_i + P_i`` of each worker in seconds.
        decay: weight of the past, 0 to 1.

    Example:
        >>> smooth(smooth(ControllerState((8, 8)), [1.0, 2.0]), [2.0, 2.0], decay=0.5).times.smoothed
        (1.5, 2.0)
    """
    return replace(state, times=state.times.observe(compute_times, decay=decay))


def control(
    state: ControllerState,
    total_batch_size: int,
    *,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    dead_band: float = 0.05,
    settings: ControlSettings = CONTROL_DEFAULTS,
    multiple: int = 1,
) -> tuple[ControllerState, tuple[int, ...] | None]:
    """Decide on new sizes, for all workers or for none.

    Args:
        state: state with at least one smoothed observation.
        total_batch_size: ``B``, which the sizes sum to.
        min_local: fewest samples of each worker.
        max_local: most samples of each worker.
        dead_band: sizes change only if one of them would by more than this share.
        settings: of the controller.
        multiple: samples of which the total, each size and each bound are multiples.

    Returns:
        The new state, and the new sizes or ``None``.

    Example:
        >>> state, sizes = control(smooth(ControllerState((20, 20)), [0.1, 0.3]), 40, min_local=(1, 1))
        >>> sizes
        (30, 10)
        >>> control(smooth(state, [0.15, 0.15]), 40, min_local=(1, 1))[1] is None
        True
    """
    state = replace(state, times=state.times.current())
    if state.probes and _only_slower(state):  # of which no bound is to be learned
        return replace(_changed(state, state.previous_sizes), tried=state.tried), state.previous_sizes
    state = replace(_learn_bounds(state, dead_band, settings), probes=False)
    mu, b = state.times.best, np.asarray(state.local_batch_sizes, dtype=float)
    given = np.full(len(b), total_batch_size) if max_local is None else np.asarray(max_local)
    learned = [bound.size if bound is not None and bound.holds else total_batch_size for bound in state.bounds]
    high = np.minimum(given, np.maximum(learned, min_local)) // multiple * multiple
    if high.sum() < total_batch_size:
        high = given
    error, free = _errors(mu, b, np.asarray(min_local), high)
    noise = _noise(mu, state.times.errors, free)
    chance = settings.significant_errors * noise
    gains = _gains(state, error, np.abs(error) > chance, settings)
    wanted = b - gains * np.asarray(state.throughput) * error
    wanted = np.maximum(
        wanted, 1e-12 * wanted.max()
    )  # in proportion also where one worker is thousands of times faster
    sizes = proportional_sizes(total_batch_size, wanted, min_local=min_local, max_local=high, multiple=multiple)
    change = np.abs(np.asarray(sizes) - b) / np.maximum(b, 1.0)
    least = settings.finishing_dead_band * dead_band if state.coarse else dead_band
    if sizes == state.local_batch_sizes:
        probe = _probe(state, error, np.abs(error) > np.maximum(chance, dead_band * mu), min_local, high, multiple)
        if probe is not None:
            tried = *state.tried, state.local_batch_sizes, probe
            return replace(_changed(state, probe), gains=tuple(gains.tolist()), probes=True, tried=tried), probe
    if not np.any((change > least) & (np.abs(error) > chance)):
        kept = _why_kept(mu, error, free, change, noise, least, settings)
        return replace(state, gains=_rested(state, settings), kept=kept), None
    coarse = not any(state.bounds) and bool(np.any(chance > dead_band * mu))
    return replace(_changed(state, sizes), gains=tuple(gains.tolist()), coarse=coarse), sizes


def _changed(state: ControllerState, sizes: tuple[int, ...]) -> ControllerState:
    """Return the state that begins with other sizes."""
    return replace(
        state,
        local_batch_sizes=sizes,
        kept=None,
        times=state.times.restarted(),
        previous_sizes=state.local_batch_sizes,
        previous_throughput=state.throughput,
        previous_errors=tuple(float(share) for share in state.times.errors),
        moves=tuple(int(new - old) for new, old in zip(sizes, state.local_batch_sizes, strict=True)),
        coarse=False,
        probes=False,
        tried=(),
    )


def _probe(
    state: ControllerState,
    error: Array,
    notable: npt.NDArray[np.bool_],
    low: Sequence[int],
    high: npt.NDArray[Any],
    unit: int,
) -> tuple[int, ...] | None:
    """Return the sizes with one unit moved from the slowest to the fastest worker, ``None`` if they have run."""
    sizes = np.asarray(state.local_batch_sizes)
    gives, takes = sizes - unit >= np.asarray(low), sizes + unit <= high
    slow, fast = (int(np.where(there, off, -np.inf).argmax()) for there, off in ((gives, error), (takes, -error)))
    if not (notable[slow] and gives[slow] and takes[fast] and error[slow] > 0 > error[fast]):
        return None
    sizes[[slow, fast]] += [-unit, unit]
    found = tuple(sizes.tolist())
    return None if found in state.tried else found


def _only_slower(state: ControllerState) -> bool:
    """Return whether of the two workers that have exchanged a unit, the later one is not earlier than before."""
    moved = np.flatnonzero(state.moves)
    before = np.asarray(state.previous_sizes) / np.maximum(state.previous_throughput, 1e-9)
    return bool(state.times.best[moved].max() > before[moved].max())


def _why_kept(
    mu: Array,
    error: Array,
    free: npt.NDArray[np.bool_],
    change: Array,
    noise: Array,
    least: float,
    settings: ControlSettings,
) -> str:
    """Say why no size changes."""
    apart = mu[free].max() / max(mu[free].min(), 1e-12) - 1.0
    if change.max() > least:
        jitter = settings.significant_errors * float((noise / np.maximum(mu, 1e-12)).max())
        return f"differences are within the noise: {change.max():.1%} in sizes, where up to {jitter:.1%} is noise"
    if not free.all():
        held = ", ".join(str(rank) for rank in np.flatnonzero(~free))
        return f"bounds hold: rank {held} at its minimum or maximum; compute times of the others differ by {apart:.1%}"
    if np.abs(error).max() <= least * mu.mean():
        return f"workers are equally fast at this split: compute times differ by {apart:.1%}"
    return f"dead band: no size would change by more than {least:.1%}"


def _errors(mu: Array, b: Array, low: npt.NDArray[Any], high: npt.NDArray[Any]) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return ``mu_i - mean(mu)``, and the workers over which the mean is taken: those that no bound holds.

    A bound holds a worker at its minimum whose time is above the mean, and one at its maximum whose time is below.
    Leaving them out changes the mean, and further workers may then be held: repeat until none is.
    """
    free = np.ones(len(mu), dtype=bool)
    for _ in range(len(mu)):
        error = mu - mu[free].mean()
        held = ((b <= low) & (error > 0)) | ((b >= high) & (error < 0))
        if not np.any(held & free) or np.all(held | ~free):
            break
        free &= ~held
    return mu - mu[free].mean(), free


def _noise(mu: Array, errors: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Return the standard error in seconds of ``mu_i - mean(mu)``, from the relative ones of ``mu_i``."""
    variance, share = (mu * errors) ** 2, free / free.sum()
    return np.asarray(np.sqrt(variance * (1.0 - 2.0 * share) + (share**2 * variance).sum()))


def _gains(
    state: ControllerState, error: Array, significant: npt.NDArray[np.bool_], settings: ControlSettings
) -> Array:
    """Return the gain of each size, the share of the rule's step: less after a reversal, more in one direction."""
    if not state.moves:
        return np.ones(len(error))
    turns = (np.asarray(state.moves) * error > 0) & significant
    factor = np.where(turns, settings.gain_after_reversal, settings.gain_growth)
    gains: Array = np.clip(np.asarray(state.gains) * factor, settings.min_gain, 1.0)
    return gains


def _rested(state: ControllerState, settings: ControlSettings) -> tuple[float, ...]:
    """Return the gains after a decision that changed nothing; a size with a learned bound in force keeps its gain."""
    return tuple(
        gain if bound is not None and bound.holds else min(settings.gain_recovery * gain, 1.0)
        for gain, bound in zip(state.gains, state.bounds, strict=bool(state.gains))
    )


def _learn_bounds(state: ControllerState, dead_band: float, settings: ControlSettings) -> ControllerState:
    """Return the state with each worker's bound learned, grown older, or forgotten."""
    sizes, speeds, errors = state.local_batch_sizes, state.throughput, state.times.errors
    now = map(Operation, sizes, speeds)
    before = map(Operation, state.previous_sizes or sizes, state.previous_throughput or speeds)
    both = np.hypot(errors, state.previous_errors if state.previous_errors else errors)
    notable = np.maximum(settings.min_throughput_change, settings.significant_errors * both)
    rows = zip(state.bounds or (None,) * len(sizes), now, before, notable.tolist(), strict=True)
    bounds = tuple(learn_bound(*row, dead_band, settings) for row in rows)
    return replace(state, bounds=bounds, previous_sizes=(), previous_throughput=(), previous_errors=())
