"""What ranks have seen of the link that compressed gradients cross, the same on all of them after a comparison."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.message_timer import MessageLog, message_seconds
from lightning_hetero.core.link.bandwidth import LinkEstimate, sending_rate
from lightning_hetero.core.link.message_link import LinkProbe, MessageLink

__all__ = ["LinkWatch"]

Array = npt.NDArray[np.float64]

PROBE = 7
"""Values of a :class:`~lightning_hetero.core.link.message_link.LinkProbe`."""


class LinkWatch:
    """Times of messages as a planner is to know them.

    Args:
        size: ranks, or in a hierarchy clusters, that exchange.

    Attributes:
        links: estimate of each one's rate.
        latency: seconds of messages of next to nothing.
        seconds: what the newest messages took, ``None`` if there were none since the last comparison.
        timed: messages that were only timed, on this rank, of which the others do not know yet.
    """

    def __init__(self, size: int) -> None:
        self.links = (LinkEstimate(),) * size
        self.latency = 0.0
        self.seconds: float | None = None
        self.timed: Array | None = None
        self._probe: LinkProbe | None = None

    def begin(self, latency: float) -> None:
        """Begin with the latency that was measured before training."""
        self.latency = latency

    def time(self, timed: Array) -> None:
        """Keep what messages of another size took on this rank, until the others know."""
        self.timed = timed

    def metrics(self, leaders: list[int]) -> dict[str, float]:
        """Return the rates and the newest seconds of messages.

        Args:
            leaders: ranks that exchange.
        """
        rates = [link.rate for link in self.links if link.rate is not None]
        metrics = {f"hetero/bandwidth/rank{i}": rate for i, rate in zip(leaders, rates, strict=False)}
        if rates:
            metrics["hetero/bandwidth"] = min(rates)
        if self.seconds is not None:
            metrics["hetero/transfer_time"] = self.seconds
        return metrics

    def take(self, messages: MessageLog) -> Array:
        """What this rank has seen since the last call: timed exchanges and messages, flat."""
        timed, self.timed = np.full(PROBE, np.nan) if self.timed is None else self.timed, None
        return np.concatenate([timed, messages.take().ravel()])

    def see(self, everyone: Array) -> None:
        """What all ranks have seen: move the estimates, the same on all of them.

        Args:
            everyone: :meth:`take` of every rank, shape ``(ranks, n)``.
        """
        timed = everyone[:, :PROBE].max(axis=0)
        self._probe = None if np.isnan(timed).any() else LinkProbe(*timed.tolist())
        seen = message_seconds(everyone[:, PROBE:].reshape(len(everyone), -1, 2 + len(self.links)))
        self.seconds = None if seen is None else float(seen[1].max())
        if seen is None:
            return
        num_bytes, seconds = seen
        self.latency = min(self.latency, float(seconds.max()))
        self.links = tuple(
            link.observe(sending_rate(num_bytes, took, self.latency))
            for link, took in zip(self.links, seconds.tolist(), strict=True)
        )

    def link(
        self, density: float, message_bytes: Callable[[float], float], *, hidden: bool, may_hide: bool, step: int
    ) -> MessageLink:
        """The link for a planner."""
        return MessageLink(
            density, message_bytes, self.links, self.seconds, hidden, self.latency, may_hide, step, self._probe
        )

    def state_dict(self, messages: MessageLog) -> dict[str, Any]:
        """What is known of the link, and of this rank's messages since the last comparison, as plain Python values."""
        return {
            "rates": [link.rate for link in self.links],
            "latency": self.latency,
            "timed": None if self.timed is None else self.timed.tolist(),
            "messages": [list(row) for row in messages.rows()],
        }

    def load_state_dict(self, state: dict[str, Any], messages: MessageLog) -> None:
        """Go on from there, if as many exchange."""
        if len(state["rates"]) == len(self.links):
            self.links, self.latency = tuple(LinkEstimate(rate) for rate in state["rates"]), state["latency"]
            self.timed = None if state["timed"] is None else np.array(state["timed"])
            messages.resume(state["messages"])
