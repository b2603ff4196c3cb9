"""Transfer of residuals and further state of compression between averagers and through checkpoints."""

from typing import Any

from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.optimizer_link import OptimizerLink
from lightning_hetero.comm.compressors.residuals import ResidualPayout, left_alone, own_share, unsent
from lightning_hetero.comm.gradients.averager import GradientAverager
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.link.link_state import LinkState

__all__ = ["CompressionCheckpoint"]


class CompressionCheckpoint:
    """State of compression while no averager holds it: from an earlier run, or waiting for a dense sum.

    Args:
        control: control plane by which ranks agree.
        hook: state of the gradient hook, which adds residuals to a dense sum.
        optimizers: optimizers, whose sparse steps have state of their own.
    """

    def __init__(self, control: ControlPlane, hook: HookState, optimizers: OptimizerLink) -> None:
        self.control, self.hook, self.optimizers = control, hook, optimizers
        self._restored: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    @property
    def topology(self) -> Topology:
        """Topology of messages."""
        return self.hook.topology or Topology.flat_over(self.control.rank, self.control.world_size)

    def of_rank(self, averager: GradientAverager | None, watch: LinkState) -> dict[str, Any]:
        """Return residuals by parameter, and the further state of this rank.

        Args:
            averager: holds the residuals; ``None`` if sums are dense.
            watch: estimates of the link, for an averager whose density can be set.
        """
        if averager is None:
            return unsent(self._waiting)
        return {
            "kind": averager.kind,
            "residuals": averager.residuals(),
            "extra": averager.extra_state(),
            "waits": self.optimizers.state(),
            "link": {} if averager.blocks is None else watch.state_dict(),
        }

    def of_all(self, own: dict[str, Any], *, alone: bool) -> dict[str, Any]:
        """Return the state of all ranks, on rank 0; empty elsewhere. A collective call, unless ``alone``."""
        own = own or self._own_share()
        everyone = left_alone(own, self.control) if alone else self.control.gather_objects_at_zero(own)
        return {"ranks": everyone, "clusters": self.topology.clusters} if everyone and any(everyone) else {}

    def _own_share(self) -> dict[str, Any]:
        return own_share(self._restored, self.topology, self.control.rank)

    def load(self, state: dict[str, Any]) -> None:
        """Hold the state of all ranks of an earlier run, for the next averager or dense sum."""
        self._restored = state
        self.drop_payout()

    def clear(self) -> None:
        """Hold nothing, as at the beginning."""
        self.load({})

    def drop_payout(self) -> None:
        """Add no residuals to the next dense sum."""
        self._waiting = {}
        self.hook.pay_out(None)

    def hand_over(self, averager: GradientAverager, watch: LinkState, before: dict[str, Any]) -> None:
        """Give a new averager the state of a checkpoint, or of its predecessor in the same run.

        Args:
            averager: the new averager.
            watch: estimates of the link.
            before: :meth:`of_rank` of its predecessor; empty without one.
        """
        if self._restored:
            self.restore(averager, watch)
        elif before:
            self._take_over(averager, watch, before)

    def restore(self, averager: GradientAverager, watch: LinkState) -> None:
        """Give a running averager the loaded state; without any, its residuals become 0."""
        own, self._restored = self._own_share(), {}
        self._take_over(averager, watch, own)

    def _take_over(self, averager: GradientAverager, watch: LinkState, own: dict[str, Any]) -> None:
        averager.load_residuals(own.get("residuals", {}))
        self.optimizers.load_state(own.get("waits", []))
        if own.get("kind") == averager.kind and own["extra"]:
            averager.load_extra_state(own["extra"])
            if averager.blocks is not None and own.get("link"):
                watch.load_state_dict(own["link"])

    def pay_out(self, module: nn.Module | None, before: dict[str, Any], *, scaled: bool) -> None:
        """Add residuals to the next dense sum: those of a checkpoint, else those in ``before``.

        Args:
            module: whose gradients are summed; ``None`` before it is known.
            before: :meth:`of_rank` of the averager that ends.
            scaled: whether a loss scaler may skip the step of that sum.
        """
        waiting = unsent(self._own_share() or before)
        if waiting and module is not None:
            self._waiting, self._restored = waiting, {}
            self.hook.pay_out(ResidualPayout.of(waiting, module, self.control.world_size, scaled=scaled))
