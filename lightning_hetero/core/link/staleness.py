"""Choice of the synchronous and the stale gradient buckets (S sec. 3.3).

All buckets cross one link in the order in which they become ready. A *synchronous* bucket has to arrive before the
backward pass ends, a *stale* one before the next backward pass ends, so this order is also that of their deadlines.
Input-side layers are ready last and become stale first. The choice is therefore only how many buckets, counted from the
output side, are synchronous.
"""

from bisect import bisect_left
from dataclasses import dataclass

from lightning_hetero.core.rounded import rounded
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["BucketTimes", "StaleChoice", "StaleSettings", "choose_synchronous"]


@dataclass(frozen=True)
class StaleSettings:
    """Thresholds at which buckets become stale and synchronous again.

    Args:
        simulated_steps: steps of the simulated link, ``>= 2``; the second half, where the pattern repeats, is measured.
        tolerance: share by which a step may take longer than without synchronous buckets, to make more synchronous.
        link_factors: factors on the transfer times; fewer buckets become stale only if the choice holds at all of them.

    Example:
        >>> StaleSettings().tolerance
        0.02
    """

    simulated_steps: int = 12
    tolerance: float = 0.02
    link_factors: tuple[float, ...] = (0.8, 0.9, 1.0, 1.12, 1.25)

    def __post_init__(self) -> None:
        check_int("simulated_steps", self.simulated_steps, minimum=2)
        check_number("tolerance", self.tolerance, low=0.0)
        for i, factor in enumerate(self.link_factors):
            check_number(f"link_factors[{i}]", factor, low=0.0, include_low=False)


SETTINGS = StaleSettings()


@dataclass(frozen=True)
class BucketTimes:
    """Times of one step that waits for nothing, and of its gradients on the link.

    Args:
        ready: seconds from the end of one synchronization until each bucket is ready on the slowest worker, increasing;
            the last is the time of a step that only computes.
        transfer: seconds that the all-reduce of each bucket takes on the link, ``>= 0``.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if there is no bucket, their numbers differ, ``ready`` decreases, or a value is out of range.

    Example:
        >>> BucketTimes(ready=(3.0, 4.0), transfer=(1.0, 3.0)).step_time(2)
        7.0
    """

    ready: tuple[float, ...]
    transfer: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ready or len(self.ready) != len(self.transfer):
            raise ValueError(
                f"ready has {len(self.ready)} and transfer has {len(self.transfer)} entries; give one per bucket."
            )
        for name, values in (("ready", self.ready), ("transfer", self.transfer)):
            for i, value in enumerate(values):
                check_number(f"{name}[{i}]", value, low=0.0)
        if any(later < earlier for earlier, later in zip(self.ready, self.ready[1:], strict=False)):
            raise ValueError(f"ready={self.ready} decreases; give the buckets in the order of the backward pass.")

    @property
    def compute(self) -> float:
        """Seconds of a step that waits for nothing."""
        return self.ready[-1]

    def step_time(self, synchronous: int) -> float:
        """Return the seconds of a step whose first ``synchronous`` buckets are synchronous and whose others are stale.

        Example:
            >>> times = BucketTimes(ready=(3.0, 4.0), transfer=(1.0, 3.0))
            >>> times.step_time(1), times.step_time(0)
            (4.0, 4.0)
        """
        begin, link, awaited = 0.0, 0.0, 0.0
        ends: list[float] = []
        for _ in range(SETTINGS.simulated_steps):
            end, stale_end = max(begin + self.compute, awaited), 0.0
            for number, (ready, seconds) in enumerate(zip(self.ready, self.transfer, strict=True)):
                link = max(begin + ready, link) + seconds
                if number < synchronous:
                    end = max(end, link)
                else:
                    stale_end = link
            ends.append(end)
            begin, awaited = end, stale_end
        half = SETTINGS.simulated_steps // 2
        return max((ends[-1] - ends[half - 1]) / half, sum(self.transfer))  # the queue may still grow slowly

    def slowed(self, factor: float) -> "BucketTimes":
        """Return the same computing on a link that takes ``factor`` times as long."""
        return BucketTimes(self.ready, tuple(factor * seconds for seconds in self.transfer))


@dataclass(frozen=True)
class StaleChoice:
    """Number of synchronous buckets, and the predictions for it.

    Args:
        synchronous: number of synchronous buckets, counted from the output side.
        step_time: predicted seconds of a step.
        all_synchronous: predicted seconds of a step in which every bucket is synchronous.
        compute: seconds of a step that waits for nothing.
        transfer: seconds that a step's gradients take on the link.

    Example:
        >>> choice = StaleChoice(synchronous=0, step_time=0.3, all_synchronous=0.4, compute=0.1, transfer=0.3)
        >>> choice.communication_bound
        True
    """

    synchronous: int
    step_time: float
    all_synchronous: float
    compute: float
    transfer: float

    @property
    def communication_bound(self) -> bool:
        """``True`` if gradients take longer than computing: staleness of one step then cannot hide them."""
        return self.transfer > (1.0 + SETTINGS.tolerance) * self.compute

    def describe(self) -> str:
        """Return one line for the log."""
        waiting, chosen, computing = (1e3 * s for s in (self.all_synchronous, self.step_time, self.compute))
        text = f"step {rounded(waiting)} -> {rounded(chosen)} ms, computing {rounded(computing)} ms"
        if self.communication_bound:
            text += f"; communication-bound: the gradients of a step take {rounded(1e3 * self.transfer)} ms on the link"
        return text


def choose_synchronous(times: BucketTimes, current: int, *, hysteresis: float = 0.03) -> StaleChoice:
    """Choose the most synchronous buckets that do not make a step longer; change their number only for a gain.

    Their number falls if that makes a step shorter by at least ``hysteresis``. It rises only if the step would not get
    longer on a link that is slower or faster by a quarter either.

    Args:
        times: times of the buckets, in the order of the backward pass.
        current: number of buckets that are synchronous now, 0 to all of them.
        hysteresis: least predicted gain for which more buckets are stale, as a share of the step time.

    Raises:
        ValueError: if ``current`` is out of range.

    Example:
        >>> slow = BucketTimes(ready=(3.0, 4.0), transfer=(0.5, 3.0))
        >>> choose_synchronous(slow, current=2).synchronous
        1
        >>> choose_synchronous(BucketTimes(ready=(3.0, 4.0), transfer=(0.5, 0.01)), current=1).synchronous
        2
    """
    if not 0 <= current <= len(times.ready):
        raise ValueError(f"current={current} must be from 0 to {len(times.ready)}, the number of buckets.")
    number = _most_synchronous(times)
    if number > current:
        number = max(current, min(_most_synchronous(times.slowed(factor)) for factor in SETTINGS.link_factors))
    elif times.step_time(number) > (1.0 - hysteresis) * times.step_time(current):
        number = current
    return StaleChoice(
        number, times.step_time(number), times.step_time(len(times.ready)), times.compute, sum(times.transfer)
    )


def _most_synchronous(times: BucketTimes) -> int:
    """Return the greatest number of synchronous buckets whose step exceeds the shortest one by the tolerance at most.

    One more synchronous bucket never makes a step shorter, so bisection finds the number.
    """
    limit = (1.0 + SETTINGS.tolerance) * times.step_time(0)
    numbers = range(1, len(times.ready) + 1)
    return bisect_left(numbers, True, key=lambda number: times.step_time(number) > limit)
