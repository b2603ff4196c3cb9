"""Block top-k in DDP's hook: each bucket is added to the residual, and the last one sends one message for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.async_ops import make_future
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk.gpu_path import DevicePath
from lightning_hetero.comm.compressors.block_topk.host_path import HostPath
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight, StaleMessages
from lightning_hetero.comm.compressors.block_topk.message_path import ModelBlocks
from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.gradients.averager import Future, GradientAverager
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, all_finite, clear
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.timing.message_timer import MessageTimer
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.encoder_choice import encoder_for
from lightning_hetero.compression.encoder_protocol import DeviceEncoder, HostEncoder
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.validation import check_number
from lightning_hetero.optim.sparse.lazy_update import LazyUpdate
from lightning_hetero.optim.sparse.warmup import kernels_work

__all__ = ["BlockTopKAverager"]


@checked_keywords
class BlockTopKAverager(GradientAverager):
    """Averager that exchanges the messages of :class:`~lightning_hetero.core.compression.settings.BlockTopK`.

    Args:
        settings: density, block, values, selector, dense steps.
        context: context of the run. With ``hold_unused``, residuals of parameters whose gradient is all 0 are held
            back, because DDP drops the gradient of a parameter that no rank has used.

    Attributes:
        density: share of all blocks that all ranks together send in a step.
        path: selects, reads and merges messages, on the host or on the device.
        paused: whether all steps are sent densely, as before ``"auto"`` has chosen.
        sparse_steps: greatest density at which the optimizer takes blocks instead of a sum of the model's size.
        stale: decides in which step messages are applied; ``None`` if all are synchronous.
        step: steps so far, dense ones included.
    """

    kind = "BlockExchange"
    may_be_stale = True
    waits = False
    skips_nonfinite = True

    def __init__(self, settings: BlockTopK, context: AveragerContext) -> None:
        control, parameters = context.control, context.parameters
        super().__init__(control.world_size)
        self.settings, self.grad_scale, self.density = settings, context.grad_scale, settings.density
        self.topology = context.topology or Topology.flat_over(control.rank, control.world_size)
        self.model = ModelBlocks.of(parameters, settings.block)
        self.path = self._path(parameters, hold_unused=context.hold_unused)
        self.messages = MessageTimer(context.observer.clock, self.topology.size, SETTINGS.of(self.topology.size))
        self.step, self.dropped = 0, DroppedSteps()
        self.stale: StaleMessages | None = None
        self.paused, self.sparse_steps = False, 0.0
        self._pass = BackwardPass()

    @classmethod
    def build(cls, settings: Any, context: AveragerContext) -> "BlockTopKAverager":
        """Build the averager for a run."""
        return cls(settings, context)

    def _path(self, parameters: Mapping[str, torch.Tensor], *, hold_unused: bool) -> HostPath | DevicePath:
        encoder = self._encoder(parameters, hold_unused)
        device = next(iter(parameters.values())).device
        rows = torch.zeros((self.topology.size, encoder.form.num_bytes), dtype=torch.uint8, device=device)
        if encoder.deferred:
            return DevicePath(encoder, self.model, self.topology, rows, hold_unused=hold_unused)
        return HostPath(encoder, self.model, self.topology, rows, hold_unused=hold_unused)

    def _encoder(self, parameters: Mapping[str, torch.Tensor], hold_unused: bool) -> HostEncoder | DeviceEncoder:
        """Return the encoder for the parameters' device: kernels on a GPU where they work, the host elsewhere."""
        form = self._form(self.density)
        return encoder_for(self.settings, self.model.layout, form, parameters, self.topology.size, hold=hold_unused)

    @property
    def blocks(self) -> "BlockTopKAverager":
        """This averager: its density can be set, and an optimizer can take its blocks."""
        return self

    @property
    def sends_blocks(self) -> bool:
        """True unless all steps are sent densely at present."""
        return not self.paused

    @property
    def encoder(self) -> HostEncoder | DeviceEncoder:
        """The encoder of the path."""
        return self.path.encoder

    @property
    def gradients(self) -> Mapping[torch.Tensor, BlockGradient | BlockMarks] | None:
        """Blocks of the newest step for an optimizer that takes them, ``None`` after a dense step."""
        return self._pass.gradients

    def forget_gradients(self) -> None:
        """Give the optimizer no blocks, because a dense step follows."""
        self._pass.hand_over(None)

    # how messages are applied

    def read_on_host(self) -> HostPath:
        """Select and merge on the host from now on, as stale messages require; return the path of messages."""
        self.settle()
        self.path = path = self.path.on_host(self.settings.selector or "exact")
        return path

    def apply_by(self, stale: StaleMessages) -> HostPath:
        """Let ``stale`` decide, from the next step on, when messages are applied; return the path of messages."""
        self.stale = stale
        return self.read_on_host()

    def pause(self, paused: bool) -> None:
        """Send all steps densely, or compress again."""
        self.paused = paused

    def bind(self, steps: Sequence[LazyUpdate]) -> None:
        """Hand blocks to these optimizers, if any; read messages on the host if the GPU kernels of one do not work."""
        block, device = self.model.layout.block, self.path.rows.device
        if isinstance(self.path, DevicePath) and not all(kernels_work(one, block, device) for one in steps):
            self.read_on_host()
        self.sparse_steps = min((one.max_sparse_density for one in steps), default=0.0)

    @property
    def takes_blocks(self) -> bool:
        """True if the optimizer gets blocks at the present density; the same on all ranks, whatever their devices."""
        most = max(0.5, self.sparse_steps) * self.model.layout.num_blocks  # in a tiny model, one block is a large share
        return self.density <= self.sparse_steps and self.encoder.form.k * self.topology.size <= most

    # density

    def _form(self, density: float) -> MessageFormat:
        return self.model.message_format(self.settings, density, self.topology.size)

    @property
    def message_size(self) -> MessageSize:
        """Bytes that this rank sends to the others in a compressed step, by density."""
        return self.model.message_size(self.settings, self.topology.size)

    @property
    def _sent_bytes(self) -> float:
        """Bytes that this rank sends to the others at the present density."""
        return float((self.topology.size - 1) * self.encoder.form.num_bytes)

    def set_density(self, density: float) -> None:
        """Send another share of the blocks from the next backward pass on; all ranks have to call it together.

        Nothing is lost by the change: unsent gradients stay in the residual. A resumed run begins again with the
        density of its settings.

        Args:
            density: share of all blocks that all ranks together send in a step, above 0, to 1.

        Raises:
            TypeError: if it is no number.
            ValueError: if it is out of range.
            RuntimeError: if gradients of a backward pass are waiting to be sent.
        """
        check_number("density", density, low=0.0, high=1.0, include_low=False)
        if self._pass.waiting:
            raise RuntimeError("the density cannot change inside a backward pass. Call set_density() between steps.")
        form = self._form(density)
        if form != self.encoder.form:
            self._wait()
            self.encoder.reform(form)
            self.path.use_rows(self.path.rows.new_zeros(self.topology.size, form.num_bytes))
        self.density = density

    # the hook

    @property
    def dense(self) -> bool:
        """True if the running step is sent densely."""
        every = self.settings.dense_every
        due = every is not None and self.step % every == 0
        return self.paused or self.step < self.settings.warmup_steps or due

    @property
    def _message_topology(self) -> Topology:
        return (None if self.stale is None else self.stale.topology) or self.topology

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        dense = self.dense
        if bucket.index() == 0:
            self._begin_pass(dense)
        if dense:
            return self._add_up(bucket)
        buffer, last = bucket.buffer(), bucket.is_last()
        future: Future = make_future(buffer)
        slots = [self.model.slots[parameter] for parameter in bucket.parameters()]
        self._pass.add(buffer, slots, future, self.topology.reduce_in_cluster(buffer))
        self.path.accumulate(self._pass, everything=last)
        if last:
            self.path.apply(self, self._send(), self._pass)
            self.encoder.finish()
            self.step += 1
            self._pass.complete("compressed")
        return future

    def _begin_pass(self, dense: bool) -> None:
        scale = 1.0 if self.grad_scale is None or dense else self.grad_scale()
        self.flags.begin(exact=dense, single_message=not dense)
        self._pass = BackwardPass(weight=1.0 / (self.world_size * scale), scale=scale)

    def _add_up(self, bucket: dist.GradBucket) -> Future:
        buffer = bucket.buffer()
        buffer.mul_(1.0 / self.world_size)
        if self.stale is not None:
            self.stale.add_to_dense(bucket)
        if bucket.is_last():
            self.step += 1
            self._pass.complete("dense")
            share = 2 * (self.topology.size - 1) / self.topology.size * self.topology.is_leader
            self.report.add(share * self.model.num_bytes, 1.0)
        return self.topology.all_reduce(buffer)

    def _send(self) -> InFlight:
        self.settle()
        self.path.write(self._pass, self.step)
        arrived = self.messages.send(self.step, self._sent_bytes)
        arrival = self._message_topology.all_gather(self.path.rows, arrived)
        return InFlight(self.path.rows, self.step, arrival, self._pass.finite)

    def skip(self, step: int, where: str) -> None:
        """Note that a step was left out on all ranks, since a gradient was not finite; ``where`` says on which rank."""
        self.flags.skip()
        if self.grad_scale is None:
            self.dropped.add(step, where)

    def count(self, blocks: int, seconds: float) -> None:
        """Report a compressed step: the blocks that were applied, and the seconds that selection took."""
        share = blocks / self.model.layout.num_blocks
        self.report.add(self._sent_bytes * self.topology.is_leader, share, seconds)

    @property
    def fill(self) -> float:
        """Gradient of a step that is left out: infinite under a loss scaler, which has to see it; otherwise 0."""
        return 0.0 if self.grad_scale is None else float("inf")

    def settle(self) -> None:
        """Report the outcome of the last step, if so far only the device knows it.

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        self.path.settle(self)

    def _wait(self) -> None:
        self.settle()
        if self.stale is not None:
            self.stale.wait()

    def after_backward(self) -> None:
        """Give parameters their sparse gradients; leave out a dense sum that is not finite."""
        arrived = self._pass.take_arrived()
        if arrived == "dense" and self.grad_scale is None and not all_finite(self.model.slots):
            clear(self.model.slots)
            if self.stale is not None:
                self.stale.undo_add()
            self.skip(self.step - 1, "on some rank")
        if arrived == "compressed" and self.takes_blocks:
            self._pass.hand_over(self.path.blocks(self._pass))

    # state

    def undo_failed(self) -> None:
        """Take the gradient of a pass that has failed out of the residual, and put back what it has sent."""
        self.path.undo_failed(self._pass)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals (not sent yet) of this rank by parameter: parts of the weighted sum over ranks."""
        self._wait()
        return self.path.residuals()

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Set the residuals: 0 for parameters not named; those of parameters not trained now are kept for later."""
        self.path.load_residuals(residuals)

    def extra_state(self) -> dict[str, Any]:
        """Return the further state that an identical continuation on the same number of ranks needs."""
        return {"step": self.step, **self.path.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`extra_state` returned."""
        self.step = state["step"]
        self.path.load_state(state)
