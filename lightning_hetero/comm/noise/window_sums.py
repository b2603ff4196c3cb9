"""Sums of squared norms over accumulation windows, of one rank and of all ranks together."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.noise.running import RunningNoiseScale

__all__ = ["NOISE_FIELDS", "WindowSums", "merge_parts", "own_part"]


NOISE_FIELDS = 6


Squares = Sequence[torch.Tensor]
"""Parts of a squared norm, to be added up: one for each bucket, say."""


class WindowSums:
    """One rank's part of the sums over steps of ``S`` and of ``|g|^2``, each weighted by the samples of its step.

    Steps with a non-finite norm are left out. A rank may know the norm of only a part of the averaged gradient, so a
    step is left out on all ranks if it is not finite on any of them (:meth:`reconcile`).

    Example:
        >>> from lightning_hetero.core.noise.accumulation import window_estimator
        >>> sums, estimator = WindowSums(), window_estimator(((4,), (4,)), nested=True)
        >>> whole = [torch.tensor(0.5), torch.tensor(0.5)]
        >>> sums.add(estimator.parts[0], estimator.samples, [[torch.tensor(0.5625)], whole, whole])
        >>> sums.take().tolist()  # B S, B |g|^2, steps and samples that are finite, steps
        [80.0, 8.0, 1.0, 8.0, 1.0]
    """

    max_waiting = 512
    """Squared norms that wait on the device to be added up together, be they of a hundred steps or of one."""

    def __init__(self) -> None:
        self._before, self._steps = np.zeros(5), 0
        self._rows: list[torch.Tensor] = []
        self._waiting: list[tuple[Sequence[Sequence[float]], float, Sequence[Squares]]] = []
        self._held = 0

    @property
    def steps(self) -> int:
        """Steps since the last :meth:`take`."""
        return self._steps

    def add(self, part: Sequence[Sequence[float]], samples: float, squares: Sequence[Squares]) -> None:
        """Add a step.

        Args:
            part: this rank's coefficients from :class:`~lightning_hetero.core.noise.accumulation.WindowEstimator`.
            samples: samples that the step counts for.
            squares: squared norms of the first micro-batch, of the whole window, and of the average.
        """
        self._waiting.append((part, samples, squares))
        self._steps += 1
        self._held += sum(map(len, squares))
        if self._held >= self.max_waiting:
            self._settle()

    def _settle(self) -> None:
        """Add up the steps that wait."""
        if not self._waiting:
            return
        parts, samples, norms_of = zip(*self._waiting, strict=True)
        self._waiting, self._held = [], 0
        kinds = [several for step in norms_of for several in step]
        squares = torch.stack([value for several in kinds for value in several]).double()

        def there(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(squares.device, non_blocking=True)

        places = there([place for place, several in enumerate(kinds) for _ in several], torch.int64)
        norms = squares.new_zeros(len(kinds)).index_add_(0, places, squares).view(-1, 3)
        weights = there(samples, torch.float64)[:, None]
        sums = (there(parts, torch.float64) @ norms[:, :, None])[:, :, 0] * weights
        finite = norms.isfinite().all(dim=1, keepdim=True)
        self._rows.append(torch.cat([sums, finite, weights], dim=1))

    def _each(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(B S, B |g|^2, 1, B, 1)`` of each step, and whether all its norms known to this rank are finite."""
        self._settle()
        rows = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros((0, 4))
        self._rows = [torch.from_numpy(rows)] if self._rows else []
        ones = np.ones(len(rows))
        return np.column_stack([rows[:, :2], ones, rows[:, 3], ones]), rows[:, 2] > 0

    def _sum(self, each: np.ndarray, finite: Any) -> np.ndarray:
        total: np.ndarray = self._before + each[finite].sum(axis=0)
        total[4] = self._before[4] + len(each)
        return total

    def pack(self) -> np.ndarray:
        """Return ``(sum of B S, of B |g|^2, finite steps, their samples, steps)`` since the last :meth:`take`.

        A sixth number is a checksum of the steps that are not finite on this rank, for :meth:`reconcile`; 0 for none.
        """
        each, finite = self._each()
        left_out = 0 if finite.all() else 1 + zlib.crc32(np.packbits(finite).tobytes())
        return np.array([*self._sum(each, finite), left_out])

    def reconcile(self, parts: np.ndarray, control: ControlPlane) -> np.ndarray:
        """Return the parts of all ranks, shape ``(ranks, 5)``, with the same steps left out of each.

        Args:
            parts: :meth:`pack` of each rank.
            control: gathers two more messages if ranks have left out different steps.
        """
        if (parts[:, 5] == parts[0, 5]).all():
            return parts[:, :5]
        each, finite = self._each()
        everyone = control.gather(finite.astype(float)).all(axis=0)
        return control.gather(self._sum(each, everyone))

    def clear(self) -> None:
        """Begin anew."""
        self._before, self._steps, self._rows = np.zeros(5), 0, []

    def take(self) -> np.ndarray:
        """Return the first five numbers of :meth:`pack`, and begin anew."""
        out = self.pack()[:5]
        self.clear()
        return out

    def load(self, part: Sequence[float]) -> None:
        """Continue from this rank's row of :meth:`reconcile`."""
        self._before, self._steps, self._rows = np.array(part, dtype=float), int(part[4]), []


def merge_parts(
    running: RunningNoiseScale, parts: np.ndarray, *, biased: bool = False, weight: float = 1.0
) -> RunningNoiseScale:
    """Return the running estimate after adding one interval's parts of all ranks, shape ``(ranks, 5)``.

    Args:
        running: estimate so far.
        parts: :meth:`WindowSums.take` of each rank.
        biased: whether the parts are based on successive steps.
        weight: number of steps that each step counts as.

    Example:
        >>> parts = np.array([[48.0, 18.0, 3, 24, 3], [48.0, 18.0, 3, 24, 3]])
        >>> round(merge_parts(RunningNoiseScale(), parts).noise_scale, 6)
        4.0
    """
    finite, samples, steps = parts[0, 2:]
    if finite:
        running = running.update(
            trace=float(parts[:, 0].sum() / samples),
            global_sq_norm=float(parts[:, 1].sum() / samples),
            total_batch_size=float(samples / finite),
            steps=float(finite) * weight,
            biased=biased,
        )
    return running.left_out(int(steps - finite))


def own_part(parts: Sequence[Sequence[float]], rank: int, world_size: int) -> list[float]:
    """Return this rank's part of an interval cut by a checkpoint, possibly of another number of ranks.

    Example:
        >>> own_part([[6.0, 2.0, 3.0, 18.0, 3.0], [2.0, 2.0, 3.0, 18.0, 3.0]], rank=0, world_size=4)
        [2.0, 1.0, 3.0, 18.0, 3.0]
    """
    if len(parts) == world_size:
        return [float(value) for value in parts[rank]]
    sums = [sum(values) / world_size for values in zip(*parts, strict=True)]
    return [*sums[:2], *map(float, parts[0][2:])]
