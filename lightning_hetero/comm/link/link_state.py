"""State of the link that compressed gradients cross, the same on all ranks after a sync round."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.message_timer import MessageTimer, message_seconds
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.message_times import MessageTimes

__all__ = ["LinkState"]

Array = npt.NDArray[np.float64]


class LinkState:
    """Estimates of message times for the planners.

    Args:
        size: number of ranks, or in a hierarchy clusters, that exchange.

    Attributes:
        times: estimates of the latency and of the rate of each of them.
        seconds: seconds of the newest messages, ``None`` if there were none in the last sync round.
    """

    def __init__(self, size: int) -> None:
        self.size, self.times = size, MessageTimes()
        self.seconds: float | None = None

    def begin(self, latency: float) -> None:
        """Start from a latency in seconds that was measured before training."""
        self.times = MessageTimes(latency=latency)

    def see_probe(self, num_bytes: int, seconds: float) -> None:
        """Take the rate from a large message of every rank to every other that was measured before training."""
        self.times = self.times.begun((self.size - 1) * num_bytes, seconds, self.size)

    def metrics(self, leaders: list[int]) -> dict[str, float]:
        """Return metrics: rates in bytes per second, and seconds of the newest messages.

        Args:
            leaders: ranks that exchange, in the order of their rates.
        """
        rates = self.times.rates
        metrics = {f"hetero/bandwidth/rank{i}": rate for i, rate in zip(leaders, rates, strict=False)}
        if rates:
            metrics["hetero/bandwidth"] = min(rates)
        if self.seconds is not None:
            metrics["hetero/transfer_time"] = self.seconds
        return metrics

    def take(self, messages: MessageTimer) -> Array:
        """Return the times of messages on this rank since the last call, flat."""
        return messages.take().ravel()

    def see(self, everyone: Array) -> None:
        """Update the estimates from the measurements of all ranks, equally on each.

        Args:
            everyone: :meth:`take` of every rank, shape ``(ranks, n)``.
        """
        seen = message_seconds(everyone.reshape(len(everyone), -1, 2 + self.size))
        self.seconds = None if seen is None else float(seen[1].max())
        if seen is None:
            return
        self.times = self.times.observe(*seen)

    def link(self, density: float, message_size: MessageSize, *, stale: bool) -> MessageLink:
        """Return the link for a planner."""
        return MessageLink(density, message_size, self.times.rates, self.seconds, stale, self.times.latency)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates as plain Python values."""
        return {
            "rates": list(self.times.rates),
            "latency": self.times.latency,
            "latency_error": self.times.latency_error,
            "last": None if self.times.last is None else list(self.times.last),
            "least": self.times.least,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the estimates if the number of ranks or clusters is the same; else keep the present ones."""
        if len(state["rates"]) == self.size and None not in state["rates"]:
            last, least = state["last"], state.get("least", math.inf)
            last = None if last is None else (float(last[0]), float(last[1]))
            self.times = MessageTimes(tuple(state["rates"]), state["latency"], state["latency_error"], last, least)
