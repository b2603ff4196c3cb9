"""Decide whether another split pays: what it saves while it will hold, against what a change costs.

``saving * horizon > cost`` in expectation over the posterior of the workers' times, and ``saving >= doubt * unknown``.
``unknown`` is what a step may lose to what is not known of the workers: by how much the slowest of them, in expectation
and one standard deviation more, exceeds the slowest of their expected times. Who finishes late in the estimates of many
workers is partly who had bad luck, and would be taken for slow. Between ``n`` equal workers luck promises some 0.4 of
what the errors cost, whatever ``n``: their expected times scatter by as much as the errors of these. So luck passes no
such test, and a gain that waits is decided later, when less is unknown, by more at once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.times import BLOCK

__all__ = ["RuleSettings", "horizon"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of the decision rule; ``benchmarks/estimator.py`` sweeps each of them.

    Args:
        change_steps: steps that a change costs in any case, ``>= 0``, for what is not known right after it; a cost in
            seconds that is given or measured comes on top.
        least_horizon: steps for which a split is taken to hold in a run that has just begun, ``>= 8``.
        doubt: times by which a gain has to exceed what a step loses to what is not known yet, ``>= 0``; the less the
            more certain it is that speeds walk, since then no later look knows more.
        soon: gain of a change, as a share of the step, above which the next look is to come as early as it can, since
            more is likely to follow.

    Example:
        >>> RuleSettings().change_steps
        1.0
    """

    change_steps: float = 1.0
    least_horizon: float = 256.0
    doubt: float = 1.5
    soon: float = 0.02


def horizon(
    gain: float, walks: Array, probability: Array, steps: float, settings: RuleSettings = RuleSettings()
) -> float:
    """Steps for which a better split saves its gain: those in which it saves less count less.

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
        Steps, at least the eight after which ranks look again where speeds stand still.

    Example:
        >>> round(horizon(0.1, np.array([0.0005, 0.05]), np.array([0.5, 0.5]), 500))
        298
    """
    longest = max(float(steps), settings.least_horizon)
    far = walks * np.sqrt(2.0 * np.pi * longest / BLOCK)
    ratio = np.clip(gain / far, 0.0, 1.0)
    return float(probability @ np.maximum(longest * ratio * (2.0 - ratio), BLOCK))
