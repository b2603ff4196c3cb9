"""Compressed messages of simulated steps: their bytes by density, their times on the link, and what timers see."""

from collections import deque

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_times import NEWEST, MessageTimes
from lightning_hetero.simulate.cluster.link_profile import LinkProfile

__all__ = ["MessageExchange"]

Array = npt.NDArray[np.float64]


class MessageExchange:
    """Exchange of one message per worker and step, by all-gather, in place of the all-reduce.

    A message leaves when the last worker has its gradients and the messages before have arrived. Synchronous messages
    end the step; stale ones of a step are waited for at the end of the next one.

    Args:
        settings: of the compression; ``dense_every`` has to be ``None``.
        link: that messages cross; a worker sends its message to all others.
        workers: number of workers.
        stale: whether messages travel while the next step computes.

    Attributes:
        density: share of the blocks that is sent.

    Example:
        >>> exchange = MessageExchange(BlockTopK(density=0.1), LinkProfile(gradient_bytes=4e6, rate=1e6), workers=2)
        >>> ends, begins, _ = exchange.run(np.ones((2, 2)), np.ones(2), clock=0.0)
        >>> ends.round(2).tolist(), begins.round(2).tolist()
        ([1.11, 1.11], [0.0, 1.11])
    """

    def __init__(self, settings: BlockTopK, link: LinkProfile, workers: int, *, stale: bool = False) -> None:
        from lightning_hetero.comm.link.link_benchmark import BENCHMARK  # imports torch, which takes a second
        from lightning_hetero.compression.wire_format import message_size

        if settings.dense_every is not None:
            raise ValueError(f"dense_every={settings.dense_every} is not simulated; leave it out.")
        self.settings, self.link, self.density, self.stale = settings, link, settings.density, stale
        self.workers = workers
        blocks = max(-(-int(link.gradient_bytes / 4) // settings.block), 1)
        self._size = message_size(blocks, settings.block, settings.value_dtype, workers)
        probe = (workers - 1) * BENCHMARK.probe_bytes  # what a run measures before its first step
        seconds = link.latency + probe / link.rate_at(0.0)
        self._times = MessageTimes(latency=link.latency).begun(probe, seconds, workers)
        # moment of arrival, bytes and seconds of messages, until a round has seen them
        self._sent: deque[tuple[float, float, float]] = deque(maxlen=SETTINGS.max_steps)
        self._starts, self._arrival = np.zeros(workers), -np.inf  # of the next step, on the clock

    @property
    def bytes_now(self) -> float:
        """Bytes that each worker sends in a step."""
        return self._size.bytes(self.density)

    def change_link(self, link: LinkProfile) -> None:
        """Send over another link from now on."""
        self.link = link

    def seconds(self, at: float) -> float:
        """Return the seconds of a step's messages at the rate of a second of the clock."""
        return self.link.latency + self.bytes_now / self.link.rate_at(at)

    def run(self, compute: Array, factors: Array, clock: float) -> tuple[Array, Array, Array]:
        """Return the seconds of some steps, when each begins, and what each worker computes for beside messages.

        Args:
            compute: seconds that each worker computes in each step, shape ``(steps, workers)``.
            factors: on the seconds of messages, shape ``(steps,)``.
            clock: when the first step begins at the earliest.
        """
        seconds, begins, num_bytes = np.empty(len(compute)), np.empty(len(compute)), self.bytes_now
        if clock > self._starts.max() + 1e-9:  # after a sync round or a restart, for which all wait
            self._starts = np.maximum(self._starts, clock)
        taken, lost = np.empty_like(compute), self.link.contention
        for t, alone in enumerate(compute):
            covered = np.maximum(self._arrival - self._starts, 0.0)  # by the message of the step before
            taken[t] = own = np.minimum(alone / (1.0 - lost), alone + lost * covered)
            ready = self._starts + own
            last, leaves = float(ready.max()), max(float(ready.max()), self._arrival)
            before = self._arrival
            takes = self.link.latency * factors[t] + self.link.transfer(num_bytes * factors[t], leaves)
            self._arrival = leaves + takes
            self._sent.append((self._arrival, num_bytes, self._arrival - last))
            self._starts = np.maximum(ready, before if self.stale else self._arrival)
            end = float(self._starts.max())
            seconds[t], begins[t], clock = end - clock, clock, end
        return seconds, begins, taken

    def see(self) -> MessageLink:
        """End a sync round: return the link as planners see it, after the messages since the last one.

        Of a message that is still in flight nothing is known.
        """
        now, took = self._starts.max(), None
        arrived = [one for one in self._sent if one[0] <= now]
        self._sent = deque([one for one in self._sent if one[0] > now], maxlen=SETTINGS.max_steps)
        if arrived:
            num_bytes = arrived[-1][1]  # the newest size: the density may have changed
            took = float(np.median([seconds for _, size, seconds in arrived if size == num_bytes][-NEWEST:]))
            self._times = self._times.observe(num_bytes, np.full(self.workers, took))
        return MessageLink(self.density, self._size, self._times.rates, took, self.stale, self._times.latency)

    def apply(self, choice: DensityChoice | None) -> None:
        """Send as a planner has decided from the next step on."""
        self.density = self.density if choice is None else choice.density
