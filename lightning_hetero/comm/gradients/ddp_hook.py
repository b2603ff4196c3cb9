"""The one DDP communication hook: averages as DDP does, marks each bucket's times, takes norms on request.

This module must not postpone the evaluation of annotations: torch inspects the hook's signature.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.squared_norms import GradientNorms
from lightning_hetero.comm.staleness.base import Delays
from lightning_hetero.comm.timing.step_timer import StepObserver

__all__ = ["HookState", "gradient_hook"]

log = logging.getLogger("lightning_hetero")

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


CALLBACKS = 256
"""The newest callbacks, any of which a thread of the process group may still hold when a training ends."""

DIRECT_BACKWARD = (
    "loss.backward() was called directly, so that the loss is not weighted by the worker's share of the batch. "
    "Call self.manual_backward(loss) (Lightning) or the strategy's or accelerator's backward(loss) instead."
)


@dataclass
class HookState:
    """What the hook works with.

    Args:
        observer: takes the times of each bucket.
        world_size: number of ranks in the average.
        in_backward: whether the running backward pass went through the strategy, which weights the loss.
        weighted: whether the loss has to be weighted at present, so that an unweighted backward pass is an error.
        inner: a hook that does the averaging: a user's, e.g. ``fp16_compress_hook``, or a compressor.
        inner_state: its state.
        owed: adds what an earlier run had not sent to a bucket, and tells whether that is all.
        topology: how gradients travel; straight between all ranks by default.
        staleness: averages in place of ``inner``, some buckets with a delay of one step.
        restored: state of ``staleness`` in a checkpoint, until there is one that takes it.
        collect_norms: whether to take norms.
        norms: takes the norms.
        exact_sum: whether the running step's gradient is the sum of all ranks', rather than a compressed one.
        one_message: whether all buckets are exchanged together with the last one.
        step_dropped: whether the running step was left out on all ranks, because a gradient was not finite; on GPU a
            number on the device, 0 if it was not.
        fired: whether a bucket was averaged since :meth:`take_fired`.
        num_bytes: bytes of the gradients that were averaged so far.
        local_squares: squared norms of the buckets before averaging, of the running step.
        global_squares: the same after averaging.
        late_squares: the same of buckets that got the sum of the step before.
        put_back: makes weights what they were, where a step runs with predicted ones.
        models: what watches over each model that has the hook, see :mod:`lightning_hetero.frontend.wrap_model`.
    """

    observer: StepObserver
    world_size: int
    in_backward: bool = False
    weighted: bool = False
    inner: Hook | None = None
    inner_state: Any = None
    owed: Callable[[dist.GradBucket], bool] | None = None
    topology: Topology | None = None
    staleness: Delays | None = None
    restored: dict[str, Any] = field(default_factory=dict)
    collect_norms: bool = False
    norms: GradientNorms = field(default_factory=GradientNorms)
    exact_sum: bool = True
    one_message: bool = False
    step_dropped: bool | torch.Tensor = False
    fired: bool = False
    num_bytes: int = 0
    local_squares: list[torch.Tensor] = field(default_factory=list)
    global_squares: list[torch.Tensor] = field(default_factory=list)
    late_squares: list[torch.Tensor] = field(default_factory=list)
    put_back: Callable[[], None] | None = None
    models: "weakref.WeakKeyDictionary[Any, Any]" = field(default_factory=weakref.WeakKeyDictionary, repr=False)
    _running: "deque[weakref.ref[Any]]" = field(default_factory=lambda: deque(maxlen=CALLBACKS), repr=False)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave nothing of this run in a copy or a pickle of the model: torch registers no hook with either."""
        return type(None), ()

    def settle(self, timeout: float = 5.0) -> None:
        """Wait until the threads of the process group have let go of our callbacks, for ``timeout`` seconds at most.

        Such a thread frees a callback a moment after backward has gone on. If the interpreter ends in that moment, it
        aborts the process ("terminate called without an active exception"), after a training that went well.
        """
        deadline = time.monotonic() + timeout
        while any(callback() is not None for callback in self._running) and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def topologies(self) -> list[Topology]:
        """The ways of gradients that have process groups."""
        late = None if self.staleness is None else self.staleness.topology
        return [way for way in (self.topology, late) if way is not None]

    def agree(self, control: ControlPlane) -> None:
        """Let ranks decide which gradients are delayed; a collective call."""
        if self.staleness is not None:
            self.staleness.agree(control)

    def delayed_state(self) -> dict[str, Any]:
        """What is delayed and still under way, for a checkpoint; without what is lost with a rank that is gone."""
        try:
            return self.restored if self.staleness is None else self.staleness.state_dict()
        except (RuntimeError, ValueError) as error:
            log.warning("gradients that were under way are lost, and not in this checkpoint: %s", error)
            return {}

    def load_delayed_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, once the model is known or at once."""
        self.restored = state
        if self.staleness is not None:
            self.staleness.load_state_dict(state)

    def take_fired(self) -> bool:
        """Whether a bucket was averaged since the last call."""
        fired, self.fired = self.fired, False
        return fired

    def take_squares(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Squared norms of the buckets since the last call, before and after averaging; ``None`` if there are none.

        Those after are of this rank's part of each bucket, where :attr:`GradientNorms.in_parts` says so.
        Those before are of the *weighted* gradient: divide by ``(W b_i / B)^2`` for the worker's own mean gradient.
        """
        if not self.local_squares:
            return None
        squares = self.local_squares, self.global_squares
        self.local_squares, self.global_squares = [], []
        return squares

    def take_norms(
        self, result: torch.Tensor, parameters: Callable[[], list[torch.Tensor]], late: bool | list[bool]
    ) -> None:
        """Take the norms of an averaged bucket, of which all, nothing, or some parameters are of the step before."""
        if isinstance(late, bool):
            (self.late_squares if late else self.global_squares).extend(self.norms.of_average(result, parameters))
            return
        owners = parameters()
        parts = result.split([owner.numel() for owner in owners])
        for owner, part, is_late in zip(owners, parts, late, strict=True):
            self.take_norms(part, lambda owner=owner: [owner], is_late)  # type: ignore[misc]

    def forget_squares(self) -> None:
        """Take no norms until that is asked for again; what a step that failed half-way has left is gone."""
        self.collect_norms, self.step_dropped = False, False
        self.local_squares, self.global_squares, self.late_squares = [], [], []

    def take_late_squares(self) -> list[torch.Tensor]:
        """Squared norms of what belongs to the step before, since the last call."""
        squares, self.late_squares = self.late_squares, []
        return squares


def gradient_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one gradient bucket over all ranks: ``sum_i (W b_i / B) g_i / W = sum_i r_i g_i`` (Cannikin, eq. 9).

    The weight ``W b_i / B`` is already in the gradient, because it was applied where the loss entered backward.

    Raises:
        RuntimeError: if the backward pass bypassed the strategy, so that its loss was not weighted.
    """
    if state.weighted and not state.in_backward:
        raise RuntimeError(DIRECT_BACKWARD)
    state.fired = True
    number = state.observer.bucket_ready()
    buffer, parameters = bucket.buffer(), bucket.parameters
    state.num_bytes += sums.num_bytes(buffer)
    at_once = state.staleness is None and state.inner is None and state.owed is None
    if state.collect_norms and not at_once:
        state.local_squares.extend(state.norms.of_bucket(buffer, parameters))
    if state.owed is not None and state.owed(bucket):
        state.owed = None
    future, late = _average(state, bucket, buffer, with_norms=state.collect_norms and at_once)

    early = state.one_message and not bucket.is_last()
    if early:  # it travels with the last bucket, so what it waits for is no communication of its own
        state.observer.bucket_done(number)

    def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
        if not early:
            state.observer.bucket_done(number)
        if state.collect_norms:
            state.take_norms(result, parameters, late)
        return result

    state._running.append(weakref.ref(finish))
    return future.then(finish)


def _average(
    state: HookState, bucket: dist.GradBucket, buffer: torch.Tensor, *, with_norms: bool
) -> tuple[torch.futures.Future[Any], bool | list[bool]]:
    """The average on its way, and what of it belongs to the step before."""
    if state.staleness is not None:
        future = state.staleness(bucket)
        return future, state.staleness.gave_late
    if state.inner is not None:
        return state.inner(state.inner_state, bucket), False
    weight = 1.0 / state.world_size  # as DDP does without a hook; a division is slower
    if with_norms:
        state.local_squares.extend(state.norms.of_weighted(buffer, weight, bucket.parameters))
    elif weight != 1.0:
        buffer.mul_(weight)
    return sums.sum_over_ranks(buffer) if state.topology is None else state.topology.sum(buffer), False
