"""Collects what the gradient noise scale needs, on the device, with one small message an interval.

The estimators of :mod:`lightning_hetero.core.noise_scale` are linear in the squared norms, so each rank adds up its
own part, ``w_i S_i`` with ``S_i`` of Cannikin, eq. 10, and the parts are summed over ranks when the interval ends. No
gradient is kept or copied, and nothing waits for the device in between.
"""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.core.noise_scale import METHODS, RunningNoiseScale, estimate_from_local_norms

__all__ = ["NOISE_FIELDS", "NoiseCollector", "merge_parts"]

NOISE_FIELDS = 5
PRECONDITIONED_AFTER = 10
"""Steps after which Adam's second moments are an average of some gradients, and not just the last one."""

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class _Seen:
    """Norms of one step; of gradients that arrive a step later, until the next step has theirs.

    Args:
        norms: squared norms of this rank's gradient and of the averaged one, without what comes later.
        sizes: samples of every rank.
        micro_batches: micro-batches of the step.
        exact: whether the averaged gradient is the sum of all ranks', rather than a compressed one.
        kind: what of it comes a step later.
    """

    norms: tuple[torch.Tensor, torch.Tensor]
    sizes: tuple[int, ...]
    micro_batches: int
    exact: bool
    kind: list[Any]

    def completed(self, late: torch.Tensor | float, dropped: bool) -> "_Seen":
        """With the squared norm that came later; not finite if the step was left out."""
        whole = torch.full_like(self.norms[1], torch.nan) if dropped else self.norms[1] + (late if self.exact else 0.0)
        return replace(self, norms=(self.norms[0], whole))


class NoiseCollector:
    """Adds up one rank's contributions to ``tr(Sigma)`` and ``|g|^2``.

    Steps with a gradient that is not finite are left out: the averaged gradient is the same on all ranks, so all
    leave out the same steps. Steps in which fewer than two ranks have samples are left out too.

    Args:
        hook: state of the gradient hook, which takes the norms.
        rank: this rank.
        method: weights of the local estimates, a name of :data:`~lightning_hetero.core.noise_scale.METHODS`.
        every_n_steps: take norms in every n-th step only.
        horizon: samples over which the running estimate looks back.
    """

    def __init__(
        self,
        hook: HookState,
        rank: int,
        *,
        method: str = "pooled",
        every_n_steps: int = 1,
        horizon: float = 50_000.0,
    ) -> None:
        self.hook, self.rank, self.method, self.every_n_steps = hook, rank, method, every_n_steps
        self.running = RunningNoiseScale(horizon=horizon)
        self._window: list[tuple[int, ...]] = []
        self._sums: torch.Tensor | None = None
        self._steps = 0
        self._inverse = 0.0
        self._warned = False
        self._held: _Seen | None = None
        self._counts = False

    def begin_step(self, number: int, sizes: tuple[int, ...]) -> None:
        """A micro-batch of these sizes begins, in the optimizer step of this number."""
        known = self.hook.preconditioner is None or number >= PRECONDITIONED_AFTER
        self._counts = number % self.every_n_steps == 0
        follows = self.hook.staleness is not None and (number - 1) % self.every_n_steps == 0
        self.hook.collect_norms = known and (self._counts or follows)
        self._window.append(sizes)

    def end_step(self) -> None:
        """The gradients of an optimizer step were averaged: take their norms."""
        norms, late = self.hook.take_norms(), self.hook.take_late_norm()
        dropped, self.hook.step_dropped = self.hook.step_dropped, False
        (sizes, *others), micro_batches, self._window = self._window, len(self._window), []
        kind = [] if self.hook.staleness is None else self.hook.staleness.step_kind
        held, self._held = self._held, None
        if held is not None and norms is not None and held.kind == kind:
            self._count(held.completed(late, dropped))
        elif held is not None and not held.exact:
            self._count(held.completed(0.0, dropped))
        unlike = any(other != sizes for other in others) or sum(size > 0 for size in sizes) < 2
        if norms is None or not self._counts or unlike or None in kind:
            return
        seen = _Seen(norms, sizes, micro_batches, self.hook.exact_sum, kind)
        if kind:
            self._held = seen
        else:
            self._count(seen.completed(0.0, dropped))

    def _count(self, seen: "_Seen") -> None:
        """Add a step to the sums, from what can be seen of it."""
        if seen.exact:
            self.add(seen.norms, seen.sizes, seen.micro_batches)
        elif len({size for size in seen.sizes if size}) > 1:
            self.add_local(seen.norms, seen.sizes, seen.micro_batches)
        elif not self._warned:
            self._warned = True
            log.warning(
                "the noise scale cannot be seen in compressed sums of equal batches (%s): it is estimated from dense "
                "steps only, unless a delayed sum is in them. Use unequal batches, or set dense_every in BlockTopK and "
                "staleness=0.",
                "/".join(map(str, seen.sizes)),
            )

    def add(self, norms: tuple[torch.Tensor, torch.Tensor], sizes: tuple[int, ...], micro_batches: int = 1) -> None:
        """Add a step in which every rank ran ``micro_batches`` batches of ``sizes``.

        Args:
            norms: squared norms of this rank's weighted gradient and of the averaged one.
            sizes: samples of every rank in each micro-batch.
            micro_batches: micro-batches of the step; together they count as one batch of each rank.
        """
        local, whole = (norm.double() for norm in norms)
        total, own = sum(sizes), sizes[self.rank]
        mean_sq = local * ((total / (len(sizes) * own)) ** 2 if own else 0.0)
        weight = _weights(self.method, sizes)[self.rank] * own * total / max(total - own, 1) * micro_batches
        part = torch.stack([weight * (mean_sq - whole), whole, torch.ones_like(whole)])
        part = torch.where(torch.isfinite(whole), part, torch.zeros_like(part))
        self._sums = part if self._sums is None else self._sums + part
        self._steps += 1
        self._inverse += 1.0 / (total * micro_batches)

    def add_local(self, norms: tuple[torch.Tensor, torch.Tensor], sizes: tuple[int, ...], micro_batches: int) -> None:
        """Add a step whose sum was compressed, from the local norms of unequal batches alone.

        The regression ``|g_i|^2 = |G|^2 + tr(Sigma) / b_i`` is linear in the norms, so that each rank adds its own
        part; ``|g|^2`` of the sum that was not seen is ``|G|^2 + tr(Sigma) / B``.
        """
        local, whole = (norm.double() for norm in norms)
        total, own, ranks = sum(sizes), sizes[self.rank], len(sizes)
        mean_sq = local * ((total / (ranks * own)) ** 2 if own else 0.0)
        trace, signal = _regression(sizes)
        part = torch.stack(
            [
                trace[self.rank] * mean_sq * micro_batches,
                (signal[self.rank] + trace[self.rank] / total) * mean_sq * ranks,
                torch.ones_like(whole),
            ]
        )
        part = torch.where(torch.isfinite(whole), part, torch.zeros_like(part))
        self._sums = part if self._sums is None else self._sums + part
        self._steps += 1
        self._inverse += 1.0 / (total * micro_batches)

    def take(self) -> np.ndarray:
        """``(sum w_i S_i, sum |g|^2, finite steps, steps, sum 1 / B)`` since the last call."""
        sums = torch.zeros(3) if self._sums is None else self._sums.cpu()
        out = np.array([*sums.tolist(), self._steps, self._inverse])
        self._sums, self._steps, self._inverse = None, 0, 0.0
        return out

    def absorb(self, parts: np.ndarray) -> None:
        """Take the parts of all ranks, shape ``(ranks, 5)``, into the running estimate, the same on all ranks."""
        self.running = merge_parts(self.running, parts)


@lru_cache(maxsize=64)
def _weights(method: str, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Weight of each rank's ``S_i``, 0 for ranks without samples."""
    b = np.array(sizes, dtype=float)
    weights = np.zeros(len(b))
    weights[b > 0] = METHODS[method](b[b > 0])[1]
    return tuple(float(w) for w in weights)


@lru_cache(maxsize=64)
def _regression(sizes: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coefficients of each rank's ``|g_i|^2`` in ``tr(Sigma)`` and in ``|G|^2``, 0 for ranks without samples."""
    units = np.eye(len(sizes))
    estimates = [estimate_from_local_norms(unit, sizes) for unit in units]
    return tuple(e.trace for e in estimates), tuple(e.grad_sq_norm for e in estimates)


def merge_parts(running: RunningNoiseScale, parts: np.ndarray) -> RunningNoiseScale:
    """The running estimate with the parts of all ranks, shape ``(ranks, 5)``, of one interval.

    Example:
        >>> parts = np.array([[6.0, 4.5, 3, 3, 0.375], [6.0, 4.5, 3, 3, 0.375]])
        >>> round(merge_parts(RunningNoiseScale(), parts).noise_scale, 6)
        4.0
    """
    finite, steps, inverse = parts[0, 2:]
    if finite:
        running = running.update(
            trace=float(parts[:, 0].sum() / finite),
            global_sq_norm=float(parts[:, 1].mean() / finite),
            total_batch_size=float(steps / inverse),
            steps=float(finite),
        )
    return running.left_out(int(steps - finite))
