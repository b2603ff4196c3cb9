"""What is compared with the measured steps was predicted before they ran."""

import math

import pytest

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.engine.watch.predictions import UNFORESEEN, Foresight, Predictions

EVEN = BatchPlan(8, (4, 4), step_time=0.5, step_time_error=0.05)
FASTER = BatchPlan(8, (6, 2), step_time=0.25, step_time_error=0.01)


def unknown(predicted):
    return all(map(math.isnan, predicted))


@pytest.mark.parametrize("foresight", [UNFORESEEN, Foresight(EVEN, 1, (0.3, 0.02))])
def test_a_plan_that_began_since_has_its_own_prediction(foresight):
    assert foresight.of(FASTER, 1) == (0.25, 0.01)
    assert unknown(foresight.of(BatchPlan(8, (5, 3)), 1))


def test_the_newest_prediction_counts_for_the_plan_that_stays():
    assert Foresight(EVEN, 1, (0.3, 0.02)).of(EVEN, 1) == (0.3, 0.02)
    assert Foresight(EVEN, 1, (0.3, 0.02)).of(BatchPlan(8, (4, 4)), 1) == (0.3, 0.02)
    assert unknown(Foresight(EVEN).of(EVEN, 1))


def test_steps_of_another_number_of_micro_batches_were_not_predicted():
    for plan in (EVEN, FASTER):
        assert unknown(Foresight(EVEN, 2, (0.3, 0.02)).of(plan, 1))
    assert UNFORESEEN.of(FASTER, 4) == (0.25, 0.01)


def test_the_policys_prediction_comes_before_that_of_a_model_that_only_watches():
    predictions, nothing = Predictions(), StepObservations.empty(2)
    plan = BatchPlan(8, (4, 4))

    def compare(predicted, watched):
        done = RoundResult(None, nothing, None, predicted, error=None if predicted is None else 0.01)
        return predictions.compare(done, plan, 1, watched)

    assert unknown(compare(None, (0.4, 0.04)))
    assert unknown(predictions.predicted)
    assert compare(0.3, (0.5, 0.05)) == (0.4, 0.04)
    assert unknown(predictions.predicted)
    assert compare(None, (math.nan, math.nan)) == (0.3, 0.01)
    assert predictions.predicted == (0.3, 0.01)
    assert compare(None, (0.2, 0.02)) == predictions.predicted, "neither knew anything new"
    assert compare(None, (0.6, 0.06)) == (0.2, 0.02)
    assert predictions.predicted == (0.3, 0.01), "the policy's is the newest that it made"
