"""What every policy of the table promises, and what a decision may be: checked for each line of ``POLICIES``."""

import json
import math
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pytest

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.control_settings import ControlSettings
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.staleness import StaleSettings
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import DEFAULT, NAMED, POLICIES, policy_name, same_policy
from lightning_hetero.core.policies.base import (
    Decision,
    Proposal,
    check_planner,
    load_planner,
    moves_total,
)
from lightning_hetero.core.policies.round_decision import decide_round
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.core.timing.step_times import SmoothingSettings
from tests.equations.clusters import (
    CLUSTER,
    FAST,
    SLOW,
    context,
    drive,
    even_plan,
    excess,
    measure,
    planner_of,
    random_cluster,
    slowed,
)

NOISE = RunningNoiseScale().update(trace=900.0, global_sq_norm=1.0 + 900 / 48, total_batch_size=48)
SIZE = MessageSize(2_000_000, 2, parts=(6,), listed=64, marked=64, marked_from=2.0, align=1)
LINK = MessageLink(0.01, SIZE, (1e7,) * 3, seconds=0.01, latency=1e-3)


@pytest.fixture(params=[name for name, entry in POLICIES.items() if entry.planner is not None])
def name(request):
    return request.param


def fresh(name, total=192):
    """A planner of this policy as it is when training begins."""
    planner = planner_of(name)
    return replace(planner, initial_total=total) if hasattr(planner, "initial_total") else planner


def learned(name, ctx):
    return drive(fresh(name), CLUSTER, even_plan(ctx), ctx, 6, np.random.default_rng(0))[0]


def stored(state):
    return json.loads(json.dumps(state, allow_nan=False))


# the table


def test_each_policy_makes_its_planner_and_is_known_by_its_name():
    for name, entry in POLICIES.items():
        planner = planner_of(name)
        assert (planner is None) == (entry.planner is None)
        assert policy_name(planner) == ("fixed" if planner is None else name)
        assert same_policy(policy_name(planner), planner)
        assert planner is None or (check_planner(planner) is planner and moves_total(planner) == planner.moves_total)
        assert not same_policy(None, planner)
        assert name in NAMED or set(entry.needs) <= set(HeteroConfig.__dataclass_fields__)
        with nullcontext() if name in NAMED else pytest.raises(ValueError, match="policy"):
            HeteroConfig(policy=name)
    assert NAMED[0] == DEFAULT
    assert not same_policy("goodput", planner_of("pid"))
    assert same_policy("lightning_hetero.core.adaptive.GoodputPlanner", planner_of("goodput"))
    assert not moves_total(None)


OUT_OF_RANGE = [
    (ControlSettings, {"min_steps": 2.5, "min_throughput_change": 1.1, "gain_growth": 0.9, "min_gain": 1.1}),
    (ControlSettings, {"gain_after_reversal": 0.0, "bound_lifetime_growth": 0, "finishing_dead_band": 1.1}),
    (SmoothingSettings, {"noise_steps": 0, "longest_mean_steps": 0, "outlier_ratio": 0}),
    (StaleSettings, {}),
]


@pytest.mark.parametrize(("settings", "wrong"), OUT_OF_RANGE)
def test_a_setting_out_of_its_range_is_refused_by_name(settings, wrong):
    numbers = [field.name for field in fields(settings) if isinstance(field.default, int | float)]
    for name, value in [*wrong.items(), *((name, value) for name in numbers for value in (-0.1, math.nan))]:
        with pytest.raises((ValueError, TypeError), match=name):
            settings(**{name: value})


# promises of all


def test_state_is_plain_python_and_follows_the_hardware_not_the_rank(name):
    ctx = context(192, 3, capacities=(4.0, 2.0, 1.0))
    planner = learned(name, ctx)
    back = fresh(name).loaded(stored(planner.state_dict()))
    assert back.state_dict() == planner.state_dict()
    here = back.initial(ctx)
    assert here == planner.initial(ctx)
    turned = replace(ctx, identities=ctx.identities[::-1], capacities=ctx.capacities[::-1])
    assert back.initial(turned).plan.local_batch_sizes == here.plan.local_batch_sizes[::-1]
    assert here.plan.local_batch_sizes[0] > here.plan.local_batch_sizes[2]
    nothing = fresh(name)
    assert nothing.loaded(stored(nothing.state_dict())).initial(ctx) == nothing.initial(ctx)
    two = replace(context(100, 2), identities=("host-2", "host-0"))
    fewer = back.initial(two).plan
    assert sum(fewer.local_batch_sizes) == 100
    assert name == "static" or excess(replace(CLUSTER, nodes=(SLOW, FAST)), fewer) <= 0.25


def test_a_planner_that_is_resumed_after_every_decision_goes_on_near_the_same_split(name):
    """Exactly the same, except for a controller that counts the steps since its last change anew."""
    ctx = context(192, 3, noise=NOISE, link=LINK)
    ends = []
    for resumes in (False, True):
        planner, plan, rng = fresh(name), even_plan(ctx), np.random.default_rng(1)
        for decision in range(8):
            seen = measure(slowed(CLUSTER, 1, 3.0 if decision > 4 else 1.0), plan.local_batch_sizes, rng)
            planner = fresh(name).loaded(stored(planner.state_dict())) if resumes else planner
            planner, proposal = planner.decide(seen, plan, replace(ctx, total_batch_size=plan.total_batch_size))
            plan = plan if proposal is None else proposal.plan
        ends.append(plan)
    if name == "pid":
        assert np.abs(np.subtract(*(end.local_batch_sizes for end in ends))).max() <= 0.1 * 192
    else:
        assert ends[0] == ends[1]


def test_no_observation_changes_nothing_and_a_decision_leaves_its_planner_as_it_was(name):
    ctx, planner = context(192, 3), fresh(name)
    before = stored(planner.state_dict())
    decision = Decision.of(planner.decide(StepObservations.empty(3), even_plan(ctx), ctx), planner, 192)
    assert decision.proposal is None
    assert decision.planner.state_dict() == before
    decision = Decision.of(planner.decide(measure(CLUSTER, (64,) * 3, np.random.default_rng(0)), even_plan(ctx), ctx))
    assert planner.state_dict() == before
    assert decision.proposal is None or decision.proposal.reason
    assert (decision.planner.state_dict() == before) == (name == "static")


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("bounded", [False, True])
def test_every_plan_has_its_total_within_bounds_in_multiples(name, multiple, bounded, seed):
    cluster, rng, moved = random_cluster(seed), np.random.default_rng(seed), []
    n = len(cluster.nodes)
    most = tuple((multiple * rng.integers(4, 9, n)).tolist()) if bounded else None
    plan = BatchPlan(4 * multiple * n, (4 * multiple,) * n)
    ctx = context(
        *(plan.total_batch_size, n), min_local=(multiple,) * n, max_local=most, multiple=multiple, noise=NOISE,
        capacities=tuple(rng.uniform(1, 9, n)), link=replace(LINK, rates=(1e7,) * n),
    )  # fmt: skip
    planner = fresh(name, plan.total_batch_size)
    first = planner.initial(ctx)
    plan = first.plan if first else plan
    for count in range(5):
        ctx = replace(ctx, epoch_begins=count % 2 == 0, total_batch_size=plan.total_batch_size)
        seen = measure(cluster, plan.local_batch_sizes, rng, noise=0.1)
        outcome = Decision.of(planner.decide(seen, plan, ctx), planner, plan.total_batch_size)
        planner, plan = outcome.planner, outcome.proposal.plan if outcome.proposal else plan
        ctx = replace(ctx, accumulation=getattr(planner, "accumulation", 1))
        sizes = np.array(plan.local_batch_sizes)
        assert sizes.sum() == plan.total_batch_size
        assert (sizes >= multiple).all()
        assert (sizes % multiple == 0).all()
        assert most is None or (sizes <= most).all()
        moved.append(plan.total_batch_size * ctx.accumulation)
    assert moves_total(planner) or len(set(moved)) == 1


# what a decision may be

PLAN = BatchPlan(16, (10, 6))


@pytest.mark.parametrize(
    ("outcome", "error", "names"),
    [
        (None, TypeError, "decide"),
        ((StaticPlanner(), PLAN), TypeError, "BatchPlan"),
        (Decision(StaticPlanner(), Proposal(PLAN, None)), TypeError, "reason"),
        (Decision("static"), TypeError, "planner.*moves_total"),
        (Decision(StaticPlanner(), density=0.5), TypeError, "density"),
        (Decision(StaticPlanner(), soon=1), TypeError, "soon"),
        (Decision(StaticPlanner(), Proposal(BatchPlan(24, (16, 8)), "more")), ValueError, "16 to 24"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_names_the_planner_and_what_is_wrong(outcome, error, names):
    with pytest.raises(error, match=f"StaticPlanner.*{names}|{names}.*StaticPlanner"):
        Decision.of(outcome, StaticPlanner(), 16)


def test_a_decision_is_one_or_a_pair_and_only_a_planner_that_moves_the_total_may():
    pair = Decision.of((StaticPlanner(), Proposal(PLAN, "by hand")), StaticPlanner(), 16)
    assert pair.proposal.plan == PLAN
    decision = Decision(Sure(True), Proposal(BatchPlan(24, (16, 8)), "more"), soon=np.True_, error=np.float32(1.0))
    assert Decision.of(decision, Sure(True), 16) is decision
    with pytest.raises(RuntimeError, match="loaded.*Forgetful"):
        load_planner(type("Forgetful", (StaticPlanner,), {"loaded": lambda self, state: None})(), {})


class Sure(StaticPlanner):
    """A step takes as many seconds as its plan has samples, give or take one."""

    def __init__(self, moves=False):
        self.moves_total = moves

    def decide(self, observations, current, context):
        return Decision(self, kept=f"{observations.num_steps} of {current.total_batch_size}", error=1.0)

    def predict(self, plan, context):
        assert (context.total_batch_size, context.noise, context.epoch_begins) == (plan.total_batch_size, None, False)
        return float(plan.total_batch_size)


def test_a_round_decides_on_the_upcoming_plan_and_predicts_the_running_one():
    old, new, seen = BatchPlan(4, (2, 2)), BatchPlan(8, (6, 2)), StepObservations(*[np.ones((3, 2))] * 7)
    for running, predicted in ((old, (4.0, None)), (new, (8.0, 1.0))):
        decision, found = decide_round(
            Sure(), seen, running, new, lambda: context(8, 2, noise=NOISE, epoch_begins=True)
        )
        assert (decision.kept, found) == ("3 of 8", predicted)
    for moves, begins, asked in ((False, True, False), (True, False, False), (True, True, True)):
        ctx, nothing = context(4, 2, epoch_begins=begins), StepObservations.empty(2)
        decision, _ = decide_round(Sure(moves), nothing, old, old, lambda ctx=ctx: ctx)
        assert decision.kept.startswith("0 of 4" if asked else "too few observations")
