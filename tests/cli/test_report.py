"""``lightning-hetero report`` and ``compare`` as a user types them: files, exit codes and errors."""

import json
from functools import partial

import pytest

from tests.cli.ran import ran
from tests.report.runs import Cluster, simulated, written


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two runs, the second one slower, of one without a timed step, and of two that cannot be read."""
    folder = tmp_path_factory.mktemp("logs")
    fast = simulated(rounds=4, steps=4, straggler=False)
    slow = simulated(Cluster(link=(0.01, 0.01, 0.02)), rounds=4, steps=4, straggler=False)
    written(fast, folder / "fast" / "version_0")
    written(slow, folder / "slow" / "version_0")
    path = written(simulated(rounds=1, steps=4, straggler=False), folder / "untimed")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"kind":"round"' not in line))
    for name, old, new in (("damaged", '"data":[', '"data":5,"old":['), ("newer", '"version":1', '"version":2')):
        path = written(fast, folder / name)
        path.write_text(path.read_text().replace(old, new))
    return folder


@pytest.fixture
def run(capsys, runs, monkeypatch):
    """Runs a command beside the runs: exit code, what it wrote, and its errors."""
    monkeypatch.chdir(runs)
    return partial(ran, capsys)


def test_a_page_beside_the_record_a_picture_and_a_trace(run, runs, tmp_path):
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    code, out, err = run("report", "fast", "--png", str(picture), "--trace", str(trace))
    assert (code, err) == (0, "")
    assert all(path in out for path in ("fast/version_0/report.html", str(picture), str(trace)))
    assert "<svg" in (runs / "fast" / "version_0" / "report.html").read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {one["ph"] for one in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "i", "C"}


def test_a_page_elsewhere_of_a_run_without_steps(run, tmp_path):
    page, trace = tmp_path / "x.html", tmp_path / "x.json"
    assert run("report", "untimed", "-o", str(page), "--trace", str(trace))[0] == 0
    assert page.stat().st_size
    assert trace.exists()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("report empty", "hetero_run.jsonl"),
        ("report fast -o no/x.html", "x.html"),
        ("report untimed -o TMP/x.html --png empty", "empty"),
        ("report fast -o fast/version_0/hetero_run.jsonl", "hetero_run.jsonl"),
        ("compare fast nowhere", "nowhere"),
        ("compare fast untimed --max-regression 5%", "--max-regression"),
        ("compare fast damaged --max-regression 5%", " B "),
        ("compare fast newer --max-regression 5%", "version"),
        ("compare fast slow --max-regression 100%", "'100%'"),
    ],
)
def test_errors_are_named(run, runs, tmp_path, line, word):
    (runs / "empty").mkdir(exist_ok=True)
    code, _, err = run(*line.replace("TMP", str(tmp_path)).split())
    assert (code, word in err) == (2, True), err


def test_two_runs_as_json(run):
    code, out, _ = run("compare", "fast", "slow", "--json", "--max-regression", "0.05")
    found = json.loads(out)
    assert (code, found["exceeded"], found["max_regression"]) == (1, True, 0.05)
    assert found["regression"] == pytest.approx(1 - found["figures"]["rate"]["b"] / found["figures"]["rate"]["a"])


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ("fast slow", 0, "slower than A"),  # without a limit, nothing is exceeded
        ("fast slow --max-regression 5%", 1, "5 %"),
        ("fast slow --max-regression 80%", 0, "80 %"),
        ("slow fast --max-regression 0%", 0, "faster than A"),
        ("fast untimed", 0, "not known"),
    ],
)
def test_the_exit_code_says_whether_the_second_run_is_slower(run, line, code, word):
    found, out, _ = run("compare", *line.split())
    assert (found, word in out) == (code, True), out
