"""Finding and reading the record of a run: the newest one below a folder, damaged lines, and clear errors."""

import json
import os

import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.json_lines import RecordError
from lightning_hetero.core.report.summary import summary_of
from lightning_hetero.report import compare_runs, find_record, read_run, trace_events
from lightning_hetero.report.compare import compared_text
from lightning_hetero.report.page import page_of
from lightning_hetero.report.sections import sections_of
from tests.report.runs import lines_of, simulated, written

RUN = simulated(rounds=4, steps=3)


def test_a_file_a_folder_and_the_newest_below_a_folder(tmp_path):
    paths = [written(RUN, tmp_path / "logs" / f"version_{i}") for i in range(3)]
    for i, path in enumerate(paths):
        os.utime(path, (1000.0 - i, 1000.0 - i))
    assert find_record(paths[2]) == paths[2]
    assert find_record(paths[2].parent) == paths[2]
    assert find_record(tmp_path) == paths[0], "the newest"
    other = written(RUN, tmp_path / "other", "renamed.jsonl")
    assert find_record(str(other)) == other


def test_what_is_written_is_read(tmp_path):
    found = read_run(written(RUN, tmp_path))
    assert [one.sizes for one in found.rounds] == [one.sizes for one in RUN.rounds]
    assert [one.reason for one in found.changes] == [one.reason for one in RUN.changes]
    assert found.header.command == RUN.header.command
    assert found.rounds[1].step_time == pytest.approx(RUN.rounds[1].step_time, rel=1e-5)
    assert found.end is not None
    assert found.damaged == 0


def test_a_run_that_was_killed_while_it_wrote_is_read_up_to_there(tmp_path):
    path = written(RUN, tmp_path)
    whole = path.read_bytes()
    cut = whole.rindex(b'{"kind":"round"') + 40
    path.write_bytes(whole[:cut])
    found = read_run(path)
    assert (len(found.rounds), found.damaged, found.end) == (3, 1, None)


def test_bytes_that_are_no_text_are_a_damaged_line(tmp_path):
    path = written(RUN, tmp_path)
    with path.open("ab") as file:
        file.write(b"\xff\xfe\x00 not JSON\n")
    assert read_run(path).damaged == 1


KINDS = ("round", "change", "straggler")
FOREIGN = (None, -0.5, 0, 1e-320, 10**15, [], [[1.0]], [None, None, None])


def test_whatever_a_line_holds_it_is_read_or_named_and_nothing_raises_later(tmp_path, caplog):
    """One field of one line has another value; all figures are finite or not known, and the trace is strict JSON."""
    whole, path, damaged = lines_of(RUN), tmp_path / "x.jsonl", 0
    targets = [max(i for i, line in enumerate(whole) if f'"kind":"{kind}"' in line) for kind in KINDS]
    for i in targets:
        values = json.loads(whole[i])
        for name in sorted({*values, "link", "max_local", "sync"} - {"kind"}):
            for other in FOREIGN:
                caplog.clear()
                path.write_text("".join([*whole[:i], json.dumps(values | {name: other}) + "\n", *whole[i + 1 :]]))
                run = read_run(path)
                damaged += run.damaged
                assert [f"line {i + 1}: " in one and name in one for one in caplog.messages] == [True] * run.damaged
                if not run.damaged:
                    for text in (summary_of(run).text(), compared_text(compare_runs(RUN, run), ("a", "b"))):
                        assert "inf" not in text.split(), (name, other)
                    json.dumps([trace_events(run), compare_runs(run, RUN).to_dict()], allow_nan=False)
                    sections_of(run, RunFigures(run))
    assert damaged > 200


def test_lines_that_are_left_out_are_named(tmp_path, caplog):
    path = written(RUN, tmp_path)
    with path.open("a") as file:
        file.write("{\n" * 5)
    found = read_run(path)
    (said,) = caplog.messages
    count = len(lines_of(RUN))
    assert f"{path}: what cannot be read is left out. line {count + 1}: a line of the record is no JSON" in said
    assert f"line {count + 3}: " in said
    assert said.endswith("2 more lines cannot be read.")
    assert f"line {count + 1}: a line of the record is no JSON" in page_of(found)


def test_of_two_runs_in_a_file_the_last_one_counts(tmp_path):
    path = written(RUN, tmp_path)
    with path.open("a") as file:
        file.writelines(lines_of(simulated(rounds=2, steps=3, policy="pid")))
    found = read_run(path)
    assert (found.header.policy, len(found.rounds)) == ("pid", 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no first line of kind 'run'"),
        ("hello\n", "no JSON"),
        ('{"kind":"run","version":99}\n', "Update lightning-hetero"),
        ("[1]\n", "must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_record_is_named_with_the_reason(tmp_path, content, says):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(RecordError, match=f"x.jsonl.*{says}"):
        read_run(path)


def test_a_folder_without_a_record_says_what_to_give(tmp_path):
    with pytest.raises(RecordError, match="there is no hetero_run.jsonl in .* report=False turns it off"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match="no file and no folder. Give the folder of a run's logger"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordError):
        read_run("a\0b")
