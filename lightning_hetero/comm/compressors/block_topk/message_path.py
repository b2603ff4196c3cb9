"""Path of block top-k's messages on one device: error feedback, writing of messages, residuals by parameter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.comm.timing.clock import clock_for
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks, GradientParts
from lightning_hetero.compression.encoder_protocol import BlockEncoder
from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.wire_format import MessageFormat, message_size
from lightning_hetero.core.compression.settings import BlockTopK, blocks_per_rank
from lightning_hetero.core.link.message_size import MessageSize

if TYPE_CHECKING:
    from lightning_hetero.comm.compressors.block_topk.averager import BlockTopKAverager
    from lightning_hetero.comm.compressors.block_topk.host_path import HostPath

__all__ = ["MessagePath", "ModelBlocks"]

Encoder = TypeVar("Encoder", bound=BlockEncoder)


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

    def message_format(self, settings: BlockTopK, density: float, receivers: int) -> MessageFormat:
        """Return the format of messages that together (one per receiver) hold the share ``density`` of all blocks."""
        layout = self.layout
        k = blocks_per_rank(layout.num_blocks, density, receivers)
        return MessageFormat(layout.num_blocks, k, settings.block, settings.value_dtype, layout.fingerprint())

    def message_size(self, settings: BlockTopK, receivers: int) -> MessageSize:
        """Return the bytes of a message as a function of the density."""
        return message_size(self.layout.num_blocks, self.layout.block, settings.value_dtype, receivers)


class MessagePath(ABC, Generic[Encoder]):
    """Error feedback, messages and merging by one encoder.

    Args:
        encoder: encoder of this rank.
        model: blocks of the model.
        topology: topology of the exchange, with this rank's place in it.
        rows: messages of all ranks (in a hierarchy, clusters), on the device whose process group sends them.
        hold_unused: hold back the residual of parameters whose gradient is all 0.
    """

    def __init__(
        self, encoder: Encoder, model: ModelBlocks, topology: Topology, rows: torch.Tensor, *, hold_unused: bool = False
    ) -> None:
        self.encoder, self.model, self.topology, self.hold_unused = encoder, model, topology, hold_unused
        self.clock = clock_for(encoder.residual.device)
        self.copies = rows.device.type != encoder.residual.device.type
        self.frozen: dict[str, torch.Tensor] = {}  # residuals of parameters that are not trained at present
        self.use_rows(rows)

    def use_rows(self, rows: torch.Tensor) -> None:
        """Exchange the next step's messages in these rows; this rank writes its own into its row."""
        self.rows = rows
        own = rows[self.topology.cluster]
        self.message = own.cpu() if self.copies else own

    # a backward pass

    def accumulate(self, running: BackwardPass, *, everything: bool) -> None:
        """Add the buckets reduced so far to the residual of the leader; with ``everything``, wait for all buckets."""
        while (ready := running.pop_reduced(everything=everything)) is not None:
            buffer, slots = ready
            begin, finite = self.clock.mark(), running.finite
            if self.topology.is_leader and finite:
                local = buffer.cpu() if self.copies else buffer
                finite = self.encoder.accumulate_bucket(slots, local, running.weight, hold=self.hold_unused)
            running.accumulated(finite, (begin, self.clock.mark()))

    def write(self, running: BackwardPass, step: int) -> None:
        """Write this rank's message into its row."""
        begin, cluster = self.clock.mark(), self.topology.cluster
        if self.topology.is_leader:
            write = self.encoder.encode if running.finite else self.encoder.give_up
            write(self.message, step=step, rank=cluster)
            if self.copies:
                self.rows[cluster].copy_(self.message)
        running.accumulated(running.finite, (begin, self.clock.mark()))

    def seconds(self, running: BackwardPass) -> float:
        """Return the seconds of error feedback, selection and writing in a backward pass."""
        return float(sum(self.clock.seconds(begin, end) for begin, end in running.spans))

    @abstractmethod
    def apply(self, averager: "BlockTopKAverager", sent: InFlight, running: BackwardPass) -> None:
        """Merge the messages of a step, and write the sum into DDP's buckets or keep it for the optimizer."""

    @abstractmethod
    def settle(self, averager: "BlockTopKAverager") -> None:
        """Report the outcome of the last step, if the device decides on it.

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """

    @abstractmethod
    def blocks(self, running: BackwardPass) -> Mapping[torch.Tensor, BlockGradient | BlockMarks]:
        """Return the blocks for an optimizer that takes them, after a backward pass."""

    @abstractmethod
    def on_host(self, selector: str) -> "HostPath":
        """Return a path on the host that takes over these residuals."""

    def undo_failed(self, running: BackwardPass) -> None:  # noqa: B027 - on a GPU, the host does not know what was sent
        """Undo a backward pass whose messages have not arrived."""

    def merged(self, slot: Slot) -> torch.Tensor:
        """Return a parameter's part of the merged sum."""
        return self.encoder.merged[slot.start : slot.start + slot.numel]

    # state

    def keep_frozen(self, residuals: dict[str, torch.Tensor]) -> None:
        """Keep residuals of parameters that are not trained at present."""
        self.frozen = residuals

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the gradients that this rank has not sent yet, by parameter."""
        flat, slots = self.encoder.residual, self.model.layout.slots
        return self.frozen | {slot.name: flat[slot.start : slot.start + slot.numel].cpu() for slot in slots}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Set the residuals: 0 for parameters not named; those of parameters not trained now are kept for later."""
        self.frozen = {name: r for name, r in residuals.items() if name not in self.model.layout.by_name}
        self.encoder.residual.zero_()
        for slot in self.model.layout.slots:
            if slot.name in residuals:
                self.encoder.residual[slot.start : slot.start + slot.numel].copy_(residuals[slot.name])

    def state(self) -> dict[str, Any]:
        """Return the state of selection, as plain values."""
        return {"selector": self.encoder.state.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""
        self.encoder.state.load_state_dict(state["selector"])
