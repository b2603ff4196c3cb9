"""Search for the best density of many totals at once: all densities of a grid, then finer ones around the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_int

__all__ = ["SEARCH", "SearchSettings", "best_densities"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search for the best density.

    Args:
        points: densities that a round tries between the neighbors of the best one so far, 3 or more.
        rounds: number of rounds. Each narrows the range by a factor of half of ``points``: from first densities a
            factor of ten apart, three rounds give three digits.

    Example:
        >>> SearchSettings().points
        33
    """

    points: int = 33
    rounds: int = 3

    def __post_init__(self) -> None:
        check_int("points", self.points, minimum=3)
        check_int("rounds", self.rounds, minimum=0)


SEARCH = SearchSettings()


def best_densities(
    objective: Callable[[Array], Array], densities: Sequence[float] | Array, settings: SearchSettings = SEARCH
) -> Array:
    """Find the density of least objective in each row: try the given ones, then finer ones around the best.

    Args:
        objective: function from densities of shape ``(1, n)`` or ``(rows, n)`` to values of shape ``(rows, n)``.
        densities: densities to choose from; the best one lies between the least and the greatest of them.
        settings: fineness of the search.

    Returns:
        Densities, shape ``(rows,)``.

    Raises:
        ValueError: if there is no density.

    Example:
        >>> best_densities(lambda d: (np.log10(d) - np.array([[-2.0], [-1.5]])) ** 2, [0.001, 0.1]).round(4).tolist()
        [0.01, 0.0316]
    """
    if len(densities) == 0:
        raise ValueError("densities is empty; give at least one, above 0 to 1.")
    tried, fractions = np.unique(densities)[None, :], np.linspace(0.0, 1.0, settings.points)
    found = least = np.full(1, np.inf)
    for _ in range(settings.rounds + 1):
        values = objective(tried)
        tried, rows = np.broadcast_to(tried, values.shape), np.arange(len(values))
        at, last = values.argmin(axis=1), values.shape[1] - 1
        better = values[rows, at] < least
        found = np.where(better, tried[rows, at], found)
        least = np.where(better, values[rows, at], least)
        low, high = [tried[rows, np.clip(at + step, 0, last), None] for step in (-1, 1)]
        tried = np.clip(low * (high / low) ** fractions, low, high)
    return found
