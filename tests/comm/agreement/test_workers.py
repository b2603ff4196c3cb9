"""Who takes part, within which bounds, and the plan that a run begins with."""

import pytest

from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.policies.base import Proposal
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.static import StaticPlanner


class Fixed(StaticPlanner):
    """Knows one split from an earlier run, whatever the bounds."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def initial(self, context):
        return Proposal(BatchPlan(sum(self.sizes), self.sizes), "known")


class Table:
    """A control plane that has heard of the other ranks already."""

    def __init__(self, *others):
        self.others = others

    def gather_objects(self, value):
        return [value, *self.others]


def roster(n=2, min_local=1, max_local=None, capacities=None, multiple=1):
    return Workers(tuple("abcd"[:n]), capacities or (1.0,) * n, min_local, max_local, multiple=multiple)


def first(roster, total, planner=None, running=None, **config):
    proposal = roster.initial_plan(HeteroConfig(**config), total, planner, running)
    return None if proposal is None else (proposal.plan.local_batch_sizes, proposal.reason)


def test_meeting_takes_the_largest_minimum_and_the_least_bound_of_each():
    met = Workers.gather(Table(("b", 2.0, 2, 9, "V100")), "a", 1.0, min_local=1, bounds=(12, 7), device="A100")
    assert met == Workers(("a", "b"), (1.0, 2.0), 2, (7, 9), ("A100", "V100"))
    assert met.world_size == 2


def test_meeting_without_bounds():
    assert Workers.gather(Table(), "a", 1.0, min_local=1, bounds=(None, None)).max_local is None


def test_one_bound_is_enough_to_have_bounds():
    met = Workers.gather(Table(("b", 1.0, 1, 9, "")), "a", 1.0, min_local=1, bounds=(None, None))
    assert met.max_local[1] == 9
    assert met.max_local[0] > 10**9


def test_equal_names_are_told_apart():
    """Two containers may have one host name and slot."""
    others = [("a", 1.0, 1, 9, ""), ("b", 1.0, 1, 9, ""), ("a", 1.0, 1, 9, "")]
    met = Workers.gather(Table(*others), "a", 1.0, min_local=1, bounds=())
    assert met.identities == ("a", "a#1", "b", "a#2")


def test_context_has_what_a_planner_must_respect():
    context = roster(2, 2, (5, 6), (1.0, 3.0)).context(HeteroConfig(hysteresis=0.1), 8, accumulation=4)
    assert (context.total_batch_size, context.min_local, context.max_local) == (8, (2, 2), (5, 6))
    assert (context.hysteresis, context.accumulation, context.capacities) == (0.1, 4, (1.0, 3.0))


@pytest.mark.parametrize("sizes", [(6, 1), (1, 7), (4, 3, 1), (8,)], ids=str)
def test_plans_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match=r"do not fit 2 workers with at least 2 and at most \[5, 9\]"):
        roster(2, 2, (5, 9)).check(BatchPlan(sum(sizes), sizes))


def test_plan_that_fits():
    roster(2, 2, (5, 9)).check(BatchPlan(11, (2, 9)))
    roster(2).check(BatchPlan(10**6 + 1, (10**6, 1)))


@pytest.mark.parametrize(
    ("kwargs", "arguments", "expected"),
    [
        ({}, {"total": 9}, ((5, 4), "equal sizes")),
        ({"max_local": (2, 100)}, {"total": 9}, ((2, 7), "equal sizes")),
        ({"max_local": (2, 100)}, {"total": 9, "planner": PerfModelPlanner()}, ((2, 7), "equal sizes")),
        (
            {"capacities": (3.0, 1.0)},
            {"total": 8, "planner": StaticPlanner()},
            ((6, 2), "in proportion to cores or peak FLOPs"),
        ),
        ({}, {"total": 7, "local_batch_sizes": [7, 0]}, ((7, 0), "given split")),
        ({}, {"total": 8, "planner": Fixed(7, 1), "running": BatchPlan(8, (5, 3))}, None),
        ({}, {"total": 8, "planner": Fixed(7, 1), "running": BatchPlan(6, (5, 1))}, ((7, 1), "known")),
        ({}, {"total": 8, "running": BatchPlan(8, (5, 3))}, ((4, 4), "equal sizes")),
        ({}, {"total": 8, "running": BatchPlan(8, (4, 4))}, None),
        ({"multiple": 3, "n": 3}, {"total": 12}, ((6, 3, 3), "equal sizes")),
        ({"multiple": 4, "max_local": (7, 9)}, {"total": 12}, ((4, 8), "equal sizes")),
        (
            {"multiple": 4, "capacities": (3.0, 1.0)},
            {"total": 12, "planner": StaticPlanner()},
            ((8, 4), "in proportion to cores or peak FLOPs"),
        ),
        (
            {"multiple": 4},
            {"total": 12, "planner": Fixed(8, 4), "running": BatchPlan(12, (7, 5))},
            ((8, 4), "known"),
        ),
        ({"multiple": 4}, {"total": 12, "planner": Fixed(8, 4), "running": BatchPlan(12, (4, 8))}, None),
    ],
    ids=str,
)
def test_first_plan(kwargs, arguments, expected):
    assert first(roster(**kwargs), **arguments) == expected


@pytest.mark.parametrize(
    ("kwargs", "arguments", "says"),
    [
        ({"min_local": 4}, {"total": 7}, "7 samples cannot give each of 2 workers at least 4"),
        ({"max_local": (2, 3)}, {"total": 8}, r"at most \[2, 3\], together 5.*batches of at most 2"),
        ({"min_local": 2}, {"total": 5, "local_batch_sizes": [4, 1]}, "below min_local_batch_size=2"),
        ({"max_local": (5, 5)}, {"total": 8, "local_batch_sizes": [6, 2]}, "do not fit"),
        ({"max_local": (5, 5)}, {"total": 8, "planner": Fixed(7, 1)}, "do not fit"),
        ({"multiple": 4}, {"total": 10}, "local_batch_multiple=4.* 8 or 12"),
        ({"multiple": 4}, {"total": 4}, "local_batch_multiple"),
        ({"multiple": 4}, {"total": 8, "planner": Fixed(7, 1)}, "local_batch_multiple=4"),
        ({"multiple": 8, "max_local": (7, 9)}, {"total": 16}, "local_batch_multiple=8"),
        (
            {"max_local": (5, 5)},
            {"total": 8, "planner": PerfModelPlanner(), "running": BatchPlan(8, (6, 2))},
            "do not fit",
        ),
    ],
    ids=str,
)
def test_first_plan_refuses(kwargs, arguments, says):
    with pytest.raises(ValueError, match=says):
        first(roster(**kwargs), **arguments)


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (BatchPlan(8, (6, 2)), TypeError, r"initial\(\) of Begins proposed BatchPlan"),
        (
            Proposal(BatchPlan(9, (6, 3)), "more"),
            ValueError,
            r"initial\(\) of Begins changes the total batch from 8 to 9",
        ),
    ],
    ids=["no proposal", "another total"],
)
def test_what_a_planner_begins_with_is_checked(outcome, error, words):
    class Begins(StaticPlanner):
        def initial(self, context):
            return outcome

    with pytest.raises(error, match=words):
        first(roster(), 8, Begins())


# a bound that falls in the run


@pytest.mark.parametrize(
    ("held", "bounds", "now"),
    [(None, (NO_LIMIT, NO_LIMIT), None), (None, (NO_LIMIT, 5), (NO_LIMIT, 5)), ((8, 8), (9, 5), (8, 5))],
)
def test_bounds_only_fall(held, bounds, now):
    assert roster(max_local=held).bounded(bounds).max_local == now


@pytest.mark.parametrize(
    ("sizes", "high", "fitting", "multiple"),
    [
        ((6, 4), (6, 4), None, 1),
        ((6, 4), (5, NO_LIMIT), (5, 5), 1),
        ((6, 4, 2), (9, 3, 9), (7, 3, 2), 1),
        ((8, 0, 4), (6, 9, 9), (6, 0, 6), 1),  # one that was left out stays so
        ((8, 4), (7, 99), (4, 8), 4),
    ],
)
def test_a_plan_beyond_a_bound_becomes_one_of_the_same_total(sizes, high, fitting, multiple):
    proposal = roster(len(sizes), max_local=high, multiple=multiple).within_bounds(BatchPlan(sum(sizes), sizes))
    assert (proposal and proposal.plan.local_batch_sizes) == fitting


def test_a_plan_beyond_a_bound_says_whose():
    proposal = roster(max_local=(NO_LIMIT, 3)).within_bounds(BatchPlan(10, (6, 4)))
    assert proposal.reason == "rank 1 cannot hold more than 3"


def test_a_total_beyond_all_bounds_is_an_error():
    workers = roster(max_local=(5, 4))
    assert workers.has_room(9)
    assert not workers.has_room(10)
    with pytest.raises(ValueError, match=r"a total batch of 10 samples does not fit.*\[5, 4\], together 9"):
        workers.within_bounds(BatchPlan(10, (6, 4)))
