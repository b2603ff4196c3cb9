"""Lines of a record: what is written is read again, and what is damaged is an error that names itself."""

import contextlib
import json
import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.report.json_lines import RecordError, as_line, from_line
from lightning_hetero.core.report.records import (
    VERSION,
    ChangeRecord,
    EndRecord,
    RoundRecord,
    StragglerRecord,
)
from tests.recorded import a_run, header


def same(a, b):
    """Equality in which numbers may differ in the seventh digit, and NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def check_round_trip(record):
    line = as_line(record)
    assert line.endswith("\n")
    assert "\n" not in line[:-1]
    read = from_line(line)
    for one in fields(record):
        if one.name == "time":  # milliseconds
            assert abs(record.time - read.time) <= 5e-4
            continue
        assert same(getattr(record, one.name), getattr(read, one.name)), one.name


def test_a_whole_run_is_read_as_it_was_written():
    run = a_run(settings={"policy": "pid"}, command=("a.py", "--x"), versions={"torch": "2"})
    for record in (run.header, *run.rounds, *run.changes, *run.gains, *run.stragglers, run.end):
        check_round_trip(record)


numbers = st.floats(allow_infinity=False)


@given(
    st.lists(numbers, max_size=4).map(tuple),
    st.text(max_size=20),
    numbers,
    st.lists(st.lists(st.lists(numbers, max_size=3).map(tuple), max_size=2).map(tuple), max_size=2).map(tuple),
)
def test_any_values_survive(seconds, text, number, sample):
    check_round_trip(
        RoundRecord(1.0, 0, 1, 2, 3, (1, 2), forward=seconds, kept=text, step_time=number, sample=sample, stale=True)
    )


def test_infinite_numbers_become_unknown():
    read = from_line(as_line(ChangeRecord(1.0, 0, 1, (1,), "why", math.inf)))
    assert math.isnan(read.predicted)


def test_defaults_take_no_room():
    assert set(json.loads(as_line(RoundRecord(1.0, 0, 1, 2, 3, (1, 2))))) == {
        *("kind", "time", "epoch", "step", "count", "timed", "sizes")
    }


def test_a_header_always_tells_its_version():
    assert json.loads(as_line(header()))["version"] == VERSION


def test_unknown_kinds_and_fields_are_ignored():
    assert from_line('{"kind":"of a later version"}') is None
    assert from_line('{"no":"kind"}') is None
    assert from_line('{"kind":["list"]}') is None
    line = json.loads(as_line(EndRecord(1.0, 0, 1, 2))) | {"later": 3}
    assert from_line(json.dumps(line)) == EndRecord(1.0, 0, 1, 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "JSON|nested"),
        ("[1]", "must be a JSON object"),
        ('{"kind":"gain"}', "damaged"),
        ('{"kind":"gain","time":"soon","epoch":0,"step":1,"before":1,"after":1}', "no number"),
        ('{"kind":"gain","time":true,"epoch":0,"step":1,"before":1,"after":1}', "no number"),
        ('{"kind":"gain","time":1,"epoch":0.5,"step":1,"before":1,"after":1}', "no integer"),
        ('{"kind":"change","time":1,"epoch":0,"step":1,"sizes":[1.5],"reason":"x"}', "no integer"),
        ('{"kind":"change","time":1,"epoch":0,"step":1,"sizes":7,"reason":"x"}', "damaged"),
        ('{"kind":"change","time":1,"epoch":0,"step":1,"sizes":[1],"reason":3}', "no text"),
        ('{"kind":"run","version":0}', "an integer >= 1"),
        ('{"kind":"run","version":true}', "an integer >= 1"),
        ('{"kind":"run"}', "an integer >= 1"),
        (f'{{"kind":"run","version":{VERSION + 1}}}', "Update lightning-hetero"),
        ('{"kind":"run","version":1,"workers":[3]}', "damaged"),
    ],
)
def test_damaged_lines_are_errors(line, says):
    with pytest.raises(RecordError, match=says):
        from_line(line)


@given(st.text(max_size=60))
def test_no_text_raises_anything_else(text):
    with contextlib.suppress(RecordError):
        from_line(text)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), lambda x: st.lists(x, max_size=3)))
def test_no_value_of_a_field_raises_anything_else(value):
    line = json.loads(as_line(StragglerRecord(1.0, "begin", 1, "data", 0, 1, 0.1, 0.2)))
    for name in line:
        if name != "kind":
            with contextlib.suppress(RecordError):
                from_line(json.dumps(line | {name: value}))
