"""Words for a split that stays: each says the figures that were compared, and that steps are short only where so."""

import re

import numpy as np
import pytest

from lightning_hetero.core.policies.split_reasons import SHORT_STEP, WORTH, costs_too_much, not_beyond_luck

SHORT = "steps are too short to balance"
DEAR = "a change would cost more than it saves"
UNKNOWN = "too little is known of the workers yet"


def kind(text):
    return text.partition(":")[0]


@pytest.mark.parametrize("step_time", [0.002, 0.2])
def test_a_cost_is_said_with_the_saving_that_it_exceeds(step_time):
    """7.25 % of a step for 230 steps, against 200 ms and half a step."""
    cost = 0.2 + 0.5 * step_time + 0.0725 * 230 * step_time
    text = costs_too_much("22/20/18", 0.0725, step_time, 230.4, cost, cost - 0.5 * step_time)
    assert "22/20/18 would take 7.2% less for 230 steps" in text
    assert f"and costs {1e3 * cost:.1f} ms" in text
    assert kind(text) == (SHORT if step_time < SHORT_STEP else DEAR)


@pytest.mark.parametrize(
    ("gain", "step_time", "steps", "fixed", "short"),
    [
        (0.05, 0.005, 200, 0.1, True),  # at 15 ms it would save 150 ms, and cost 100 and a step of 15
        (0.05, 0.005, 200, 0.134, True),
        (0.05, 0.005, 200, 0.136, False),  # it would not pay at 15 ms either
        (0.05, 0.005, 10, 0.0, False),  # the cost is all in steps, so their length changes nothing
        (0.019, 0.005, 2000, 0.2, False),  # hardly worth it
        (0.05, 0.015, 200, 0.14, False),
    ],
)
def test_steps_are_too_short_for_a_cost_that_would_pay_at_the_limit(gain, step_time, steps, fixed, short):
    cost = fixed + step_time
    assert gain * step_time * steps <= cost
    text = costs_too_much("6/4", gain, step_time, steps, cost, fixed)
    assert kind(text) == (SHORT if short else DEAR)
    assert (gain >= WORTH and step_time < SHORT_STEP and gain * SHORT_STEP * steps > fixed + SHORT_STEP) is short
    assert ("a larger batch helps" in text) is short


@pytest.mark.parametrize(
    ("gain", "step_time", "least", "short"),
    [
        (0.05, 0.003, 0.2, True),  # at 15 ms, 4 % would do
        (0.05, 0.003, 0.25, True),
        (0.05, 0.003, 0.26, False),
        (0.019, 0.003, 0.05, False),
        (0.05, 0.015, 0.051, False),
        (0.05, 0.1, 0.2, False),
    ],
)
def test_steps_are_too_short_for_noise_that_would_do_at_the_limit(gain, step_time, least, short):
    text = not_beyond_luck("34/30", gain, step_time, least, np.array([0.2, 0.5]))
    assert kind(text) == (SHORT if short else UNKNOWN)
    assert (f"they take {1e3 * step_time:.1f} ms" in text) is short
    assert f"34/30 would take {gain:.1%} less, and only a gain of {least:.1%} is beyond luck" in text
    assert "single steps vary by 20% to 50%," in text
    assert text.endswith("; a larger batch helps") is short


@pytest.mark.parametrize(
    ("jitter", "said"),
    [
        ((0.22, 0.22), "22%"),
        ((0.221, 0.224), "22%"),
        ((0.0314, 0.22, 0.1), "3.1% to 22%"),
        ((0.0, 0.0004), "0.0%"),
        ((0.0995, 1.5), "10% to 150%"),
    ],
)
def test_jitter_is_said_from_the_calmest_to_the_most_restless_worker(jitter, said):
    text = not_beyond_luck("6/4", -0.001, 0.1, 0.03, np.array(jitter))
    assert re.search(r"their single steps vary by (.*?),", text).group(1) == said
    assert "6/4 would take 0.0% less" in text


@pytest.mark.parametrize("step_time", [0.002, 0.0091, 0.3])
@pytest.mark.parametrize("gain", [0.03, 0.06])
def test_what_changes_from_round_to_round_is_behind_the_colon(gain, step_time):
    """The log says a kind once."""
    texts = (
        costs_too_much("6/4", gain, step_time, 200, 1.0, 0.1),
        not_beyond_luck("6/4", gain, step_time, 2 * gain, np.array([gain, 0.3])),
    )
    assert all(kind(text) in (SHORT, DEAR, UNKNOWN) and "\n" not in text for text in texts)
