"""Collector of squared norms for the gradient noise scale: on the device, with one small message per interval.

The estimators of :mod:`lightning_hetero.core.noise.accumulation` are linear in squared norms. So each rank adds up its
own part, and the parts are summed over ranks when the interval ends. No gradient is kept or copied, and nothing waits
for the device in between: a step only costs its norms, which are combined for many steps at once.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.noise.window_sums import Squares, WindowSums, merge_parts
from lightning_hetero.core.noise.accumulation import WindowEstimator, window_estimator
from lightning_hetero.core.noise.running import RunningNoiseScale

__all__ = ["NoiseCollector"]

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class _Held:
    """A step whose averaged gradient, or a part of it, arrives with the next step.

    Args:
        estimator: estimator of its window.
        first: squared norms of the first micro-batch.
        local: squared norms of this rank's gradient.
        whole: squared norms of the part of the averaged gradient that has arrived.
        exact: whether the averaged gradient is the sum of all ranks', rather than a compressed one.
        kind: names of its stale parameters; their sums come with the next step if the same ones are stale there.
    """

    estimator: WindowEstimator
    first: Squares
    local: Squares
    whole: Squares
    exact: bool
    kind: frozenset[str]


def _unless(dropped: bool | torch.Tensor, squares: Squares) -> Squares:
    """Return the squared norms, NaN if the step was left out."""
    if isinstance(dropped, torch.Tensor):
        return [torch.where(dropped != 0, torch.nan, value) for value in squares]
    return [torch.full_like(value, torch.nan) for value in squares] if dropped else squares


class NoiseCollector:
    """One rank's contributions to ``tr(Sigma)`` and ``|g|^2``, added up from the norms of a gradient hook.

    Windows that cannot separate noise from signal are left out on all ranks: those in which fewer than two ranks have
    samples, and those whose micro-batches were split too differently.

    Args:
        hook: state of the gradient hook, which computes the norms.
        rank: this rank.
        method: weights of the local estimates, a name of :data:`~lightning_hetero.core.noise.estimators.METHODS`.
        every_n_steps: take norms in every n-th step only.
        horizon: steps over which the running estimate averages.
        summed: whether losses are sums over samples rather than means.
    """

    preconditioned_after_steps = 10
    """Steps after which Adam's second moments average several gradients, and no longer reflect just the last one."""

    def __init__(
        self,
        hook: HookState,
        rank: int,
        *,
        method: str = "pooled",
        every_n_steps: int = 1,
        horizon: float = RunningNoiseScale().horizon,
        summed: bool = False,
    ) -> None:
        self.hook, self.rank, self.method, self.every_n_steps = hook, rank, method, every_n_steps
        hook.squares.norms.divide(rank, hook.world_size)
        self.summed = summed
        self.running = RunningNoiseScale(horizon=horizon)
        self.sums = WindowSums()
        self.number = 0
        """Optimizer steps so far, including those of a run that this one resumes."""
        self._on_update: Callable[[], None] = lambda: None
        self._divisor: Callable[[], int | None] = lambda: None
        self._parameters: Callable[[], Iterable[torch.Tensor]] = tuple
        self._window: list[tuple[int, ...]] = []
        self._first: list[torch.Tensor] = []
        self._warned = False
        self._held: _Held | None = None

    def begin_step(self, sizes: tuple[int, ...]) -> None:
        """Begin a micro-batch; ``sizes`` are the samples of each rank."""
        known = self.hook.squares.norms.preconditioner is None or self.number >= self.preconditioned_after_steps
        due = self.number % self.every_n_steps == 0
        self.hook.squares.want(known and (due or self._held is not None))
        self._window.append(sizes)

    def accumulate(self, divisor: Callable[[], int | None], parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Also use the first micro-batch of each accumulation window.

        Args:
            divisor: gives the divisor of micro-batch losses; if it gives ``None``, their number in the window.
            parameters: gives the model's parameters.
        """
        self._divisor, self._parameters = divisor, parameters

    def begin_anew(self) -> None:
        """Leave steps out as at the beginning of a run: Adam knows no gradients of parameters that have just joined."""
        self.number, self._held = 0, None

    def after_backward(self) -> None:
        """Take the norms of the first micro-batch of a window, whose gradients were not averaged."""
        if self.hook.squares.due and len(self._window) == 1 and not self.hook.squares.local:
            self._first = self.hook.squares.norms.of_parameters(self._parameters())

    def end_step(self) -> None:
        """End an optimizer step: take the norms of its averaged gradients."""
        due = self.number % self.every_n_steps == 0
        self.number += 1
        squares, stale = self.hook.squares.take(), self.hook.squares.take_stale()
        dropped = self.hook.step_skipped
        window, self._window = tuple(self._window), []
        first, self._first = self._first, []
        kind = frozenset() if self.hook.staleness is None else self.hook.staleness.step_kind
        self._complete(kind, stale, dropped)
        if squares is None or not due or kind is None:
            return
        local = squares[0]
        whole = squares[1] if kind else _unless(dropped, squares[1])
        nested = bool(first) and len(window) > 1
        known = self.running.noise_scale if nested else math.inf
        estimator = window_estimator(
            window,
            divisor=self._divisor(),
            summed=self.summed,
            method=self.method,
            nested=nested,
            exact=self.hook.is_exact,
            noise_scale=math.inf if math.isnan(known) else known,
        )
        if estimator is not None and kind:
            self._held = _Held(estimator, first if len(window) > 1 else [], local, whole, self.hook.is_exact, kind)
        elif estimator is not None:
            self.add(estimator, first if len(window) > 1 else [], local, whole)
        elif not self.hook.is_exact and not self._warned:
            self._warned = True
            log.warning(
                "the noise scale cannot be seen in compressed sums of equal batches (%s): it is estimated from dense "
                "steps only, unless a stale sum is in them. Use unequal batches, or set dense_every in BlockTopK and "
                "staleness=0.",
                "/".join(map(str, window[0])),
            )

    def settle(self) -> None:
        """Wait for the sums that the last step has in flight, so a checkpoint holds the whole step.

        All ranks have to call it together.
        """
        if self._held is not None and self.hook.staleness is not None:
            in_flight, dropped = self.hook.staleness.wait_in_flight()
            stale: list[torch.Tensor] = []
            for flat, owners in in_flight:
                stale += self.hook.squares.norms.of_average(flat, lambda owners=owners: owners)  # type: ignore[misc]
            self._complete(self._held.kind, stale, dropped)

    def _complete(self, kind: frozenset[str] | None, stale: Squares, dropped: bool | torch.Tensor) -> None:
        """Add the previous step, part of whose averaged gradient came with this one."""
        held, self._held = self._held, None
        if held is not None and (held.kind == kind or not held.exact):
            whole = _unless(dropped, [*held.whole, *stale] if held.exact else held.whole)
            self.add(held.estimator, held.first, held.local, whole)

    def add(self, estimator: WindowEstimator, first: Squares, local: Squares, whole: Squares) -> None:
        """Add a step, by the squared norms of this rank's weighted gradient and of the averaged one."""
        part = estimator.part(self.rank, divided=self.hook.squares.norms.in_parts)
        self.sums.add(part, estimator.samples, (first, local, whole))

    def pack(self) -> np.ndarray:
        """Return this rank's sums since the last sync round."""
        return self.sums.pack()

    def unpack(self, everyone: np.ndarray, control: ControlPlane) -> None:
        """Update the running estimate, equal on all ranks, by the sums of all ranks (see :meth:`pack`)."""
        agreed = self.sums.reconcile(everyone, control)
        self.sums.clear()
        self.take_over(merge_parts(self.running, agreed))
        self._on_update()

    def take_over(self, running: RunningNoiseScale) -> None:
        """Continue from this estimate."""
        self.running = running

    def resume(self, steps: int, part: Sequence[float]) -> None:
        """Continue in the middle of an interval.

        Args:
            steps: optimizer steps so far.
            part: this rank's part of the sums of the interval.
        """
        self.number = steps
        self.sums.load(part)

    def on_update(self, call: Callable[[], None] | None) -> None:
        """Set the function to call after each new estimate; ``None`` for none."""
        self._on_update = call or (lambda: None)
