"""A record is read from its lines, whatever became of the last one."""

import pytest

from lightning_hetero.core.report.json_lines import RecordError, as_line
from lightning_hetero.core.report.records import EndRecord, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from tests.recorded import a_run, header


def lines(run):
    every = (run.header, *run.rounds, *run.changes, *run.gains, *run.stragglers, run.end)
    return [as_line(one) for one in every]


def test_a_run_is_read_from_its_lines():
    run = a_run()
    read = RunRecord.from_lines(lines(run))
    counts = [len(getattr(read, name)) for name in ("rounds", "changes", "gains", "stragglers")]
    assert counts == [5, 1, 1, 2]
    assert read.workers == 3
    assert read.end == run.end
    assert read.damaged == 0


def test_a_line_that_was_cut_is_counted_and_left_out():
    text = "".join(lines(a_run()))
    read = RunRecord.from_lines(text[: len(text) - 20].splitlines())
    assert read.end is None
    assert read.damaged == 1
    assert len(read.rounds) == 5


def test_every_prefix_with_a_header_can_be_read():
    text = "".join(lines(a_run()))
    first = text.index("\n")
    for end in range(first + 1, len(text), 97):
        assert RunRecord.from_lines(text[:end].splitlines()).header == header()


def test_of_several_runs_the_last_one_counts():
    one, two = a_run(0), a_run(1, workers=2)
    assert RunRecord.from_lines([*lines(one), *lines(two)]).workers == 2
    assert len(RunRecord.from_lines([*lines(one), as_line(header(4))]).rounds) == 0


def test_blank_lines_are_no_damage():
    assert RunRecord.from_lines([as_line(header()), "\n", "  \n"]).damaged == 0


def test_without_a_header_there_is_no_run():
    with pytest.raises(RecordError, match="no first line of kind 'run'"):
        RunRecord.from_lines([as_line(EndRecord(1.0, 0, 1, 2))])
    with pytest.raises(RecordError, match="no first line"):
        RunRecord.from_lines([])
    with pytest.raises(RecordError, match="no JSON"):
        RunRecord.from_lines(["PK\x03\x04 a checkpoint"])


def test_a_newer_schema_is_an_error_and_no_damage():
    with pytest.raises(RecordError, match="Update"):
        RunRecord.from_lines([as_line(header()).replace('"version":1', '"version":2')])


def test_rounds_keep_their_order():
    rounds = [RoundRecord(float(i), 0, i, 1, 1, (1, 1)) for i in (1, 2, 3)]
    assert RunRecord.of([header(2), *rounds]).rounds == tuple(rounds)
