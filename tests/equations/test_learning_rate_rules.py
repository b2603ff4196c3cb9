"""Factors on the learning rate against their formulas and limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.batching.lr_scaling import LR_RULES, check_lr_scaling, lr_gain

sizes = st.integers(1, 100_000)
positive = st.floats(1e-12, 1e12)
FORMULAS = {  # of B, B_0, tr(Sigma), |G|^2
    "adascale": lambda total, initial, trace, norm: (trace / initial + norm) / (trace / total + norm),
    "sqrt": lambda total, initial, trace, norm: math.sqrt(total / initial),
    "linear": lambda total, initial, trace, norm: total / initial,
    "none": lambda total, initial, trace, norm: 1.0,
}


@pytest.mark.parametrize("rule", LR_RULES)
@given(sizes, sizes, positive, positive)
def test_every_rule_is_its_formula_and_lies_between_one_and_the_ratio_of_totals(rule, total, initial, trace, norm):
    gain = lr_gain(rule, total, initial, trace, norm)
    assert gain == pytest.approx(FORMULAS[rule](total, initial, trace, norm))
    low, high = sorted((1.0, total / initial))
    assert low * (1 - 1e-9) <= gain <= high * (1 + 1e-9)
    assert lr_gain(rule, initial, initial, trace, norm) == 1
    assert check_lr_scaling(rule) == rule


@given(sizes, sizes, positive)
def test_adascale_goes_from_one_without_noise_to_the_ratio_in_noise_alone(total, initial, value):
    assert lr_gain("adascale", total, initial, 0.0, value) == 1
    assert lr_gain("adascale", total, initial, value, 0.0) == pytest.approx(total / initial)
    for unknown in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (-1.0, 2.0), (1.0, -1.0), (0.0, 0.0)):
        assert lr_gain("adascale", total, initial, *unknown) == 1


def test_a_function_of_the_users_gets_all_four_values():
    given_values = []
    assert lr_gain(lambda *values: given_values.append(values) or 3, 64, 16, 3.0, 0.5) == 3.0
    assert given_values == [(64, 16, 3.0, 0.5)]
    assert check_lr_scaling(len) is len
    assert check_lr_scaling("auto") == "auto"


@pytest.mark.parametrize("rule", ["cubic", ["linear"]])
def test_unknown_rules_are_refused_with_those_allowed(rule):
    with pytest.raises((ValueError, TypeError), match="lr_scaling.*" + ".*".join(LR_RULES)):
        check_lr_scaling(rule)
    with pytest.raises((ValueError, TypeError), match="lr_scaling"):
        lr_gain(rule, 64, 16, 3.0, 0.5)
    for gain in (math.inf, None):
        with pytest.raises((ValueError, TypeError), match="lr_scaling"):
            lr_gain(lambda *_, gain=gain: gain, 64, 16, 3.0, 0.5)
