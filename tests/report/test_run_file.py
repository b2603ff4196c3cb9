"""Finding and reading the record of a run: the newest one below a folder, damaged lines, and clear errors."""

import json
import os

import pytest

from lightning_hetero.report import RecordError, compare_runs, find_record, read_run, trace_events
from tests.report.runs import lines_of, simulated, written

RUN = simulated(rounds=4, steps=3)
WHOLE = "".join(lines_of(RUN)).encode()


def test_a_file_a_folder_and_the_newest_below_a_folder(tmp_path):
    paths = [written(RUN, tmp_path / "logs" / f"version_{i}") for i in range(3)]
    for i, path in enumerate(paths):
        os.utime(path, (1000.0 - i, 1000.0 - i))
    assert find_record(paths[2]) == find_record(paths[2].parent) == paths[2]
    assert find_record(tmp_path) == paths[0], "the newest"
    other = written(RUN, tmp_path / "other", "renamed.jsonl")
    assert find_record(str(other)) == other


def test_what_cannot_be_read_is_left_out_and_named(tmp_path, caplog):
    path = tmp_path / "hetero_run.jsonl"
    path.write_bytes(WHOLE + b"\xff\xfe\x00 not JSON\n")
    found = read_run(path)
    assert (len(found.rounds), found.damaged, found.end is not None) == (4, 1, True)
    assert [str(path) in said and "line " in said for said in caplog.messages] == [True]


FOREIGN = (None, -0.5, 0, 1e-320, 10**15, [], [[1.0]], [None, None, None])


@pytest.mark.parametrize("kind", ["round", "change", "gain", "straggler", "end"])
def test_whatever_a_line_holds_it_is_read_or_named_and_nothing_raises_later(kind, tmp_path, caplog):
    """One field of one line has another value; the comparison and the trace are strict JSON."""
    whole, path, damaged = lines_of(RUN), tmp_path / "x.jsonl", 0
    i = max(i for i, line in enumerate(whole) if f'"kind":"{kind}"' in line)
    values = json.loads(whole[i])
    for name in sorted({*values, "link", "max_local", "sync"} - {"kind"}):
        for other in FOREIGN:
            caplog.clear()
            path.write_text("".join([*whole[:i], json.dumps(values | {name: other}) + "\n", *whole[i + 1 :]]))
            run = read_run(path)
            damaged += run.damaged
            assert [f"line {i + 1}: " in one and name in one for one in caplog.messages] == [True] * run.damaged
            if not run.damaged:
                json.dumps([trace_events(run), compare_runs(run, RUN).to_dict()], allow_nan=False)
    assert damaged > 15


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "'run'"),
        ('{"kind":"run","version":99}\n', "Update lightning-hetero"),
    ],
)
def test_a_file_that_is_no_record_is_named_with_the_reason(tmp_path, content, says):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(RecordError, match=f"x.jsonl.*{says}"):
        read_run(path)


@pytest.mark.parametrize(("name", "says"), [("", "hetero_run.jsonl"), ("nowhere", "nowhere"), ("a\0b", "a")])
def test_a_place_without_a_record_is_named(tmp_path, name, says):
    with pytest.raises(RecordError, match=says):
        read_run(f"{tmp_path}/{name}")
