"""Interface of averagers with stale gradients, which reach the optimizer one step late."""

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import GradientAverager
from lightning_hetero.core.link.staleness import StaleChoice

__all__ = ["Predicted", "StaleAverager"]

Predicted = dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]


class StaleAverager(GradientAverager):
    """Averager for DDP's hook that applies some gradients one step late.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        topology: topology of stale sums, with process groups of its own, so no other collective waits behind them;
            ``None`` for the topology of synchronous sums.

    Attributes:
        step_kind: names of the parameters that were stale in the running step; ``None`` if a sum mixed two steps.
        keeps_own: whether this rank's own part of a stale sum is kept until the sum is applied.
        choice: newest decision by the link, ``None`` before there is one.
        externally_controlled: whether a controller decides what is stale, as it does together with the density.
    """

    waits = False

    def __init__(
        self, limit: int, parameters: dict[str, torch.Tensor], world_size: int, topology: Topology | None
    ) -> None:
        super().__init__(world_size)
        self.limit, self.parameters, self.topology = limit, parameters, topology
        self.step_kind: frozenset[str] | None = frozenset()
        self.externally_controlled = self.keeps_own = False
        self.choice: StaleChoice | None = None

    def keep_own(self) -> None:
        """Keep this rank's own part of stale sums, for :meth:`predicted_sums`."""
        self.keeps_own = True

    def control_externally(self, controlled: bool) -> None:
        """Leave the decision on what is stale to a controller, or take it back."""
        self.externally_controlled = controlled

    @abstractmethod
    def drain(self) -> dict[str, torch.Tensor]:
        """Return and forget all sums that were not applied yet, by parameter, flat: the caller has to apply them."""

    @abstractmethod
    def wait_in_flight(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """Wait for the sums that the last step left in flight; the next step still applies them.

        Returns:
            Flat sums, each with its parameters, and whether the step turned out to be left out.
        """

    @abstractmethod
    def predicted_sums(self, cluster_shares: list[float], share: float) -> Predicted | None:
        """Return a prediction of the sums that the optimizer gets in the next step, before they have arrived.

        It is this rank's own part, divided by its share of the batch (:meth:`extrapolation_factor`); or the sums
        themselves if all ranks know them already, as after a checkpoint: a resumed run then goes on identically.

        Args:
            cluster_shares: shares of the batch of this rank's cluster, itself included.
            share: share of this rank.

        Returns:
            For each stale parameter ``(places, elements)``, flat: places are ``None`` for all elements, elements are
            ``None`` if nothing is known. ``None`` if the next gradients are synchronous.
        """

    @staticmethod
    def extrapolation_factor(share: float, parts: int) -> float:
        """Return ``min(1 / share, parts)``, the factor from this rank's part of a sum to the sum of ``parts`` parts.

        The cap is the factor of equal parts: a small share is too noisy for a larger one, and its residual may stem
        from a time when the share was larger.

        Example:
            >>> StaleAverager.extrapolation_factor(0.7, 2), StaleAverager.extrapolation_factor(0.01, 2)
            (1.4285714285714286, 2.0)
        """
        return min(1.0 / share, float(parts)) if share > 0.0 else float(parts)

    @property
    @abstractmethod
    def stale_share(self) -> float:
        """Share of the gradient's elements that is stale, 0 to 1."""

    @abstractmethod
    def make_all_stale(self) -> None:
        """Make everything stale from the next backward pass on; all ranks have to call it together."""

    @abstractmethod
    def make_all_synchronous(self) -> None:
        """Make everything synchronous from the next backward pass on; all ranks have to call it together."""

    @abstractmethod
    def pack(self) -> npt.NDArray[np.float64]:
        """Return the times of transfers since the last sync round, of the same length on all ranks."""

    @abstractmethod
    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Let rank 0 decide, from the measured link, what is stale from the next step on; a collective call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the names of stale parameters and the sums in flight, equal on all ranks; wait for the sums."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; sums now in flight belong to steps that are undone, and are discarded."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return bytes per second of the link, seconds that a step's gradients take on it, and the stale share."""

    @abstractmethod
    def for_dense_sums(self, topology: Topology | None) -> "StaleAverager":
        """Return the successor for dense sums, which takes over all that this averager has not applied yet.

        Args:
            topology: topology of synchronous sums.
        """
