"""Time lost by stragglers: a record gives what the detector counted, also that of a run that was killed."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.lost_time import lost_time, straggler_spans
from lightning_hetero.core.report.records import RoundRecord, StragglerRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.summary import summary_of
from lightning_hetero.core.stragglers.detector import StragglerDetector
from tests.recorded import header

STEPS = 8
SCENES = {
    "one": [(0.1, 0.15, 0.1)] * 3,
    "two at once": [(0.1, 0.15, 0.15)] * 2,
    "one within another": [(0.1, 0.15, 0.1), (0.1, 0.15, 0.15), (0.1, 0.15, 0.15), (0.1, 0.15, 0.1)],
    "one after another": [(0.1, 0.15, 0.1)] * 2 + [(0.1, 0.1, 0.1)] + [(0.1, 0.1, 0.15)] * 3,
}


def steps(backward):
    sizes, zeros = np.full((STEPS, 3), 8.0), np.zeros((STEPS, 3))
    busy = np.tile(backward, (STEPS, 1))
    return StepObservations(sizes, zeros, busy, zeros, zeros, zeros, np.full((STEPS, 3), max(backward)))


def watched(scene, ended=True):
    """Record of some rounds as a run writes it, and the detector that watched them."""
    detector, records = StragglerDetector(3), []
    for i, backward in enumerate([(0.1,) * 3, *scene, *[(0.1,) * 3] * ended]):
        for one in detector.observe(steps(backward), STEPS):
            event = "end" if one.relieved else "begin"
            at = 0, STEPS * i
            line = StragglerRecord(i - 0.01, event, one.rank, one.phase, *at, one.cost, one.lost, one.relieved)
            records.append(line)
        records.append(RoundRecord(float(i), 0, STEPS * (i + 1) - 1, STEPS, STEPS, (8, 8, 8)))
    return RunRecord.of([header(3), *records]), detector


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", SCENES)
def test_lost_seconds_are_those_that_the_detector_counted(name, ended):
    run, detector = watched(SCENES[name], ended)
    assert RunFigures(run).lost == pytest.approx(detector.lost)
    waited = STEPS * sum(max(backward) - 0.1 for backward in SCENES[name])
    assert detector.lost == pytest.approx(waited), "the scene is what it says"
    assert any(one.end is None for one in straggler_spans(run)) != ended


def test_a_run_that_was_killed_has_lost_what_its_stragglers_cost_until_then():
    run, _ = watched(SCENES["two at once"], ended=False)
    assert all(one.event == "begin" for one in run.stragglers)
    assert [one.total for one in straggler_spans(run)] == pytest.approx([0.05 * 16] * 2)
    (line,) = [one for one in summary_of(replace(run, rounds=with_times(run.rounds))).lines if "straggler" in one]
    assert line.startswith("2 stragglers, 0.8 s lost; most by rank 1 (backward)")


def with_times(rounds):
    busy = dict.fromkeys(("data", "forward", "backward", "optimizer"), (0.01,) * 3)
    return tuple(replace(one, step_time=0.1, **busy) for one in rounds)


def a_line(time, event, rank=1, lost=1.0, phase="data"):
    return StragglerRecord(time, event, rank, phase, 0, 1, 0.1, lost)


def spans_of(*lines, rounds=(1.0, 2.0, 3.0, 4.0)):
    counts = {time: int(10 * time) for time in rounds}
    records = [RoundRecord(time, 0, int(time), count, 0, (8, 8, 8)) for time, count in counts.items()]
    return straggler_spans(RunRecord.of([header(3), *records, *lines]))


def test_what_lies_between_is_shared_out_by_steps():
    (one,) = spans_of(a_line(1.0, "begin"), a_line(4.0, "end", lost=6.0))
    assert (one.first, one.lost) == (0, pytest.approx((1.0, 5.0 * 20 / 50, 5.0 * 30 / 50)))
    (one,) = spans_of(a_line(1.9, "begin"), a_line(2.1, "end", lost=6.0))
    assert (one.first, one.lost, one.total) == (1, (6.0,), 6.0)
    (one,) = spans_of(a_line(3.0, "begin", lost=0.5), a_line(4.5, "end", lost=2.5))
    assert (one.first, one.lost) == (2, (0.5, 2.0))


def test_lines_that_are_missing_or_out_of_order_still_count():
    (one,) = spans_of(a_line(3.0, "end", lost=2.0))
    assert (one.begin, one.first, one.lost) == (None, 1, (2.0,))
    first, second, third = spans_of(
        a_line(1.0, "begin"), a_line(1.0, "begin", phase="link", rank=-1), a_line(2.0, "end"), a_line(3.0, "end")
    )
    assert (first.known.phase, first.end.time, second.end, third.begin) == ("data", 2.0, None, None)
    assert spans_of(a_line(1.0, "begin"), rounds=())[0].lost == (1.0,)
    assert lost_time([]) == 0.0
