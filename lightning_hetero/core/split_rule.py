"""Decide whether another split pays: what it saves while it will hold, against what a change costs.

``saving * horizon > cost`` in expectation over the posterior of the workers' times. Who finishes late in the estimates
of many workers is partly who had bad luck, so the estimates are shrunk before anything is predicted from them: each
worker is taken to finish with the others, as the running split would have it, unless its own times say otherwise (a
mixture of a spike and a slab, fitted by expectation maximisation to all workers at once). Equal workers are thereby
found equal, however many there are and however often one looks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.times import BLOCK

__all__ = ["RuleSettings", "horizon", "shrunk"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of the decision rule; ``benchmarks/estimator.py`` sweeps each of them.

    Args:
        change_steps: steps that a change costs in any case, ``>= 0``, for what is not known right after it; a cost in
            seconds that is given or measured comes on top.
        least_horizon: steps for which a split is taken to hold in a run that has just begun, ``>= 8``.
        own_speed: standard deviation of the logarithm of a worker's speed about that of the others, if it differs.
        rounds: rounds of expectation maximisation, ``>= 1``.
        soon: gain of a change, as a share of the step, above which the next look is to come as early as it can, since
            more is likely to follow.

    Example:
        >>> RuleSettings().change_steps
        1.0
    """

    change_steps: float = 1.0
    least_horizon: float = 192.0
    own_speed: float = 0.2
    rounds: int = 15
    soon: float = 0.02


def shrunk(seconds: Array, errors: Array, settings: RuleSettings = RuleSettings(), moving: float = 0.0) -> Array:
    """Finish times given that workers may in truth finish together.

    Logarithms ``x_i`` with standard errors ``e_i`` come from ``(1 - p) N(L, e_i^2) + p N(L, e_i^2 + w^2)``; ``L``,
    ``p`` and ``w`` are fitted to all of them.

    Args:
        seconds: when each worker is done, shape ``(workers,)``, ``> 0``.
        errors: standard errors of these.
        settings: of the rule.
        moving: probability that speeds move, so that workers that finished together need not do so any more.

    Returns:
        Expected seconds of each worker, shape ``(workers,)``.

    Example:
        >>> shrunk(np.array([1.01, 0.99, 1.0, 2.0]), np.full(4, 0.02)).round(2).tolist()
        [1.0, 1.0, 1.0, 2.0]
    """
    x = np.log(seconds)
    variance = np.maximum(errors / seconds, 1e-6) ** 2
    if len(x) < 2:
        return seconds
    level, width, share = float(np.median(x)), float(x.var()) + settings.own_speed**2, 0.5
    for _ in range(settings.rounds):
        spike, slab = _parts(x, variance, level, width, share)
        own = 1.0 / (1.0 + np.exp(np.clip(spike - slab, -500.0, 500.0)))
        share = (own.sum() + 0.5) / (len(x) + 1.0)
        weight = (1.0 - own) / variance + own / (variance + width)
        level = float((weight * x).sum() / weight.sum())
        off = np.maximum((x - level) ** 2 - variance, 0.0)
        width = float((own * off).sum() + settings.own_speed**2) / (own.sum() + 1.0)
    own = own * _differ(x, variance, level, width, share)
    own = moving + (1.0 - moving) * own
    return np.asarray(np.exp(level + own * width / (width + variance) * (x - level)))


def _parts(x: Array, variance: Array, level: float, width: float, share: float) -> tuple[Array, Array]:
    """Logarithms of the densities of the spike and of the slab, with their shares, up to one constant."""
    off, wide = (x - level) ** 2, variance + width
    spike = np.log1p(-share) - 0.5 * (off / variance + np.log(variance))
    return spike, np.log(share) - 0.5 * (off / wide + np.log(wide))


def _differ(x: Array, variance: Array, level: float, width: float, share: float) -> float:
    """Probability that any worker has a speed of its own, by the Bayes factor of the mixture (BIC, two parameters)."""
    together = float((x / variance).sum() / (1.0 / variance).sum())
    alone = -0.5 * ((x - together) ** 2 / variance + np.log(variance))
    evidence = float((np.logaddexp(*_parts(x, variance, level, width, share)) - alone).sum()) - np.log(len(x))
    return float(1.0 / (1.0 + np.exp(-np.clip(evidence, -500.0, 500.0))))


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
        Steps, at least eight: no look comes earlier.

    Example:
        >>> round(horizon(0.1, np.array([0.0005, 0.05]), np.array([0.5, 0.5]), 500))
        298
    """
    longest = max(float(steps), settings.least_horizon)
    far = walks * np.sqrt(2.0 * np.pi * longest / BLOCK)
    ratio = np.clip(gain / far, 0.0, 1.0)
    return float(probability @ np.maximum(longest * ratio * (2.0 - ratio), BLOCK))
