"""Scaling rules of the learning rate with the total batch size: one factor on the rate of the user's schedule.

The factor compares a step at ``B`` with one at the initial total ``B_0``. AdaScale (Johnson et al., 2020) takes the
gain in progress from the noise: ``r = (tr(Sigma) / B_0 + |G|^2) / (tr(Sigma) / B + |G|^2)``, between 1 and ``B /
B_0``; it is for SGD. The square root is for Adam-like optimizers.
"""

import math
from collections.abc import Callable
from typing import Any

from lightning_hetero.core.validation import check_choice

__all__ = ["LR_RULES", "adascale", "check_lr_scaling", "lr_gain"]

Rule = Callable[[float, float, float, float], float]


def adascale(total: float, initial: float, trace: float, grad_sq_norm: float) -> float:
    """Return the gain ratio of AdaScale: ``(tr(Sigma) / B_0 + |G|^2) / (tr(Sigma) / B + |G|^2)``.

    Args:
        total: ``B``.
        initial: ``B_0``.
        trace: ``tr(Sigma)``, ``>= 0``.
        grad_sq_norm: ``|G|^2``, ``>= 0``.

    Returns:
        Between 1 (no noise) and ``B / B_0`` (noise alone); 1 while nothing is known.

    Example:
        >>> adascale(20, 10, trace=1.0, grad_sq_norm=0.0), adascale(20, 10, trace=0.0, grad_sq_norm=1.0)
        (2.0, 1.0)
    """
    known = math.isfinite(trace) and math.isfinite(grad_sq_norm) and trace >= 0 and grad_sq_norm >= 0
    if not known or trace + grad_sq_norm == 0:
        return 1.0
    return (trace / initial + grad_sq_norm) / (trace / total + grad_sq_norm)


LR_RULES: dict[str, Rule] = {
    "adascale": adascale,
    "sqrt": lambda total, initial, trace, grad_sq_norm: math.sqrt(total / initial),
    "linear": lambda total, initial, trace, grad_sq_norm: total / initial,
    "none": lambda total, initial, trace, grad_sq_norm: 1.0,
}
"""Rules by name, in this order AdaScale's gain, ``sqrt(B / B_0)``, ``B / B_0`` and 1."""


def check_lr_scaling(rule: Any) -> Any:
    """Return ``rule`` if it is the name of a rule, ``"auto"`` or a function.

    Raises:
        ValueError: if it is something else.

    Example:
        >>> check_lr_scaling("sqrt")
        'sqrt'
    """
    return rule if callable(rule) else check_choice("lr_scaling", rule, ("auto", *LR_RULES))


def lr_gain(rule: str | Rule, total: float, initial: float, trace: float, grad_sq_norm: float) -> float:
    """Return the factor on the scheduled learning rate at ``B`` by a rule of :data:`LR_RULES` or the user's function.

    Args:
        rule: name, or ``rule(total, initial, trace, grad_sq_norm) -> float``.
        total: ``B``.
        initial: ``B_0``.
        trace: ``tr(Sigma)``.
        grad_sq_norm: ``|G|^2``.

    Raises:
        TypeError: if the rule does not return a number.
        ValueError: if the rule is unknown, or its number is not positive and finite.

    Example:
        >>> lr_gain("linear", 64, 16, 0.0, 1.0), lr_gain("sqrt", 64, 16, 0.0, 1.0)
        (4.0, 2.0)
    """
    function: Any = rule if callable(rule) else LR_RULES.get(str(rule))
    if function is None:
        raise ValueError(f"lr_scaling={rule!r} is unknown; allowed are {', '.join(map(repr, LR_RULES))} or a function.")
    value = function(total, initial, trace, grad_sq_norm)
    try:
        gain = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"lr_scaling gave {value!r} for a total of {total}; return a positive number.") from error
    if not math.isfinite(gain) or gain <= 0:
        raise ValueError(f"lr_scaling gave {gain} for a total of {total}; it has to be a positive number.")
    return gain
