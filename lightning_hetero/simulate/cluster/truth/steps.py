"""Steps of a simulated cluster, one after another on its clock."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.simulate.cluster.result import Recorder, Stretch
from lightning_hetero.simulate.cluster.truth.factors import Factors, FactorStream
from lightning_hetero.simulate.cluster.truth.messages import MessageExchange
from lightning_hetero.simulate.cluster.truth.optimum import Costs, best_split
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.cluster.truth.step_events import StepTimes, bucket_times

__all__ = ["StepRunner"]

Array = npt.NDArray[np.float64]

MOST_NUMBERS = 1_000_000
"""Steps times workers that are simulated at a time."""


class StepRunner:
    """Simulation of steps by their events.

    Args:
        cluster: workers and their link.
        factors: source of the factors on all times.
        record: takes note of the steps.
        messages: exchange of compressed gradients, ``None`` for dense sums.

    Attributes:
        cluster: workers and their link now.
        undisturbed: the same without what :meth:`slow_down` added.
        count: steps that have run.
        clock: second at which the newest step ended.
    """

    def __init__(
        self, cluster: ClusterState, factors: FactorStream, record: Recorder, messages: MessageExchange | None = None
    ) -> None:
        self.cluster, self.count, self.clock = cluster, 0, 0.0
        self.undisturbed, self._factors, self._record = cluster, factors, record
        self.messages = messages
        self._added: tuple[dict[str, float], float] = {}, 1.0  # what slow_down added, by worker, and to the link
        self._seeds = cluster.size  # so many were given out
        self._known: tuple[tuple[object, ...], tuple[float, float]] | None = None  # of the newest split and cluster

    def slow_down(self, factors: float | Sequence[float] | Array, link: float) -> None:
        """Make workers and link slower than the profiles say."""
        self.cluster, self._known = self.undisturbed.slowed(factors, link), None
        each = np.broadcast_to(np.asarray(factors, dtype=float), (self.cluster.size,)).tolist()
        self._added = dict(zip(self.cluster.names, each, strict=True)), link
        if self.messages is not None:
            self.messages.change_link(self.cluster.link)

    def change_workers(self, cluster: ClusterState, seed: int) -> None:
        """Go on with other workers; those of a former name go on with their random numbers and as slow as they were."""
        before = {name: i for i, name in enumerate(self.cluster.names)}
        stay = {before[name]: i for i, name in enumerate(cluster.names) if name in before}
        self._factors.change(stay, cluster.devices, [seed + self._seeds + i for i in range(cluster.size)])
        self._seeds += cluster.size
        self.undisturbed, (slow, link) = cluster, self._added
        self.slow_down([slow.get(name, 1.0) for name in cluster.names], link)

    def wait(self, seconds: float) -> None:
        """Let the clock go on."""
        self.clock += seconds

    def exact_seconds(self, sizes: Array) -> float:
        """Return the seconds of the next step without jitter."""
        return self._exact(sizes, self._factors.slow(), self.clock)

    def best(self, total: int) -> tuple[float, npt.NDArray[np.int64]]:
        """Return the least of these seconds over all integer splits of a total, and a split that takes them."""
        return self._best(total, self._factors.slow(), self.clock)

    def coefficients(self) -> Array:
        """Return the rows ``q``, ``s``, ``k`` and ``m`` of all workers in the next step."""
        if self.cluster.coefficients is None:
            raise TypeError("devices has some that are no DeviceProfile: their times have no coefficients.")
        return np.asarray(self.cluster.coefficients * self._factors.slow())

    def _exact(self, sizes: Array, slow: Array, at: float) -> float:
        lines, waits = self._lines(slow, at)
        return max(float(lines.seconds(sizes).max()), waits)

    def _best(self, total: int, slow: Array, at: float) -> tuple[float, npt.NDArray[np.int64]]:
        lines, waits = self._lines(slow, at)
        seconds, sizes = best_split(lines, total, self.cluster.low, self.cluster.high)
        return max(seconds, waits), sizes

    def _lines(self, slow: Array, at: float) -> tuple[Costs, float]:
        """Return the step time that each worker asks for, and that which stale messages ask for."""
        messages = self._messages
        if messages is None:
            link = self.cluster.link
            return self.cluster.costs(slow, link.ready_shares, link.seconds(self.cluster.size, at)), 0.0
        takes = messages.seconds(at)
        seconds = np.array([0.0 if messages.stale else takes])
        return self.cluster.costs(slow, np.ones(1), seconds), takes if messages.stale else 0.0

    @property
    def most(self) -> int:
        """Steps that may be simulated at a time."""
        most = max(MOST_NUMBERS // self.cluster.size, 1)
        dense = 0 if self.messages is None else self.messages.settings.warmup_steps - self.count
        return min(most, dense) if dense > 0 else most

    def run(self, plan: BatchPlan, steps: int) -> StepTimes:
        """Run steps at one split, at most :attr:`most` of them; return their times."""
        cluster, factors = self.cluster, self._factors.take(steps)
        planned = np.asarray(plan.local_batch_sizes, dtype=float)
        sizes = np.maximum(planned, cluster.min_local)
        outside, backward = cluster.times(sizes)
        a, p = outside * factors.devices[:, :, 0], backward * factors.devices[:, :, 1]
        shares, first = cluster.link.ready_shares, factors.first
        messages = self._messages
        if messages is not None:  # one, that leaves when all gradients are there
            ends, begins, taken = messages.run(a + p, factors.link, self.clock)
            slowed = taken / np.maximum(a + p, 1e-300)
            a, p = a * slowed, p * slowed
            done, first = ends[:, None], shares[0] * (np.ones_like(a) if first is None else first)
            shares = np.ones(1)
        elif cluster.link.trace:
            done, begins = self._along_trace(a, p, factors.link)
        else:
            link = cluster.link.seconds(cluster.size) * factors.link[:, None]
            done = bucket_times(a, p, shares, link)
            begins = self.clock + np.cumsum(done[:, -1]) - done[:, -1]
        times = StepTimes(sizes, a, p, shares, done, first, planned)
        exact, optimum = self._without_jitter(plan, sizes, factors, begins)
        clock = begins + times.seconds
        idle = times.idle.astype(np.float32)
        self._record.add(
            Stretch(cluster.names, plan.local_batch_sizes, times.seconds, exact, optimum, clock, idle, *self._sending)
        )
        self.count, self.clock = self.count + steps, float(clock[-1])
        return times

    @property
    def _messages(self) -> MessageExchange | None:
        """Exchange of the next step, ``None`` if it is dense."""
        messages = self.messages
        return None if messages is None or self.count < messages.settings.warmup_steps else messages

    @property
    def _sending(self) -> tuple[float, bool]:
        """Density of the next step, and whether it is stale."""
        messages = self._messages
        return (1.0, False) if messages is None else (messages.density, messages.stale)

    def _along_trace(self, a: Array, p: Array, factors: Array) -> tuple[Array, Array]:
        """Return when each bucket is averaged, and when each step begins, where the rate of the link moves."""
        link, shares, clock = self.cluster.link, self.cluster.link.ready_shares, self.clock
        done, begins = np.empty((len(a), len(shares))), np.empty(len(a))
        latest = np.stack([(a + p * share).max(axis=1) for share in shares], axis=1)
        sent = link.bytes_of_bucket(self.cluster.size) if self.cluster.size > 1 else 0.0
        latency = link.latency if self.cluster.size > 1 else 0.0
        for t in range(len(a)):
            begins[t], end = clock, 0.0
            for j in range(len(shares)):
                start = max(end, latest[t, j])
                end = start + latency * factors[t] + link.transfer(sent * factors[t], clock + start)
                done[t, j] = end
            clock += end
        return done, begins

    def _without_jitter(self, plan: BatchPlan, sizes: Array, factors: Factors, begins: Array) -> tuple[Array, Array]:
        """Return the seconds of each step without jitter, at its split and at the best one."""
        exact, best, cluster = np.empty(len(begins)), np.empty(len(begins)), self.cluster
        moved = np.flatnonzero((factors.slow[1:] != factors.slow[:-1]).any(axis=1)) + 1
        rates = [cluster.link.rate_at(begin) for begin in begins] if cluster.link.trace else [0.0] * len(begins)
        turned = [t for t in range(1, len(rates)) if rates[t] != rates[t - 1]]
        first = [0, *sorted({*moved.tolist(), *turned})]
        for here, there in zip(first, [*first[1:], len(begins)], strict=True):
            step = factors.slow[here], rates[here], float(begins[here])
            exact[here:there], best[here:there] = self._of_split(plan, sizes, *step)
        return exact, best

    def _of_split(self, plan: BatchPlan, sizes: Array, slow: Array, rate: float, at: float) -> tuple[float, float]:
        messages = self._messages
        sent = () if messages is None else (messages.density, messages.stale)
        key = (slow.tobytes(), plan.local_batch_sizes, rate, sent)
        if self._known is None or self._known[0] != key:
            total = int(max(plan.total_batch_size, self.cluster.low.sum()))
            self._known = key, (self._exact(sizes, slow, at), self._best(total, slow, at)[0])
        return self._known[1]
