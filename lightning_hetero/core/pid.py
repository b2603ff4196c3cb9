"""Proportional control of batch sizes with no time model (dynamic batching, sec. III-C, eq. 4-5).

``delta b_i = -X_i (mu_i - mean(mu))`` with the throughput ``X_i = b_i / mu_i`` and ``mu_i`` the smoothed compute time
since the last change. Made stable by a dead band, smoothing, bounds, and an upper bound learned where throughput fell
after a rise. The paper's rule does not keep the total; here sizes are re-normalised to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.plan import proportional_sizes

__all__ = ["ControllerState", "control", "smooth"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ControllerState:
    """State of the proportional controller; replaced, never changed in place.

    Args:
        local_batch_sizes: sizes that run now.
        smoothed: ``mu_i`` in seconds since the last change, empty before the first observation.
        previous_sizes: sizes before the last change, empty if there was none.
        previous_throughput: ``X_i`` in samples per second before the last change.
        learned_max: upper bound learned for each worker, 0 for none.
        bound_age: decisions since each bound was learned.
        bound_throughput: ``X_i`` before the rise that taught each bound.
        count: observations behind ``smoothed``.
    """

    local_batch_sizes: tuple[int, ...]
    smoothed: tuple[float, ...] = ()
    previous_sizes: tuple[int, ...] = ()
    previous_throughput: tuple[float, ...] = ()
    learned_max: tuple[int, ...] = ()
    bound_age: tuple[int, ...] = ()
    bound_throughput: tuple[float, ...] = ()
    count: int = 0

    @property
    def throughput(self) -> tuple[float, ...]:
        """``X_i = b_i / mu_i`` in samples per second."""
        return tuple(b / max(mu, 1e-9) for b, mu in zip(self.local_batch_sizes, self.smoothed, strict=True))


def smooth(state: ControllerState, compute_times: Sequence[float] | Array, *, decay: float = 0.9) -> ControllerState:
    """Add the compute times of one step to the exponential moving average ``mu_i``.

    The first ``1 / (1 - decay)`` steps since the last change count alike, so that no single one dominates.

    Args:
        state: state so far.
        compute_times: ``a_i + P_i`` of each worker in seconds.
        decay: weight of the past, 0 to 1.

    Example:
        >>> smooth(smooth(ControllerState((8, 8)), [1.0, 2.0]), [2.0, 2.0], decay=0.5).smoothed
        (1.5, 2.0)
    """
    times = np.asarray(compute_times, dtype=float)
    newest = max(1.0 - decay, 1.0 / (state.count + 1))
    mu = times if not state.smoothed else (1 - newest) * np.asarray(state.smoothed) + newest * times
    return replace(state, smoothed=tuple(float(t) for t in mu), count=state.count + 1)


def control(
    state: ControllerState,
    total_batch_size: int,
    *,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    dead_band: float = 0.05,
    bound_lifetime: int = 20,
) -> tuple[ControllerState, tuple[int, ...] | None]:
    """One decision of the controller: new sizes for all workers, or for none.

    Args:
        state: state with at least one smoothed observation.
        total_batch_size: ``B``, which the sizes sum to.
        min_local: fewest samples of each worker.
        max_local: most samples of each worker.
        dead_band: sizes change only if one of them would by more than this share.
        bound_lifetime: decisions after which a learned bound lapses, since what caused it may be over.

    Returns:
        The new state, and the new sizes or ``None``.

    Example:
        >>> state, sizes = control(smooth(ControllerState((20, 20)), [0.1, 0.3]), 40, min_local=(1, 1))
        >>> sizes
        (30, 10)
        >>> control(smooth(state, [0.15, 0.15]), 40, min_local=(1, 1))[1] is None
        True
    """
    state = _learn_bounds(state, bound_lifetime)
    mu, b = np.asarray(state.smoothed), np.asarray(state.local_batch_sizes, dtype=float)
    wanted = np.maximum(b - np.asarray(state.throughput) * (mu - mu.mean()), 1e-3)
    given = np.full(len(b), total_batch_size) if max_local is None else np.asarray(max_local)
    learned = np.asarray(state.learned_max or [0] * len(b))
    high = np.where(learned > 0, np.minimum(given, np.maximum(learned, min_local)), given)
    if high.sum() < total_batch_size:
        high = given
    sizes = proportional_sizes(total_batch_size, wanted, min_local=min_local, max_local=high)
    change = np.abs(np.asarray(sizes) - b) / np.maximum(b, 1.0)
    if change.max() <= dead_band:
        return state, None
    changed = replace(
        state,
        local_batch_sizes=sizes,
        smoothed=(),
        count=0,
        previous_sizes=state.local_batch_sizes,
        previous_throughput=state.throughput,
    )
    return changed, sizes


def _learn_bounds(state: ControllerState, lifetime: int, *, notable: float = 0.1) -> ControllerState:
    """Bound a worker by its former size if its throughput fell after a rise, both by more than 10 %.

    A bound is forgotten when it is old, or when the worker is faster than it was before the rise: then something else
    than its size had slowed it down.
    """
    count = len(state.local_batch_sizes)
    bound, age = list(state.learned_max or (0,) * count), [a + 1 for a in state.bound_age or (0,) * count]
    before = list(state.bound_throughput or (0.0,) * count)
    for i, (size, speed) in enumerate(zip(state.local_batch_sizes, state.throughput, strict=True)):
        if bound[i] and (age[i] > lifetime or speed > (1 + notable) * before[i]):
            bound[i] = 0
        if not state.previous_sizes:
            continue
        old_size, old_speed = state.previous_sizes[i], state.previous_throughput[i]
        if size > (1 + notable) * old_size and speed < (1 - notable) * old_speed:
            bound[i], age[i], before[i] = old_size, 0, old_speed
    return replace(
        state,
        learned_max=tuple(bound),
        bound_age=tuple(age),
        bound_throughput=tuple(before),
        previous_sizes=(),
        previous_throughput=(),
    )
