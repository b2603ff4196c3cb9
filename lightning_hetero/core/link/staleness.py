"""Choice of the gradient buckets that are awaited, and of those that are stale (S sec. 3.3).

All sums cross one link in the order in which they become ready. A *synchronous* one has to be there when the backward
pass ends, a *stale* one when the next backward pass ends, so that order is that of their deadlines. Input-side layers
are ready last, so that they are the first to become stale: the only question is how many buckets, from the output side
on, are synchronous.
"""

from bisect import bisect_left
from dataclasses import dataclass

from lightning_hetero.core.validation import check_int, check_number

__all__ = ["BucketTimes", "StaleChoice", "StaleHysteresis", "StaleSettings", "choose_synchronous"]


@dataclass(frozen=True)
class StaleSettings:
    """Thresholds at which buckets, or whole messages, become stale and synchronous again.

    Args:
        simulated_steps: steps of the simulated link; the second half is measured, when the pattern repeats itself.
        tolerance: share by which a step may take longer than with the fewest synchronous buckets, so that more are.
        link_factors: fewer buckets are stale than now only if that holds for transfers that take so many times as long.
        min_relative_gain: least predicted gain for which messages become stale, as a share.
        keep_relative_gain: gain below which they are synchronous again.
        rounds: sync rounds in a row that have to speak for stale messages.

    Example:
        >>> StaleSettings().rounds
        3
    """

    simulated_steps: int = 12
    tolerance: float = 0.02
    link_factors: tuple[float, ...] = (0.8, 0.9, 1.0, 1.12, 1.25)
    min_relative_gain: float = 0.05
    keep_relative_gain: float = 0.01
    rounds: int = 3

    def __post_init__(self) -> None:
        check_int("simulated_steps", self.simulated_steps, minimum=2)
        check_int("rounds", self.rounds, minimum=1)
        check_number("tolerance", self.tolerance, low=0.0)
        check_number("min_relative_gain", self.min_relative_gain, low=0.0, high=1.0)
        check_number("keep_relative_gain", self.keep_relative_gain, low=0.0, high=self.min_relative_gain)
        for i, factor in enumerate(self.link_factors):
            check_number(f"link_factors[{i}]", factor, low=0.0, include_low=False)


SETTINGS = StaleSettings()


@dataclass(frozen=True)
class BucketTimes:
    """Times of one step that waits for nothing, and of its gradients on the link.

    Args:
        ready: seconds from the end of one synchronisation until each bucket is ready on the slowest worker, increasing;
            the last is the time of a step that is computing only.
        transfer: seconds that the sum of each bucket takes on the link, ``>= 0``.

    Raises:
        TypeError: if a value is no number.
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
        """Return the seconds of a step whose first ``synchronous`` buckets are awaited and whose others are stale.

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
        synchronous: buckets, from the output side on, that are awaited.
        step_time: predicted seconds of a step.
        all_synchronous: predicted seconds of a step in which every bucket is awaited.
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
        """``True`` if gradients take longer than computing, so that staleness of one step cannot cover them."""
        return self.transfer > (1.0 + SETTINGS.tolerance) * self.compute

    def describe(self) -> str:
        """Return one line for the log."""
        waiting, chosen, computing = (1e3 * s for s in (self.all_synchronous, self.step_time, self.compute))
        text = f"step {waiting:.3g} -> {chosen:.3g} ms, computing {computing:.3g} ms"
        if self.communication_bound:
            text += f"; communication-bound: the gradients of a step take {1e3 * self.transfer:.3g} ms on the link"
        return text


@dataclass(frozen=True)
class StaleHysteresis:
    """Hysteresis of stale messages, all of a step or none: slow to become stale, quick to be synchronous again.

    Args:
        rounds: sync rounds in a row that spoke for stale messages.

    Example:
        >>> state = StaleHysteresis()
        >>> for _ in range(3):
        ...     state, stale = state.observe(False, gain=0.2)
        >>> stale, state.observe(True, gain=0.03)[1], state.observe(True, gain=0.0)[1]
        (True, True, False)
    """

    rounds: int = 0

    def observe(self, stale: bool, gain: float, settings: StaleSettings = SETTINGS) -> "tuple[StaleHysteresis, bool]":
        """Take in one sync round more.

        Args:
            stale: whether messages are stale at present.
            gain: predicted gain of stale messages over synchronous ones, each at its best density, as a share.
            settings: when to turn.

        Returns:
            What is known now, and whether messages are to be stale.
        """
        if stale:
            return StaleHysteresis(), gain >= settings.keep_relative_gain
        rounds = self.rounds + 1 if gain > settings.min_relative_gain else 0
        return (StaleHysteresis(), True) if rounds >= settings.rounds else (StaleHysteresis(rounds), False)


def choose_synchronous(times: BucketTimes, current: int, *, hysteresis: float = 0.03) -> StaleChoice:
    """Choose as many synchronous buckets as fit without making a step longer; another number only for a gain.

    Fewer are synchronous if that makes a step shorter by ``hysteresis`` at least; more are only if the step would not
    get longer on a link slower or faster by a quarter either.

    Args:
        times: of the buckets, in the order of the backward pass.
        current: buckets that are synchronous now, 0 to their number.
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
    """Return the greatest number of synchronous buckets whose step is as short as one can be, but for the tolerance.

    A bucket more that is awaited never makes a step shorter, so that bisection finds it.
    """
    limit = (1.0 + SETTINGS.tolerance) * times.step_time(0)
    numbers = range(1, len(times.ready) + 1)
    return bisect_left(numbers, True, key=lambda number: times.step_time(number) > limit)
