"""Predicted time to accuracy: density of compression, total batch and split together (StellaTrain, sec. 4).

``f_i(x) = min(beta_i / alpha_i x, beta_i)`` samples per second on worker ``i`` (eq. 2); ``TTA`` is in proportion to
``(1 + g(r, X)) / (X / max_i x_i / f_i(x_i))`` (eq. 5), with ``g`` the extra samples that compression and batch size
cost (:mod:`lightning_hetero.core.compression.convergence_profile`). Eq. 6 is not as printed: it compares bytes with
bytes, ``bytes(density) <= bandwidth * x_i / f_i(x_i)``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Change",
    "DensityChoice",
    "LATE_PENALTY",
    "assumed_penalty",
    "cut_penalty",
    "density_penalty",
    "largest_density",
    "minimise_time_to_accuracy",
    "time_to_accuracy",
]

Array = npt.NDArray[np.float64]

PENALTY = 0.1
"""Extra samples, as a share, for each factor of ten by which less is sent."""

LATE_PENALTY = 0.5
"""Extra samples, as a share, that gradients are taken to cost which arrive a step late. StellaTrain saw 0.18 at most
(sec. 6); early in a training with momentum it is more, so that nothing is delayed for a small gain."""

CUT_PENALTY = 0.3
"""Steps of progress that a cut of the density costs for each step by which blocks wait longer. On the digits
(``benchmarks/wan.py``), a cut from 10 % to 0.67 % put trainings back by 30 to 45 steps, where blocks wait for 140 more:
by about a third."""

FORBIDDEN = 1e30
"""Seconds per sample of what must not be chosen."""


def largest_density(budget: float, message_bytes: Callable[[float], float], densities: Sequence[float]) -> float:
    """Largest density whose messages fit into a step: ``bytes(density) <= bandwidth * seconds`` (eq. 6).

    Args:
        budget: what the link has in a step, in bytes, or in seconds if that is what ``message_bytes`` gives.
        message_bytes: what a worker sends in a step at a density, increasing.
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


def density_penalty(density: float) -> float:
    """Extra samples that a density costs where no profile says more: 10 % for each factor of ten below 1.

    That is an assumption, no measurement: error feedback sends what a step leaves out later, so that the price of a low
    density is a delay, and it grows slowly. A
    :class:`~lightning_hetero.core.compression.convergence_profile.ConvergenceProfile` of the model at hand replaces it.

    Example:
        >>> density_penalty(1.0), round(density_penalty(0.01), 3)
        (0.0, 0.2)
    """
    return PENALTY * math.log10(1.0 / density)


def cut_penalty(density: float, present: float, steps: float) -> float:
    """Extra samples that a cut of the density costs a young training: ``0.3 (1 / density - 1 / present) / steps``.

    A block is sent once in about ``1 / density`` steps. After a cut it waits for so much longer, and until then the
    weights lack what it holds back, which is less than the whole, because what is large goes first. That counts as a
    share of the steps so far: early in a training it is much of it, later next to nothing.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        present: the share that is sent now; a density that is no lower costs nothing.
        steps: steps of the training so far, above 0.

    Example:
        >>> round(cut_penalty(0.01, 0.1, steps=200), 3), round(cut_penalty(0.01, 0.1, steps=20_000), 5)
        (0.135, 0.00135)
        >>> cut_penalty(0.1, 0.01, steps=200)
        0.0
    """
    return CUT_PENALTY * max(1.0 / density - 1.0 / present, 0.0) / steps


def assumed_penalty(density: float, present: float, steps: int, late: bool = False) -> float:
    """``g`` where no profile says more: what a density costs, what a cut costs by now, and messages that come late.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        present: the share that is sent now.
        steps: steps of the training so far; those before the first count as one.
        late: whether gradients arrive a step late.

    Example:
        >>> round(assumed_penalty(0.01, 0.1, steps=200), 3), round(assumed_penalty(0.01, 0.1, steps=200, late=True), 3)
        (0.335, 0.835)
    """
    return density_penalty(density) + cut_penalty(density, present, max(steps, 1)) + LATE_PENALTY * late


@dataclass(frozen=True)
class Change:
    """A change of the density, and what it rests on.

    Args:
        density: before the change.
        num_bytes: bytes of the larger message, of the one before or of the one after.
        crossing: seconds that those were seen to take beyond latency.
        total: samples of a step.
        compute: seconds of a step that sends nothing.
        more: whether the density went up.

    Example:
        >>> Change(0.1, num_bytes=37e3, crossing=0.18, total=10, compute=0.016, more=False).density
        0.1
    """

    density: float
    num_bytes: float
    crossing: float
    total: int
    compute: float
    more: bool


@dataclass(frozen=True)
class DensityChoice:
    """A density and a total batch, and the predictions that they rest on.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        total_batch_size: samples of a step.
        objective: predicted seconds per sample, times the penalty on convergence (eq. 5).
        compute: seconds of a step that sends nothing.
        transfer: seconds that its messages take at this density.
        least: seconds that they take at the least density allowed.
        hidden: whether messages travel while the next step computes, or else every step waits for its own.
        probe: density whose messages are to be timed before anything changes, ``None`` for none.

    Example:
        >>> choice = DensityChoice(0.01, 64, objective=0.002, compute=0.1, transfer=0.02, least=0.002)
        >>> round(choice.step_time, 6), choice.network_bound
        (0.12, False)
    """

    density: float
    total_batch_size: int
    objective: float
    compute: float
    transfer: float
    least: float
    hidden: bool = False
    probe: float | None = None

    @property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return max(self.compute, self.transfer) if self.hidden else self.compute + self.transfer

    @property
    def network_bound(self) -> bool:
        """Whether even the least density takes longer than computing (eq. 6 has no solution)."""
        return self.least > self.compute

    def describe(self) -> str:
        """One line for the log.

        Example:
            >>> DensityChoice(0.01, 64, objective=0.002, compute=0.1, transfer=0.02, least=0.002).describe()
            'a step of 64 samples computes for 100 ms and sends for 20 ms'
        """
        text = (
            f"a step of {self.total_batch_size} samples computes for {1e3 * self.compute:.3g} ms and sends for "
            f"{1e3 * self.transfer:.3g} ms"
        )
        if self.hidden:
            text += ", which come a step later"
        if self.network_bound:
            text += f"; network-bound: even the least density takes {1e3 * self.least:.3g} ms on the link"
        return text


def minimise_time_to_accuracy(
    step_times: Mapping[int, float],
    densities: Sequence[float],
    *,
    transfer: Callable[[float], float],
    penalty: Callable[[float, float], float],
    hidden: bool = True,
    handling: Callable[[float], float] = lambda density: 0.0,
    headroom: float = 1.0,
) -> DensityChoice:
    """Total batch and density of least predicted time to accuracy under the bandwidth constraint (eq. 1, 5, 6).

    The paper searches split, total and density by Nelder-Mead, with a weight ``lambda`` on unequal iteration times.
    With a time model at hand the split of each total is the exact optimum, and unequal times need no weight of their
    own. All totals and all densities are tried, then Nelder-Mead moves the density between its neighbours. Eq. 6 holds
    for messages that travel while the next step computes; where every step waits for its own, their time adds up.

    Args:
        step_times: seconds of a step that sends nothing, at the best split of each total to choose from.
        densities: densities to choose from; the best one lies between the least and the greatest of them.
        transfer: seconds that the messages of a step take at a density, increasing.
        penalty: extra samples that a density and a total cost, as a share: ``g(density, total)``, above -1.
        hidden: whether messages travel while the next step computes.
        handling: seconds that selecting and merging at a density add to computing, or take from it.
        headroom: factor by which messages that are hidden are to take less than computing, 1 or more.

    Raises:
        ValueError: if there is no total or no density, or a penalty is -1 or less.

    Example:
        >>> def penalty(density, total):
        ...     return density_penalty(density)
        >>> choice = minimise_time_to_accuracy({64: 0.1}, [0.001, 0.01, 0.1], transfer=lambda d: 5 * d, penalty=penalty)
        >>> round(choice.density, 3)
        0.02
    """
    if not step_times:
        raise ValueError("step_times is empty; give at least one total batch size.")

    def evaluate(density: float, total: int) -> DensityChoice:
        seconds, extra = step_times[total] + handling(density), penalty(density, total)
        if extra <= -1.0:
            raise ValueError(f"penalty({density}, {total}) = {extra} must be above -1: a share of extra samples.")
        choice = DensityChoice(density, total, 0.0, seconds, transfer(density), transfer(min(densities)), hidden)
        return replace(choice, objective=float(time_to_accuracy(total, choice.step_time, extra)))

    def allowed(total: int) -> float:
        return largest_density(step_times[total] / headroom, transfer, densities) if hidden else max(densities)

    found = (evaluate(d, total) for total in step_times for d in densities if d <= allowed(total))
    best = min(found, key=lambda choice: choice.objective, default=None)
    if best is None:
        raise ValueError("densities is empty; give at least one, above 0 to 1.")
    infeasible = hidden and headroom * best.transfer > step_times[best.total_batch_size]  # eq. 6 has no solution
    if infeasible or min(densities) == max(densities):
        return best
    polished = evaluate(_polish(best, densities, evaluate, headroom), best.total_batch_size)
    return polished if polished.objective < best.objective else best


def _polish(
    best: DensityChoice,
    densities: Sequence[float],
    evaluate: Callable[[float, int], DensityChoice],
    headroom: float,
) -> float:
    """The density near the best one that is better still, by Nelder-Mead over its logarithm."""
    low, high = min(densities), max(densities)

    def objective(logs: Array) -> float:
        density = float(np.exp(logs[0]))
        choice = evaluate(density, best.total_batch_size)
        fits = not best.hidden or headroom * choice.transfer <= choice.compute
        return choice.objective if fits and low <= density <= high else FORBIDDEN

    start = math.log(best.density)
    options = {"xatol": 1e-3, "fatol": 1e-12, "initial_simplex": [[start], [start + 0.1]], "maxfev": 60}
    found = _minimize(objective, [start], options)
    return float(np.exp(found.x[0])) if found.fun < FORBIDDEN else best.density


def _minimize(function: Callable[[Array], float], start: Any, options: dict[str, Any]) -> Any:
    """Nelder-Mead. Scipy's optimisers take a second to import, and are for these searches alone."""
    from scipy.optimize import minimize

    return minimize(function, start, method="Nelder-Mead", options=options)
