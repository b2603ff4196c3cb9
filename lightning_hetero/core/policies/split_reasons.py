"""Reasons to keep a split that is not the optimum, in the words of the log, with the figures that the rule compared.

The rule is that of :mod:`lightning_hetero.core.policies.split_rule`; nothing here decides. The text before the first
colon is the kind of the reason. It holds no figure that changes between sync rounds, so each kind is logged once.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["SHORT_STEP", "WORTH", "costs_too_much", "not_beyond_luck"]

Array = npt.NDArray[np.float64]

SHORT_STEP = 0.015
"""Seconds of a step below which workers can hardly be balanced."""
WORTH = 0.02
"""Least gain that is worth an advice."""


def costs_too_much(split: str, gain: float, step_time: float, steps: float, cost: float, fixed: float = 0.0) -> str:
    """Say that a change would cost more than it saves; that steps are too short, if it would pay at ``SHORT_STEP``.

    Args:
        split: the better split, as text.
        gain: share of a step that it saves.
        step_time: predicted seconds of a step of the running split.
        steps: for which the better split is assumed to hold.
        cost: seconds that the change costs.
        fixed: those of them that longer steps would not change; the others are a number of steps.

    Example:
        >>> costs_too_much("6/4", 0.003, 0.1, 256, 0.1)
        'a change would cost more than it saves: 6/4 would take 0.3% less for 256 steps, and costs 100.0 ms'
        >>> costs_too_much("6/4", 0.1, 0.002, 256, 0.102, 0.1).partition(": ")[2]
        'they take 2.0 ms, 6/4 would take 10.0% less for 256 steps, and costs 102.0 ms; a larger batch helps'
    """
    figures = f"{_other(split, gain)} for {steps:.0f} steps, and costs {cost * 1e3:.1f} ms"
    longer = SHORT_STEP / step_time
    if _is_short(step_time, gain) and gain * SHORT_STEP * steps > fixed + (cost - fixed) * longer:
        return _too_short(step_time, figures)
    return f"a change would cost more than it saves: {figures}"


def not_beyond_luck(split: str, gain: float, step_time: float, least: float, jitter: Array) -> str:
    """Say that too little is known; that steps are too short, if noise of the same seconds would do at ``SHORT_STEP``.

    Args:
        split: the one that seems better, as text.
        gain: share of a step that it is expected to save.
        step_time: predicted seconds of a step of the running split.
        least: gain that would do.
        jitter: relative standard deviation of each worker's single steps.

    Example:
        >>> not_beyond_luck("34/30", 0.01, 0.1, 0.034, np.array([0.22, 0.22]))
        'too little is known of the workers yet: their single steps vary by 22%, 34/30 would take 1.0% less, \
and only a gain of 3.4% is beyond luck'
        >>> not_beyond_luck("34/30", 0.05, 0.003, 0.2, np.array([0.3, 0.4])).partition(", ")[0]
        'steps are too short to balance: they take 3.0 ms'
    """
    low, high = _rounded(float(jitter.min())), _rounded(float(jitter.max()))
    vary = f"single steps vary by {low}" + (f" to {high}" if high != low else "")
    figures = f"{_other(split, gain)}, and only a gain of {least:.1%} is beyond luck"
    if _is_short(step_time, gain) and gain * SHORT_STEP >= least * step_time:
        return _too_short(step_time, f"the workers' {vary}, {figures}")
    return f"too little is known of the workers yet: their {vary}, {figures}"


def _is_short(step_time: float, gain: float) -> bool:
    return step_time < SHORT_STEP and gain >= WORTH


def _too_short(step_time: float, figures: str) -> str:
    return f"steps are too short to balance: they take {step_time * 1e3:.1f} ms, {figures}; a larger batch helps"


def _rounded(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def _other(split: str, gain: float) -> str:
    return f"{split} would take {max(gain, 0.0):.1%} less"
