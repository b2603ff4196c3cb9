"""Decision rule for another split: its saving for as long as it holds, against the cost of a change.

``saving * horizon > cost`` in expectation over the posterior of the workers' times, and ``saving >= doubt * unknown``.
``saving`` and ``unknown`` are shares of a step, ``cost`` is in steps; a cost in seconds becomes steps through the
predicted step time of the running split.

``unknown`` is the share of a step that the other split may lose to errors of the estimated times: by how much the
expected maximum of the workers' times, plus one standard deviation, exceeds the maximum of their expected times. Among
many workers, the one that seems slowest is partly just unlucky. Between ``n`` equal workers, chance alone predicts a
gain of about 0.4 of what the errors cost, whatever ``n``, because their estimated times differ by as much as the errors
of the estimates. The test rejects such gains. A real gain that it delays is taken later, when less is unknown, in one
larger change. ``doubt`` is smaller where sizes already differ and single steps hardly vary: chance then misleads by
little, and waiting for more steps would lose more than that.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.times import WALK_STEPS

__all__ = ["RuleSettings", "cost", "doubt", "horizon"]

Array = npt.NDArray[np.float64]


@checked_keywords
@dataclass(frozen=True)
class RuleSettings:
    """Settings of the decision rule; ``benchmarks/estimator.py`` sweeps each of them.

    Args:
        change_steps: steps that a change costs, ``>= 0``, because less is known of the new split; a given or measured
            cost in seconds comes on top.
        young: steps up to which a run is young, ``> 0``. Until then a change costs less than ``change_steps``, in
            proportion to the steps so far: a young run has learned little of its split that it could lose.
        least_horizon: steps for which a split is assumed to hold in a run that has just begun, ``>= 8``.
        doubt: factor by which a gain has to exceed ``unknown``, ``>= 0``. It falls where speeds walk, since then no
            later sync round knows more, and where single steps vary by less than ``noisy``.
        noisy: relative noise of single steps from which on ``doubt`` counts in full, ``> 0``; below, it falls with
            their variance, unless sizes are equal.
        soon: gain of a change, as a share of the step, above which the next sync round should come as early as
            possible, since more gain is likely to follow.

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
    """Return the number of steps for which a better split saves its gain; steps in which it saves less count less.

    The run is assumed to last as long again, ``T`` steps. After ``t`` of them a speed has walked by a standard
    deviation of ``s(t) = walk sqrt(t / 8)``. The better split is then off by ``E|N(0, s)|``, the other by ``E|gain +
    N(0, s)|``: the difference is ``gain`` at first, and ``gain^2 / (sqrt(2 pi) s)`` once ``s`` is far above ``gain``.
    The smaller of the two, divided by ``gain`` and summed over the steps, is ``T (2 r - r^2)`` with ``r = gain /
    (sqrt(2 pi) s(T))``, 1 at most.

    Args:
        gain: share of the step time that the better split saves, up to 1; below 0 it saves nothing.
        walks: candidates for the standard deviation of the logarithm of a speed's walk over eight steps.
        probability: probability of each candidate.
        steps: steps since the run began.
        settings: of the rule.

    Returns:
        Steps. Each candidate counts for at least eight: where speeds stand still, the next sync round comes after that.

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
        steps: steps since the run began, including the runs that it continues.
        settings: of the rule.

    Returns:
        Steps, 0 to ``change_steps``.

    Example:
        >>> [cost(steps) for steps in (32, 64, 1000)]
        [0.25, 0.5, 1.0]
    """
    return settings.change_steps * min(1.0, steps / settings.young)


def doubt(jitter: Array, moving: float, equal: bool, settings: RuleSettings = RuleSettings()) -> float:
    """Return the factor by which a gain has to exceed ``unknown``, the share of a step that estimation errors may cost.

    ``doubt * min(1, jitter / noisy)^2 * (1 - moving)``, with the median jitter of all workers; ``doubt * (1 - moving)``
    where sizes are equal: equal workers then keep equal sizes, however noisy they are.

    Args:
        jitter: relative standard deviations of single steps, outside of and in backward, shape ``(workers, 2)``.
        moving: probability that speeds walk minus the probability that they stand still, 0 to 1.
        equal: whether the running sizes are equal, up to one sample.
        settings: of the rule.

    Returns:
        A factor, 0 to ``settings.doubt``.

    Example:
        >>> [round(doubt(np.full((3, 2), jitter), 0.0, False), 2) for jitter in (0.02, 0.04, 0.15)]
        [0.38, 1.5, 1.5]
    """
    noise = 1.0 if equal else min(float(np.median(jitter)) / settings.noisy, 1.0)
    return settings.doubt * noise**2 * (1.0 - moving)
