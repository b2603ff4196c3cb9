"""Select, read and merge the messages of block top-k on the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.in_flight import BackwardPass, InFlight
from lightning_hetero.comm.timing.clock import clock_for
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks, GradientParts
from lightning_hetero.compression.layout import Layout, Slot, split
from lightning_hetero.compression.reference import Pack

if TYPE_CHECKING:
    from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager

__all__ = ["HostPath", "ModelBlocks"]


@dataclass(frozen=True)
class ModelBlocks:
    """Blocks of a model's parameters.

    Args:
        layout: where each parameter lies in one flat buffer.
        slots: the same by parameter.
        parts: makes gradients of blocks.
        num_bytes: bytes of the dense gradient.
    """

    layout: Layout
    slots: dict[torch.Tensor, Slot]
    parts: GradientParts
    num_bytes: int

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], block: int) -> "ModelBlocks":
        """Lay parameters out, by name and in the order of the module."""
        layout = Layout.of(((name, p.numel()) for name, p in parameters.items()), block)
        slots = {p: layout.by_name[name] for name, p in parameters.items()}
        num_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        return cls(layout, slots, GradientParts(slots, block), num_bytes)


class HostPath:
    """Error feedback, messages and merging by an encoder whose packs the host reads.

    Args:
        encoder: of the host, in torch or Numba.
        model: blocks of the model.
        topology: this rank's place among those that exchange.
        rows: messages of all of them, on the device whose process group sends them.
        hold_unused: hold back the residual of parameters whose gradient is all 0.
    """

    deferred = False
    """Whether the host learns later what the device decided on a step."""

    def __init__(
        self, encoder: Any, model: ModelBlocks, topology: Topology, rows: torch.Tensor, *, hold_unused: bool = False
    ) -> None:
        self.encoder, self.model, self.topology, self.hold_unused = encoder, model, topology, hold_unused
        self.clock = clock_for(encoder.residual.device)
        self.copies = rows.device.type != encoder.residual.device.type
        self.frozen: dict[str, torch.Tensor] = {}  # residuals of parameters that are not trained at present
        self.use_rows(rows)

    def use_rows(self, rows: torch.Tensor) -> None:
        """Receive the messages of the next step here; this rank's own is written into its row."""
        self.rows = rows
        own = rows[self.topology.cluster]
        self.message = own.cpu() if self.copies else own

    # a backward pass

    def accumulate(self, running: BackwardPass, *, everything: bool) -> None:
        """Add gradients to the residuals, those of the cluster on its leader: what has come up, or all there are."""
        while (ready := running.pop_reduced(everything=everything)) is not None:
            buffer, slots = ready
            begin, finite = self.clock.mark(), running.finite
            if self.topology.leads and finite:
                local = buffer.cpu() if self.copies else buffer
                finite = self.encoder.accumulate_bucket(slots, local, running.weight, hold=self.hold_unused)
            running.accumulated(finite, (begin, self.clock.mark()))

    def write(self, running: BackwardPass, step: int) -> None:
        """Write this rank's message into its row."""
        begin, cluster = self.clock.mark(), self.topology.cluster
        if self.topology.leads:
            write = self.encoder.encode if running.finite else self.encoder.give_up
            write(self.message, step=step, rank=cluster)
            if self.copies:
                self.rows[cluster].copy_(self.message)
        running.accumulated(running.finite, (begin, self.clock.mark()))

    def seconds(self, running: BackwardPass) -> float:
        """Return what error feedback, selection and writing took in a backward pass."""
        return float(sum(self.clock.seconds(begin, end) for begin, end in running.spans))

    def read(self, sent: InFlight) -> list[Pack] | None:
        """Wait for messages: their packs, in the order of ranks; ``None`` if a gradient was not finite.

        Raises:
            ValueError: if a message is malformed.
        """
        sent.arrival.wait()
        packs: list[Pack] | None = self.encoder.read(self._on_host(sent), step=sent.step)
        return packs

    def take_back(self, sent: InFlight) -> None:
        """Return to the residual what a message took from it."""
        self.encoder.take_back(self._on_host(sent)[self.topology.cluster])

    def _on_host(self, sent: InFlight) -> torch.Tensor:
        return sent.rows.cpu() if self.copies else sent.rows

    def apply(self, averager: "BlockTopKAverager", sent: InFlight, running: BackwardPass) -> None:
        """Keep the sum for an optimizer that takes blocks, or write it into DDP's buckets."""
        packs = averager.receive(sent) if averager.stale is None else averager.stale.step(sent)
        averager.count(sum(len(pack.indices) for pack in packs), self.seconds(running))
        if averager.takes_blocks:
            running.hand_over(self.model.parts.of(self._sparse_sum(packs, running, averager.fill)))
            return
        self.encoder.merge(packs)
        left_out = bool(averager.flags.skipped) and averager.fill != 0.0
        for buffer, slots, _ in running.waiting:
            for slot, flat in split(buffer, slots):
                if left_out:
                    flat.fill_(averager.fill)
                else:
                    flat.copy_(self.merged(slot))
                    if running.scale != 1.0:
                        flat.mul_(running.scale)

    def _sparse_sum(self, packs: list[Pack], running: BackwardPass, fill: float) -> Pack:
        """Return the merged blocks; if there are none, for a loss scaler one infinite element of each parameter."""
        if packs:
            total: Pack = self.encoder.merge_sparse(packs)
            if running.scale != 1.0:
                total.values.mul_(running.scale)
            return total
        block = self.model.layout.block
        starts = [] if fill == 0.0 else [slot.start // block for slot in self.model.layout.slots if slot.numel]
        values = torch.zeros(len(starts), block, dtype=torch.float32)
        values[:, 0] = fill
        return Pack(torch.tensor(starts, dtype=torch.int64), values)

    def merged(self, slot: Slot) -> torch.Tensor:
        """Return a parameter's part of the merged sum."""
        part: torch.Tensor = self.encoder.merged[slot.start : slot.start + slot.numel]
        return part

    def blocks(self, running: BackwardPass) -> Mapping[torch.Tensor, BlockGradient | BlockMarks]:
        """Give parameters their sparse gradients; return them."""
        for parameter, gradient in (running.gradients or {}).items():
            if isinstance(gradient, BlockGradient) and (parameter.grad is not None or len(gradient.rows)):
                parameter.grad = gradient.grad
        return running.gradients or {}

    def on_host(self, selector: str) -> "HostPath":
        """Return this path: it is that of the host."""
        return self

    def settle(self, averager: "BlockTopKAverager") -> None:
        """Do nothing: the host has decided on every step itself."""

    # state

    def keep_frozen(self, residuals: dict[str, torch.Tensor]) -> None:
        """Keep residuals of parameters that are not trained at present."""
        self.frozen = residuals

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return what this rank has not sent yet, by parameter."""
        flat, slots = self.encoder.residual, self.model.layout.slots
        return self.frozen | {slot.name: flat[slot.start : slot.start + slot.numel].cpu() for slot in slots}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with these residuals; parameters that are not named begin with 0, those not trained keep theirs."""
        self.frozen = {name: r for name, r in residuals.items() if name not in self.model.layout.by_name}
        self.encoder.residual.zero_()
        for slot in self.model.layout.slots:
            if slot.name in residuals:
                self.encoder.residual[slot.start : slot.start + slot.numel].copy_(residuals[slot.name])

    def state(self) -> dict[str, Any]:
        """Return the state of selection, as plain values."""
        scores = {} if self.encoder.balance is None else {"scores": self.encoder.balance.state_dict()}
        return {"selector": self.encoder.state.state_dict(), **scores}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on as :meth:`state` described."""
        self.encoder.state.load_state_dict(state["selector"])
        if self.encoder.balance is not None:
            self.encoder.balance.load_state_dict(state.get("scores", {}))
