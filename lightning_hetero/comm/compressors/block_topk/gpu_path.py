"""Block top-k's messages on the GPU, which selects, checks and merges; the host learns the outcome of a step later."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk.host_path import HostPath
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.comm.compressors.block_topk.message_path import MessagePath, ModelBlocks
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.encoder_protocol import DeviceEncoder
from lightning_hetero.compression.host.encoder import cpu_encoder

if TYPE_CHECKING:
    from lightning_hetero.comm.compressors.block_topk.averager import BlockTopKAverager

__all__ = ["DevicePath"]


class DevicePath(MessagePath[DeviceEncoder]):
    """Path of messages whose encoder decides on the device: the host never waits in a step.

    Args:
        encoder: the Triton encoder.
        model: blocks of the model.
        topology: topology of the exchange, with this rank's place in it.
        rows: messages of all ranks (in a hierarchy, clusters).
        hold_unused: hold back the residual of parameters whose gradient is all 0.
    """

    def __init__(
        self,
        encoder: DeviceEncoder,
        model: ModelBlocks,
        topology: Topology,
        rows: torch.Tensor,
        *,
        hold_unused: bool = False,
    ) -> None:
        super().__init__(encoder, model, topology, rows, hold_unused=hold_unused)
        self._last = BackwardPass()
        block = model.layout.block
        self._masks = {
            p: encoder.touched[slot.start // block : (slot.start + slot.padded) // block]
            for p, slot in model.slots.items()
        }

    def apply(self, averager: "BlockTopKAverager", sent: InFlight, running: BackwardPass) -> None:
        """Let the device check and add up the messages; :meth:`settle` reports the outcome."""
        sent.arrival.wait()
        self.encoder.receive(sent.rows, rank=self.topology.cluster, step=sent.step)
        averager.flags.skip(self.encoder.verdict)
        self._last = running
        weight = running.weight if self.topology.is_leader else 0.0  # of the gradient in the residual
        for buffer, slots, _ in running.waiting:
            self.encoder.deliver_bucket(slots, buffer, weight, scale=running.scale, fill=averager.fill)

    def settle(self, averager: "BlockTopKAverager") -> None:
        """Report the outcome of the last step, if it was not reported yet.

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        outcome = self.encoder.outcome()
        if outcome is not None:
            averager.count(outcome.blocks, self.seconds(self._last))
            if outcome.dropped and averager.grad_scale is None:
                averager.dropped.add(outcome.step, "on some rank")

    def blocks(self, running: BackwardPass) -> Mapping[torch.Tensor, BlockGradient | BlockMarks]:
        """Return marks of the blocks that were written into DDP's buckets."""
        return {p: BlockMarks(marks, p.grad) for p, marks in self._masks.items() if p.grad is not None}

    def on_host(self, selector: str) -> HostPath:
        """Return a path on the host that takes over these residuals."""
        encoder = cpu_encoder(self.model.layout, self.encoder.form, selector, torch.float32)
        encoder.residual.copy_(self.encoder.residual)
        path = HostPath(encoder, self.model, self.topology, self.rows, hold_unused=self.hold_unused)
        path.keep_frozen(self.frozen)
        return path
