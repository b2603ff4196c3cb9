"""Lines of a record: what is written is read again, and what is damaged is an error that names itself."""

import contextlib
import json
import math
import re
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


unknown = st.just(math.nan)
seconds = st.floats(0, 1e9) | unknown
row = st.lists(st.floats(-1e100, 1e100) | unknown, min_size=9, max_size=11).map(tuple)


@given(
    st.just(()) | st.tuples(seconds, seconds),
    st.text(max_size=20),
    seconds,
    st.lists(st.tuples(row, row), max_size=2).map(tuple),
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
        *("kind", "time", "epoch", "step", "count", "timed", "sizes", "crc")
    }


def test_times_have_milliseconds_and_other_numbers_six_digits():
    line = json.loads(as_line(ChangeRecord(123456.78949, 0, 1, (1,), "why", 0.123456789)))
    assert (line["time"], line["predicted"]) == (123456.789, 0.123457)


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
        ('{"kind":"gain","time":null,"epoch":0,"step":1,"before":1,"after":1}', "time: is null"),
        ('{"kind":"gain","time":1,"epoch":0,"step":1,"before":1}', "after: is missing"),
        ('{"kind":"gain","time":1,"epoch":0,"step":1,"before":1,"after":NaN}', "NaN is no number of JSON"),
        ('{"kind":"gain","time":1,"epoch":0,"step":1,"before":1,"after":1e999}', "after: inf is above"),
        ('{"kind":"round","time":1,"epoch":0,"step":1,"count":0,"timed":2,"sizes":[1]}', "count: 0 steps, of which 2"),
        ('{"kind":"round","time":1,"epoch":0,"step":1,"count":1,"timed":1,"sizes":[0,0]}', "sizes: has no positive"),
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


FOREIGN = (None, True, -1, -0.5, 1e308, 10**400, math.inf, "x", [], [1], [[1]], [None], {}, {"a": 1}, [[[1.0]]])


def mutated(run):
    """Each line of a run with another value in one of its fields, or in the first value of a list."""
    for record in (run.header, *run.rounds[-1:], *run.changes, *run.gains, *run.stragglers, run.end):
        line = json.loads(as_line(record))
        for name, value in line.items():
            if name not in ("kind", "version"):
                yield from ((name, line | {name: other}) for other in FOREIGN)
                if isinstance(value, list):
                    yield from ((name, line | {name: [other, *value[1:]]}) for other in FOREIGN)
                    yield name, line | {name: [*value, *value]}


def test_a_value_of_another_type_or_range_is_an_error_that_names_its_field():
    run, errors = a_run(settings={"policy": "pid"}, command=("a.py",), versions={"torch": "2"}), 0
    for name, line in mutated(run):
        read, error = read_or_error(json.dumps(line).replace("Infinity", "1e999"), run.workers)
        if read is None:
            assert re.match(rf"damaged '{line['kind']}': {name}\b", error), error
            errors += 1
            continue
        for one in (number for field in fields(read) for number in flat(getattr(read, field.name))):
            assert math.isnan(one) or -1 <= one <= 1e100, (name, line[name])
    assert errors > 700


def read_or_error(line, workers):
    try:
        return from_line(line, workers), ""
    except RecordError as error:
        return None, str(error)


def flat(value):
    """All numbers in a value."""
    if isinstance(value, tuple):
        return [number for one in value for number in flat(one)]
    return [value] if isinstance(value, int | float) else []


def test_a_list_has_one_value_per_worker():
    line = json.loads(as_line(RoundRecord(1.0, 0, 1, 2, 2, (1, 2), data=(0.1, 0.2), nodes=((1.0,) * 4,) * 2)))
    assert from_line(json.dumps(line), 2).data == from_line(json.dumps(line)).data == (0.1, 0.2)
    for name, value, says in (
        ("sizes", [1], "sizes: has 1 values, and the run has 2 workers"),
        ("data", [0.1] * 3, "data: has 3 values"),
        ("nodes", [[1.0] * 4], "nodes: has 1 values"),
        ("nodes", [[1.0] * 3] * 2, r"nodes\[0\]: has 3 values; 4 are needed"),
        ("sample", [[[1.0] * 9]], r"sample\[0\]: has 1 values, and the run has 2 workers"),
        ("sample", [[[1.0] * 8] * 2], r"sample\[0\]\[0\]: has 8 values; at least 9"),
    ):
        with pytest.raises(RecordError, match=says):
            from_line(json.dumps(line | {name: value}), 2)
    assert from_line(json.dumps(line | {"data": [], "sample": []}), 2).data == ()


def test_a_line_that_changed_is_not_read_and_one_without_a_checksum_is():
    line = as_line(ChangeRecord(1.0, 0, 1, (1, 30), "über", 0.25))
    assert from_line(line).predicted == 0.25
    with pytest.raises(RecordError, match="has changed since it was written"):
        from_line(line.replace("0.25", "0.26"))
    without = re.sub(r',"crc":"\w+"', "", line)
    assert from_line(without.replace("0.25", "0.26")).predicted == 0.26
