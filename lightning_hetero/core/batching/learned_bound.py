"""Upper bounds of batch sizes, learned where throughput fell after a rise (D sec. III-C).

Two differences from the paper. A bound is learned only where throughput fell by as much as the size rose: the
proportional rule itself corrects a smaller fall, but from there on it would oscillate forever. And a bound is on trial,
because one disturbed stretch of steps looks like a rise that went wrong: it lapses after two decisions, and holds four
times as long each time that the fall recurs.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_hetero.core.batching.control_settings import CONTROL_DEFAULTS, ControlSettings

__all__ = ["LearnedBound", "Operation", "learn_bound"]


class Operation(NamedTuple):
    """Size and throughput of a worker.

    Args:
        size: samples of a step.
        throughput: samples per second.

    Example:
        >>> Operation(60, 100.0).size
        60
    """

    size: int
    throughput: float


@dataclass(frozen=True, slots=True)
class LearnedBound:
    """Largest size of a worker, taken from a fall of its throughput after a rise.

    Args:
        size: samples before the rise.
        throughput: ``X_i`` before the rise, in samples per second.
        lifetime: decisions for which the bound holds.
        age: decisions since the fall. A lapsed bound is kept until a rise goes well, so that it lasts longer if the
            fall recurs.

    Example:
        >>> LearnedBound(60, 100.0, lifetime=2, age=1).holds, LearnedBound(60, 100.0, lifetime=2, age=2).holds
        (True, False)
    """

    size: int
    throughput: float
    lifetime: int = ControlSettings.first_bound_lifetime
    age: int = 0

    @property
    def holds(self) -> bool:
        """True while sizes have to stay below it."""
        return self.age < self.lifetime


def learn_bound(
    bound: LearnedBound | None,
    now: Operation,
    before: Operation,
    notable: float,
    dead_band: float,
    settings: ControlSettings = CONTROL_DEFAULTS,
) -> LearnedBound | None:
    """Return a worker's bound after one more decision.

    A bound is learned if the size rose and the next size, ``b X / X_old``, would be at most the former one, within the
    dead band: from there on the rule would oscillate. It is forgotten if a rise beyond it went well, or if throughput
    at the former size is no longer the same: then something other than the size had changed it.

    Args:
        bound: bound of the worker so far, ``None`` for none.
        now: current operation of the worker.
        before: its operation before its last change.
        notable: least relative change of throughput that counts as a change.
        dead_band: of the controller.
        settings: of the controller.

    Example:
        >>> learn_bound(None, Operation(80, 60.0), Operation(60, 100.0), 0.1, 0.05)
        LearnedBound(size=60, throughput=100.0, lifetime=2, age=0)
    """
    rise, fall = now.size / max(before.size, 1), before.throughput / max(now.throughput, 1e-12)
    if now.size > before.size and fall > 1 / (1 - min(notable, 0.9)) and fall * (1 + dead_band) >= rise:
        lifetime = settings.first_bound_lifetime
        if bound is not None:  # the fall recurs
            lifetime = min(settings.bound_lifetime_growth * bound.lifetime, settings.longest_bound_lifetime)
        return LearnedBound(before.size, before.throughput, lifetime)
    if bound is None or now.size > max(bound.size, before.size):
        return None
    if now.size == bound.size and abs(now.throughput / max(bound.throughput, 1e-12) - 1) > notable:
        return None
    return replace(bound, age=bound.age + 1)
