"""Average gradients so that some of them reach the optimizer one step late: what the rest of the package asks of it."""

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
    """Average gradients in DDP's hook, some of them one step late.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        topology: topology of what is stale, with process groups of its own, so that no other collective waits behind
            it; ``None`` for that of what is awaited.

    Attributes:
        step_kind: names of what was stale in the running step; ``None`` after sums of two steps in one.
        keeps_own: whether this rank's own part of what is stale is kept until its sum is applied.
        choice: newest decision by the link, ``None`` before there is one.
        externally_controlled: whether a controller decides what is stale, which weighs it against other things.
    """

    def __init__(
        self, limit: int, parameters: dict[str, torch.Tensor], world_size: int, topology: Topology | None
    ) -> None:
        super().__init__(world_size)
        self.limit, self.parameters, self.topology = limit, parameters, topology
        self.step_kind: frozenset[str] | None = frozenset()
        self.externally_controlled = self.keeps_own = False
        self.choice: StaleChoice | None = None

    def keep_own(self) -> None:
        """Keep this rank's own part of what is stale, for :meth:`predicted_sums`."""
        self.keeps_own = True

    def control_externally(self, controlled: bool) -> None:
        """Leave the decision on what is stale to a controller, or take it back."""
        self.externally_controlled = controlled

    @abstractmethod
    def drain(self) -> dict[str, torch.Tensor]:
        """Return all sums that the optimizer has not had yet, by parameter, flat; from now on they are the caller's."""

    @abstractmethod
    def wait_in_flight(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """Wait for what the last step has left in flight, as the next one will give it.

        Returns:
            flat sums, each with its parameters, and whether the step turned out to be left out.
        """

    @abstractmethod
    def predicted_sums(self, cluster_shares: list[float], share: float) -> Predicted | None:
        """Return what is known of the sums that the optimizer gets in the next step, before they are there.

        This rank's own part, divided by its share of the batch (:meth:`extrapolation_factor`); or the sums themselves
        where all ranks know them already, as after a checkpoint, so that a resumed run goes on identically.

        Args:
            cluster_shares: shares of the batch of this rank's cluster, itself included.
            share: this rank's.

        Returns:
            Flat elements by parameter that is stale, with their places in it or ``None`` for all of them, and
            ``None`` for elements of which nothing is known; ``None`` if the next gradients are awaited.
        """

    @staticmethod
    def extrapolation_factor(share: float, parts: int) -> float:
        """Return the factor from one's own part of a sum to the sum, of so many parts that are equal on average.

        A small share says too little for a large factor, and what it left unsent may be of times when it was larger.

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
        """Await everything from the next backward pass on; all ranks have to call it together."""

    @abstractmethod
    def pack(self) -> npt.NDArray[np.float64]:
        """Return what transfers have taken since the last sync round, of one length on all ranks."""

    @abstractmethod
    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Let rank 0 decide by the link what is stale from the next step on; a collective call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what is stale and the sums in flight, equal on all ranks; waits for them."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what is in flight now belongs to steps that are taken back."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return bytes per second of the link, seconds that a step's gradients take on it, and the stale share."""

    @abstractmethod
    def for_dense_sums(self, topology: Topology | None) -> "StaleAverager":
        """Return its successor where sums are dense from now on, with all that this one has not applied yet.

        Args:
            topology: topology of sums that are awaited.
        """
