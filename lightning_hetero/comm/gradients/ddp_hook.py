"""The one DDP communication hook: mark each bucket's times, ask the averager, take norms on request.

This module must not postpone the evaluation of annotations: torch inspects the hook's signature.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import DDPMean, GradientAverager, UserHook
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.timing.step_timer import StepTimer

__all__ = ["DIRECT_BACKWARD", "BackwardCheck", "HookState", "gradient_hook"]

log = logging.getLogger("lightning_hetero")

CALLBACKS_HELD = 256
"""The newest callbacks, any of which a thread of the process group may still hold when a training ends."""

DIRECT_BACKWARD = (
    "loss.backward() was called directly, so that the loss is not weighted by the worker's share of the batch. "
    "Call self.manual_backward(loss) (Lightning) or the strategy's or accelerator's backward(loss) instead."
)


class HookState:
    """Answer what the gradient hook asks: who averages, whether the loss was weighted, whether norms are due.

    Args:
        observer: takes the times of each bucket.
        world_size: number of ranks in the average.
        topology: way of gradients; flat between all ranks by default.
        averager: averages buckets; as plain DDP by default.
        weighted: whether the loss has to be weighted, so that an unweighted backward pass is an error.

    Attributes:
        staleness: averages in place of ``averager``, some buckets one step late; ``None`` if all are awaited.
        residual_payout: adds what an earlier run had not sent to a bucket, and tells whether that is all.
        squares: squared norms of the running step's buckets.
        backwards: counts backward passes between two optimizer steps.
        backward_via_strategy: whether the running backward pass went through the strategy, which weights the loss.
        num_bytes: bytes of the gradients that were averaged so far.
    """

    def __init__(
        self,
        observer: StepTimer,
        world_size: int,
        *,
        topology: Topology | None = None,
        averager: GradientAverager | None = None,
        weighted: bool = False,
    ) -> None:
        self.observer, self.world_size, self.topology, self.weighted = observer, world_size, topology, weighted
        self.averager = averager or DDPMean(world_size, topology)
        self.staleness: StaleAverager | None = None
        self.residual_payout: Callable[[dist.GradBucket], bool] | None = None
        self.squares, self.backwards = BucketSquares(), BackwardCheck()
        self.backward_via_strategy, self.num_bytes = False, 0
        self._skipped = self._fired = False
        self._restored: dict[str, Any] = {}
        self._running: deque[weakref.ref[Any]] = deque(maxlen=CALLBACKS_HELD)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave nothing of this run in a copy or a pickle of the model: torch registers no hook with either."""
        return type(None), ()

    # who averages

    @property
    def active(self) -> GradientAverager:
        """The averager of the running step."""
        return self.staleness or self.averager

    def use(self, averager: GradientAverager | None) -> None:
        """Average by this from the next backward pass on; ``None`` for the mean of plain DDP."""
        self.averager = averager or DDPMean(self.world_size, self.topology)

    def use_hook(self, hook: Callable[..., Any] | None, state: Any = None) -> None:
        """Average by a communication hook of the user's; ``None`` for the mean of plain DDP."""
        self.use(None if hook is None else UserHook(hook, state, self.world_size))

    def set_staleness(self, staleness: StaleAverager | None) -> None:
        """Let this decide from the next backward pass on which gradients are stale; ``None`` awaits them all."""
        self.staleness = staleness

    def pay_out(self, payout: Callable[[dist.GradBucket], bool] | None) -> None:
        """Add residuals of an earlier run to the next buckets; ``None`` for none."""
        self.residual_payout = payout

    @property
    def topologies(self) -> list[Topology]:
        """The ways of gradients that have process groups."""
        stale = None if self.staleness is None else self.staleness.topology
        return [way for way in (self.topology, stale) if way is not None]

    # the running step

    def require_weighting(self, weighted: bool) -> None:
        """Make an unweighted backward pass an error, or allow it."""
        self.weighted = weighted

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the backward pass inside, and mark it as one that went through the strategy."""
        self.backwards.count()
        self.backward_via_strategy = True
        try:
            yield
        finally:
            self.backward_via_strategy = False

    def begin_bucket(self, buffer: torch.Tensor, *, first: bool) -> None:
        """Note that a bucket is about to be averaged.

        Raises:
            RuntimeError: if the backward pass bypassed the strategy, so that its loss was not weighted.
        """
        if self.weighted and not self.backward_via_strategy:
            raise RuntimeError(DIRECT_BACKWARD)
        if first:
            self._skipped = False
        self._fired = True
        self.num_bytes += buffer.nbytes if not buffer.is_sparse else buffer._indices().nbytes + buffer._values().nbytes

    def end_payout(self) -> None:
        """Note that residuals of an earlier run are applied."""
        self.residual_payout = None

    def skip_step(self) -> None:
        """Note that the running step was left out on all ranks."""
        self._skipped = True

    def take_fired(self) -> bool:
        """Return whether a bucket was averaged since the last call."""
        fired, self._fired = self._fired, False
        return fired

    @property
    def is_exact(self) -> bool:
        """``True`` if the running step's gradient is the sum of all ranks'."""
        return self.active.flags.exact

    @property
    def step_skipped(self) -> bool | torch.Tensor:
        """``True`` if the running step was left out on all ranks; on GPU a number on the device, 0 if it was not."""
        return self._skipped or self.active.flags.skipped

    def forget_squares(self) -> None:
        """Take no norms until that is asked for again; what a step that failed half-way has left is gone."""
        self._skipped = False
        self.squares.forget()

    # what ends later

    def hold(self, callback: Any) -> None:
        """Remember a callback that a thread of the process group may hold until :meth:`settle`."""
        self._running.append(weakref.ref(callback))

    def settle(self, timeout: float = 5.0) -> None:
        """Wait until the threads of the process group have let go of our callbacks, for ``timeout`` seconds at most.

        Such a thread frees a callback a moment after backward has gone on. If the interpreter ends in that moment, it
        aborts the process ("terminate called without an active exception"), after a training that went well.
        """
        deadline = time.monotonic() + timeout
        while any(callback() is not None for callback in self._running) and time.monotonic() < deadline:
            time.sleep(0.001)

    # checkpoints of stale gradients

    def stale_state(self) -> dict[str, Any]:
        """Return what is stale and in flight, for a checkpoint; without what is lost with a rank that is gone."""
        try:
            return self._restored if self.staleness is None else self.staleness.state_dict()
        except (RuntimeError, ValueError) as error:
            log.warning("gradients in flight are lost, and not in this checkpoint: %s", error)
            return {}

    def load_stale_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, once the model is known or at once."""
        self._restored = state
        if self.staleness is not None:
            self.staleness.load_state_dict(state)

    def take_restored(self) -> dict[str, Any]:
        """Return the state of a checkpoint that no staleness has taken yet; from now on it is the caller's."""
        restored, self._restored = self._restored, {}
        return restored


class BackwardCheck:
    """Count backward passes between two optimizer steps."""

    def __init__(self) -> None:
        self.passes, self.stepped = 0, False

    def begin_batch(self) -> None:
        """Count anew if the optimizer has stepped."""
        if self.stepped:
            self.passes, self.stepped = 0, False

    def count(self) -> None:
        """Count a backward pass."""
        self.passes += 1

    def step(self) -> None:
        """Make sure that there was one.

        Raises:
            RuntimeError: if there was none since the batch of the last optimizer step.
        """
        if self.passes == 0:
            raise RuntimeError(DIRECT_BACKWARD)
        self.stepped = True


def gradient_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one gradient bucket over all ranks: ``sum_i (W b_i / B) g_i / W = sum_i r_i g_i`` (C eq. 9).

    The weight ``W b_i / B`` is already in the gradient, because it was applied where the loss entered backward.

    Raises:
        RuntimeError: if the backward pass bypassed the strategy, so that its loss was not weighted.
    """
    buffer, squares, averager = bucket.buffer(), state.squares, state.active
    state.begin_bucket(buffer, first=bucket.index() == 0)
    number = state.observer.bucket_ready()
    payout = state.residual_payout
    fused = squares.due and averager.takes_norms and payout is None
    if squares.due and not fused:
        squares.take_local(buffer, bucket.parameters)
    if payout is not None and payout(bucket):
        state.end_payout()
    future = averager.average(bucket, squares if fused else None)
    parameters, stale = (bucket.parameters, averager.stale_parts) if squares.due else (None, False)
    travels_later = averager.flags.single_message and not bucket.is_last()
    if travels_later:  # with the last bucket, so what it waits for is no communication of its own
        state.observer.bucket_done(number)

    def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
        if not travels_later:
            state.observer.bucket_done(number)
        if parameters is not None:
            squares.take_averaged(result, parameters, stale)
        return result

    state.hold(finish)
    return future.then(finish)
