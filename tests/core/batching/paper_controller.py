"""The controller of dynamic batching as its paper prints it (sec. III-C), the baseline of ours.

Literal in what it prints: the four steps at the end of the section, eq. 4 and 5, the exponential average over the
iterations since the last change, bounds, and an upper bound for a worker whose throughput dropped after its batch grew.
It decides after each iteration. The total is not kept, because the paper's rule does not keep it.
"""

import numpy as np


class PaperController:
    """Sizes by the rule of the paper.

    Args:
        sizes: initial ``b_k``.
        dead_band: ``Delta_min(b)``, as a share of the size.
        smoothing: weight of the newest iteration in the exponential average.
        low: ``b_k,min``.
        high: ``b_k,max``.
        every: iterations between two decisions; 1 in the paper.
    """

    def __init__(self, sizes, *, dead_band=0.05, smoothing=0.1, low=1, high=None, every=1):
        self.sizes = np.asarray(sizes, dtype=float)
        self.dead_band, self.smoothing, self.every = dead_band, smoothing, every
        self.low = np.full(len(self.sizes), low, dtype=float)
        self.high = np.full(len(self.sizes), np.inf) if high is None else np.array(high, dtype=float)
        self.mu, self.iterations, self.before = None, 0, None

    def step(self, times):
        """One iteration took ``times``; gives whether the sizes changed."""
        # 1) exponential moving average of the iterations since the last change
        self.mu = times if self.mu is None else (1 - self.smoothing) * self.mu + self.smoothing * times
        self.iterations += 1
        if self.iterations % self.every:
            return False
        throughput = self.sizes / self.mu  # X_k = b_k / t_k
        if self.before is not None:  # a drop in throughput after b_0 grew to b: b_max = b_0
            sizes, speed = self.before
            dropped = (self.sizes > sizes) & (throughput < speed)
            self.high[dropped] = np.minimum(self.high, sizes)[dropped]
            self.before = None
        # 2) eq. 4 and 5
        wanted = self.sizes - throughput * (self.mu - self.mu.mean())
        # 3) bounds; a batch is a whole number of samples, and of one at least
        wanted = np.maximum(np.round(np.clip(wanted, self.low, self.high)), 1.0)
        # 4) dead band: all sizes change, or none
        if np.max(np.abs(wanted - self.sizes) / self.sizes) <= self.dead_band:
            return False
        self.before, self.mu, self.iterations = (self.sizes, throughput), None, 0
        self.sizes = wanted
        return True
