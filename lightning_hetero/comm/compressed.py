"""Gradient compression of one rank, as the engine holds it: made when the model is known, saved with the checkpoint."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning_hetero.comm.block_exchange import BlockExchange, StepReport
from lightning_hetero.comm.control import ControlPlane
from lightning_hetero.comm.gradient_hook import HookState
from lightning_hetero.comm.link import choose, latency
from lightning_hetero.comm.messages import message_seconds
from lightning_hetero.comm.torch_hooks import HalfExchange, LowRankExchange
from lightning_hetero.core.bandwidth import LinkEstimate, MessageLink, sending_rate
from lightning_hetero.core.compressors import Automatic, BlockTopK, Compressor, HalfPrecision, LowRank
from lightning_hetero.core.tta import DensityChoice
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
        self.links = (LinkEstimate(),) * control.world_size
        self.choice: DensityChoice | None = None
        self.latency = 0.0
        self._seconds: float | None = None
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
        if self.control.world_size == 1 or not parameters:
            return
        settings: Any = self.settings
        if isinstance(settings, Automatic):
            settings = choose(settings, parameters, self.control)
        if isinstance(settings, BlockTopK):
            self.exchange = BlockExchange(
                settings, parameters, self.hook, self.control.rank, grad_scale=grad_scale, hold_unused=hold_unused
            )
            self.latency = latency(self.control, next(iter(parameters.values())).device)
        elif isinstance(settings, LowRank):
            self.exchange = LowRankExchange(settings, parameters, self.hook, grad_scale=grad_scale)
        elif isinstance(settings, HalfPrecision):
            self.exchange = HalfExchange(settings, parameters, self.hook)
        self.hook.inner, self.hook.inner_state = self.exchange, None
        if self._restored:
            self._go_on(self._restored)
        elif before:  # another fit of the same run
            self._take_over(before)

    def lead(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Tell sparse optimizers which blocks a gradient touches."""
        for optimizer in optimizers:
            if isinstance(optimizer, SparseOptimizer) and isinstance(self.exchange, BlockExchange):
                optimizer.follow(self.exchange.touched_blocks, self.exchange.layout.block)

    # the link

    def take_messages(self) -> npt.NDArray[np.float64]:
        """Times of this rank's messages since the last call, of one shape on all ranks."""
        return self.exchange.messages.take() if isinstance(self.exchange, BlockExchange) else np.zeros(0)

    def see_messages(self, everyone: npt.NDArray[np.float64]) -> None:
        """What all ranks saw of their messages: move the estimate of each rank's rate, the same on all of them."""
        seen = message_seconds(everyone.reshape(len(everyone), -1, 2 + len(everyone))) if everyone.size else None
        self._seconds = None if seen is None else float(seen[1].max())
        if seen is None:
            return
        num_bytes, seconds = seen
        self.latency = min(self.latency, float(seconds.max()))
        self.links = tuple(
            link.observe(sending_rate(num_bytes, took, self.latency))
            for link, took in zip(self.links, seconds.tolist(), strict=True)
        )

    def link(self, *, hidden: bool) -> MessageLink | None:
        """What a planner may know of the link; ``None`` where no density could be set."""
        exchange = self.exchange
        if not isinstance(exchange, BlockExchange):
            return None
        return MessageLink(exchange.density, exchange.sent_bytes, self.links, self._seconds, hidden, self.latency)

    def set_density(self, density: float | None) -> None:
        """Send another share of the blocks from the next step on, on all ranks together; ``None`` leaves it."""
        if density is not None and isinstance(self.exchange, BlockExchange):
            self.exchange.set_density(density)

    def follow(self, choice: DensityChoice | None) -> None:
        """Send as densely as rank 0 has chosen, and let it say so if that is a change."""
        if choice is None or not isinstance(self.exchange, BlockExchange):
            return
        bound = self.choice is not None and self.choice.network_bound
        before, self.choice = self.exchange.density, choice
        self.exchange.set_density(choice.density)
        if self.control.rank == 0 and (choice.density != before or choice.network_bound != bound):
            rates = [link.rate or math.inf for link in self.links]
            log.log(
                logging.WARNING if choice.network_bound else logging.INFO,
                "density %.3g -> %.3g: rank %d sends %.4g MB/s at the least; %s",
                before,
                choice.density,
                rates.index(min(rates)),
                min(rates) / 1e6,
                choice.describe(),
            )

    # state

    def take_report(self) -> StepReport | None:
        """What was sent since the last call, ``None`` if nothing was."""
        if self.exchange is None or self.exchange.report.steps == 0:
            return None
        report, self.exchange.report = self.exchange.report, StepReport()
        return report

    def metrics(self) -> dict[str, float]:
        """Metrics of compressed gradients on this rank, means over the steps since the last call; none without any."""
        report = self.take_report()
        if report is None:
            return {}
        metrics = {
            "hetero/bytes_sent": report.sent / report.steps,
            "hetero/bytes_received": report.received / report.steps,
            "hetero/compression_density": report.density / report.steps,
            "hetero/encode_time": report.encode / report.steps,
        }
        rates = [link.rate for link in self.links if link.rate is not None]
        metrics |= {f"hetero/bandwidth/rank{i}": rate for i, rate in enumerate(rates)}
        if rates:
            metrics["hetero/bandwidth"] = min(rates)
        if self._seconds is not None:
            metrics["hetero/transfer_time"] = self._seconds
        if self.choice is not None:
            metrics["hetero/time_to_accuracy"] = self.choice.objective
        return metrics

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
        return {"ranks": everyone} if everyone and any(everyone) else {}

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
        """This rank's own state, or an equal share of the sum of all residuals on another number of ranks."""
        if not state:
            return {}
        ranks, world_size = state["ranks"], self.control.world_size
        if len(ranks) == world_size:
            own: dict[str, Any] = ranks[self.control.rank]
            return own
        total: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for name, residual in rank["residuals"].items():
                total[name] = total[name] + residual if name in total else residual.clone()
        if self.control.rank == 0:
            log.info("residuals of %d ranks were summed and split over %d", len(ranks), world_size)
        return {**ranks[0], "residuals": {name: residual / world_size for name, residual in total.items()}}


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
