"""Decision, from the measured link, which gradients are stale; the same on all ranks.

The link is estimated from the times of transfers.
:func:`~lightning_hetero.core.link.staleness.choose_synchronous` decides, and all ranks follow from the same step on.
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
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.staleness import BucketTimes, StaleChoice, choose_synchronous

__all__ = ["MeasuredStaleness"]

log = logging.getLogger("lightning_hetero")


class MeasuredStaleness(StaleAverager):
    """Averager that makes stale what the measured link cannot carry in time.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain, as a share of the step time, for which more gradients become stale.
        topology: topology of stale sums, with process groups of its own, so no other collective waits behind them;
            ``None`` for the topology of synchronous sums.
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
        self._timer = BucketTimer(clock, SETTINGS.of(world_size))

    # what the two kinds say of themselves

    @abstractmethod
    def _sent_bytes(self) -> list[float]:
        """Return the bytes that each transfer of a step sends over the link, in the order of the backward pass."""

    @abstractmethod
    def _awaited(self) -> int:
        """Return the number of first transfers, counted from the output side, that are fully synchronous."""

    @abstractmethod
    def _await_first(self, number: int) -> None:
        """Make all transfers but the first ``number`` stale, from the next step on."""

    def make_all_synchronous(self) -> None:
        """Make everything synchronous from the next backward pass on; all ranks have to call it together."""
        self._await_first(len(self._sent_bytes()))

    def follow(self, before: StaleAverager) -> None:
        """Take over the settings of the previous averager of the same model; if all was stale there, all is here."""
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
        """Return the times of transfers since the last sync round; empty if this averager does not decide by them."""
        sent = self._sent_bytes()
        if self.limit == 0 or self.externally_controlled or not sent:
            return np.zeros(0)
        return self._timer.take(len(sent)).ravel()

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Let rank 0 decide, from the measured link, what is stale from the next step on; a collective call."""
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
        """Follow rank 0's choice, and log a change."""
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
        """Call ``callback`` when a transfer is done; the end of the run waits until its thread has released it."""
        if self._hold is not None:
            self._hold(callback)
        return future.then(callback)

    def _fitting(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sums of a checkpoint that belong to trained parameters, unchanged.

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
