"""Decide whether another split pays: what it saves while it will hold, against what a change costs.

``saving * horizon > cost`` in expectation over the posterior of the workers' times, and ``saving >= doubt * unknown``.
``saving`` and ``unknown`` are shares of a step, ``cost`` is in steps; seconds that are given become steps by the time
that the running split is predicted to take.

``unknown`` is what a step of the other split may lose to what is not known of the workers: by how much the slowest of
them, in expectation and one standard deviation more, exceeds the slowest of their expected times. Who finishes late in
the estimates of many workers is partly who had bad luck, and would be taken for slow. Between ``n`` equal workers luck
promises some 0.4 of what the errors cost, whatever ``n``: their expected times differ by as much as the errors of
these. So luck passes no such test, and a gain that waits is decided later, when less is unknown, by more at once. Where
sizes differ already and single steps hardly vary, doubt is less: luck can then mislead by little, and to wait for
more steps would lose more than that.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.times import WALK_STEPS

__all__ = ["RuleSettings", "cost", "doubt", "horizon"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of the decision rule; ``benchmarks/estimator.py`` sweeps each of them.

    Args:
        change_steps: steps that a change costs, ``>= 0``, for what is not known right after it; a cost in seconds that
            is given or measured comes on top.
        young: steps before which a run is young, ``> 0``. A change then costs less of ``change_steps``, in proportion
            to the steps so far, since a young run has learned little of its split that it could lose.
        least_horizon: steps for which a split is taken to hold in a run that has just begun, ``>= 8``.
        doubt: times by which a gain has to exceed what a step loses to what is not known yet, ``>= 0``. It falls
            where speeds walk, since then no later sync round knows more, and below ``noisy``.
        noisy: relative noise of single steps from which on doubt is whole, ``> 0``; with less it falls as their
            variance does, unless sizes are equal.
        soon: gain of a change, as a share of the step, above which the next sync round is to come as early as it can,
            since more is likely to follow.

    Raises:
        ValueError: if a setting is out of its range.

    Example:
        >>> RuleSettings().change_steps
        1.0
    """

    change_steps: float = 1.0
    young: float = 128.0
    least_horizon: float = 256.0
    doubt: float = 1.5
    noisy: float = 0.04
    soon: float = 0.02

    def __post_init__(self) -> None:
        for name, least in (("change_steps", 0.0), ("least_horizon", float(WALK_STEPS)), ("doubt", 0.0), ("soon", 0.0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)!r} of the decision rule; give {least:g} or more.")
        for name in ("young", "noisy"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} of the decision rule; give more than 0.")


def horizon(
    gain: float, walks: Array, probability: Array, steps: float, settings: RuleSettings = RuleSettings()
) -> float:
    """Return the steps for which a better split saves its gain: those in which it saves less count less.

    A run is taken to last as long again, ``T`` steps. Until then a speed walks by a standard deviation of ``s(t) =
    walk sqrt(t / 8)``. The better split is then off by ``E|N(0, s)|``, the other by ``E|gain + N(0, s)|``: more by
    ``gain`` at first, and by ``gain^2 / (sqrt(2 pi) s)`` where ``s`` is far more than that. The smaller of these two,
    over ``gain`` and summed over the steps, is ``T (2 r - r^2)`` with ``r = gain / (sqrt(2 pi) s(T))``, 1 at most.

    Args:
        gain: share of the step time that it saves, up to 1; nothing is gained below 0.
        walks: standard deviations of the logarithm of a speed's walk over eight steps, one of which is the true one.
        probability: of each of these.
        steps: steps since the run began.
        settings: of the rule.

    Returns:
        Steps. Each walk counts for at least the eight after which the next sync round comes where speeds stand still.

    Example:
        >>> round(horizon(0.1, np.array([0.0005, 0.05]), np.array([0.5, 0.5]), 500))
        298
    """
    longest = max(float(steps), settings.least_horizon)
    far = walks * np.sqrt(2.0 * np.pi * longest / WALK_STEPS)
    ratio = np.clip(gain / far, 0.0, 1.0)
    return float(probability @ np.maximum(longest * ratio * (2.0 - ratio), WALK_STEPS))


def cost(steps: float, settings: RuleSettings = RuleSettings()) -> float:
    """Return the steps that a change costs, ``change_steps * min(1, steps / young)``.

    Args:
        steps: steps since the run began, or the first of those that it goes on with.
        settings: of the rule.

    Returns:
        Steps, 0 to ``change_steps``.

    Example:
        >>> [cost(steps) for steps in (32, 64, 1000)]
        [0.25, 0.5, 1.0]
    """
    return settings.change_steps * min(1.0, steps / settings.young)


def doubt(jitter: Array, moving: float, equal: bool, settings: RuleSettings = RuleSettings()) -> float:
    """Return the factor by which a gain has to exceed what a step may lose to what is not known.

    ``doubt * min(1, jitter / noisy)^2 * (1 - moving)``, by the median of all workers; ``doubt * (1 - moving)`` where
    sizes are equal, so that equal workers stay equal whatever their noise.

    Args:
        jitter: relative standard deviations of single steps, outside of and in backward, shape ``(workers, 2)``.
        moving: by how much more likely it is that speeds walk than that they stand still, 0 to 1.
        equal: whether the running sizes are equal, to one sample.
        settings: of the rule.

    Returns:
        A factor, 0 to ``settings.doubt``.

    Example:
        >>> [round(doubt(np.full((3, 2), jitter), 0.0, False), 2) for jitter in (0.02, 0.04, 0.15)]
        [0.38, 1.5, 1.5]
    """
    noise = 1.0 if equal else min(float(np.median(jitter)) / settings.noisy, 1.0)
    return settings.doubt * noise**2 * (1.0 - moving)
