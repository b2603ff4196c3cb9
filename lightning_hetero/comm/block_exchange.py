"""Block top-k inside DDP's hook: each bucket goes into the residual, the last one sends one message for all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.clock import clock_for
from lightning_hetero.comm.dropped import DroppedSteps, all_finite, clear
from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.compression.encoder import cpu_encoder
from lightning_hetero.compression.gradients import BlockGradient, BlockMarks, block_gradients
from lightning_hetero.compression.layout import Layout, Slot, flat_view
from lightning_hetero.compression.reference import Pack, merge_sparse
from lightning_hetero.compression.wire import MessageFormat
from lightning_hetero.core.compressors import BlockTopK, blocks_per_rank
from lightning_hetero.optim import sparse_steps

__all__ = ["BlockExchange", "StepReport", "gather_rows", "pending"]


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


def gather_rows(rows: torch.Tensor, rank: int, group: Any = None) -> None:
    """All-gather in place: row ``i`` is rank ``i``'s; this rank's own is filled already.

    NCCL gathers in one call. On gloo, whose all-gather allocates in every call, a broadcast of each row into its place
    is faster (``benchmarks/compression.py``).
    """
    if dist.get_backend(group) == "nccl":  # in place: the row is where it is to be
        dist.all_gather_into_tensor(rows, rows[rank], group=group)
        return
    works = [dist.broadcast(row, src=peer, group=group, async_op=True) for peer, row in enumerate(rows)]
    for work in works:
        work.wait()


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
        self.rows = torch.zeros((self.world_size, self.encoder.form.num_bytes), dtype=torch.uint8, device=device)
        self.on_host = device.type != self.encoder.residual.device.type
        self._message = self.rows[rank].cpu() if self.on_host else self.rows[rank]
        self._masks = self._views(self.encoder.touched) if self.encoder.deferred else {}
        self.step, self.dropped = 0, DroppedSteps()
        self.report = StepReport()
        self._dense_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        self.sparse_steps = False
        """Whether the optimizer takes blocks, so that the sum is never written into a tensor of the model's size."""
        self.gradients: Mapping[torch.Tensor, BlockGradient | BlockMarks] | None = None
        self._arrived: str | None = None
        self._waiting: list[tuple[Any, list[tuple[Slot, torch.Tensor]], Any]] = []
        self._finite, self._weight, self._scale = True, 1.0, 1.0
        self._clock = clock_for(self.encoder.residual.device)
        self._spans: list[tuple[Any, Any]] = []
        self._queued: list[tuple[Any, Any]] = []

    def _encoder(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        """The encoder for the parameters' device: Triton's on GPU, unless something was asked for that only CPU has."""
        s = self.settings
        double = any(p.dtype == torch.float64 for p in parameters.values())
        k = blocks_per_rank(self.layout.num_blocks, s.density, self.world_size)
        form = MessageFormat(self.layout.num_blocks, k, s.block, s.value_dtype, self.layout.fingerprint())
        device = next(iter(parameters.values())).device
        if device.type == "cuda" and not double and s.selector in (None, "histogram") and find_spec("triton"):
            from lightning_hetero.compression.triton_encoder import TritonEncoder

            return TritonEncoder(self.layout, form, device, self.world_size)
        return cpu_encoder(self.layout, form, s.selector or "exact", torch.float64 if double else torch.float32)

    def _views(self, touched: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
        """The part of each parameter in what there is of each block."""
        block = self.layout.block
        return {p: touched[s.start // block : (s.start + s.padded) // block] for p, s in self.slots.items()}

    # the hook

    @property
    def dense(self) -> bool:
        """Whether the running step is sent densely."""
        every = self.settings.dense_every
        return self.step < self.settings.warmup_steps or (every is not None and self.step % every == 0)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        self.hook.exact_sum, self.hook.one_message = self.dense, not self.dense
        self.hook.step_dropped, self.gradients = False, None
        if self.dense:
            buffer = bucket.buffer().div_(self.world_size)
            if bucket.is_last():
                self.step += 1
                self._arrived = "dense"
                self.report.add(2 * (self.world_size - 1) / self.world_size * self._dense_bytes, 1.0)
            return dist.all_reduce(buffer, async_op=True).get_future()
        if bucket.index() == 0:
            self._begin()
        begin = self._clock.mark()
        pieces = self._take(bucket)
        self._spans.append((begin, self._clock.mark()))
        future = pending(bucket.buffer())
        self._waiting.append((bucket.buffer(), pieces, future))
        if bucket.is_last():
            self._exchange()
        return future

    def _begin(self) -> None:
        self._waiting, self._finite, self._spans = [], True, []
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
        self.settle()
        begin = self._clock.mark()
        if self._finite:
            self.encoder.encode(self._message, step=self.step)
        else:
            self.encoder.give_up(self._message, step=self.step)
        if self.on_host:
            self.rows[self.rank].copy_(self._message)
        self._spans.append((begin, self._clock.mark()))
        gather_rows(self.rows, self.rank)
        self._arrived = "compressed"
        if self.encoder.deferred:
            self._hand_on()
        else:
            self._merge()
        self.encoder.finish()
        self.step += 1
        waiting, self._waiting = self._waiting, []
        for buffer, _, future in waiting:
            future.set_result(buffer)

    def _merge(self) -> None:
        """Add up the messages, unless a gradient was not finite."""
        packs = self.encoder.read(self.rows.cpu() if self.on_host else self.rows, step=self.step)
        if packs is None:
            self._drop()
        self._pass_on(packs)
        self._count(sum(len(pack.indices) for pack in packs or ()), self._spans)

    def _count(self, blocks: int, spans: list[tuple[Any, Any]]) -> None:
        sent = (self.world_size - 1) * self.encoder.form.num_bytes
        encode = sum(self._clock.seconds(begin, end) for begin, end in spans)
        self.report.add(sent, blocks / self.layout.num_blocks, encode)

    def _hand_on(self) -> None:
        """Let the device check and add up the messages; :meth:`settle` tells later what became of it."""
        self.encoder.receive(self.rows, rank=self.rank, step=self.step)
        self.hook.step_dropped, self._queued = self.encoder.verdict, self._spans
        for _, pieces, _ in self._waiting:
            for slot, flat in pieces:
                self.encoder.deliver(slot, flat, self._weight, scale=self._scale, fill=self._fill)

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

    def _pass_on(self, packs: list[Pack] | None) -> None:
        """Keep the sum for an optimizer that takes blocks, or write it into DDP's buckets; ``None``: dropped."""
        if self.sparse_steps and self.settings.density <= sparse_steps.BREAK_EVEN:
            total = self._dropped_sum() if packs is None else merge_sparse(packs)
            if self._scale != 1.0 and packs is not None:
                total.values.mul_(self._scale)
            self.gradients = block_gradients(total, self.slots)
            return
        if packs is not None:
            self.encoder.merge(packs)
        for _, pieces, _ in self._waiting:
            for slot, flat in pieces:
                self._write(slot, flat, dropped=packs is None)

    def _dropped_sum(self) -> Pack:
        """No block; for a loss scaler, which has to see it, one infinite element of each parameter."""
        block = self.layout.block
        starts = [] if self.grad_scale is None else [slot.start // block for slot in self.layout.slots]
        values = torch.zeros(len(starts), block)
        values[:, 0] = float("inf")
        return Pack(torch.tensor(starts, dtype=torch.int64), values)

    def _write(self, slot: Slot, flat: torch.Tensor, *, dropped: bool) -> None:
        if not dropped:
            flat.copy_(self.encoder.merged[slot.start : slot.start + slot.numel])
            if self._scale != 1.0:
                flat.mul_(self._scale)
        else:
            flat.fill_(self._fill)

    def _drop(self) -> None:
        self.encoder.undo()
        self.hook.step_dropped = True
        if self.grad_scale is None:
            self.dropped.add(self.step, f"on {'this rank' if not self._finite else 'another rank than this'}")

    def hand_over(self) -> None:
        """After backward: give parameters their sparse gradients; leave out a dense sum that is not finite."""
        arrived, self._arrived = self._arrived, None
        if arrived == "dense" and self.grad_scale is None and not all_finite(self.slots):
            clear(self.slots)
            self.hook.step_dropped = True
            self.dropped.add(self.step - 1, "on some rank")
        if arrived == "compressed" and self.sparse_steps and self.encoder.deferred:
            self.gradients = {p: BlockMarks(marks, p.grad) for p, marks in self._masks.items() if p.grad is not None}
            return
        if arrived is None or self.gradients is None:
            return
        for parameter, gradient in self.gradients.items():
            if isinstance(gradient, BlockGradient) and (parameter.grad is not None or len(gradient.rows)):
                parameter.grad = gradient.grad

    # state

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter: a part of the weighted sum over ranks."""
        self.settle()
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
