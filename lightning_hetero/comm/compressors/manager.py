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

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.auto import Undecided
from lightning_hetero.comm.compressors.block_topk import BlockExchange
from lightning_hetero.comm.compressors.half import HalfExchange
from lightning_hetero.comm.compressors.in_flight import StepReport
from lightning_hetero.comm.compressors.powersgd import LowRankExchange
from lightning_hetero.comm.compressors.requirements import check_parameters, check_trained, warn_of_untrained
from lightning_hetero.comm.compressors.residuals import Owed, hand_over_waits, left_alone, own_share, unpaid
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.link.link_benchmark import latency
from lightning_hetero.comm.link.link_state import LinkWatch
from lightning_hetero.comm.staleness.dense import Staleness
from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.auto import CompressionChoice
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.compression.settings import Automatic, BlockTopK, Compressor, HalfPrecision, LowRank
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.optim.sparse.lazy_update import SparseSteps
from lightning_hetero.optim.sparse.rules import SparseAdamW, SparseSGD, sparse_steps

__all__ = ["GradientCompression"]

log = logging.getLogger("lightning_hetero")

Exchange = BlockExchange | LowRankExchange | HalfExchange


class GradientCompression:
    """Puts a compressor into the gradient hook, and carries its residuals through checkpoints.

    Args:
        settings: the compressor.
        control: for what ranks agree on.
        hook: state of the gradient hook.
        sparse: whether the optimizer takes sparse steps: ``False``, ``True``, or when momentum is paid, ``"ahead"``
            (what ``True`` is) or ``"later"``.
    """

    def __init__(
        self, settings: Compressor, control: ControlPlane, hook: HookState, sparse: bool | str = False
    ) -> None:
        self.settings, self.control, self.hook, self.sparse = settings, control, hook, sparse
        self.exchange: Exchange | None = None
        self._undecided: Undecided | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, SparseSteps] = weakref.WeakKeyDictionary()
        self.watch = LinkWatch(self._topology().size)
        self.choice: DensityChoice | None = None
        self._restored: dict[str, Any] = {}
        self._waits: list[Any] = []
        self._idle: dict[str, Any] = {}
        self._scaled = self._looked = False
        self._module: weakref.ref[nn.Module] | None = None

    @classmethod
    def of(cls, config: HeteroConfig, control: ControlPlane, hook: HookState) -> "GradientCompression | None":
        """Compression by these settings, ``None`` without any."""
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
            ValueError: if the module has a parameter that cannot be compressed.
        """
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_parameters(parameters)
        if self._module is not None and self._module() not in (None, module):
            raise ValueError(
                "compression= sends the gradients of one model, and a second one was set up. Put both into one module, "
                "or set compression=None."
            )
        if self._module is None or self._module() is not module:
            self._optimizers = []
        self._module = weakref.ref(module)
        before, self.exchange, self._idle, self._undecided = self.state_dict_of_rank(), None, {}, None
        self.hook.owed, self._scaled = None, grad_scale is not None
        if self.control.world_size > 1 and parameters:
            self._make(parameters, before, grad_scale, hold_unused)
        elif parameters:
            self._owe(own_share(self._restored, self._topology(), self.control.rank) or before)
        self._connect()

    def _make(
        self,
        parameters: Mapping[str, torch.Tensor],
        before: dict[str, Any],
        grad_scale: Callable[[], float] | None,
        hold_unused: bool,
    ) -> None:
        settings: Any = self.settings
        if isinstance(settings, Automatic):
            self._undecided = Undecided(settings, parameters, self.control, self._topology())
            settings = self._undecided.meanwhile
        if isinstance(settings, BlockTopK):
            self.exchange = BlockExchange(
                settings, parameters, self.hook, self.control.rank, grad_scale=grad_scale, hold_unused=hold_unused
            )
            self.watch.latency = latency(self.control, self._topology(), next(iter(parameters.values())).device)
        elif isinstance(settings, LowRank):
            self.exchange = LowRankExchange(settings, parameters, self.hook, grad_scale=grad_scale)
        elif isinstance(settings, HalfPrecision):
            self.exchange = HalfExchange(settings, parameters, self.hook)
        self.hook.inner, self.hook.inner_state = self.exchange, None
        if self._restored:
            self._go_on(self._restored)
        elif before:  # another fit of the same run
            self._take_over(before)
        if self._undecided is not None and isinstance(self.exchange, BlockExchange):
            self.exchange.paused = True

    def end_step(self) -> None:
        """A synchronised step is over; a collective call while ``"auto"`` has not chosen."""
        if self._undecided is None:
            return
        choice = self._undecided.look(self.hook.observer, hidden=self._may_hide)
        if choice is not None:
            self._choose(choice)
            self._connect()

    def _choose(self, choice: CompressionChoice) -> None:
        """Block top-k at the density that ``"auto"`` has chosen, or no exchange of our own any more."""
        self._undecided = None
        if choice.density is not None and isinstance(self.exchange, BlockExchange):
            self.exchange.paused = False
            self.exchange.set_density(choice.density)
            return
        state = self.state_dict_of_rank()
        self.exchange = self.hook.inner = None
        if self.hook.staleness is not None:
            self.hook.staleness = Staleness.after(self.hook.staleness, self.hook.world_size, fresh=self.hook.topology)
        self._owe(state)

    def _owe(self, state: dict[str, Any]) -> None:
        """Sums are dense: what compression had not sent goes into the next one."""
        module = None if self._module is None else self._module()
        idle = unpaid(state)
        if idle and module is not None:
            self._idle, self._restored = idle, {}
            self.hook.owed = Owed.of(idle, module, self.control.world_size, scaled=self._scaled)

    def _topology(self) -> Topology:
        return self.hook.topology or Topology.straight(self.control.rank, self.control.world_size)

    # the optimizer

    def lead(self, optimizers: Iterable[torch.optim.Optimizer], *, more: bool = False) -> None:
        """Let optimizers take sparse steps, those that are sparse by themselves and, if it was asked for, torch's own.

        Args:
            optimizers: all optimizers of the module.
            more: whether they join those that were given before.

        Raises:
            ValueError: if sparse steps were asked for and cannot be.
        """
        self._optimizers = [*(self._optimizers if more else ()), *optimizers]
        if self.sparse and len(self._optimizers) > 1:
            raise ValueError(
                f"sparse_optimizer={self.sparse!r} is for one optimizer, which takes all gradients; there are "
                f"{len(self._optimizers)}. Use one, or set sparse_optimizer=False."
            )
        self._connect()

    def _connect(self) -> None:
        """Sparse steps if all optimizers have them, so that no one misses a dense gradient."""
        exchange = self.exchange if isinstance(self.exchange, BlockExchange) else None
        steps = [self._steps_of(optimizer) for optimizer in self._optimizers]
        together = exchange is not None and bool(steps) and None not in steps
        for one in steps:
            if one is not None:
                source = (lambda: exchange.gradients) if together and exchange is not None else None
                one.follow(source, 16 if exchange is None else exchange.layout.block)
        self._waits = hand_over_waits(self._waits, steps)
        if exchange is not None:
            exchange.lead([one for one in steps if one is not None] if together else [])
        if self.sparse and exchange is not None:
            check_trained(self._optimizers, exchange.slots)

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> SparseSteps | None:
        if isinstance(optimizer, SparseSGD | SparseAdamW):
            return optimizer.sparse
        if self.sparse and optimizer not in self._steps:
            self._steps[optimizer] = sparse_steps(optimizer, self.sparse if isinstance(self.sparse, str) else "ahead")
        return self._steps.get(optimizer)

    def steps_of(self, optimizer: torch.optim.Optimizer) -> SparseSteps | None:
        """Sparse steps of an optimizer, ``None`` if its steps are dense."""
        return None if self._blocks is None or not self._blocks.takes_blocks else self._steps_of(optimizer)

    def after_backward(self) -> None:
        """A backward pass is over: give parameters their sparse gradients, leave out what is not finite."""
        if self.exchange is not None:
            self.exchange.hand_over()
        if not self._looked and self._optimizers and self._blocks is not None and self._undecided is None:
            self._looked = True
            if self.control.rank == 0 and self._module is not None:
                warn_of_untrained(self._optimizers, self._module())

    def stand_ins(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What to clip in place of these parameters: whose gradient is sparse gives way to one that holds its values.

        Norms and factors are then those of the merged gradient, over the blocks that were sent.
        """
        gradients = getattr(self.exchange, "gradients", None) or {}
        found = []
        for parameter in parameters:
            gradient = gradients.get(parameter)
            if not isinstance(gradient, BlockGradient) or not gradient.stands(parameter):
                found.append(parameter)
            elif len(gradient.rows):
                stand_in = gradient.values.detach()
                stand_in.grad = gradient.values
                found.append(stand_in)
        return found

    # the link

    @property
    def _blocks(self) -> BlockExchange | None:
        return self.exchange if isinstance(self.exchange, BlockExchange) else None

    @property
    def _may_hide(self) -> bool:
        return self.hook.staleness is not None and self.hook.staleness.limit > 0

    def take_messages(self) -> npt.NDArray[np.float64]:
        """Times of this rank's messages since the last call, of one shape on all ranks."""
        return np.zeros(0) if self._blocks is None else self.watch.take(self._blocks.messages)

    def see_messages(self, everyone: npt.NDArray[np.float64]) -> None:
        """What all ranks saw of their messages."""
        if everyone.size:
            self.watch.see(everyone)

    def link(self) -> MessageLink | None:
        """What a planner may know of the link; ``None`` where no density could be set."""
        exchange, late = self._blocks, self.hook.staleness
        if exchange is None:
            return None
        return self.watch.link(
            exchange.density,
            exchange.message_size,
            hidden=late is not None and late.delayed_share > 0.0,
            may_hide=self._may_hide,
            step=exchange.step,
        )

    def set_density(self, density: float | None) -> None:
        """Send another share of the blocks from the next step on, on all ranks together; ``None`` leaves it."""
        if density is not None and isinstance(self.exchange, BlockExchange):
            self.exchange.set_density(density)

    def follow(self, choice: DensityChoice | None, stale: bool | None, probe: float | None) -> None:
        """Send as densely, and as late, as rank 0 has chosen, which says so; time messages of the density ``probe``."""
        if choice is None or not isinstance(self.exchange, BlockExchange):
            return
        bound = self.choice is not None and self.choice.network_bound
        before, self.choice = self.exchange.density, choice
        self.exchange.set_density(choice.density)
        late, moved = self.hook.staleness, False
        if late is not None and late.limit and stale is not None:
            late.led, moved = True, stale != (late.delayed_share > 0.0)
            if stale:
                late.delay_all()
            else:
                late.delay_none()
        if probe is not None and self._topology().size > 1:
            self.watch.timed = self.exchange.probe(probe)
        if self.control.rank == 0 and (choice.density != before or choice.network_bound != bound or moved):
            rates = [link.rate or math.inf for link in self.watch.links]
            log.log(
                logging.WARNING if choice.network_bound else logging.INFO,
                "density %.3g -> %.3g: rank %d sends %.4g MB/s at the least; %s",
                before,
                choice.density,
                self._topology().clusters[rates.index(min(rates))][0],
                min(rates) / 1e6,
                choice.describe(),
            )

    # state

    def settle(self) -> None:
        """Look at what the device decided on the last step, if it is not known yet (block top-k on GPU).

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """
        if isinstance(self.exchange, BlockExchange):
            self.exchange.settle()

    def _pay(self) -> None:
        for steps in filter(None, map(self._steps_of, self._optimizers)):
            steps.settle()

    def close(self) -> None:
        """The run ends: see what became of the last step, and pay what sparse steps owe, so that weights are final."""
        self.settle()
        self._pay()

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
        metrics = {
            "hetero/bytes_sent": report.sent / report.steps,
            "hetero/bytes_received": report.received / report.steps,
            "hetero/compression_density": report.density / report.steps,
            "hetero/encode_time": report.encode / report.steps,
        }
        rates = [link.rate for link in self.watch.links if link.rate is not None]
        leaders = [members[0] for members in self._topology().clusters]
        metrics |= {f"hetero/bandwidth/rank{i}": rate for i, rate in zip(leaders, rates, strict=False)}
        if rates:
            metrics["hetero/bandwidth"] = min(rates)
        if self.watch.seconds is not None:
            metrics["hetero/transfer_time"] = self.watch.seconds
        if self.choice is not None:
            metrics["hetero/time_to_accuracy"] = self.choice.objective
        return metrics

    def state_dict_of_rank(self) -> dict[str, Any]:
        """Residuals by parameter, and what else this rank needs to go on."""
        if self.exchange is None:
            return unpaid(self._idle)
        return {
            "kind": type(self.exchange).__name__,
            "residuals": self.exchange.residuals(),
            "extra": self.exchange.extra_state(),
            "waits": [steps.notes() for steps in filter(None, map(self._steps_of, self._optimizers))],
            "link": {} if self._blocks is None else self.watch.state_dict(self._blocks.messages),
        }

    def state_dict(self, *, alone: bool = False) -> dict[str, Any]:
        """State of all ranks, on rank 0; empty elsewhere. A collective call, unless ``alone``; pays sparse steps."""
        self._pay()
        own = self.state_dict_of_rank() or own_share(self._restored, self._topology(), self.control.rank)
        everyone = left_alone(own, self.control) if alone else self.control.gather_objects_at_zero(own)
        return {"ranks": everyone, "clusters": self._topology().clusters} if everyone and any(everyone) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the residuals of an earlier run, once the model is attached or at once; without any, with zero."""
        self._restored, self._idle, self.hook.owed = state, {}, None
        if self.exchange is not None:
            self._go_on(state)
        elif self.control.world_size == 1:
            self._owe(own_share(state, self._topology(), self.control.rank))

    def forget(self) -> None:
        """Let the model that is attached next begin as the first one did."""
        self._restored, self._idle, self._module, self.exchange, self.choice = {}, {}, None, None, None
        self.hook.owed = None
        self.watch = LinkWatch(self._topology().size)

    def _go_on(self, state: dict[str, Any]) -> None:
        self._take_over(own_share(state, self._topology(), self.control.rank))
        self._restored = {}

    def _take_over(self, own: dict[str, Any]) -> None:
        assert self.exchange is not None
        self.exchange.load_residuals(own.get("residuals", {}))
        self._waits = hand_over_waits(own.get("waits", []), map(self._steps_of, self._optimizers))
        if own.get("kind") == type(self.exchange).__name__ and own["extra"]:
            self.exchange.load_extra_state(own["extra"])
            if self._blocks is not None and own.get("link"):
                self.watch.load_state_dict(own["link"], self._blocks.messages)
        if own.get("residuals") and isinstance(self.exchange, HalfExchange):
            log.warning("the checkpoint has gradients that were not sent yet, which 16-bit sums cannot send")
