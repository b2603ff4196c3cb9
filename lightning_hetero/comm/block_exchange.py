"""Block top-k inside DDP's hook: each bucket goes into the residual, the last one sends one message for all of them."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hetero.comm import sums
from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.compression.encoder import BlockEncoder
from lightning_hetero.compression.layout import Layout, Slot, flat_view
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.wire import MessageFormat
from lightning_hetero.core.compressors import BlockTopK, blocks_per_rank

__all__ = ["BlockExchange", "Late", "Sending", "StepReport", "gather_rows", "pending"]

log = logging.getLogger("lightning_hetero")


@dataclass
class StepReport:
    """Sums over steps of what was sent.

    Args:
        steps: steps.
        sent: bytes that this rank sent to others.
        received: bytes that it received.
        density: share of the gradient's elements that was applied, summed over steps.
        encode: seconds of error feedback, selection and writing.
    """

    steps: int = 0
    sent: float = 0.0
    received: float = 0.0
    density: float = 0.0
    encode: float = 0.0

    def add(self, sent: float, density: float, encode: float = 0.0) -> None:
        """One more step, in which as much was received as sent."""
        self.steps += 1
        self.sent += sent
        self.received += sent
        self.density += density
        self.encode += encode


@dataclass
class Sending:
    """Messages of one step on their way, this rank's and those of all others.

    Args:
        rows: the messages, one row for each rank.
        step: the step that they belong to.
        arrival: is done when they are there.
        finite: whether this rank's gradient was, as far as the host knows.
    """

    rows: torch.Tensor
    step: int
    arrival: torch.futures.Future[Any]
    finite: bool


class Late(Protocol):
    """Who decides in which step messages are applied."""

    def turn(self, sending: Sending) -> list[Pack]:
        """What the running step applies, now that its messages are on their way."""

    def pay(self, bucket: dist.GradBucket) -> None:
        """Put what is owed into a bucket that is about to be summed densely."""

    def settle(self) -> None:
        """Wait for what is under way."""


def gather_rows(rows: torch.Tensor, rank: int, group: Any = None) -> None:
    """All-gather in place: row ``i`` is rank ``i``'s; this rank's own is filled already."""
    sums.wait_for(sums.gather_over_ranks(rows, rank, range(len(rows)), group))


def pending(buffer: torch.Tensor) -> Any:
    """A future that is set by hand, for a tensor on this device."""
    return torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()


class BlockExchange:
    """The exchange of :class:`~lightning_hetero.core.compressors.BlockTopK`.

    Args:
        settings: density, block, values, selector, dense steps.
        parameters: the module's parameters that need gradients, by name, in the order of the module.
        hook: state of the gradient hook.
        rank: this rank.
        grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
        hold_unused: hold back the residual of parameters whose gradient is all 0, because DDP does not hand on the
            gradient of a parameter that no rank has used.
    """

    def __init__(
        self,
        settings: BlockTopK,
        parameters: Mapping[str, torch.Tensor],
        hook: HookState,
        rank: int,
        *,
        grad_scale: Callable[[], float] | None = None,
        hold_unused: bool = False,
    ) -> None:
        self.settings, self.hook, self.rank, self.grad_scale = settings, hook, rank, grad_scale
        self.hold_unused, self.world_size = hold_unused, hook.world_size
        self.layout = Layout.of(((name, p.numel()) for name, p in parameters.items()), settings.block)
        self.slots = {p: self.layout.by_name[name] for name, p in parameters.items()}
        self.encoder = self._encoder(parameters)
        device = next(iter(parameters.values())).device
        self.on_host = device.type != self.encoder.residual.device.type
        self.use_rows(torch.zeros((self.world_size, self.encoder.form.num_bytes), dtype=torch.uint8, device=device))
        self.step, self.dropped = 0, 0
        self.late: Late | None = None
        self.group: Any = None
        self.report = StepReport()
        self._dense_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        self._packs: list[torch.Tensor] | None = None
        self._waiting: list[tuple[Any, list[tuple[Slot, torch.Tensor]], Any]] = []
        self._finite, self._weight, self._scale, self._encode = True, 1.0, 1.0, 0.0

    def _encoder(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        """The encoder for the parameters' device: Triton's on GPU, unless something was asked for that only CPU has."""
        s = self.settings
        double = any(p.dtype == torch.float64 for p in parameters.values())
        k = blocks_per_rank(self.layout.num_blocks, s.density, self.world_size)
        form = MessageFormat(self.layout.num_blocks, k, s.block, s.value_dtype, self.layout.fingerprint())
        device = next(iter(parameters.values())).device
        if device.type == "cuda" and not double and s.selector in (None, "histogram") and find_spec("triton"):
            from lightning_hetero.compression.triton_encoder import TritonEncoder

            return TritonEncoder(self.layout, form, device)
        return BlockEncoder(self.layout, form, s.selector or "exact", torch.float64 if double else torch.float32)

    def use_rows(self, rows: torch.Tensor) -> None:
        """Receive the messages of the next step here; this rank's own is written into its row."""
        self.rows = rows
        self._message = rows[self.rank].cpu() if self.on_host else rows[self.rank]

    # the hook

    @property
    def dense(self) -> bool:
        """Whether the running step is sent densely."""
        every = self.settings.dense_every
        return self.step < self.settings.warmup_steps or (every is not None and self.step % every == 0)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        self.hook.exact_sum, self.hook.one_message = self.dense, not self.dense
        self.hook.step_dropped, self._packs = False, None
        if self.dense:
            buffer = bucket.buffer().div_(self.world_size)
            if self.late is not None:
                self.late.pay(bucket)
            if bucket.is_last():
                self.step += 1
                self.report.add(2 * (self.world_size - 1) / self.world_size * self._dense_bytes, 1.0)
            return dist.all_reduce(buffer, async_op=True).get_future()
        if bucket.index() == 0:
            self._begin()
        begin = time.perf_counter()
        pieces = self._take(bucket)
        self._encode += time.perf_counter() - begin
        future = pending(bucket.buffer())
        self._waiting.append((bucket.buffer(), pieces, future))
        if bucket.is_last():
            self._exchange()
        return future

    def _begin(self) -> None:
        self._waiting, self._finite, self._encode = [], True, 0.0
        self._scale = 1.0 if self.grad_scale is None else self.grad_scale()
        self._weight = 1.0 / (self.world_size * self._scale)

    def _take(self, bucket: dist.GradBucket) -> list[tuple[Slot, torch.Tensor]]:
        """Add a bucket's gradients to the residuals."""
        pieces = []
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            slot, flat = self.slots[parameter], flat_view(gradient)
            pieces.append((slot, flat))
            if self._finite:
                local = flat.cpu() if self.on_host else flat
                self._finite = self.encoder.accumulate(slot, local, self._weight, hold=self.hold_unused)
        return pieces

    def _exchange(self) -> None:
        """Send, receive, merge, and hand the sum to DDP."""
        sending = self._send()
        packs = self.receive(sending) if self.late is None else self.late.turn(sending)
        self.encoder.merge(packs)
        for _, pieces, _ in self._waiting:
            for slot, flat in pieces:
                self._write(slot, flat)
        count = sum(len(pack.indices) for pack in packs)
        sent = (self.world_size - 1) * self.encoder.form.num_bytes
        self.report.add(sent, count / self.layout.num_blocks, self._encode)
        self.touch(packs)
        self.encoder.finish()
        self.step += 1
        waiting, self._waiting = self._waiting, []
        for buffer, _, future in waiting:
            future.set_result(buffer)

    def _send(self) -> Sending:
        """Write this rank's message, and let it set out."""
        begin = time.perf_counter()
        if self._finite:
            self.encoder.encode(self._message, step=self.step)
        else:
            self.encoder.give_up(self._message, step=self.step)
        if self.on_host:
            self.rows[self.rank].copy_(self._message)
        self._encode += time.perf_counter() - begin
        arrival = sums.gather_over_ranks(self.rows, self.rank, range(self.world_size), self.group)
        return Sending(self.rows, self.step, arrival, self._finite)

    def receive(self, sending: Sending) -> list[Pack]:
        """Wait for messages: their packs, in the order of ranks; none if a gradient was not finite.

        Raises:
            ValueError: if a message is malformed.
        """
        sums.wait_for(sending.arrival)
        rows = sending.rows.cpu() if self.on_host else sending.rows
        packs = self.encoder.read(rows, step=sending.step)
        if packs is None:
            self._drop(sending, rows[self.rank])
        return packs or []

    def _write(self, slot: Slot, flat: torch.Tensor) -> None:
        if self.hook.step_dropped and self.grad_scale is not None:  # the loss scaler has to see it
            flat.fill_(float("inf"))
            return
        flat.copy_(self.encoder.merged[slot.start : slot.start + slot.numel])
        if self._scale != 1.0:
            flat.mul_(self._scale)

    def _drop(self, sending: Sending, own: torch.Tensor) -> None:
        """Leave a step out; of one that is over, only what was sent can come back, since the gradient is gone."""
        if sending.step == self.step:
            self.encoder.undo()
        elif sending.finite:
            self.encoder.take_back(own)
        self.hook.step_dropped = True
        self.dropped += 1
        if self.grad_scale is None and (self.dropped & (self.dropped - 1)) == 0:  # 1, 2, 4, 8, ...
            log.warning(
                "a gradient was not finite in step %d on rank %s: all ranks left that gradient out (%d so far)",
                sending.step,
                "other than this" if sending.finite else "of this process",
                self.dropped,
            )

    # what was applied

    def touch(self, packs: list[Pack]) -> None:
        """The gradient that the optimizer gets next is the sum of these packs."""
        self._packs = [pack.indices for pack in packs]

    def sums_of(self, packs: list[Pack]) -> dict[str, torch.Tensor]:
        """The sum of packs by parameter, flat."""
        self.encoder.merge(packs)
        merged = self.encoder.merged
        flat = {slot.name: merged[slot.start : slot.start + slot.numel].clone() for slot in self.layout.slots}
        self.encoder.finish()
        return flat

    def touched_blocks(self) -> dict[torch.Tensor, torch.Tensor] | None:
        """Numbers of the blocks of each parameter that the last gradient touches; ``None`` if it was sent densely."""
        if self._packs is None:
            return None
        nothing = torch.zeros(0, dtype=torch.int64, device=self.rows.device)
        blocks = torch.cat([nothing, *self._packs]).unique()
        starts = torch.tensor([slot.start // self.layout.block for slot in self.layout.slots])
        ends = torch.searchsorted(
            blocks.cpu(), torch.cat([starts[1:], torch.tensor([self.layout.num_blocks])])
        ).tolist()
        touched, begin = {}, 0
        for parameter, end in zip(self.slots, ends, strict=True):
            first = self.slots[parameter].start // self.layout.block
            touched[parameter] = (blocks[begin:end] - first).to(parameter.device)
            begin = end
        return touched

    # state

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter: a part of the weighted sum over ranks."""
        if self.late is not None:
            self.late.settle()
        flat = self.encoder.residual
        return {slot.name: flat[slot.start : slot.start + slot.numel].cpu() for slot in self.layout.slots}

    def load_residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        """Go on with these residuals; parameters that are not named begin with 0."""
        self.encoder.residual.zero_()
        for slot in self.layout.slots:
            if slot.name in residuals:
                self.encoder.residual[slot.start : slot.start + slot.numel].copy_(residuals[slot.name])

    def extra_state(self) -> dict[str, Any]:
        """What else a run needs to go on identically on the same number of ranks."""
        return {"step": self.step, "selector": self.encoder.state.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Go on as :meth:`extra_state` described."""
        self.step = state["step"]
        self.encoder.state.load_state_dict(state["selector"])
