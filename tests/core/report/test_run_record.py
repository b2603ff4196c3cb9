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


A_ROUND = as_line(RoundRecord(9.0, 0, 9, 1, 1, (1, 1)))
UNREADABLE = {
    "newer": as_line(header(2)).replace('"version":1', '"version":2'),
    "damaged": as_line(header(2)).replace('"policy":"perf_model"', '"policy":5'),
    "cut": as_line(header(2))[:60],
    "behind a line that was cut": A_ROUND[:30] + as_line(header(2)),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_header_that_cannot_be_read_ends_the_run_before_it(name):
    """Its rounds are those of no other run; the error names the line, and how to read the run before."""
    first = [*lines(a_run()), UNREADABLE[name], A_ROUND]
    with pytest.raises(RecordError, match=r"line 12, the first of the newest run: .* the lines from 12 on") as error:
        RunRecord.from_lines(first)
    assert ("Update lightning-hetero" in str(error.value)) == (name == "newer")
    assert RunRecord.from_lines(first[:11]).end is not None
    read = RunRecord.from_lines([*first, as_line(header(4)), "{"])
    assert (read.workers, read.rounds, read.problems[0][:7], len(read.problems)) == (4, (), "line 15", 1)


def test_a_record_may_begin_with_the_rest_of_another_one():
    assert len(RunRecord.from_lines(["{", A_ROUND, *lines(a_run())]).rounds) == 5


def test_words_of_a_line_are_no_header():
    other = '{"kind":"of a later version","inner":{"kind":"run"}}'
    text = as_line(RoundRecord(9.0, 0, 9, 1, 1, (1, 1, 1), kept='"kind":"run"'))
    assert len(RunRecord.from_lines([*lines(a_run()), other, text]).rounds) == 6


def test_rounds_keep_their_order():
    rounds = [RoundRecord(float(i), 0, i, 1, 1, (1, 1)) for i in (1, 2, 3)]
    assert RunRecord.of([header(2), *rounds]).rounds == tuple(rounds)
