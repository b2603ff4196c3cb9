"""Past of each worker's phases, by batch size: what a phase is expected to take if nothing is wrong."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.stragglers.settings import StragglerSettings

__all__ = ["Past", "largest_expected"]

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def largest_expected(size: float, known: dict[float, Array]) -> Array:
    """Return the largest times that a worker may take for a size that it has not run, if times grow with the size.

    Between two known sizes times lie on a line. Beyond them they grow in proportion at most, and with one known size
    nothing says that a smaller batch is any faster.

    Args:
        size: samples.
        known: times of the phases at other sizes, not empty.

    Example:
        >>> known = {10.0: np.array([1.0]), 20.0: np.array([1.5])}
        >>> [float(largest_expected(size, known)[0]) for size in (10, 15, 40, 5)]
        [1.0, 1.25, 3.0, 1.0]
    """
    sizes = sorted(known)
    above = [one for one in sizes if one >= size]
    below = [one for one in sizes if one <= size]
    if not above:
        return np.asarray(known[below[-1]] * (size / below[-1]))
    if not below:
        return known[above[0]]
    low, high = below[-1], above[0]
    share = 0.0 if high == low else (size - low) / (high - low)
    return np.asarray(known[low] + share * (known[high] - known[low]))


class Past:
    """Running means of the phases of all workers at their present sizes, and the means at earlier sizes.

    Args:
        workers: number of workers.
        phases: number of phases.
        settings: limits of the detection.

    Attributes:
        sizes: present sizes, NaN before any.
        expected: largest times expected at these sizes, shape ``(workers, phases)``, NaN where nothing is known.
        spread: mean square of the relative deviations of whole rounds, per worker.

    Example:
        >>> past, everyone = Past(1, 1, StragglerSettings()), np.ones(1, dtype=bool)
        >>> past.resize(np.array([8.0]))
        >>> past.learn(np.array([[0.1]]), usual=everyone, suspicious=~everyone)
        >>> past.resize(np.array([16.0]))
        >>> past.expected.tolist(), past.tried.tolist()
        ([[0.2]], [False])
    """

    def __init__(self, workers: int, phases: int, settings: StragglerSettings) -> None:
        self.settings = settings
        self.sizes = np.full(workers, np.nan)
        self.expected = np.full((workers, phases), np.nan)
        self.spread = np.full(workers, settings.first_deviation**2)
        self._rounds = np.zeros(workers)
        self._held = np.zeros(workers)  # squares of relative deviations that the next round has to confirm
        self._known: list[dict[float, Array]] = [{} for _ in range(workers)]

    def resize(self, sizes: Array) -> None:
        """Expect what workers with other sizes than before take for these."""
        for rank in np.flatnonzero(sizes != self.sizes):
            known, before = self._known[rank], float(self.sizes[rank])
            if self._rounds[rank] and before > 0:
                known[before] = self.expected[rank].copy()
            self.sizes[rank] = sizes[rank]
            size = float(sizes[rank])
            self._rounds[rank] = 1.0 if size in known else 0.0
            self.expected[rank] = largest_expected(size, known) if known and size > 0 else np.nan

    @property
    def tried(self) -> Flags:
        """Workers that have run their present size before, so that their times there are known and not bounded."""
        return np.asarray(self._rounds > 0)

    def learn(self, times: Array, usual: Flags, suspicious: Flags) -> None:
        """Move the means of workers that are as usual towards the times of a round.

        A round in which a worker was suspiciously slow has to wait: if the next one confirms it, a straggler has begun,
        and else it was the noise of a single round, which counts as such.

        Args:
            times: seconds of the phases, shape ``(workers, phases)``.
            usual: workers that are no stragglers.
            suspicious: workers that were slower than expected.
        """
        total, now = self.expected.sum(axis=1), times.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.nan_to_num((now / total - 1.0) ** 2)
        held = usual & suspicious & (self._held == 0.0)
        single = usual & ~suspicious & (self._held > 0.0)
        self._widen(single, self._held, self.settings.weight)
        self._held = np.where(held, off, 0.0)
        usual = usual & ~held
        self._rounds[usual] += 1
        fresh = usual & (self._rounds == 1)
        self.expected[fresh] = times[fresh]
        usual = usual & ~fresh
        weight = np.maximum(1.0 / (self._rounds + 1.0), self.settings.weight)
        self._widen(usual, off, weight)
        self.expected[usual] += weight[usual, None] * (times[usual] - self.expected[usual])

    def _widen(self, which: Flags, squares: Array, weight: Array | float) -> None:
        """Move the mean squares of some workers; a single round counts as nine times the present one at most."""
        most = np.minimum(squares, 9.0 * self.spread)
        moved = self.spread + weight * (most - self.spread)
        self.spread = np.where(which, np.maximum(moved, self.settings.min_deviation**2), self.spread)

    def forget(self, ranks: Sequence[int], times: Array) -> None:
        """Begin anew with some workers, for which the times of this round are the usual ones from now on."""
        for rank in ranks:
            self._known[rank].clear()
            self._rounds[rank], self.expected[rank] = 1.0, times[rank]
