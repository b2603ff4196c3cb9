"""What stale messages cost: how much longer workers compute while one is under way.

Message and computing share cores, memory and buses. Computing that is covered by messages for a share ``s`` of its time
takes ``c (1 + f s)``. Rounds of different shares tell ``f``. Because the density follows the computing time, shares are
compared, not seconds: a worker that becomes slow for another reason would else look slowed by its longer messages.
"""

from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Contention"]

KEPT = 0.95
"""Weight of all rounds before, in the next one."""
DOUBT = 0.03
"""Weight of the belief so far, in squares of shares: scatter of 5 % in computing against a cost of 30 %."""
MOST = 0.9
"""Most of a message's time that computing can lose."""


@dataclass(frozen=True)
class Contention:
    """Estimate of what computing loses to a message under way.

    Args:
        drag: seconds by which a step gets longer for each second of a stale message that it covers, 0 to 0.9.
        sizes: samples of each worker in the rounds that are compared.
        sums: weights of these rounds, and weighted sums of ``s``, ``C``, ``s^2`` and ``s C``.
        before: estimate when these rounds began, ``f``.

    Example:
        >>> found = Contention()
        >>> for compute, seconds in ((0.1, 0.0), (0.13, 0.2), (0.13, 0.2)):
        ...     found = found.observe((8, 8), compute, seconds)
        >>> round(found.drag, 2)  # 0.3 / 1.3
        0.22
    """

    drag: float = 0.0
    sizes: tuple[float, ...] = ()
    sums: tuple[float, ...] = (0.0,) * 5
    before: float = 0.0

    def observe(self, sizes: tuple[float, ...], compute: float, seconds: float) -> "Contention":
        """Return the estimate after a round.

        Args:
            sizes: samples of each worker; rounds of other sizes are not compared.
            compute: seconds that the slowest worker computes, above 0.
            seconds: seconds of a message.
        """
        known = self
        if sizes != self.sizes:
            known = Contention(self.drag, sizes, before=self.drag / (1.0 - self.drag))
        share = min(seconds / compute, 1.0)
        new = np.array([1.0, share, compute, share**2, share * compute])
        sums = KEPT * np.array(known.sums) + new
        _, s, c, ss, sc = sums / sums[0]
        spread = sums[0] * (ss - s * s)
        slope = (sums[0] * (sc - s * c) + DOUBT * known.before * c) / (spread + DOUBT)
        f = max(slope / max(c - slope * s, 0.1 * c), 0.0)
        return replace(known, drag=min(float(f / (1.0 + f)), MOST), sums=tuple(sums.tolist()))
