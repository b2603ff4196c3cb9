"""Steps of a simulated cluster, one after another on its clock."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.simulate.cluster.factors import Factors, FactorStream
from lightning_hetero.simulate.cluster.optimum import CostLines, best_split
from lightning_hetero.simulate.cluster.result import Recorder, Stretch
from lightning_hetero.simulate.cluster.state import ClusterState
from lightning_hetero.simulate.cluster.step_events import StepTimes, bucket_times

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

    Attributes:
        cluster: workers and their link now.
        count: steps that have run.
        clock: second at which the newest step ended.
    """

    def __init__(self, cluster: ClusterState, factors: FactorStream, record: Recorder) -> None:
        self.cluster, self.count, self.clock = cluster, 0, 0.0
        self._undisturbed, self._factors, self._record = cluster, factors, record
        self._slow = np.ones(cluster.size)  # slowdown of the newest step
        self._known: tuple[tuple[object, ...], tuple[float, float]] | None = None  # of the newest split

    def slow_down(self, factors: float | Sequence[float] | Array, link: float) -> None:
        """Make workers and link slower than the profiles say."""
        self.cluster = self._undisturbed.slowed(factors, link)

    def wait(self, seconds: float) -> None:
        """Let the clock go on."""
        self.clock += seconds

    def lines(self) -> CostLines:
        """Return the step time that each worker asks for, at the speeds of the newest step."""
        return self.cluster.lines(self._slow, self.clock)

    @property
    def most(self) -> int:
        """Steps that may be simulated at a time."""
        return max(MOST_NUMBERS // self.cluster.size, 1)

    def run(self, plan: BatchPlan, steps: int) -> StepTimes:
        """Run steps at one split, at most :attr:`most` of them; return their times."""
        cluster, factors = self.cluster, self._factors.take(steps)
        sizes = np.maximum(np.asarray(plan.local_batch_sizes, dtype=float), cluster.min_local)
        q, s, k, m = cluster.coefficients
        a, p = (q * sizes + s) * factors.devices[:, :, 0], (k * sizes + m) * factors.devices[:, :, 1]
        shares = cluster.link.ready_shares
        if cluster.link.trace:
            done, begins = self._along_trace(a, p, factors.link)
        else:
            link = cluster.link.seconds(cluster.size) * factors.link[:, None]
            done = bucket_times(a, p, shares, link)
            begins = self.clock + np.cumsum(done[:, -1]) - done[:, -1]
        times = StepTimes(sizes, a, p, shares, done, factors.first)
        exact, optimum = self._without_jitter(plan, sizes, factors, begins)
        clock = begins + times.seconds
        idle = times.idle.astype(np.float32)
        self._record.add(Stretch(cluster.names, plan.local_batch_sizes, times.seconds, exact, optimum, clock, idle))
        self.count, self.clock = self.count + steps, float(clock[-1])
        return times

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
            self._slow = factors.slow[here]
            exact[here:there], best[here:there] = self._of_split(plan, sizes, rates[here], float(begins[here]))
        return exact, best

    def _of_split(self, plan: BatchPlan, sizes: Array, rate: float, at: float) -> tuple[float, float]:
        key = (self._slow.tobytes(), plan.local_batch_sizes, id(self.cluster), rate)
        if self._known is None or self._known[0] != key:
            cluster, lines = self.cluster, self.cluster.lines(self._slow, at)
            least, _ = best_split(lines, int(max(plan.total_batch_size, cluster.low.sum())), cluster.low, cluster.high)
            self._known = key, (float(lines.seconds(sizes).max()), least)
        return self._known[1]
