"""A record is read as it was written, whatever became of some lines; what is damaged names its line and field."""

import json
import math
import os
import re
from dataclasses import fields

import pytest

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report.json_lines import as_line, from_line
from lightning_hetero.core.report.records import VERSION, ChangeRecord, EndRecord, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report import RecordError, compare_runs, find_record, read_run, trace_events
from tests.recorded import a_run, header
from tests.report.runs import lines_of, simulated, written

RUN = a_run(settings={"policy": "pid"}, command=("a.py", "--x"), versions={"torch": "2"})
ODD = {"forward": (math.nan, 1e9), "kept": "é\n\ud800", "sample": (((1e100,) * 10, (math.nan,) * 9),), "stale": True}
EVERY = (RUN.header, *RUN.rounds, *RUN.changes, *RUN.gains, *RUN.stragglers, RUN.end)
LINES = [as_line(one) for one in EVERY]


def same(a, b):
    """Equality in which numbers have six digits, and what is not known equals itself."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == (pytest.approx(b, rel=1e-5, nan_ok=True) if isinstance(b, float) else b)


def test_every_line_is_read_as_it_was_written():
    for record in (*EVERY, RoundRecord(1.0, 0, 1, 2, 3, (1, 2), **ODD)):
        line = as_line(record)
        assert line.index("\n") == len(line) - 1
        read = from_line(line)
        for one in fields(record):
            found, value = getattr(read, one.name), getattr(record, one.name)
            assert abs(found - value) <= 5e-4 if one.name == "time" else same(found, value), one.name


def test_the_schema_is_what_its_readers_rely_on():
    assert set(json.loads(as_line(RoundRecord(1.0, 0, 1, 2, 3, (1, 2))))) == {
        *("kind", "time", "epoch", "step", "count", "timed", "sizes", "crc")  # defaults take no room
    }
    line = json.loads(as_line(ChangeRecord(123456.78949, 0, 1, (1,), "why", 0.123456789)))
    assert (line["time"], line["predicted"]) == (123456.789, 0.123457)
    assert {json.loads(line)["kind"] for line in LINES} == {"run", "round", "change", "gain", "straggler", "end"}
    renamed = {"local_batch_sizes": "size", "data_wait": "data"}
    assert tuple(renamed.get(name, name) for name in StepObservations.FIELDS) == RoundRecord.SAMPLED
    for other in ('{"kind":"of a later version"}', '{"no":"kind"}', '{"kind":["list"]}'):
        assert from_line(other) is None
    assert from_line(json.dumps(json.loads(as_line(EndRecord(1.0, 0, 1, 2))) | {"later": 3})) == EndRecord(1.0, 0, 1, 2)


GAIN = {"kind": "gain", "time": 1, "epoch": 0, "step": 1, "before": 1, "after": 1}
ROUND = {"kind": "round", "time": 1, "epoch": 0, "step": 1, "count": 1, "timed": 1, "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        *(("{", "JSON"), ("[" * 100_000, "JSON|nested"), ("[1]", "object"), ('{"kind":"gain"}', "time")),
        (json.dumps(GAIN | {"after": math.inf}), "JSON"),
        (json.dumps(GAIN | {"after": math.inf}).replace("Infinity", "1e999"), "after"),
        (json.dumps(ROUND | {"nodes": [[1.0] * 3] * 2}), r"nodes\[0\]"),
        (json.dumps(ROUND | {"sample": [[[1.0] * 8] * 2]}), r"sample\[0\]\[0\]"),
        *((json.dumps({"kind": "run", **more}), "version") for more in ({}, {"version": 0}, {"version": True})),
        (json.dumps({"kind": "run", "version": VERSION + 1}), "Update"),
        (json.dumps({"kind": "run", "version": 1, "workers": [3]}), "damaged"),
        (LINES[-1].replace('"steps":50', '"steps":51'), "checksum"),
    ],
    ids=lambda text: text[:40],
)
def test_damaged_lines_are_refused_by_the_name_of_their_field(line, says):
    with pytest.raises(RecordError, match=says):
        from_line(line, 2)
    assert from_line(json.dumps(ROUND | {"data": [], "sample": []}), 2).total == 3, "of an earlier version, no checksum"


FOREIGN = (None, True, -0.5, 0, 1e-320, 1e101, 10**400, "x", [], [1], [[1.0]], [None] * 3, {"a": 1})


@pytest.mark.parametrize("kind", ["round", "change", "gain", "straggler", "end"])
def test_whatever_a_line_holds_it_is_read_or_named_and_nothing_raises_later(kind, tmp_path, caplog):
    """One field of one line has another value; the comparison and the trace are strict JSON."""
    run = simulated(rounds=4, steps=3)
    whole, path, damaged = lines_of(run), tmp_path / "x.jsonl", 0
    i = max(i for i, line in enumerate(whole) if f'"kind":"{kind}"' in line)
    values = json.loads(re.sub(r',"crc":"\w+"', "", whole[i]))
    for name in sorted({*values, *(("link", "max_local", "sync") if kind == "round" else ())} - {"kind"}):
        for other in FOREIGN:
            caplog.clear()
            path.write_text("".join([*whole[:i], json.dumps(values | {name: other}) + "\n", *whole[i + 1 :]]))
            found = read_run(path)
            damaged += found.damaged
            said = [one for one in caplog.messages if f"{path}" in one and f"line {i + 1}: " in one and name in one]
            assert len(said) == found.damaged
            if not found.damaged:
                json.dumps([trace_events(found), compare_runs(found, run).to_dict()], allow_nan=False)
    assert damaged > 30


# files


def test_every_prefix_of_a_file_can_be_read_and_damage_is_counted():
    text = "".join(LINES)
    for end in range(len(LINES[0]), len(text), 97):
        assert RunRecord.from_lines(text[:end].splitlines()).header == RUN.header
    whole, cut = RunRecord.from_lines(LINES), RunRecord.from_lines(text[:-20].splitlines())
    assert (whole.end, whole.damaged, whole.workers, whole.header) == (RUN.end, 0, 3, RUN.header)
    assert [len(getattr(whole, name)) for name in ("rounds", "changes", "gains", "stragglers")] == [5, 1, 1, 2]
    assert (cut.end, cut.damaged, cut.rounds) == (None, 1, whole.rounds)


A_ROUND = as_line(RoundRecord(9.0, 0, 9, 1, 1, (1, 1, 1), kept='"kind":"run"'))
TWO, FOUR = as_line(header(2)), as_line(header(4))
OF_LATER = '{"kind":"of a later version","inner":{"kind":"run"}}'
FILES = {
    "the last of several runs counts": ([*LINES, FOUR], 4, 0, 0),
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
    "behind a line that was cut": A_ROUND[:30] + TWO,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_header_that_cannot_be_read_ends_the_run_before_it(name):
    """Its rounds are those of no other run; the error names the line, and from where on to leave out lines."""
    with pytest.raises(RecordError, match=r"line 12\b"):
        RunRecord.from_lines([*LINES, UNREADABLE[name], A_ROUND])


@pytest.mark.parametrize("content", ["", LINES[-1], "PK\x03\x04 a checkpoint"])
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(RecordError, match=r"x.jsonl.*(first line|JSON)"):
        read_run(tmp_path / "x.jsonl")


def test_a_file_a_folder_and_the_newest_below_a_folder(tmp_path):
    paths = [written(RUN, tmp_path / "logs" / f"version_{i}") for i in range(3)]
    for i, path in enumerate(paths):
        os.utime(path, (1000.0 - i, 1000.0 - i))
    assert find_record(paths[2]) == find_record(paths[2].parent) == paths[2]
    assert find_record(tmp_path) == paths[0], "the newest"
    for name, says in (("logs/version_0/a", "nowhere|a"), ("a\0b", "a")):
        with pytest.raises(RecordError, match=says):
            read_run(f"{tmp_path}/{name}")
