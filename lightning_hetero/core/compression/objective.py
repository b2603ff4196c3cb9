"""Predicted time to accuracy: density of compression, total batch and split together (S sec. 4).

``f_i(x) = min(beta_i / alpha_i x, beta_i)`` samples per second on worker ``i`` (S eq. 2); ``TTA`` is in proportion to
``(1 + g(r, X)) / (X / max_i x_i / f_i(x_i))`` (S eq. 5), with ``g`` the extra samples that compression and batch size
cost (:mod:`lightning_hetero.core.compression.convergence_profile`). Eq. 6 is not as printed: it compares bytes with
bytes, ``bytes(density) <= bandwidth * x_i / f_i(x_i)``.

One call evaluates all densities of all totals.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.rounded import rounded

__all__ = [
    "DensityChoice",
    "density_penalty",
    "minimise_time_to_accuracy",
    "step_seconds",
    "time_to_accuracy",
]

Array = npt.NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)

PER_DECADE = 0.1
"""Extra samples, as a share, for each factor of ten by which less is sent. An assumption, not a measurement."""


def time_to_accuracy(total: Numbers, step_time: Numbers, loss_penalty: Numbers) -> Numbers:
    """Return the objective, seconds per sample times the penalty: ``(1 + g) / (X / T)`` (S eq. 5).

    Example:
        >>> time_to_accuracy(100, 0.5, 0.2)
        0.006
    """
    return (1.0 + loss_penalty) * step_time / total


def density_penalty(density: Numbers) -> Numbers:
    """Return the extra samples of a density without a profile, as a share: 10 % for each factor of ten below 1.

    An assumption, not a measurement: error feedback sends in a later step what this one leaves out, so a low density
    costs only a delay, and that cost grows slowly. A
    :class:`~lightning_hetero.core.compression.convergence_profile.ConvergenceProfile` of the model replaces it.

    Example:
        >>> density_penalty(np.array([1.0, 0.01])).round(3).tolist()
        [0.0, 0.2]
    """
    return cast(Numbers, PER_DECADE * np.log10(1.0 / density))


def step_seconds(compute: Numbers, transfer: Numbers, *, stale: bool, drag: float = 0.0) -> Numbers:
    """Return the seconds of a step: a synchronous message adds all of its time, a stale one a share, the drag.

    Example:
        >>> [float(step_seconds(3.0, 2.0, stale=stale, drag=0.25)) for stale in (False, True)]
        [5.0, 3.5]
    """
    return cast(Numbers, np.maximum(compute + drag * transfer, transfer) if stale else compute + transfer)


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
        drag: seconds by which computing gets longer for each second of a stale message.

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
    drag: float = 0.0

    @property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return float(step_seconds(self.compute, self.transfer, stale=self.stale, drag=self.drag))

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
    densities: Array,
    *,
    transfer: Callable[[Array], Array],
    penalty: Callable[[Array, Array], Array],
    stale: bool = True,
    drag: float = 0.0,
) -> list[DensityChoice]:
    """Find the density of least time to accuracy of each total under the bandwidth constraint (S eq. 1, 5, 6).

    The paper searches split, total and density by Nelder-Mead, with a weight ``lambda`` on unequal iteration times.
    Here the time model gives the exact optimum of the split for each total, unequal times need no weight, and all
    totals and densities are tried at once. Eq. 6 applies to messages that travel while the next step computes; where
    every step waits for its own, the times add up. If no density fits, the least one is used.

    Args:
        step_times: seconds of a step that sends nothing, at the best split of each total.
        densities: densities to choose from, increasing.
        transfer: seconds that the messages of a step take at a density, above 0, increasing; takes and gives arrays.
        penalty: extra samples that a density and a total cost, as a share, above -1; takes and gives arrays.
        stale: whether messages travel while the next step computes.
        drag: seconds by which computing gets longer for each second of a stale message.

    Raises:
        ValueError: if there is no density, or a penalty is -1 or less.

    Example:
        >>> def penalty(density, total):
        ...     return density_penalty(density)
        >>> grid = np.geomspace(0.001, 0.1, 201)
        >>> (choice,) = minimise_time_to_accuracy({64: 0.1}, grid, transfer=lambda d: 5 * d, penalty=penalty)
        >>> round(choice.density, 3)
        0.02
    """
    totals, compute = np.array(list(step_times.items()), dtype=float).T[:, :, None]
    sent = transfer(densities)
    extra = np.broadcast_to(penalty(densities, totals), (len(totals), len(densities)))
    if extra.min() <= -1.0:
        raise ValueError(f"penalty(density, total) = {extra.min()} must be above -1: a share of extra samples.")
    step = step_seconds(compute, sent, stale=stale, drag=drag)
    values = time_to_accuracy(totals, step, extra)
    fitting = np.where(sent <= compute + drag * sent, values, np.inf) if stale else values
    return [
        DensityChoice(
            float(densities[at]), total, float(values[row, at]), seconds, float(sent[at]), float(sent[0]), stale, drag
        )
        for row, (at, (total, seconds)) in enumerate(zip(fitting.argmin(axis=1), step_times.items(), strict=True))
    ]
