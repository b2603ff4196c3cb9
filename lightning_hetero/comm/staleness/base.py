"""Decide by the measured link which gradients are stale, the same on all ranks.

The link is what transfers were measured to take, the decision is
:func:`~lightning_hetero.core.link.staleness.choose_synchronous`, and all ranks follow it from the same step on.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import Future
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.timing.bucket_timer import BucketTimer, combine
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.staleness import BucketTimes, StaleChoice, choose_synchronous

__all__ = ["MeasuredStaleness"]

log = logging.getLogger("lightning_hetero")


class MeasuredStaleness(StaleAverager):
    """Make stale what the link cannot carry in time, by what its transfers were measured to take.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain for which more is stale, as a share of the step time.
        topology: of what is stale, with process groups of its own, so that no other collective waits behind it;
            ``None`` for that of what is awaited.
        hold: remembers callbacks that a thread of the process group may still hold when training ends.
    """

    unit = "gradient buckets"

    def __init__(
        self,
        limit: int,
        parameters: dict[str, torch.Tensor],
        *,
        world_size: int,
        clock: Clock,
        hysteresis: float = 0.03,
        topology: Topology | None = None,
        hold: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(limit, parameters, world_size, topology)
        self.hysteresis, self.clock = hysteresis, clock
        self.link = LinkEstimate()
        self._hold = hold
        self._timer = BucketTimer(clock)

    # what the two kinds say of themselves

    @abstractmethod
    def _sent_bytes(self) -> list[float]:
        """Return the bytes that each transfer of a step takes across the link, in the order of the backward pass."""

    @abstractmethod
    def _awaited(self) -> int:
        """Return the number of transfers from the output side on of which nothing is stale."""

    @abstractmethod
    def _await_first(self, number: int) -> None:
        """Make all transfers but the first ones stale, from the next step on."""

    def make_all_synchronous(self) -> None:
        """Await everything from the next backward pass on; all ranks have to call it together."""
        self._await_first(len(self._sent_bytes()))

    def follow(self, before: StaleAverager) -> None:
        """Go on as the staleness before this one, of other parameters of the same model; if all was stale, all is."""
        self.externally_controlled, self.keeps_own = before.externally_controlled, before.keeps_own
        self.choice = before.choice
        if self.limit and before.stale_share == 1.0:
            self.make_all_stale()

    # the decision

    def metrics(self) -> dict[str, float]:
        """Return bytes per second of the link, seconds that a step's gradients take on it, and the stale share."""
        if self.limit == 0:
            return {}
        metrics = {"hetero/delayed_share": self.stale_share}
        if self.link.rate is not None:
            metrics["hetero/bandwidth"] = self.link.rate
        if self.choice is not None:
            metrics["hetero/transfer_time"] = self.choice.transfer
        return metrics

    def trace(self) -> list[tuple[int, int, float, float, float]]:
        """Return :meth:`~lightning_hetero.comm.timing.bucket_timer.BucketTimer.spans`."""
        return self._timer.spans()

    def pack(self) -> npt.NDArray[np.float64]:
        """Return what transfers have taken since the last sync round; nothing where that decides on nothing."""
        sent = self._sent_bytes()
        if self.limit == 0 or self.externally_controlled or not sent:
            return np.zeros(0)
        return self._timer.take(len(sent)).ravel()

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Let rank 0 decide by the link what is stale from the next step on; a collective call."""
        if not everyone.size:
            return
        sent = self._sent_bytes()
        tables = everyone.reshape(len(everyone), -1, 2 + len(sent))
        self.link, choice = control.decide(lambda: self._decide(tables, sent))
        if choice is not None:
            self._follow(choice, len(sent), say=control.rank == 0)

    def _decide(self, everyone: npt.NDArray[np.float64], sent: list[float]) -> tuple[LinkEstimate, StaleChoice | None]:
        """Estimate the link from the newest steps, and choose how many transfers it can carry in time."""
        seen = combine(everyone)
        if seen is None:
            return self.link, None
        link = self.link.observe(sum(sent) / max(seen[0], 1e-9))
        times = BucketTimes(tuple(seen[1].tolist()), tuple(link.seconds(num_bytes) for num_bytes in sent))
        return link, choose_synchronous(times, self._awaited(), hysteresis=self.hysteresis)

    def _follow(self, choice: StaleChoice, transfers: int, *, say: bool) -> None:
        """Make stale what rank 0 has chosen, and say so if that is a change."""
        bound = self.choice is not None and self.choice.communication_bound
        before, self.choice = self._awaited(), choice
        self._await_first(choice.synchronous)
        if say and (choice.synchronous != before or choice.communication_bound != bound):
            log.log(
                logging.WARNING if choice.communication_bound else logging.INFO,
                "staleness: %d of %d %s (%.0f %% of the gradient) come a step later; link %.4g MB/s: %s",
                transfers - choice.synchronous,
                transfers,
                self.unit,
                100 * self.stale_share,
                (self.link.rate or 0.0) / 1e6,
                choice.describe(),
            )

    # common ground

    def _then(self, future: Future, callback: Any) -> Future:
        """Call back when a transfer is done, from a thread that is waited for before the process ends."""
        if self._hold is not None:
            self._hold(callback)
        return future.then(callback)

    def _fitting(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sums of a checkpoint for parameters that are trained, as these are.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        found = {}
        for name, value in sums.items():
            parameter = self.parameters.get(name)
            if parameter is None:
                log.warning("staleness: %s is not trained any more, so that its last stale gradient is left out", name)
                continue
            if parameter.numel() != value.numel():
                raise ValueError(
                    f"the stale gradient of {name} has {value.numel()} elements, the parameter {parameter.numel()}. "
                    "Resume with the model that the checkpoint was made with."
                )
            found[name] = value
        return found
