"""A record is read as it was written, whatever became of some lines; what is damaged names its line and field."""

import json
import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report.json_lines import RecordError, as_line, from_line
from lightning_hetero.core.report.records import VERSION, ChangeRecord, EndRecord, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from tests.recorded import a_run, header

RUN = a_run(settings={"policy": "pid"}, command=("a.py", "--x"), versions={"torch": "2"})
EVERY = (RUN.header, *RUN.rounds, *RUN.changes, *RUN.gains, *RUN.stragglers, RUN.end)
LINES = [as_line(one) for one in EVERY]


def same(a, b):
    """Equality in which numbers have six digits, and what is not known equals itself."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == (pytest.approx(b, rel=1e-5, nan_ok=True) if isinstance(b, float) else b)


def check_round_trip(record):
    line = as_line(record)
    assert line.endswith("\n")
    assert "\n" not in line[:-1]
    read = from_line(line)
    for one in fields(record):
        found, value = getattr(read, one.name), getattr(record, one.name)
        assert abs(found - value) <= 5e-4 if one.name == "time" else same(found, value), one.name


unknown = st.just(math.nan)
seconds = st.floats(0, 1e9) | unknown
row = st.lists(st.floats(-1e100, 1e100) | unknown, min_size=9, max_size=11).map(tuple)


@given(
    st.just(()) | st.tuples(seconds, seconds), st.text(max_size=20), seconds, st.lists(st.tuples(row, row), max_size=2)
)
def test_any_record_is_read_as_it_was_written(busy, text, number, sample):
    more = {"forward": busy, "kept": text, "step_time": number, "sample": tuple(sample), "stale": True}
    check_round_trip(RoundRecord(1.0, 0, 1, 2, 3, (1, 2), **more))
    for record in EVERY:
        check_round_trip(record)
    assert math.isnan(from_line(as_line(ChangeRecord(1.0, 0, 1, (1,), "why", math.inf))).predicted)


def test_the_schema_is_what_its_readers_rely_on():
    assert set(json.loads(as_line(RoundRecord(1.0, 0, 1, 2, 3, (1, 2))))) == {
        *("kind", "time", "epoch", "step", "count", "timed", "sizes", "crc")  # defaults take no room
    }
    line = json.loads(as_line(ChangeRecord(123456.78949, 0, 1, (1,), "why", 0.123456789)))
    assert (line["time"], line["predicted"]) == (123456.789, 0.123457)
    assert json.loads(LINES[0])["version"] == VERSION
    assert {json.loads(line)["kind"] for line in LINES} == {"run", "round", "change", "gain", "straggler", "end"}
    renamed = {"local_batch_sizes": "size", "data_wait": "data"}
    assert tuple(renamed.get(name, name) for name in StepObservations.FIELDS) == RoundRecord.SAMPLED
    for other in ('{"kind":"of a later version"}', '{"no":"kind"}', '{"kind":["list"]}'):
        assert from_line(other) is None
    assert from_line(json.dumps(json.loads(as_line(EndRecord(1.0, 0, 1, 2))) | {"later": 3})) == EndRecord(1.0, 0, 1, 2)


GAIN = {"kind": "gain", "time": 1, "epoch": 0, "step": 1, "before": 1, "after": 1}
ROUND = {"kind": "round", "time": 1, "epoch": 0, "step": 1, "count": 1, "timed": 1, "sizes": [1, 2]}
CHANGE = {"kind": "change", "time": 1, "epoch": 0, "step": 1, "sizes": [1, 2], "reason": "x"}
STRAGGLER = json.loads(re.sub(r',"crc":"\w+"', "", as_line(RUN.stragglers[0])))
ENDS = [
    *((GAIN, "before", 0, 1e9), (GAIN, "predicted", 0, 1e100), (STRAGGLER, "rank", -1, 2**53)),
    *((ROUND, "accumulation", 1, 2**53), (ROUND, "gamma", 0, 1), (ROUND, "noise_scale", -1e100, 1e100)),
]


@pytest.mark.parametrize(("line", "name", "low", "high"), ENDS)
def test_both_ends_of_a_range_are_in_it(line, name, low, high):
    assert [getattr(from_line(json.dumps(line | {name: value})), name) for value in (low, high)] == [low, high]
    for value in (low - max(1, abs(low)), 2 * high):
        with pytest.raises(RecordError, match=name):
            from_line(json.dumps(line | {name: value}))


CHANGED = [
    *(
        (GAIN, {name: value}, name)
        for name, value in {"time": "soon", "epoch": 0.5, "step": True, "after": None}.items()
    ),
    *((ROUND, {name: value}, name) for name, value in {"count": 0, "sizes": [0, 0], "data": [0.1] * 3}.items()),
    (ROUND, {"nodes": [[1.0] * 3] * 2}, r"nodes\[0\]"),
    (ROUND, {"sample": [[[1.0] * 8] * 2]}, r"sample\[0\]\[0\]"),
    (ROUND, {"stale": 1}, "stale"),
    *((CHANGE, {"sizes": value}, "sizes") for value in ([1.5, 1], [1], 7)),
    (CHANGE, {"reason": 3}, "reason"),
    (STRAGGLER, {"event": "ended"}, "event"),
    ({"kind": "run"}, {}, "version"),
    ({"kind": "run"}, {"version": True}, "version"),
    ({"kind": "run"}, {"version": VERSION + 1}, "Update"),
    ({"kind": "run"}, {"version": 1, "workers": [3]}, "damaged"),
]
DAMAGED = [
    *((json.dumps(line | change), says) for line, change, says in CHANGED),
    *(("{", "JSON"), ("[" * 100_000, "JSON|nested"), ("[1]", "object"), ('{"kind":"gain"}', "time")),
    (json.dumps(GAIN | {"after": math.inf}), "JSON"),
    (json.dumps(GAIN | {"after": math.inf}).replace("Infinity", "1e999"), "after"),
    (LINES[-1].replace('"steps":50', '"steps":51'), "checksum"),
]


@pytest.mark.parametrize(("line", "says"), DAMAGED, ids=lambda text: text[:40])
def test_damaged_lines_are_refused_by_the_name_of_their_field(line, says):
    with pytest.raises(RecordError, match=says):
        from_line(line, 2)
    assert from_line(json.dumps(ROUND | {"data": [], "sample": []}), 2).total == 3
    assert from_line(json.dumps(STRAGGLER), 2).rank == 1, "lines of earlier versions have no checksum"


# files


def test_every_prefix_of_a_file_can_be_read_and_damage_is_counted():
    text = "".join(LINES)
    for end in range(len(LINES[0]), len(text), 97):
        assert RunRecord.from_lines(text[:end].splitlines()).header == RUN.header
    whole, cut = RunRecord.from_lines(LINES), RunRecord.from_lines(text[:-20].splitlines())
    assert (whole.end, whole.damaged, whole.workers, whole.header) == (RUN.end, 0, 3, RUN.header)
    assert [len(getattr(whole, name)) for name in ("rounds", "changes", "gains", "stragglers")] == [5, 1, 1, 2]
    assert (cut.end, cut.damaged, cut.rounds) == (None, 1, whole.rounds)
    assert [one.time for one in whole.rounds] == pytest.approx([one.time for one in RUN.rounds], abs=1e-3)


A_ROUND = as_line(RoundRecord(9.0, 0, 9, 1, 1, (1, 1, 1), kept='"kind":"run"'))
TWO, FOUR = as_line(header(2)), as_line(header(4))
OF_LATER = '{"kind":"of a later version","inner":{"kind":"run"}}'
FILES = {
    "the last of several runs counts": ([*LINES, FOUR], 4, 0, 0),
    "blank lines": ([TWO, "\n", "  \n"], 2, 0, 0),
    "the rest of another run": (["{", A_ROUND, *LINES], 3, 5, 0),
    "words that look like a header": ([*LINES, OF_LATER, A_ROUND], 3, 6, 0),
    "a line with another number of workers": ([TWO, A_ROUND, "{"], 2, 0, 2),
    "a header after a damaged one": ([*LINES, TWO[:60], A_ROUND, FOUR, "{"], 4, 0, 1),
}


@pytest.mark.parametrize("name", FILES)
def test_of_a_file_the_last_run_is_read(name):
    lines, workers, rounds, damaged = FILES[name]
    read = RunRecord.from_lines(lines)
    assert (read.workers, len(read.rounds), read.damaged) == (workers, rounds, damaged)
    assert all(problem.startswith(f"line {len(lines)}") for problem in read.problems[-1:])


UNREADABLE = {
    "newer": TWO.replace('"version":1', '"version":2'),
    "damaged": TWO.replace('"policy":"perf_model"', '"policy":5'),
    "cut": TWO[:60],
    "behind a line that was cut": A_ROUND[:30] + TWO,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_header_that_cannot_be_read_ends_the_run_before_it(name):
    """Its rounds are those of no other run; the error names the line, and from where on to leave out lines."""
    with pytest.raises(RecordError, match=r"line 12\b.* lines from 12 on"):
        RunRecord.from_lines([*LINES, UNREADABLE[name], A_ROUND])
    with pytest.raises(RecordError, match="line 1"):
        RunRecord.from_lines([UNREADABLE[name]])


@pytest.mark.parametrize("lines", [[], [LINES[-1]], ["PK\x03\x04 a checkpoint"]])
def test_without_a_header_there_is_no_run(lines):
    with pytest.raises(RecordError, match="first line|JSON"):
        RunRecord.from_lines(lines)
