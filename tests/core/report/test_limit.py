"""The verdict names what limits the step: the link, a worker and its phase, the computing of all, or neither."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.limit import BOUND_BY_REST, limit_of
from lightning_hetero.core.report.run_record import RunRecord
from tests.recorded import a_round, header

NODES = [(0.001, 0.002, 0.002, 0.001), (0.002, 0.002, 0.004, 0.001)]


def limits(sizes=(16, 16), nodes=NODES, **more):
    one = a_round(np.random.default_rng(0), sizes, nodes=nodes, **more)
    return limit_of(RunFigures(RunRecord.of([header(2), one])))


def test_what_limits_the_step_is_named():
    assert limits() == "rank 1's backward pass"
    assert limits(data=(0.0, 0.3)) == "rank 1's loader"
    assert limits(data=(0.3, 0.0)) == "rank 0's loader"
    assert limits(link=0.2) == "the link (67% of the step)"
    assert limits((20, 10)) == "computing, balanced over all workers"
    assert limits((20, 10), data=(0.06, 0.06)) == "loading, balanced over all workers"


@pytest.mark.parametrize(("slower", "says"), [(1.08, "computing, balanced over all workers"), (1.12, "rank 1's")])
def test_workers_within_the_noise_of_their_times_are_balanced(slower, says):
    """Three standard errors of nine steps with 10 % of jitter are 10 % of the time."""
    record = a_round(np.random.default_rng(0), (16, 16), nodes=[NODES[0]] * 2)
    later = {name: getattr(record, name)[0] * np.array([1.0, slower]) for name in PHASES}
    changed = {**{name: tuple(map(float, seconds)) for name, seconds in later.items()}, "timed": 9}
    one = replace(record, jitter=(0.01, 0.1), **changed)
    assert limit_of(RunFigures(RunRecord.of([header(2), one]))).startswith(says)
    steady = replace(one, jitter=(0.001, 0.001))
    assert limit_of(RunFigures(RunRecord.of([header(2), steady]))).startswith("rank 1's")


def test_several_last_workers_are_no_single_one():
    for slow, says in ((2, "computing of ranks 0 and 2"), (4, "computing of 4 of 5 workers")):
        nodes = [NODES[0], NODES[1], *[NODES[0]] * (slow - 1)]
        record = a_round(np.random.default_rng(0), (16, 4, *[16] * (slow - 1)), nodes=nodes)
        assert limit_of(RunFigures(RunRecord.of([header(slow + 1), record]))) == says


def test_the_forward_pass_and_the_optimizer_can_limit():
    record = a_round(np.random.default_rng(0), (16, 16), nodes=[NODES[0]] * 2)
    slow = {name: tuple(np.array(getattr(record, name)) + [0.0, 0.1]) for name in ("forward", "optimizer")}
    for name, words in (("forward", "forward pass"), ("optimizer", "optimizer")):
        changed = replace(record, **{name: slow[name]}, step_time=record.step_time + 0.1)
        assert limit_of(RunFigures(RunRecord.of([header(2), changed]))) == f"rank 1's {words}"


def test_one_worker_is_not_balanced():
    record = a_round(np.random.default_rng(0), (16,), nodes=NODES[:1])
    assert limit_of(RunFigures(RunRecord.of([header(1), record]))) == "computing"


def test_without_timed_steps_the_limit_is_unknown():
    assert limit_of(RunFigures(RunRecord(header(2)))) == "unknown: no step was timed"


@pytest.mark.parametrize(("share", "says"), [(0.99, "computing, balanced"), (1.01, "the training loop, and single")])
def test_a_step_that_is_mostly_neither_computing_nor_the_link_says_so(share, says):
    """Steps of a few milliseconds: the split has little to do with their time."""
    record = a_round(np.random.default_rng(0), (20, 10), nodes=NODES)
    busy = record.step_time - record.link
    longer = replace(record, step_time=(busy + record.link) / (1.0 - share * BOUND_BY_REST))
    assert limit_of(RunFigures(RunRecord.of([header(2), longer]))).startswith(says)
