"""Predicted time to accuracy: density of compression, total batch and split together (S sec. 4).

``f_i(x) = min(beta_i / alpha_i x, beta_i)`` samples per second on worker ``i`` (S eq. 2); ``TTA`` is in proportion to
``(1 + g(r, X)) / (X / max_i x_i / f_i(x_i))`` (S eq. 5), with ``g`` the extra samples that compression and batch size
cost (:mod:`lightning_hetero.core.compression.convergence_profile`). Eq. 6 is not as printed: it compares bytes with
bytes, ``bytes(density) <= bandwidth * x_i / f_i(x_i)``.

Functions take numbers or arrays: one call evaluates all densities of all totals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.compression.density_search import SEARCH, SearchSettings, best_densities
from lightning_hetero.core.rounded import rounded
from lightning_hetero.core.validation import check_number

__all__ = [
    "DensityChoice",
    "PenaltySettings",
    "assumed_penalty",
    "cut_penalty",
    "density_penalty",
    "minimise_time_to_accuracy",
    "penalised_time",
    "time_to_accuracy",
]

Array = npt.NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)

DOES_NOT_FIT = 1e30
"""Objective of stale messages that take longer than computing, per second that they take: above any real one."""


@dataclass(frozen=True)
class PenaltySettings:
    """Assumed cost of compression and staleness, in extra samples, without a convergence profile.

    Args:
        per_decade: extra samples, as a share, for each factor of ten by which less is sent. An assumption, not a
            measurement.
        stale: extra samples, as a share, for gradients that are applied one step late. StellaTrain's
            trainings kept 82 % of the speed of convergence or more (S sec. 6), which is 0.22 at most; early in a
            training with momentum the cost is higher, so a small gain does not justify it.
        cut_steps_per_waiting_step: steps of progress that a cut of the density costs for each step by which blocks wait
            longer. On the digits (``benchmarks/wan.py``), a cut from 10 % to 0.67 % made blocks wait for 140 more steps
            and set trainings back by 30 to 45 steps, about a third of that.

    Example:
        >>> PenaltySettings().per_decade
        0.1
    """

    per_decade: float = 0.1
    stale: float = 0.5
    cut_steps_per_waiting_step: float = 0.3

    def __post_init__(self) -> None:
        check_number("per_decade", self.per_decade, low=0.0)
        check_number("stale", self.stale, low=0.0)
        check_number("cut_steps_per_waiting_step", self.cut_steps_per_waiting_step, low=0.0)


PENALTY = PenaltySettings()


def time_to_accuracy(total: Numbers, step_time: Numbers, loss_penalty: Numbers) -> Numbers:
    """Return the objective, seconds per sample times the penalty: ``(1 + g) / (X / T)`` (S eq. 5).

    Example:
        >>> time_to_accuracy(100, 0.5, 0.2)
        0.006
    """
    return (1.0 + loss_penalty) * step_time / total


def density_penalty(density: Numbers, settings: PenaltySettings = PENALTY) -> Numbers:
    """Return the extra samples of a density without a profile, as a share: 10 % for each factor of ten below 1.

    An assumption, not a measurement: error feedback sends in a later step what this one leaves out, so a low density
    costs only a delay, and that cost grows slowly. A
    :class:`~lightning_hetero.core.compression.convergence_profile.ConvergenceProfile` of the model replaces it.

    Example:
        >>> density_penalty(np.array([1.0, 0.01])).round(3).tolist()
        [0.0, 0.2]
    """
    return cast(Numbers, settings.per_decade * np.log10(1.0 / density))


def cut_penalty(density: Numbers, present: float, steps: float, settings: PenaltySettings = PENALTY) -> Numbers:
    """Return the extra samples of a cut in a young training: ``0.3 (1 / density - 1 / present) / steps``.

    A block is sent about once in ``1 / density`` steps. After a cut it waits longer, and until then the weights lack
    its part of the gradient. They lack less than the number of missing blocks suggests, because large blocks go first.
    The cost is a share of the steps so far: large early in training, negligible later.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        present: the share that is sent now; a density that is no lower costs nothing.
        steps: steps of the training so far, above 0.
        settings: cost of each step by which blocks wait longer.

    Example:
        >>> cut_penalty(np.array([0.01, 0.2]), 0.1, steps=200).round(3).tolist()
        [0.135, 0.0]
        >>> float(cut_penalty(0.01, 0.1, steps=20_000).round(5))
        0.00135
    """
    waits = np.maximum(1.0 / density - 1.0 / present, 0.0)
    return cast(Numbers, settings.cut_steps_per_waiting_step * waits / steps)


def assumed_penalty(
    density: Numbers, present: float, steps: int, stale: bool = False, settings: PenaltySettings = PENALTY
) -> Numbers:
    """Return ``g`` without a profile: the cost of a density, of a cut at this point, and of stale gradients.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        present: the share that is sent now.
        steps: steps of the training so far; 0 counts as 1.
        stale: whether gradients are stale.
        settings: cost of each.

    Example:
        >>> [round(float(assumed_penalty(0.01, 0.1, steps=200, stale=stale)), 3) for stale in (False, True)]
        [0.335, 0.835]
    """
    cut = cut_penalty(density, present, max(steps, 1), settings)
    return density_penalty(density, settings) + cut + settings.stale * stale


def penalised_time(
    total: Array, compute: Array, transfer: Array, penalty: Array, *, stale: bool, headroom: float = 1.0
) -> Array:
    """Return the time to accuracy (S eq. 5), prohibitively large where stale messages outlast computing (S eq. 6).

    Args:
        total: samples of a step; all arrays are broadcast.
        compute: seconds of a step that sends nothing.
        transfer: seconds that its messages take, above 0.
        penalty: extra samples that density and total cost, as a share: ``g``, above -1.
        stale: whether messages travel while the next step computes.
        headroom: factor by which stale messages must be shorter than computing, 1 or more.

    Raises:
        ValueError: if a penalty is -1 or less.

    Example:
        >>> total, compute, transfer = np.array([1.0]), np.array([0.2]), np.array([0.05, 0.5])
        >>> [penalised_time(total, compute, transfer, 0 * total, stale=stale).tolist() for stale in (False, True)]
        [[0.25, 0.7], [0.2, 5e+29]]
    """
    if penalty.min() <= -1.0:
        raise ValueError(f"penalty(density, total) = {penalty.min()} must be above -1: a share of extra samples.")
    if not stale:
        return time_to_accuracy(total, compute + transfer, penalty)
    fits = headroom * transfer <= compute
    return np.where(fits, time_to_accuracy(total, compute, penalty), DOES_NOT_FIT * transfer)


@dataclass(frozen=True)
class DensityChoice:
    """A density and a total batch, and the predictions for them.

    Args:
        density: share of the gradient's blocks that is sent, above 0, to 1.
        total_batch_size: samples of a step.
        objective: predicted seconds per sample, times the penalty on convergence (S eq. 5).
        compute: seconds of a step that sends nothing.
        transfer: seconds that its messages take at this density.
        least: seconds that they take at the least density allowed.
        stale: whether messages travel while the next step computes; if not, every step waits for its own.

    Example:
        >>> choice = DensityChoice(0.01, 64, objective=0.002, compute=0.1, transfer=0.02, least=0.002)
        >>> round(choice.step_time, 6), choice.communication_bound
        (0.12, False)
    """

    density: float
    total_batch_size: int
    objective: float
    compute: float
    transfer: float
    least: float
    stale: bool = False

    @property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return max(self.compute, self.transfer) if self.stale else self.compute + self.transfer

    @property
    def communication_bound(self) -> bool:
        """``True`` if even the least density takes longer than computing (S eq. 6 has no solution)."""
        return self.least > self.compute

    def describe(self) -> str:
        """Return one line for the log.

        Example:
            >>> DensityChoice(0.01, 64, objective=0.002, compute=0.1, transfer=0.02, least=0.002).describe()
            'a step of 64 samples computes for 100 ms and sends for 20 ms'
        """
        text = (
            f"a step of {self.total_batch_size} samples computes for {rounded(1e3 * self.compute)} ms and sends for "
            f"{rounded(1e3 * self.transfer)} ms"
        )
        if self.stale:
            text += ", which come a step later"
        if self.communication_bound:
            text += f"; communication-bound: even the least density takes {rounded(1e3 * self.least)} ms on the link"
        return text


def minimise_time_to_accuracy(
    step_times: Mapping[int, float],
    densities: Sequence[float],
    *,
    transfer: Callable[[Array], Array],
    penalty: Callable[[Array, Array], Array],
    stale: bool = True,
    headroom: float = 1.0,
    settings: SearchSettings = SEARCH,
) -> DensityChoice:
    """Find total batch and density of least time to accuracy under the bandwidth constraint (S eq. 1, 5, 6).

    The paper searches split, total and density by Nelder-Mead, with a weight ``lambda`` on unequal iteration times.
    Here the time model gives the exact optimum of the split for each total, and unequal times need no weight. All
    totals and densities are tried at once, then finer densities. Eq. 6 applies to messages that travel while the next
    step computes; where every step waits for its own, the times add up. If no density fits, the least one is used.

    Args:
        step_times: seconds of a step that sends nothing, at the best split of each total to choose from.
        densities: densities to choose from; the best one lies between the least and the greatest of them.
        transfer: seconds that the messages of a step take at a density, above 0, increasing; takes and gives arrays.
        penalty: extra samples that a density and a total cost, as a share, above -1; takes and gives arrays.
        stale: whether messages travel while the next step computes.
        headroom: factor by which stale messages must be shorter than computing, 1 or more.
        settings: fineness of the search.

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
    totals, compute = np.array(list(step_times.items()), dtype=float).T[:, :, None]

    def objective(density: Array) -> Array:
        extra = np.asarray(penalty(density, totals))
        return penalised_time(totals, compute, transfer(density), extra, stale=stale, headroom=headroom)

    found = best_densities(objective, densities, settings)[:, None]
    best = int(objective(found).argmin())
    sent, least = transfer(found[best]), transfer(np.array([min(densities)]))
    step = np.maximum(compute[best], sent) if stale else compute[best] + sent
    value = time_to_accuracy(totals[best], step, np.asarray(penalty(found[best], totals[best])))
    seconds, at, lowest = float(compute[best, 0]), float(sent[0]), float(least[0])
    return DensityChoice(float(found[best, 0]), int(totals[best, 0]), float(value[0]), seconds, at, lowest, stale)
