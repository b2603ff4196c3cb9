"""What dense and compressed gradients that arrive a step later have in common: how rank 0 decides on the delay.

The link is what transfers were measured to take, the decision is
:func:`~lightning_hetero.core.link.staleness.choose_fresh`, and all ranks follow it from the same step on.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.timing.bucket_timer import TransferLog, combine
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.staleness import BucketTimes, DelayChoice, choose_fresh

__all__ = ["Delays", "Expected"]

log = logging.getLogger("lightning_hetero")

Expected = dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]


class Delays(ABC):
    """Averages gradients in DDP's hook, some of them with a delay of one step.

    Args:
        limit: greatest delay in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain for which more is delayed, as a share of the step time.
        topology: way of what is delayed, with process groups of its own, so that no other collective waits behind it;
            ``None`` for that of what is fresh.
        running: callbacks that a thread of the process group may still hold, by weak reference.

    Attributes:
        gave_late: whether the last bucket got the sum of the step before, and nothing else; of a bucket that has both,
            for each of its parameters.
        step_kind: names of what was delayed in the running step; ``None`` after sums of two steps in one.
        keeps_own: whether this rank's own part of what is delayed is kept until its sum is applied.
        led: whether somebody else decides what is delayed, a controller that weighs it against other things.
    """

    unit = "gradient buckets"

    def __init__(
        self,
        limit: int,
        parameters: dict[str, torch.Tensor],
        *,
        clock: Clock,
        hysteresis: float = 0.03,
        topology: Topology | None = None,
        running: Any = None,
    ) -> None:
        self.limit, self.parameters, self.hysteresis, self.topology = limit, parameters, hysteresis, topology
        self.link = LinkEstimate()
        self.choice: DelayChoice | None = None
        self.gave_late: bool | list[bool] = False
        self.step_kind: frozenset[str] | None = frozenset()
        self.led = self.keeps_own = False
        self._running = running
        self._log = TransferLog(clock)

    # what the two kinds say of themselves

    @abstractmethod
    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """Average one bucket; DDP hands them over in the same order on all ranks."""

    @abstractmethod
    def take_sums(self) -> dict[str, torch.Tensor]:
        """All sums that the optimizer has not had yet, by parameter, flat; from now on they are the caller's."""

    @abstractmethod
    def arrived(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """What the last step has delayed, as the next one will give it: waits for what is under way.

        Returns:
            flat sums, each with its parameters, and whether the step turned out to be left out.
        """

    @abstractmethod
    def expected(self, cluster_shares: list[float], share: float) -> Expected | None:
        """What is known of the sums that the optimizer gets in the next step, before they are there.

        This rank's own part, divided by its share of the batch (:meth:`whole`); or the sums themselves where all ranks
        know them already, as after a checkpoint, so that a resumed run goes on identically.

        Args:
            cluster_shares: shares of the batch of this rank's cluster, itself included.
            share: this rank's.

        Returns:
            Flat elements by parameter that is delayed, with their places in it or ``None`` for all of them, and
            ``None`` for elements of which nothing is known; ``None`` if the next gradients are awaited.
        """

    @staticmethod
    def whole(share: float, parts: int) -> float:
        """Factor from one's own part of a sum to the sum, of so many parts that have equal shares on average.

        A small share says too little for a large factor, and what it left unsent may be of times when it was larger.

        Example:
            >>> Delays.whole(0.7, 2), Delays.whole(0.01, 2)
            (1.4285714285714286, 2.0)
        """
        return min(1.0 / share, float(parts)) if share > 0.0 else float(parts)

    @property
    @abstractmethod
    def delayed_share(self) -> float:
        """Share of the gradient's elements that is delayed, 0 to 1."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is delayed and the sums that are owed, equal on all ranks; waits for what is under way."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what is under way now belongs to steps that are taken back."""

    @abstractmethod
    def delay_all(self) -> None:
        """Delay everything from the next backward pass on; all ranks have to call it together."""

    def delay_none(self) -> None:
        """Await everything from the next backward pass on; all ranks have to call it together."""
        self._keep_fresh(len(self._sent_bytes()))

    @abstractmethod
    def _sent_bytes(self) -> list[float]:
        """Bytes that each transfer of a step takes across the link, in the order of the backward pass."""

    @abstractmethod
    def _fresh(self) -> int:
        """Transfers from the output side on of which nothing is delayed."""

    @abstractmethod
    def _keep_fresh(self, number: int) -> None:
        """Delay all transfers but the first ones, from the next step on."""

    def follow(self, before: "Delays") -> None:
        """Go on as the delays before this one, of other parameters of the same model; a whole delay stays one."""
        self.led, self.keeps_own, self.choice = before.led, before.keeps_own, before.choice
        if self.limit and before.delayed_share == 1.0:
            self.delay_all()

    # the decision

    def metrics(self) -> dict[str, float]:
        """Bytes per second of the link, seconds that a step's gradients take on it, and the share that is delayed."""
        if self.limit == 0:
            return {}
        metrics = {"hetero/delayed_share": self.delayed_share}
        if self.link.rate is not None:
            metrics["hetero/bandwidth"] = self.link.rate
        if self.choice is not None:
            metrics["hetero/transfer_time"] = self.choice.transfer
        return metrics

    def trace(self) -> list[tuple[int, int, float, float, float]]:
        """Return :meth:`~lightning_hetero.comm.timing.bucket_timer.TransferLog.spans`."""
        return self._log.spans()

    def agree(self, control: ControlPlane) -> None:
        """Look at the link, and let rank 0 decide what is delayed from the next step on; a collective call."""
        sent = self._sent_bytes()
        if self.limit == 0 or not sent or self.led:
            return
        everyone = control.gather(self._log.take(len(sent)))
        self.link, choice = control.decide(lambda: self._decide(everyone, sent))
        if choice is not None:
            self._follow(choice, len(sent), say=control.rank == 0)

    def _decide(self, everyone: npt.NDArray[np.float64], sent: list[float]) -> tuple[LinkEstimate, DelayChoice | None]:
        """What the link is worth by the newest steps, and how many transfers it can carry in time."""
        seen = combine(everyone)
        if seen is None:
            return self.link, None
        link = self.link.observe(sum(sent) / max(seen[0], 1e-9))
        times = BucketTimes(tuple(seen[1].tolist()), tuple(link.seconds(num_bytes) for num_bytes in sent))
        return link, choose_fresh(times, self._fresh(), hysteresis=self.hysteresis)

    def _follow(self, choice: DelayChoice, transfers: int, *, say: bool) -> None:
        """Delay what rank 0 has chosen, and say so if that is a change."""
        bound = self.choice is not None and self.choice.network_bound
        before, self.choice = self._fresh(), choice
        self._keep_fresh(choice.fresh)
        if say and (choice.fresh != before or choice.network_bound != bound):
            log.log(
                logging.WARNING if choice.network_bound else logging.INFO,
                "staleness: %d of %d %s (%.0f %% of the gradient) come a step later; link %.4g MB/s: %s",
                transfers - choice.fresh,
                transfers,
                self.unit,
                100 * self.delayed_share,
                (self.link.rate or 0.0) / 1e6,
                choice.describe(),
            )

    # common ground

    def _then(self, future: torch.futures.Future[Any], callback: Any) -> torch.futures.Future[Any]:
        """Call back when a transfer is done, from a thread that is waited for before the process ends."""
        if self._running is not None:
            self._running.append(weakref.ref(callback))
        return future.then(callback)

    def _fitting(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums of a checkpoint for parameters that are trained, as these are.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        found = {}
        for name, value in sums.items():
            parameter = self.parameters.get(name)
            if parameter is None:
                log.warning(
                    "staleness: %s is not trained any more, so that its last delayed gradient is left out", name
                )
                continue
            if parameter.numel() != value.numel():
                raise ValueError(
                    f"the delayed gradient of {name} has {value.numel()} elements, the parameter {parameter.numel()}. "
                    "Resume with the model that the checkpoint was made with."
                )
            found[name] = value
        return found
