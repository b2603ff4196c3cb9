"""Factors on the learning rate against their formulas and limits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.lr_scaling import LR_RULES, adascale, lr_gain

moderate = settings(max_examples=100, deadline=None, derandomize=True)
sizes = st.integers(1, 100_000)
positive = st.floats(1e-12, 1e12)


@moderate
@given(sizes, sizes, positive, positive)
def test_adascale_is_the_formula(total, initial, trace, grad_sq_norm):
    expected = (trace / initial + grad_sq_norm) / (trace / total + grad_sq_norm)
    assert adascale(total, initial, trace, grad_sq_norm) == pytest.approx(expected)


@moderate
@given(sizes, sizes, positive, positive)
def test_adascale_lies_between_one_and_the_ratio_of_totals(total, initial, trace, grad_sq_norm):
    low, high = sorted((1.0, total / initial))
    assert low * (1 - 1e-9) <= adascale(total, initial, trace, grad_sq_norm) <= high * (1 + 1e-9)


@moderate
@given(sizes, sizes, positive)
def test_adascale_limits(total, initial, value):
    assert adascale(total, initial, trace=0.0, grad_sq_norm=value) == 1
    assert adascale(total, initial, trace=value, grad_sq_norm=0.0) == pytest.approx(total / initial)
    assert adascale(initial, initial, trace=value, grad_sq_norm=1.0) == 1


@moderate
@given(sizes, positive, positive, st.floats(1, 1e3))
def test_more_noise_gives_more_gain(initial, trace, grad_sq_norm, more):
    assert adascale(4 * initial, initial, trace * more, grad_sq_norm) >= adascale(
        4 * initial, initial, trace, grad_sq_norm
    ) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("trace", "grad_sq_norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (-1.0, 2.0), (1.0, -1.0), (0.0, 0.0)]
)
def test_adascale_is_one_while_nothing_is_known(trace, grad_sq_norm):
    assert adascale(64, 16, trace, grad_sq_norm) == 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), ("adascale", (3.0 / 16 + 0.5) / (3.0 / 64 + 0.5))],
)
def test_rules(rule, expected):
    assert lr_gain(rule, 64, 16, 3.0, 0.5) == pytest.approx(expected)


@pytest.mark.parametrize("rule", LR_RULES)
def test_every_rule_is_one_at_the_initial_total(rule):
    assert lr_gain(rule, 16, 16, 3.0, 0.5) == 1


def test_a_function_of_the_users_gets_all_four_values():
    given = []

    def rule(*values):
        given.append(values)
        return 3

    assert lr_gain(rule, 64, 16, 3.0, 0.5) == 3.0
    assert given == [(64, 16, 3.0, 0.5)]


@pytest.mark.parametrize("rule", ["cubic", "", None, 2.0, ["linear"]])
def test_unknown_rules_are_named_with_those_allowed(rule):
    with pytest.raises(ValueError, match=r"unknown; allowed are 'adascale', 'sqrt', 'linear', 'none' or a function"):
        lr_gain(rule, 64, 16, 3.0, 0.5)


@pytest.mark.parametrize("gain", [0.0, -1.0, math.nan, math.inf])
def test_gains_that_are_no_factor_are_refused(gain):
    with pytest.raises(ValueError, match=r"for a total of 64; it has to be a positive number"):
        lr_gain(lambda *_: gain, 64, 16, 3.0, 0.5)


@pytest.mark.parametrize("gain", [None, "much", (1.0, 2.0)])
def test_results_that_are_no_number_are_refused(gain):
    with pytest.raises(TypeError, match="return a positive number"):
        lr_gain(lambda *_: gain, 64, 16, 3.0, 0.5)
