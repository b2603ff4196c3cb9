"""The DDP communication hook of this package: mark each bucket's times, call the averager, take norms on request.

This module must not postpone the evaluation of annotations: torch inspects the hook's signature.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.bucket_futures import BucketFutures
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import DDPMean, GradientAverager, UserHook
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["DIRECT_BACKWARD", "BackwardCheck", "HookState", "gradient_hook"]

log = logging.getLogger("lightning_hetero")

CALLBACKS_HELD = 256
"""Number of newest callbacks that a thread of the process group may still hold when a training ends."""

DIRECT_BACKWARD = (
    "loss.backward() was called directly, so that the loss is not weighted by the worker's share of the batch. "
    "Call self.manual_backward(loss) (Lightning) or the strategy's or accelerator's backward(loss) instead."
)


@checked_keywords
class HookState:
    """State of the gradient hook: who averages, whether the loss was weighted, whether norms are due.

    Args:
        observer: takes the times of each bucket.
        world_size: number of ranks in the average.
        topology: topology of gradients; flat over all ranks by default.
        averager: averages buckets; the mean of plain DDP by default.
        weighted: whether the loss has to be weighted, so that an unweighted backward pass is an error.

    Attributes:
        staleness: averages in place of ``averager``, with some gradients stale; ``None`` if all are synchronous.
        residual_payout: adds residuals that were never sent to a bucket, and returns whether none is left.
        squares: squared norms of the running step's buckets.
        backwards: counts backward passes between two optimizer steps.
        backward_via_strategy: whether the running backward pass went through the strategy, which weights the loss.
        num_bytes: bytes of the gradients that were averaged so far.
        futures: futures in front of those of the buckets, which can be failed; ``None`` if nobody is to fail them.
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
        self.futures: BucketFutures | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Keep this run out of copies and pickles of the model: torch registers the hook with neither."""
        return type(None), ()

    # who averages

    @property
    def active(self) -> GradientAverager:
        """The averager of the running step."""
        return self.staleness or self.averager

    def use(self, averager: GradientAverager | None) -> None:
        """Use this averager from the next backward pass on; ``None`` for the mean of plain DDP."""
        self.averager = averager or DDPMean(self.world_size, self.topology)

    def use_hook(self, hook: Callable[..., Any] | None, state: Any = None) -> None:
        """Average by a communication hook of the user's; ``None`` for the mean of plain DDP."""
        self.use(None if hook is None else UserHook(hook, state, self.world_size))

    def set_staleness(self, staleness: StaleAverager | None) -> None:
        """Let ``staleness`` average from the next backward pass on; ``None`` makes all gradients synchronous."""
        self.staleness = staleness

    def pay_out(self, payout: Callable[[dist.GradBucket], bool] | None) -> None:
        """Add residuals that were never sent to the next buckets; ``None`` for none."""
        self.residual_payout = payout

    @property
    def topologies(self) -> list[Topology]:
        """Topologies of gradients that have process groups."""
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
        if first:
            self._skipped = False
        self.begin_reduction(
            buffer.nbytes if not buffer.is_sparse else buffer._indices().nbytes + buffer._values().nbytes
        )

    def begin_reduction(self, num_bytes: int) -> None:
        """Note that gradients of so many bytes are about to be averaged, by DDP or by FSDP.

        Raises:
            RuntimeError: if the backward pass bypassed the strategy, so that its loss was not weighted.
        """
        if self.weighted and not self.backward_via_strategy:
            raise RuntimeError(DIRECT_BACKWARD)
        self._fired = True
        self.backwards.begin_sending()
        self.num_bytes += num_bytes

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
        """Discard the norms of a step that failed half-way; take none until they are wanted again."""
        self._skipped = False
        self.squares.forget()

    # what ends later

    def hold(self, callback: Any) -> None:
        """Remember the callback of a bucket that was sent; the process group may hold it until :meth:`settle`."""
        self.backwards.end_sending(weakref.ref(callback))

    def settle(self, timeout: float = 5.0) -> None:
        """Wait until the process group's threads have released our callbacks, at most ``timeout`` seconds.

        Such a thread frees a callback shortly after backward has gone on. If the interpreter ends in between, it aborts
        the process ("terminate called without an active exception"), after a successful training.
        """
        deadline = time.monotonic() + timeout
        held = [*self.backwards.held, *(() if self.futures is None else self.futures.held)]
        while any(callback() is not None for callback in held) and time.monotonic() < deadline:
            time.sleep(0.001)

    def let_fail(self) -> BucketFutures:
        """Put futures that another thread can fail in front of those of the next buckets, and return them."""
        self.futures = BucketFutures()
        return self.futures

    # checkpoints of stale gradients

    def stale_state(self) -> dict[str, Any]:
        """Return stale gradients in flight for a checkpoint; empty, with a warning, if a lost rank holds them."""
        try:
            return self._restored if self.staleness is None else self.staleness.state_dict()
        except (RuntimeError, ValueError) as error:
            log.warning("gradients in flight are lost, and not in this checkpoint: %s", error)
            return {}

    def load_stale_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint: at once, or when the model is known."""
        self._restored = state
        if self.staleness is not None:
            self.staleness.load_state_dict(state)

    def take_restored(self) -> dict[str, Any]:
        """Return and forget the state of a checkpoint that no staleness has restored yet."""
        restored, self._restored = self._restored, {}
        return restored


class BackwardCheck:
    """Counter of backward passes between two optimizer steps.

    Attributes:
        passes: backward passes since the last step.
        stepped: whether the optimizer has stepped.
        sending: whether a bucket is about to be sent, or was when its hook failed.
        held: callbacks of the newest buckets that were sent.
    """

    def __init__(self) -> None:
        self.passes, self.stepped, self.sending = 0, False, False
        self.held: deque[weakref.ref[Any]] = deque(maxlen=CALLBACKS_HELD)

    def begin_batch(self) -> None:
        """Count anew if the optimizer has stepped."""
        if self.stepped:
            self.passes, self.stepped = 0, False

    def count(self) -> None:
        """Count a backward pass."""
        self.passes += 1
        self.sending = False

    def begin_sending(self) -> None:
        """Note that a bucket is about to be sent."""
        self.sending = True

    def end_sending(self, callback: "weakref.ref[Any]") -> None:
        """Note that it was sent, and its callback."""
        self.sending = False
        self.held.append(callback)

    def step(self) -> None:
        """Check that a backward pass came before the optimizer step.

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
        state.pay_out(None)
    with state.observer.waiting() if averager.waits else nullcontext():
        future = averager.average(bucket, squares if fused else None)
    if state.futures is not None:
        future = state.futures.stand_in(future, buffer.device)
    parameters, stale = (bucket.parameters, averager.stale_parts) if squares.due else (None, False)
    travels_later = averager.flags.single_message and not bucket.is_last()
    if travels_later:  # with the last bucket: its wait is no communication of its own
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
