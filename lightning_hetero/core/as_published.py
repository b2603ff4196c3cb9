"""Forms that exist only to compare with the papers; training uses none of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.finish_lines import Bound, check_bounds
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.validation import check_int, check_number, check_sizes

__all__ = ["ThroughputModel", "bootstrap_sizes", "largest_density"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ThroughputModel:
    """Samples per second of one worker: linear up to ``alpha`` samples, constant above (S eq. 2, Table 2).

    Args:
        alpha: samples from which on the worker is fully busy, above 0.
        beta: samples per second from there on, above 0.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if a value is not above 0.

    Example:
        >>> rtx_2080_ti_vit = ThroughputModel(alpha=20, beta=99)
        >>> rtx_2080_ti_vit.throughput(10), rtx_2080_ti_vit.throughput(40)
        (49.5, 99.0)
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, low=0.0, include_low=False)
        check_number("beta", self.beta, low=0.0, include_low=False)

    def throughput(self, x: float) -> float:
        """Return the samples per second at a batch of ``x``."""
        return float(min(self.beta / self.alpha * x, self.beta))

    def seconds(self, x: float) -> float:
        """Return the seconds of an iteration, ``x / f(x)``: constant up to ``alpha`` samples.

        Example:
            >>> ThroughputModel(20, 100).seconds(5), ThroughputModel(20, 100).seconds(40)
            (0.2, 0.4)
        """
        return max(x, self.alpha) / self.beta

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float]) -> "ThroughputModel":
        """Fit iteration times by least squares of their relative error, by Nelder-Mead (S sec. 4.1).

        Raises:
            ImportError: if SciPy is missing.
            ValueError: if there is no measurement, or one is not above 0.

        Example:
            >>> model = ThroughputModel.fit([4, 8, 16, 32, 64], [0.1, 0.1, 0.1, 0.16, 0.32])
            >>> round(model.alpha, 2), round(model.beta, 1)
            (20.0, 200.0)
        """
        x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
        if x.size == 0 or x.shape != t.shape or not ((x > 0) & (t > 0)).all():
            raise ValueError("give one time above 0 for each batch size above 0, and at least one of them.")
        try:  # imported here: it takes a second, and nothing else in the package needs it
            from scipy.optimize import minimize
        except ImportError as missing:
            raise ImportError(f"ThroughputModel.fit() needs SciPy ({missing}): pip install scipy") from missing

        def error(logs: Array) -> float:
            alpha, beta = np.exp(logs)
            return float(np.square(np.maximum(x, alpha) / beta / t - 1.0).sum())

        beta = float((x / t).max())
        starts = [np.log([alpha, beta]) for alpha in (beta * t.min(), x.min(), x.max())]
        found = [minimize(error, s, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-15}) for s in starts]
        alpha, beta = np.exp(min(found, key=lambda result: float(result.fun)).x)
        return cls(float(alpha), float(beta))


def largest_density(budget: float, message_bytes: Callable[[float], float], densities: Sequence[float]) -> float:
    """Return the largest density whose messages fit into a step: ``bytes(density) <= bandwidth * seconds`` (S eq. 6).

    Args:
        budget: bytes that the link carries in a step; seconds, if ``message_bytes`` returns seconds.
        message_bytes: bytes that a worker sends in a step at a density, increasing with it.
        densities: densities to choose from, each above 0, to 1.

    Returns:
        The largest density that fits; the least one if none does.

    Example:
        >>> largest_density(50.0, lambda density: 100.0 * density, [0.01, 0.1, 0.5, 1.0])
        0.5
    """
    if not densities:
        raise ValueError("densities is empty; give at least one, above 0 to 1.")
    fitting = [density for density in densities if message_bytes(density) <= budget]
    return max(fitting) if fitting else min(densities)


def bootstrap_sizes(
    total_batch_size: int,
    local_batch_sizes: Sequence[int],
    compute_times: Sequence[float] | Array,
    *,
    min_local: Bound = 1,
    max_local: Bound | None = None,
) -> tuple[int, ...]:
    """Return the next sizes while every worker has been seen at one size only (C eq. 8).

    ``b_i' = B (1 / t_i) / sum_j (1 / t_j)`` with the time per sample ``t_i = compute_i / b_i``.

    Args:
        total_batch_size: ``B`` of the next steps.
        local_batch_sizes: sizes at which the times were taken.
        compute_times: ``a_i + P_i`` in seconds, ``> 0``.
        min_local: fewest samples of a worker.
        max_local: most samples of a worker.

    Returns:
        One size per worker, sum ``B``.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if the bounds cannot be met, or there is not one time ``>= 0`` per worker.

    Example:
        >>> bootstrap_sizes(40, [20, 20], [0.1, 0.3])
        (30, 10)
    """
    total = check_int("total_batch_size", total_batch_size, minimum=1)
    sizes = check_sizes("local_batch_sizes", local_batch_sizes, minimum=0)
    times = np.asarray(compute_times, dtype=float)
    if times.shape != (len(sizes),) or not np.all(times >= 0):
        raise ValueError(f"give one compute time in seconds, > 0, per worker ({len(sizes)}); got {compute_times!r}.")
    low, high = check_bounds(len(sizes), total, min_local, max_local)
    speed = np.maximum(np.asarray(sizes, dtype=float), 1.0) / np.maximum(times, 1e-9)
    return proportional_sizes(total, speed, min_local=low, max_local=high)
