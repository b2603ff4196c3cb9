"""What rank 0 learns of costs: which decision carries it, and that the split by cost comes near the optimum."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.timing.cost.features import share_features
from lightning_hetero.data.cost.division import CostDivision
from lightning_hetero.engine.cost_learning import CostLearning

PLAN = BatchPlan(12, (8, 4))
DIVISION = CostDivision(np.ones(12), CostWeights.of("cost"))


def seen(steps, seed=0, *, theta=(0, 0, 1, 0, 0), sizes=(8, 4), speeds=(1.0, 2.0)):
    rng = np.random.default_rng(seed)
    work = np.array([[share_features(rng.lognormal(0, 0.6, n)) for n in sizes] for _ in range(steps)])
    compute = 3.0 + np.array(speeds) * (work @ np.array(theta)) * np.exp(rng.normal(0, 0.01, (steps, 2)))
    planned, zero = np.tile(np.array(sizes, dtype=float), (steps, 1)), np.zeros((steps, 2))
    return StepObservations(planned, 0.5 * compute, 0.5 * compute, zero, zero, zero, compute, work=work)


def test_learned_weights_are_proposed_by_themselves_once():
    learning = CostLearning(DIVISION)
    learning.observe(seen(40), PLAN)
    decision = learning.carried_by(Decision(None, kept="nothing to gain"), PLAN)
    plan = decision.proposal.plan
    assert plan.local_batch_sizes == PLAN.local_batch_sizes
    assert "padded_cost" in decision.proposal.reason
    assert decision.kept is None
    learning.observe(seen(40, seed=1), plan)
    assert learning.carried_by(Decision(None), plan).proposal is None, "they have hardly changed"


def test_a_plan_of_the_planner_carries_the_weights():
    learning, proposed = CostLearning(DIVISION), Proposal(BatchPlan(12, (9, 3)), "faster")
    running = replace(PLAN, cost=CostWeights.of("padded_cost"))
    assert learning.carried_by(Decision(None, proposed), running).proposal.plan.cost == running.cost
    learning.observe(seen(40), PLAN)
    carried = learning.carried_by(Decision(None, proposed), PLAN).proposal
    assert carried.plan.local_batch_sizes == (9, 3)
    assert carried.plan.cost.theta == learning.fit.theta
    own = Proposal(replace(proposed.plan, cost=CostWeights.of("samples")), "given")
    assert learning.carried_by(Decision(None, own), PLAN).proposal == own


def test_weights_that_are_learned_anew_go_before_those_of_the_running_plan():
    learning = CostLearning(DIVISION)
    learning.observe(seen(40), PLAN)
    old = replace(PLAN, cost=CostWeights.of("samples"))
    proposed = Proposal(BatchPlan(12, (9, 3)), "faster")
    assert learning.carried_by(Decision(None, proposed), old).proposal.plan.cost.theta == learning.fit.theta


def test_fixed_work_is_learned_where_a_plan_has_none():
    """Weights of a plan that was resumed, or given, say nothing of what a step costs whatever its share."""
    learning = CostLearning(DIVISION)
    learning.observe(seen(40), PLAN)
    known = replace(PLAN, cost=replace(learning.carried_by(Decision(None), PLAN).proposal.plan.cost, fixed=()))
    plan = learning.carried_by(Decision(None), known).proposal.plan
    assert min(plan.cost.fixed) > 0.5


def test_a_fit_stays_where_new_steps_teach_nothing():
    learning = CostLearning(DIVISION)
    learning.observe(seen(40), PLAN)
    fit = learning.fit
    broken = seen(300)
    learning.observe(replace(broken, forward=broken.forward * np.nan), PLAN)
    assert learning.fit == fit


def test_times_are_reduced_with_the_weights_of_the_plan_until_there_is_a_fit():
    raw = seen(6)  # too few for a fit
    by_plan = CostLearning(DIVISION).observe(raw, replace(PLAN, cost=CostWeights.of("padded_cost")))
    by_first = CostLearning(DIVISION).observe(raw, PLAN)
    assert by_plan.compute.std() < 0.6 * by_first.compute.std()


def test_nothing_is_proposed_before_there_is_a_fit():
    learning = CostLearning(DIVISION)
    learning.observe(seen(3), PLAN)
    assert learning.carried_by(Decision(None, kept="few"), PLAN) == Decision(None, kept="few")


def test_planners_see_times_without_the_work_that_varies():
    learning, raw = CostLearning(DIVISION), seen(60)
    reduced = learning.observe(raw, PLAN)
    np.testing.assert_array_equal(reduced.local_batch_sizes, raw.local_batch_sizes)
    assert (reduced.compute.std(axis=0) < 0.2 * raw.compute.std(axis=0)).all()


@pytest.fixture(scope="module")
def benchmark():
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("lengths_benchmark", folder / "lengths.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(folder))
    return module


@pytest.mark.parametrize("row", [2, 4, 6], ids=["padded", "packed", "fixed"])
def test_the_learned_split_by_cost_is_near_the_optimum(benchmark, row):
    """The closed loop with the default planner, on a seed that the benchmark does not have."""
    found = benchmark.measure(*benchmark.ROWS[row][2:], seed=11)
    assert found["cost"] > 0.95
    assert found["cost"] == max(found.values())
