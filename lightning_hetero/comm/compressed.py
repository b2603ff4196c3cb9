"""Gradient compression of one rank, as the engine holds it: made when the model is known, saved with the checkpoint."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_hetero.comm.block_exchange import BlockExchange, StepReport
from lightning_hetero.comm.control import ControlPlane
from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.comm.link import choose
from lightning_hetero.comm.topology import Topology
from lightning_hetero.comm.torch_hooks import HalfExchange, LowRankExchange
from lightning_hetero.core.compressors import Automatic, BlockTopK, Compressor, HalfPrecision, LowRank
from lightning_hetero.optim.sparse import SparseOptimizer

__all__ = ["GradientCompression"]

log = logging.getLogger("lightning_hetero")

Exchange = BlockExchange | LowRankExchange | HalfExchange


class GradientCompression:
    """Puts a compressor into the gradient hook, and carries its residuals through checkpoints.

    Args:
        settings: the compressor.
        control: for what ranks agree on.
        hook: state of the gradient hook.
    """

    def __init__(self, settings: Compressor, control: ControlPlane, hook: HookState) -> None:
        self.settings, self.control, self.hook = settings, control, hook
        self.exchange: Exchange | None = None
        self._restored: dict[str, Any] = {}
        self._module: weakref.ref[nn.Module] | None = None

    @classmethod
    def of(cls, settings: Any, control: ControlPlane, hook: HookState) -> "GradientCompression | None":
        """Compression by these settings, ``None`` without any."""
        return None if settings is None else cls(settings, control, hook)

    def attach(
        self, module: nn.Module, *, grad_scale: Callable[[], float] | None = None, hold_unused: bool = False
    ) -> None:
        """Compress the gradients of a module; a collective call.

        Args:
            module: whose parameters are trained; its names are the keys of the residuals.
            grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
            hold_unused: whether parameters may be left out by all ranks (``find_unused_parameters``).

        Raises:
            ValueError: if the module has a parameter that cannot be compressed.
        """
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_parameters(parameters)
        if self._module is not None and self._module() not in (None, module):
            raise ValueError(
                "compression= sends the gradients of one model, and a second one was set up. Put both into one module, "
                "or set compression=None."
            )
        self._module = weakref.ref(module)
        before, self.exchange = self.state_dict_of_rank(), None
        topology = self._topology()
        if self.control.world_size == 1 or not parameters:
            return
        settings: Any = self.settings
        if isinstance(settings, Automatic):
            settings = choose(settings, parameters, self.control, topology)
        if isinstance(settings, BlockTopK):
            self.exchange = BlockExchange(
                settings, parameters, self.hook, self.control.rank, grad_scale=grad_scale, hold_unused=hold_unused
            )
        elif isinstance(settings, LowRank):
            self.exchange = LowRankExchange(settings, parameters, self.hook, grad_scale=grad_scale)
        elif isinstance(settings, HalfPrecision):
            self.exchange = HalfExchange(settings, parameters, self.hook)
        self.hook.inner, self.hook.inner_state = self.exchange, None
        if self._restored:
            self._go_on(self._restored)
        elif before:  # another fit of the same run
            self._take_over(before)

    def _topology(self) -> Topology:
        return self.hook.topology or Topology.straight(self.control.rank, self.control.world_size)

    def lead(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Tell sparse optimizers which blocks a gradient touches."""
        for optimizer in optimizers:
            if isinstance(optimizer, SparseOptimizer) and isinstance(self.exchange, BlockExchange):
                optimizer.follow(self.exchange.touched_blocks, self.exchange.layout.block)

    # state

    def settle(self) -> None:
        """Look at what the device decided on the last step, if it is not known yet (block top-k on GPU).

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        if isinstance(self.exchange, BlockExchange):
            self.exchange.settle()

    def take_report(self) -> StepReport | None:
        """What was sent since the last call, ``None`` if nothing was."""
        self.settle()
        if self.exchange is None or self.exchange.report.steps == 0:
            return None
        report, self.exchange.report = self.exchange.report, StepReport()
        return report

    def metrics(self) -> dict[str, float]:
        """Metrics of compressed gradients on this rank, means over the steps since the last call; none without any."""
        report = self.take_report()
        if report is None:
            return {}
        return {
            "hetero/bytes_sent": report.sent / report.steps,
            "hetero/bytes_received": report.received / report.steps,
            "hetero/compression_density": report.density / report.steps,
            "hetero/encode_time": report.encode / report.steps,
        }

    def state_dict_of_rank(self) -> dict[str, Any]:
        """Residuals by parameter, and what else this rank needs to go on."""
        if self.exchange is None:
            return {}
        return {
            "kind": type(self.exchange).__name__,
            "residuals": self.exchange.residuals(),
            "extra": self.exchange.extra_state(),
        }

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks, on rank 0; empty elsewhere. A collective call."""
        everyone = self.control.gather_objects_at_zero(self.state_dict_of_rank() or self._own_share(self._restored))
        return {"ranks": everyone, "clusters": self._topology().clusters} if everyone and any(everyone) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the residuals of an earlier run, once the model is attached or at once."""
        self._restored = state
        if self.exchange is not None and state:
            self._go_on(state)

    def _go_on(self, state: dict[str, Any]) -> None:
        self._take_over(self._own_share(state))
        self._restored = {}

    def _take_over(self, own: dict[str, Any]) -> None:
        assert self.exchange is not None
        self.exchange.load_residuals(own["residuals"])
        if own["kind"] == type(self.exchange).__name__ and own["extra"]:
            self.exchange.load_extra_state(own["extra"])
        if own["residuals"] and isinstance(self.exchange, HalfExchange):
            log.warning("the checkpoint has gradients that were not sent yet, which 16-bit sums cannot send")

    def _own_share(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's own state, or, among other workers, an equal share of the sum of all residuals.

        In a hierarchy only the leaders of clusters hold residuals.
        """
        if not state:
            return {}
        ranks, topology = state["ranks"], self._topology()
        before = state.get("clusters", tuple((rank,) for rank in range(len(ranks))))
        if before == topology.clusters:
            own: dict[str, Any] = ranks[self.control.rank]
            return own
        total: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for name, residual in rank["residuals"].items():
                total[name] = total[name] + residual if name in total else residual.clone()
        if self.control.rank == 0:
            log.info("residuals of %d ranks were summed and split over %d", len(before), topology.size)
        share = {name: residual / topology.size for name, residual in total.items()} if topology.leads else {}
        return {**ranks[0], "residuals": share}


def check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that gradients of these parameters can be compressed.

    Raises:
        ValueError: naming the first that cannot.
    """
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, parameter in parameters.items():
        if parameter.dtype not in allowed or parameter.layout != torch.strided:
            raise ValueError(
                f"compression cannot send the gradient of {name}, which is {parameter.dtype} and {parameter.layout}; "
                "allowed are dense parameters of float32, bfloat16, float16 and float64. Set compression=None."
            )
