"""Block top-k inside DDP's hook: each bucket goes into the residual, the last one sends one message for all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.async_ops import pending
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.in_flight import Late, Sending, StepReport
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, all_finite, clear
from lightning_hetero.comm.link.link_benchmark import handling_seconds, probe
from lightning_hetero.comm.timing.clock import clock_for
from lightning_hetero.comm.timing.message_timer import MessageLog
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks, GradientParts
from lightning_hetero.compression.encoder_choice import encoder_for
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.layout import Layout, Slot, split
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.wire_format import MessageFormat, message_size
from lightning_hetero.core.compression.settings import BlockTopK, blocks_per_rank
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.validation import check_number
from lightning_hetero.optim.sparse.lazy_update import SparseSteps
from lightning_hetero.optim.sparse.warmup import kernels_work

__all__ = ["BlockExchange"]


class BlockExchange:
    """The exchange of :class:`~lightning_hetero.core.compression.settings.BlockTopK`.

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
        self.settings, self.hook, self.grad_scale = settings, hook, grad_scale
        self.hold_unused, self.world_size = hold_unused, hook.world_size
        self.topology = hook.topology or Topology.straight(rank, hook.world_size)
        self.layout = Layout.of(((name, p.numel()) for name, p in parameters.items()), settings.block)
        self.slots = {p: self.layout.by_name[name] for name, p in parameters.items()}
        self.parts = GradientParts(self.slots, settings.block)
        self.density = settings.density
        self.encoder = self._encoder(parameters)
        device = next(iter(parameters.values())).device
        self.on_host = device.type != self.encoder.residual.device.type
        self.use_rows(torch.zeros((self.topology.size, self.encoder.form.num_bytes), dtype=torch.uint8, device=device))
        self._masks: dict[torch.Tensor, torch.Tensor] = {}
        for p, slot in self.slots.items() if self.encoder.deferred else ():
            blocks = slice(slot.start // settings.block, (slot.start + slot.padded) // settings.block)
            self._masks[p] = self.encoder.touched[blocks]
        self.step, self.dropped = 0, DroppedSteps()
        self.late: Late | None = None
        self.way: Topology | None = None
        self.report = StepReport()
        self.messages = MessageLog(hook.observer.clock, self.topology.size)
        self._dense_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        self.paused = False  # whether all steps are sent densely, until "auto" has chosen
        self.sparse_steps = 0.0  # greatest density at which the optimizer takes blocks, and no sum has the model's size
        self._frozen: dict[str, torch.Tensor] = {}  # residuals of parameters that are not trained at present
        self.gradients: Mapping[torch.Tensor, BlockGradient | BlockMarks] | None = None
        self._arrived: str | None = None
        self._waiting: list[tuple[torch.Tensor, list[Slot], Any]] = []
        self._raised: list[tuple[Any, torch.Tensor, list[Slot]]] = []
        self._finite, self._weight, self._scale = True, 1.0, 1.0
        self._clock = clock_for(self.encoder.residual.device)
        self._spans: list[tuple[Any, Any]] = []
        self._queued: list[tuple[Any, Any]] = []
        self._handling: float | None = None

    def _encoder(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        """The encoder for the parameters' device: kernels on a GPU where they work, the host elsewhere."""
        return encoder_for(
            self.settings, self.layout, self._form(self.density), parameters, self.topology.size, hold=self.hold_unused
        )

    def use_rows(self, rows: torch.Tensor) -> None:
        """Receive the messages of the next step here; this rank's own is written into its row."""
        self.rows = rows
        own = rows[self.topology.cluster]
        self._message = own.cpu() if self.on_host else own

    def read_on_host(self) -> None:
        """Select and merge on the host from now on: messages that are applied a step late are read there."""
        if self.encoder.deferred:
            self.settle()
            residual, s = self.encoder.residual, self.settings
            self.encoder = cpu_encoder(self.layout, self.encoder.form, s.selector or "exact", torch.float32)
            self.encoder.residual.copy_(residual)
            self.on_host, self._clock = residual.is_cuda, clock_for(torch.device("cpu"))
            self.use_rows(self.rows)

    def lead(self, steps: Sequence[SparseSteps]) -> None:
        """Hand blocks to these optimizers, if any; messages are read on the host where kernels of one of them fail."""
        block, device = self.layout.block, self.rows.device
        if self.encoder.deferred and not all(kernels_work(one, block, device) for one in steps):
            self.read_on_host()
        self.sparse_steps = min((one.most for one in steps), default=0.0)

    def _form(self, density: float) -> MessageFormat:
        s = self.settings
        k = blocks_per_rank(self.layout.num_blocks, density, self.topology.size)
        return MessageFormat(self.layout.num_blocks, k, s.block, s.value_dtype, self.layout.fingerprint())

    @property
    def message_size(self) -> MessageSize:
        """Bytes that this rank sends to the others in a compressed step, by density."""
        return message_size(self.layout.num_blocks, self.layout.block, self.settings.value_dtype, self.topology.size)

    @property
    def _sent(self) -> float:
        """Those at the present density."""
        return float((self.topology.size - 1) * self.encoder.form.num_bytes)

    def probe(self, density: float) -> npt.NDArray[np.float64]:
        """Time messages as they are and as they would be at another density; all ranks have to call it together.

        What comes back are the fields of :class:`~lightning_hetero.core.link.message_link.LinkProbe` as this rank saw
        them.
        """
        self.settle()
        if self.late is not None:
            self.late.settle()
        if self._handling is None:
            self._handling = 0.0 if self.encoder.deferred else handling_seconds(self.layout, self.settings.value_dtype)
        sizes = self.encoder.form.num_bytes, self._form(density).num_bytes
        timed = probe(self.way or self.topology, self.rows.device, *sizes)
        return np.array([*timed, self._handling * self.density, self._handling * density])

    @property
    def takes_blocks(self) -> bool:
        """Whether the optimizer gets blocks at the present density: the same on all ranks, whatever their devices."""
        most = max(0.5, self.sparse_steps) * self.layout.num_blocks  # of a tiny model, one block is a lot
        return self.density <= self.sparse_steps and self.encoder.form.k * self.topology.size <= most

    def set_density(self, density: float) -> None:
        """Send another share of the blocks from the next backward pass on; all ranks have to call it together.

        What was not sent stays in the residual, so that nothing is lost by the change. A resumed run begins with the
        density of its settings again.

        Args:
            density: share of all blocks that all ranks together send in a step, above 0, to 1.

        Raises:
            TypeError: if it is no number.
            ValueError: if it is out of range.
            RuntimeError: if gradients of a backward pass are waiting to be sent.
        """
        check_number("density", density, low=0.0, high=1.0, include_low=False)
        if self._waiting:
            raise RuntimeError("the density cannot change inside a backward pass. Call set_density() between steps.")
        form = self._form(density)
        if form != self.encoder.form:
            self.settle()
            if self.late is not None:
                self.late.settle()
            self.encoder.reform(form)
            self.use_rows(self.rows.new_zeros(self.topology.size, form.num_bytes))
        self.density = density

    # the hook

    @property
    def dense(self) -> bool:
        """Whether the running step is sent densely."""
        every = self.settings.dense_every
        due = every is not None and self.step % every == 0
        return self.paused or self.step < self.settings.warmup_steps or due

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        self.hook.exact_sum, self.hook.one_message = self.dense, not self.dense
        self.hook.step_dropped, self.gradients = False, None
        buffer, last = bucket.buffer(), bucket.is_last()
        if self.dense:
            buffer.mul_(1.0 / self.world_size)
            if self.late is not None:
                self.late.pay(bucket)
            if last:
                self.step += 1
                self._arrived = "dense"
                share = 2 * (self.topology.size - 1) / self.topology.size * self.topology.leads
                self.report.add(share * self._dense_bytes, 1.0)
            return self.topology.sum(buffer)
        if bucket.index() == 0:
            self._begin()
        future, slots = pending(buffer), [self.slots[parameter] for parameter in bucket.parameters()]
        self._waiting.append((buffer, slots, future))
        self._raised.append((self.topology.collect(buffer), buffer, slots))
        self._take(everything=last)
        if last:
            self._exchange()
        return future

    def _begin(self) -> None:
        self._waiting, self._raised, self._finite, self._spans = [], [], True, []
        self._scale = 1.0 if self.grad_scale is None else self.grad_scale()
        self._weight = 1.0 / (self.world_size * self._scale)

    def _take(self, *, everything: bool) -> None:
        """Add gradients to the residuals, those of the cluster on its leader: what has come up, or all there are."""
        while self._raised and (everything or self._raised[0][0] is None or self._raised[0][0].is_completed()):
            raised, buffer, slots = self._raised.pop(0)
            if raised is not None:
                raised.wait()
            begin = self._clock.mark()
            if self.topology.leads and self._finite:
                local = buffer.cpu() if self.on_host else buffer
                self._finite = self.encoder.accumulate_bucket(slots, local, self._weight, hold=self.hold_unused)
            self._spans.append((begin, self._clock.mark()))

    def _exchange(self) -> None:
        """Send, receive, merge, and hand the sum to DDP."""
        sending = self._send()
        self._arrived = "compressed"
        if self.encoder.deferred:
            self._hand_on(sending)
        else:
            self._merge(self.receive(sending) if self.late is None else self.late.turn(sending))
        self.encoder.finish()
        self.step += 1
        waiting, self._waiting = self._waiting, []
        for buffer, _, future in waiting:
            future.set_result(buffer)

    def _send(self) -> Sending:
        """Write this rank's message, and let it set out."""
        self.settle()
        begin = self._clock.mark()
        if self.topology.leads:
            if self._finite:
                self.encoder.encode(self._message, step=self.step, rank=self.topology.cluster)
            else:
                self.encoder.give_up(self._message, step=self.step, rank=self.topology.cluster)
            if self.on_host:
                self.rows[self.topology.cluster].copy_(self._message)
        self._spans.append((begin, self._clock.mark()))
        arrived = self.messages.send(self.step, self._sent)
        arrival = (self.way or self.topology).gather(self.rows, arrived)
        return Sending(self.rows, self.step, arrival, self._finite)

    def receive(self, sending: Sending) -> list[Pack]:
        """Wait for messages: their packs, in the order of ranks; none if a gradient was not finite.

        Raises:
            ValueError: if a message is malformed.
        """
        sending.arrival.wait()
        rows = sending.rows.cpu() if self.on_host else sending.rows
        packs = self.encoder.read(rows, step=sending.step)
        if packs is None:
            self._drop(sending, rows[self.topology.cluster])
        return packs or []

    def _merge(self, packs: list[Pack]) -> None:
        """Keep the sum for an optimizer that takes blocks, or write it into DDP's buckets."""
        self._count(sum(len(pack.indices) for pack in packs), self._spans)
        if self.takes_blocks:
            total = self.encoder.merge_sparse(packs) if packs else self._dropped_sum()
            if self._scale != 1.0 and packs:
                total.values.mul_(self._scale)
            self.gradients = self.parts.of(total)
            return
        self.encoder.merge(packs)
        for buffer, slots, _ in self._waiting:
            for slot, flat in split(buffer, slots):
                self._write(slot, flat)

    def _count(self, blocks: int, spans: list[tuple[Any, Any]]) -> None:
        encode = sum(self._clock.seconds(begin, end) for begin, end in spans)
        self.report.add(self._sent * self.topology.leads, blocks / self.layout.num_blocks, encode)

    def _hand_on(self, sending: Sending) -> None:
        """Let the device check and add up the messages; :meth:`settle` tells later what became of it."""
        sending.arrival.wait()
        self.encoder.receive(sending.rows, rank=self.topology.cluster, step=sending.step)
        self.hook.step_dropped, self._queued = self.encoder.verdict, self._spans
        weight = self._weight if self.topology.leads else 0.0  # of what went into the residual
        for buffer, slots, _ in self._waiting:
            self.encoder.deliver_bucket(slots, buffer, weight, scale=self._scale, fill=self._fill)

    def settle(self) -> None:
        """Look at what the device decided on the last step, if it is not known yet.

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        outcome = self.encoder.outcome() if self.encoder.deferred else None
        if outcome is not None:
            self._count(outcome.blocks, self._queued)
            if outcome.dropped and self.grad_scale is None:
                self.dropped.add(outcome.step, "on some rank")

    @property
    def _fill(self) -> float:
        """The gradient of a step that is left out: a loss scaler has to see it; without one, it is 0."""
        return 0.0 if self.grad_scale is None else float("inf")

    def _dropped_sum(self) -> Pack:
        """No block; for a loss scaler, which has to see it, one infinite element of each parameter."""
        block = self.layout.block
        starts = [] if self.grad_scale is None else [slot.start // block for slot in self.layout.slots if slot.numel]
        values = torch.zeros(len(starts), block, dtype=torch.float32)
        values[:, 0] = float("inf")
        return Pack(torch.tensor(starts, dtype=torch.int64), values)

    def _write(self, slot: Slot, flat: torch.Tensor) -> None:
        if self.hook.step_dropped and self.grad_scale is not None:
            flat.fill_(self._fill)
            return
        flat.copy_(self.encoder.merged[slot.start : slot.start + slot.numel])
        if self._scale != 1.0:
            flat.mul_(self._scale)

    def _drop(self, sending: Sending, own: torch.Tensor) -> None:
        """Leave a step out; of one that is over, only what was sent can come back, since the gradient is gone."""
        if sending.step == self.step:
            self.encoder.undo()
        elif sending.finite and self.topology.leads:
            self.encoder.take_back(own)
        self.hook.step_dropped = True
        if self.grad_scale is None:
            self.dropped.add(sending.step, f"on {'another rank than this' if sending.finite else 'this rank'}")

    # what was applied

    def sums_of(self, packs: list[Pack]) -> dict[str, torch.Tensor]:
        """The sum of packs by parameter, flat."""
        self.encoder.merge(packs)
        merged = self.encoder.merged
        flat = {slot.name: merged[slot.start : slot.start + slot.numel].clone() for slot in self.layout.slots}
        self.encoder.finish()
        return flat

    def hand_over(self) -> None:
        """After backward: give parameters their sparse gradients; leave out a dense sum that is not finite."""
        arrived, self._arrived = self._arrived, None
        if arrived == "dense" and self.grad_scale is None and not all_finite(self.slots):
            clear(self.slots)
            if self.late is not None:
                self.late.unpaid()
            self.hook.step_dropped = True
            self.dropped.add(self.step - 1, "on some rank")
        if arrived == "compressed" and self.takes_blocks and self.encoder.deferred:
            self.gradients = {p: BlockMarks(marks, p.grad) for p, marks in self._masks.items() if p.grad is not None}
            return
        for parameter, gradient in ((self.gradients if arrived else None) or {}).items():
            if isinstance(gradient, BlockGradient) and (parameter.grad is not None or len(gradient.rows)):
                parameter.grad = gradient.grad

    # state

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter: a part of the weighted sum over ranks."""
        self.settle()
        if self.late is not None:
            self.late.settle()
        flat, slots = self.encoder.residual, self.layout.slots
        return self._frozen | {slot.name: flat[slot.start : slot.start + slot.numel].cpu() for slot in slots}

    def load_residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        """Go on with these residuals; parameters that are not named begin with 0, those not trained keep theirs."""
        self._frozen = {name: r for name, r in residuals.items() if name not in self.layout.by_name}
        self.encoder.residual.zero_()
        for slot in self.layout.slots:
            if slot.name in residuals:
                self.encoder.residual[slot.start : slot.start + slot.numel].copy_(residuals[slot.name])

    def extra_state(self) -> dict[str, Any]:
        """What else a run needs to go on identically on the same number of ranks."""
        balance = None if self.encoder.deferred else self.encoder.balance
        scores = {} if balance is None else {"scores": balance.state_dict()}
        return {"step": self.step, "selector": self.encoder.state.state_dict(), **scores}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Go on as :meth:`extra_state` described."""
        self.step = state["step"]
        self.encoder.state.load_state_dict(state["selector"])
        if not self.encoder.deferred and self.encoder.balance is not None:
            self.encoder.balance.load_state_dict(state.get("scores", {}))
