"""Workers under a processor quota in virtual time: what a step takes where a node has a share of a core.

A quota is handed out period by period, as Linux does (CFS bandwidth control): a worker that has used its part waits for
the next period, one that idles begins the next step with an unused part and runs it at full speed. So the times of
single steps lie far apart, and only their mean follows the share.
"""

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cpu_quota import quota_limited_times


class QuotaWorker:
    """A worker with ``share`` seconds of processor time in a second, in periods of 100 ms."""

    def __init__(self, share, phase, period=0.1):
        self.share, self.phase, self.period = share, phase, period
        self._current, self._used = None, 0.0

    def run(self, start, seconds):
        """The moment at which ``seconds`` of processor time are done that begin at ``start``."""
        now = start
        while seconds > 1e-12:
            current = int((now - self.phase) // self.period)
            end = self.phase + (current + 1) * self.period
            if current != self._current:
                self._current, self._used = current, 0.0
            part = min(seconds, self.share * self.period - self._used, end - now)
            if part <= 1e-12:
                now = end + 1e-9
                continue
            now, seconds, self._used = now + part, seconds - part, self._used + part
        return now


class QuotaCluster:
    """Synchronous steps of such workers, seen as the package's observer sees them.

    Args:
        shares: of a core, one per worker.
        sample: seconds of processor time for a sample, of which a third is forward.
        fixed: seconds of processor time in each step for loading, the update and the loop.
        averaging: seconds of processor time for the averaging, which each worker needs once all are ready.
        link: seconds of the averaging in which nobody computes.
        crowding: share by which computing is slower while all compute, at most.
        noise: relative spread of processor times.
        corrected: whether observed times are those that the quotas sustain, as :class:`StepTimer` gives them.
    """

    def __init__(
        self,
        shares=(1.0, 0.5, 0.3),
        *,
        sample=1e-3,
        fixed=3e-3,
        averaging=1e-3,
        link=2e-3,
        crowding=0.0,
        noise=0.02,
        corrected=True,
        seed=0,
    ):
        self.rng = np.random.default_rng(seed)
        phases = self.rng.random(len(shares)) / 10
        self.workers = [QuotaWorker(share, phase) for share, phase in zip(shares, phases, strict=True)]
        self.sample, self.fixed, self.averaging, self.link = sample, fixed, averaging, link
        self.crowding, self.noise, self.corrected, self.now = crowding, noise, corrected, 0.0

    def steps(self, sizes, count):
        """Observations of ``count`` further steps, in which times are those that the quotas sustain."""
        rows, used = (np.array(values) for values in zip(*(self._step(sizes) for _ in range(count)), strict=True))
        for i, worker in enumerate(self.workers):
            if self.corrected:
                rows[:, i, 1:3] = np.stack(quota_limited_times(*rows[:, i, 1:3].T, *used[:, i].T, worker.share), axis=1)
        return StepObservations.from_array(rows)

    def step_time(self, sizes, count=200):
        """Mean seconds of a step."""
        begin = self.now
        for _ in range(count):
            self._step(sizes)
        return (self.now - begin) / count

    def _step(self, sizes):
        begin, rows, used = self.now, [], []
        spread = np.maximum(1 + self.noise * self.rng.standard_normal((2, len(sizes))), 0.5)
        load = np.asarray(sizes) * self.sample * (1 + self.crowding * np.asarray(sizes) / sum(sizes))
        for worker, work, (first, second) in zip(self.workers, load, spread.T, strict=True):
            used.append((first * (self.fixed + work / 3), second * 2 / 3 * work))
            forward = worker.run(begin, used[-1][0])
            rows.append((forward, worker.run(forward, used[-1][1])))
        latest = max(ready for _, ready in rows) + self.link
        self.now = max(worker.run(latest, self.averaging) for worker in self.workers)
        return [
            [size, forward - begin, ready - forward, ready - forward, 0.0, self.now - ready, self.now - begin, 0.0, 0.0]
            for size, (forward, ready) in zip(sizes, rows, strict=True)
        ], used
