"""Predicted time to accuracy: density of compression, total batch and split together (StellaTrain, sec. 4).

``f_i(x) = min(beta_i / alpha_i x, beta_i)`` samples per second on worker ``i`` (eq. 2); ``TTA`` is in proportion to
``(1 + g(r, X)) / (X / max_i x_i / f_i(x_i))`` (eq. 5), with ``g`` the extra samples that compression and batch size
cost (:mod:`lightning_hetero.core.surrogate`). Two equations are not as printed: the standard deviation of eq. 3 lacks
its means, and eq. 6 compares bytes with bytes, ``bytes(density) <= bandwidth * x_i / f_i(x_i)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from lightning_hetero.core.optperf import solve_optperf
from lightning_hetero.core.plan import BatchPlan
from lightning_hetero.core.time_model import ClusterTimeModel
from lightning_hetero.core.validation import check_number

__all__ = [
    "Configuration",
    "ThroughputModel",
    "iteration_time_variation",
    "largest_density",
    "minimise_time_to_accuracy",
    "time_to_accuracy",
]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ThroughputModel:
    """Samples per second of one worker: linear up to ``alpha`` samples, constant above (StellaTrain, eq. 2, Table 2).

    Args:
        alpha: samples from which the worker is busy all the time, above 0.
        beta: samples per second from there on, above 0.

    Raises:
        TypeError: if a value is no number.
        ValueError: if it is not above 0.

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
        """Samples per second at a batch of ``x``."""
        return float(min(self.beta / self.alpha * x, self.beta))

    def seconds(self, x: float) -> float:
        """Seconds of an iteration, ``x / f(x)``: constant up to ``alpha`` samples.

        Example:
            >>> ThroughputModel(20, 100).seconds(5), ThroughputModel(20, 100).seconds(40)
            (0.2, 0.4)
        """
        return max(x, self.alpha) / self.beta

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float]) -> "ThroughputModel":
        """Least squares of the relative error of iteration times, by Nelder-Mead (StellaTrain, sec. 4.1).

        Raises:
            ValueError: if there is no measurement, or one is not above 0.

        Example:
            >>> model = ThroughputModel.fit([4, 8, 16, 32, 64], [0.1, 0.1, 0.1, 0.16, 0.32])
            >>> round(model.alpha, 2), round(model.beta, 1)
            (20.0, 200.0)
        """
        x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
        if x.size == 0 or x.shape != t.shape or not ((x > 0) & (t > 0)).all():
            raise ValueError("give one time above 0 for each batch size above 0, and at least one of them.")

        def error(logs: Array) -> float:
            alpha, beta = np.exp(logs)
            return float(np.square(np.maximum(x, alpha) / beta / t - 1.0).sum())

        beta = float((x / t).max())
        starts = [np.log([alpha, beta]) for alpha in (beta * t.min(), x.min(), x.max())]
        found = [minimize(error, s, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-15}) for s in starts]
        alpha, beta = np.exp(min(found, key=lambda result: float(result.fun)).x)
        return cls(float(alpha), float(beta))


def iteration_time_variation(seconds: Sequence[float]) -> float:
    """Coefficient of variation of the workers' iteration times, ``sigma / mu`` (StellaTrain, eq. 3 with its means).

    Example:
        >>> iteration_time_variation([1.0, 3.0])
        0.5
    """
    times = np.asarray(seconds, dtype=float)
    return float(times.std() / times.mean())


def largest_density(budget: float, message_bytes: Callable[[float], float], densities: Sequence[float]) -> float:
    """Largest density whose messages fit into a step: ``bytes(density) <= bandwidth * seconds`` (eq. 6, in bytes).

    Args:
        budget: bytes that the link carries in a step.
        message_bytes: bytes that a worker sends in a step at a density, increasing.
        densities: those to choose from, each above 0, to 1.

    Returns:
        The largest that fits; the least of them if none does.

    Example:
        >>> largest_density(50.0, lambda density: 100.0 * density, [0.01, 0.1, 0.5, 1.0])
        0.5
    """
    if not densities:
        raise ValueError("densities is empty; give at least one, above 0 to 1.")
    fitting = [density for density in densities if message_bytes(density) <= budget]
    return max(fitting) if fitting else min(densities)


def time_to_accuracy(total: float, step_time: float, loss_penalty: float) -> float:
    """What is minimised: ``(1 + g) / (X / T)``, seconds per sample at the least penalty (StellaTrain, eq. 5).

    Example:
        >>> time_to_accuracy(100, 0.5, 0.2)
        0.006
    """
    return (1.0 + loss_penalty) * step_time / total


@dataclass(frozen=True)
class Configuration:
    """Density, plan and what they are predicted to give.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        plan: total batch and split, with the predicted step time.
        objective: predicted seconds per sample, times the penalty on convergence.
        variation: coefficient of variation of the workers' computing times.
    """

    density: float
    plan: BatchPlan
    objective: float
    variation: float


def minimise_time_to_accuracy(
    cluster: ClusterTimeModel,
    totals: Sequence[int],
    densities: Sequence[float],
    *,
    bandwidth: float,
    message_bytes: Callable[[float], float],
    penalty: Callable[[float, float], float],
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
) -> Configuration:
    """Density, total batch and split of least predicted time to accuracy under the bandwidth constraint (eq. 1, 5, 6).

    The paper searches all three by Nelder-Mead, with a weight ``lambda`` on unequal iteration times. With a time model
    at hand the split is the exact optimum of each total, and all totals and all densities that fit are tried; unequal
    times need no weight of their own.

    Args:
        cluster: time model of the workers, in which the exchange is the part that no density avoids.
        totals: total batches to choose from.
        densities: densities to choose from.
        bandwidth: bytes per second that a worker sends.
        message_bytes: bytes that a worker sends in a step at a density.
        penalty: extra samples that a density and a total cost, as a share: ``g(1 - density, total)``, above -1.
        min_local: fewest samples of each worker.
        max_local: most samples of each worker.

    Raises:
        ValueError: if there is no total, or a penalty is -1 or less.
    """
    check_number("bandwidth", bandwidth, low=0.0, include_low=False)
    if not totals:
        raise ValueError("totals is empty; give at least one total batch size.")
    best: Configuration | None = None
    for total in totals:
        plan = solve_optperf(cluster, total, min_local=min_local, max_local=max_local)
        step = plan.step_time or cluster.step_time(plan.local_batch_sizes)
        allowed = largest_density(bandwidth * step, message_bytes, densities)
        times = [node.compute_time(b) for node, b in zip(cluster.nodes, plan.local_batch_sizes, strict=True)]
        for density in (d for d in densities if d <= allowed):
            extra = penalty(density, total)
            if extra <= -1.0:
                raise ValueError(f"penalty({density}, {total}) = {extra} must be above -1: a share of extra samples.")
            seconds = max(step, message_bytes(density) / bandwidth)
            objective = time_to_accuracy(total, seconds, extra)
            if best is None or objective < best.objective:
                best = Configuration(density, plan, objective, iteration_time_variation(times))
    assert best is not None
    return best
