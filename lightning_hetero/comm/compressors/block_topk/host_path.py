"""Block top-k's messages on the host, which selects, reads and merges."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.comm.compressors.block_topk.message_path import MessagePath
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.encoder_protocol import HostEncoder
from lightning_hetero.compression.layout import split
from lightning_hetero.compression.reference import Pack

if TYPE_CHECKING:
    from lightning_hetero.comm.compressors.block_topk.averager import BlockTopKAverager

__all__ = ["HostPath"]


class HostPath(MessagePath[HostEncoder]):
    """Path of messages by an encoder in torch or Numba: the host reads the packs and decides on each step."""

    def read(self, sent: InFlight) -> list[Pack] | None:
        """Wait for messages; return their packs in the order of ranks, ``None`` if a gradient was not finite.

        Raises:
            ValueError: if a message is malformed.
        """
        sent.arrival.wait()
        return self.encoder.read(self._on_host(sent), step=sent.step)

    def receive(self, averager: "BlockTopKAverager", sent: InFlight) -> list[Pack]:
        """Wait for messages; return their packs in the order of ranks, an empty list if a gradient was not finite.

        After the end of the step, only the sent blocks can return to the residual, because the gradient is gone.

        Raises:
            ValueError: if a message is malformed.
        """
        packs = self.read(sent)
        if packs is not None:
            return packs
        if sent.step == averager.step:
            self.encoder.undo()
        elif sent.finite and self.topology.is_leader:
            self.encoder.take_back(self._on_host(sent)[self.topology.cluster])
        averager.skip(sent.step, f"on {'another rank than this' if sent.finite else 'this rank'}")
        return []

    def undo_failed(self, running: BackwardPass) -> None:
        """Undo a backward pass whose messages have not arrived, up to one rounding; nothing if they have."""
        if running.waiting:
            self.encoder.undo()
            self.encoder.finish()

    def _on_host(self, sent: InFlight) -> torch.Tensor:
        return sent.rows.cpu() if self.copies else sent.rows

    def apply(self, averager: "BlockTopKAverager", sent: InFlight, running: BackwardPass) -> None:
        """Keep the sum for an optimizer that takes blocks, or write it into DDP's buckets."""
        packs = self.receive(averager, sent) if averager.stale is None else averager.stale.step(sent)
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
        """Return the merged blocks; without any, under a loss scaler, one infinite element per parameter."""
        if packs:
            total = self.encoder.merge_sparse(packs)
            if running.scale != 1.0:
                total.values.mul_(running.scale)
            return total
        block = self.model.layout.block
        starts = [] if fill == 0.0 else [slot.start // block for slot in self.model.layout.slots if slot.numel]
        values = torch.zeros(len(starts), block, dtype=torch.float32)
        values[:, 0] = fill
        return Pack(torch.tensor(starts, dtype=torch.int64), values)

    def sums_of(self, packs: list[Pack]) -> dict[str, torch.Tensor]:
        """Return the sum of packs by parameter, flat."""
        self.encoder.merge(packs)
        flat = {slot.name: self.merged(slot).clone() for slot in self.model.layout.slots}
        self.encoder.finish()
        return flat

    def blocks(self, running: BackwardPass) -> Mapping[torch.Tensor, BlockGradient | BlockMarks]:
        """Give parameters their sparse gradients; return them."""
        for parameter, gradient in (running.gradients or {}).items():
            if isinstance(gradient, BlockGradient) and (parameter.grad is not None or len(gradient.rows)):
                parameter.grad = gradient.grad
        return running.gradients or {}

    def on_host(self, selector: str) -> "HostPath":
        """Return this path, which already is on the host."""
        return self

    def settle(self, averager: "BlockTopKAverager") -> None:
        """Do nothing: the host has decided on every step itself."""

    # state

    def state(self) -> dict[str, Any]:
        """Return the state of selection, as plain values."""
        scores = {} if self.encoder.balance is None else {"scores": self.encoder.balance.state_dict()}
        return {**super().state(), **scores}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""
        super().load_state(state)
        if self.encoder.balance is not None:
            self.encoder.balance.load_state_dict(state.get("scores", {}))
