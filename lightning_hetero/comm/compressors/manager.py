"""Gradient compression of one rank: built when the model is known, saved with the checkpoint."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.checkpoint import CompressionCheckpoint
from lightning_hetero.comm.compressors.density_control import DensityControl
from lightning_hetero.comm.compressors.optimizer_link import OptimizerLink, clip_targets
from lightning_hetero.comm.compressors.registry import AveragerContext, averager_for
from lightning_hetero.comm.gradients.averager import GradientAverager, StepReport
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.requirements import check_parameters, warn_of_untrained
from lightning_hetero.comm.link.link_benchmark import BENCHMARK, slowest_exchange
from lightning_hetero.comm.link.link_state import LinkState
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.compression.settings import Compressor
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.optim.sparse.lazy_update import LazyUpdate

__all__ = ["GradientCompression"]

log = logging.getLogger("lightning_hetero")


class GradientCompression:
    """Compressor in the gradient hook, whose residuals are carried through checkpoints.

    Args:
        settings: settings of the compressor.
        control: control plane by which ranks agree.
        hook: state of the gradient hook.
        sparse: whether the optimizer takes sparse steps: ``False``, ``True``, or the time at which momentum is applied,
            ``"ahead"`` (as with ``True``) or ``"later"``.

    Attributes:
        averager: sends compressed gradients; ``None`` before the model is known, on one rank, and where
            ``compression="auto"`` has chosen dense sums.
        optimizers: optimizers that may take its blocks.
        watch: estimates of the link, equal on all ranks.
        density: newest choice of a controller of the density.
        checkpoint: holds residuals while no averager does.
    """

    def __init__(
        self, settings: Compressor, control: ControlPlane, hook: HookState, sparse: bool | str = False
    ) -> None:
        self.settings, self.control, self.hook = settings, control, hook
        self.averager: GradientAverager | None = None
        self.optimizers = OptimizerLink(sparse)
        self.checkpoint = CompressionCheckpoint(control, hook, self.optimizers)
        self.watch = LinkState(self._topology.size)
        self.density = DensityControl(control.rank == 0)
        self._scaled = self._warned = False
        self._module: weakref.ref[nn.Module] | None = None

    @classmethod
    def of(cls, config: HeteroConfig, control: ControlPlane, hook: HookState) -> "GradientCompression | None":
        """Return the compression that ``config`` asks for, ``None`` if it asks for none."""
        settings: Any = config.compression
        return None if settings is None else cls(settings, control, hook, config.sparse_optimizer)

    def attach(
        self, module: nn.Module, *, grad_scale: Callable[[], float] | None = None, hold_unused: bool = False
    ) -> None:
        """Compress the gradients of a module; a collective call.

        Args:
            module: whose parameters are trained; its names are the keys of the residuals.
            grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
            hold_unused: whether parameters may be left out by all ranks (``find_unused_parameters``).

        Raises:
            ValueError: if the module has a parameter that cannot be compressed, or another module is attached.
        """
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_parameters(parameters)
        if self._module is not None and self._module() not in (None, module):
            raise ValueError(
                "compression= sends the gradients of one model, and a second one was set up. Put both into one module, "
                "or set compression=None."
            )
        if self._module is not None and self._module() is not module:
            self.optimizers.forget()
        self._module = weakref.ref(module)
        before, self.averager = self.state_dict_of_rank(), None
        self.checkpoint.drop_payout()
        self._scaled = grad_scale is not None
        if self.control.world_size > 1 and parameters:
            self._begin(parameters, before, grad_scale, hold_unused)
        elif parameters:
            self._pay_out(before)
        self._connect()

    def _begin(
        self,
        parameters: Mapping[str, torch.Tensor],
        before: dict[str, Any],
        grad_scale: Callable[[], float] | None,
        hold_unused: bool,
    ) -> None:
        """Build the averager, and give it the residuals of its predecessor or of a checkpoint."""
        context = AveragerContext(
            parameters, self.control, self.hook.observer, self.hook.topology, grad_scale, hold_unused
        )
        self.averager = averager_for(self.settings, context)
        if self.blocks is not None:
            device = next(iter(parameters.values())).device
            self.watch.begin(slowest_exchange(BENCHMARK.latency_bytes, self.control, self._topology, device))
        self.hook.use(self.averager)
        self.checkpoint.hand_over(self.averager, self.watch, before)

    def end_step(self) -> None:
        """End a synchronized step; a collective call while ``"auto"`` has not chosen."""
        if self.averager is None or not self.averager.undecided:
            return
        if not self.averager.end_step(may_be_stale=self._may_delay):
            self._send_densely()
        if self.averager is None or not self.averager.undecided:
            self._connect()

    def _send_densely(self) -> None:
        """Stop compressing, because ``"auto"`` has chosen dense sums."""
        state, self.averager = self.state_dict_of_rank(), None
        self.hook.use(None)
        if self.hook.staleness is not None:
            self.hook.set_staleness(self.hook.staleness.for_dense_sums(self.hook.topology))
        self._pay_out(state)

    def _pay_out(self, before: dict[str, Any]) -> None:
        """Add residuals to the next dense sum: those of a checkpoint, else those in ``before``."""
        self.checkpoint.pay_out(self._trained_module, before, scaled=self._scaled)

    @property
    def _trained_module(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    @property
    def _topology(self) -> Topology:
        return self.checkpoint.topology

    # the optimizer

    @property
    def sparse(self) -> bool | str:
        """Setting of sparse steps: ``False``, ``True``, ``"ahead"`` or ``"later"``."""
        return self.optimizers.sparse

    def bind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], *, more: bool = False) -> None:
        """Let optimizers take sparse steps: those of this package, and torch's own if the settings ask for it.

        Args:
            optimizers: all optimizers of the module.
            more: whether they join those that were given before.

        Raises:
            ValueError: if the settings ask for sparse steps and they are not possible.
        """
        self.optimizers.bind(optimizers, more=more)
        self._connect()

    def _connect(self) -> None:
        self.optimizers.connect(self.blocks)

    def steps_of(self, optimizer: torch.optim.Optimizer) -> LazyUpdate | None:
        """Return the sparse steps of an optimizer, ``None`` if its steps are dense."""
        return None if self.blocks is None or not self.blocks.takes_blocks else self.optimizers.steps_of(optimizer)

    def after_backward(self) -> None:
        """Give parameters their sparse gradients; leave out sums that are not finite."""
        if self.averager is not None:
            self.averager.after_backward()
        if self._warned or not self.optimizers.optimizers or self.blocks is None or self.blocks.undecided:
            return
        self._warned = True
        if self.control.rank == 0 and self._module is not None:
            warn_of_untrained(self.optimizers.optimizers, self._module())

    def clip_targets(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what to clip in place of these parameters: for a sparse gradient, a tensor that holds its values.

        Norms and clipping factors are then those of the merged gradient, over the sent blocks.
        """
        gradients = None if self.blocks is None else self.blocks.gradients
        return clip_targets(parameters, gradients or {})

    # the link

    @property
    def blocks(self) -> BlockTopKAverager | None:
        """The averager, if its density can be set."""
        return None if self.averager is None else cast("BlockTopKAverager | None", self.averager.blocks)

    @property
    def _may_delay(self) -> bool:
        return self.hook.staleness is not None and self.hook.staleness.limit > 0

    def pack(self) -> npt.NDArray[np.float64]:
        """Return the times of this rank's messages since the last call, in the same shape on all ranks."""
        return np.zeros(0) if self.blocks is None else self.watch.take(self.blocks.messages).ravel()

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Update the estimates of the link by the message times of all ranks."""
        if everyone.size:
            self.watch.see(everyone)

    def link(self) -> MessageLink | None:
        """Return the link as planners see it; ``None`` if there is no density to set."""
        blocks, stale = self.blocks, self.hook.staleness
        if blocks is None:
            return None
        return self.watch.link(blocks.density, blocks.message_size, stale=stale is not None and stale.stale_share > 0.0)

    def set_density(self, density: float | None) -> None:
        """Send another share of the blocks from the next step on, on all ranks together; ``None`` leaves it."""
        if density is not None and self.blocks is not None:
            self.blocks.set_density(density)

    def measure_link(self) -> None:
        """Measure the rate of the link by a large message, where none is known; a collective call."""
        module, size = self._trained_module, BENCHMARK.probe_bytes
        if self.blocks is not None and module is not None and not self.watch.times.rates:
            device = next(module.parameters()).device
            self.watch.see_probe(size, slowest_exchange(size, self.control, self._topology, device))

    def apply_choice(self, choice: DensityChoice | None) -> None:
        """Apply rank 0's choice of density; rank 0 logs changes."""
        if choice is not None and self.blocks is not None:
            self.density.apply(choice, self.blocks, self.watch.times.rates)

    # state

    def settle(self) -> None:
        """Report the outcome of the last step, if so far only the device knows it (block top-k on GPU).

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        if self.averager is not None:
            self.averager.settle()

    def close(self) -> None:
        """End the run: report the last step's outcome, and apply deferred updates, so that weights are final."""
        self.settle()
        self.optimizers.flush()

    def take_report(self) -> StepReport | None:
        """Return the traffic since the last call, ``None`` without any."""
        return None if self.averager is None else self.averager.take_report()

    def metrics(self) -> dict[str, float]:
        """Return metrics of compressed gradients on this rank, means over the steps since the last call."""
        report = self.take_report()
        if report is None:
            return {}
        metrics = {
            "hetero/bytes_sent": report.sent / report.steps,
            "hetero/bytes_received": report.received / report.steps,
            "hetero/compression_density": report.density / report.steps,
            "hetero/encode_time": report.encode / report.steps,
            **self.watch.metrics([members[0] for members in self._topology.clusters]),
        }
        if self.density.choice is not None:
            metrics["hetero/time_to_accuracy"] = self.density.choice.objective
        return metrics

    def state_dict_of_rank(self) -> dict[str, Any]:
        """Return residuals by parameter, and the further state of this rank."""
        return self.checkpoint.of_rank(self.averager, self.watch)

    def state_dict(self, *, alone: bool = False) -> dict[str, Any]:
        """Return the state of all ranks, on rank 0; empty elsewhere. A collective call, unless ``alone``.

        Deferred updates are applied first.
        """
        self.optimizers.flush()
        return self.checkpoint.of_all(self.state_dict_of_rank(), alone=alone)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals of an earlier run, now or when the model is attached; an empty state sets them to 0."""
        self.checkpoint.load(state)
        if self.averager is not None:
            self.checkpoint.restore(self.averager, self.watch)
        elif self.control.world_size == 1:
            self._pay_out({})

    def reset(self) -> None:
        """Forget all state; the model that is attached next begins like the first one."""
        self.checkpoint.clear()
        self.optimizers.forget()
        self._module = self.averager = None
        self.density, self.watch = DensityControl(self.control.rank == 0), LinkState(self._topology.size)
