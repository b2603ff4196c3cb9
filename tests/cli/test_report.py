"""``lightning-hetero report`` and ``compare`` as a user types them: files, output, exit codes and errors."""

import json
from functools import partial

import pytest

from tests.cli.ran import ran
from tests.report.runs import Cluster, simulated, written


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two runs, the second one slower, and of one without a timed step."""
    folder = tmp_path_factory.mktemp("logs")
    fast = simulated(rounds=4, steps=4, straggler=False)
    slow = simulated(Cluster(link=(0.01, 0.01, 0.02)), rounds=4, steps=4, straggler=False)
    untimed = simulated(rounds=1, steps=4, straggler=False)
    written(fast, folder / "fast" / "version_0")
    written(slow, folder / "slow" / "version_0")
    path = written(untimed, folder / "untimed")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"kind":"round"' not in line))
    for name, old, new in (("damaged", '"data":[', '"data":5,"old":['), ("newer", '"version":1', '"version":2')):
        path = written(fast, folder / name)
        path.write_text(path.read_text().replace(old, new))
    return {name: str(folder / name) for name in ("fast", "slow", "untimed", "damaged", "newer")}


@pytest.fixture
def run(capsys):
    """Runs a command: exit code, what it wrote, and its errors."""

    return partial(ran, capsys)


def test_a_page_beside_the_record_a_picture_and_a_trace(run, runs, tmp_path):
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    code, out, err = run("report", runs["fast"], "--png", str(picture), "--trace", str(trace))
    page = f"{runs['fast']}/version_0/report.html"
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"page: {page}",
        f"picture: {picture}",
        f"trace: {trace} (open it in https://ui.perfetto.dev)",
    ]
    with open(page) as file:
        assert "over even sizes" in file.read()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {one["ph"] for one in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "i", "C"}


def test_a_page_elsewhere_and_a_trace_without_steps(run, runs, tmp_path):
    page, trace = tmp_path / "x.html", tmp_path / "x.json"
    code, out, _ = run("report", runs["untimed"], "-o", str(page), "--trace", str(trace))
    assert code == 0
    assert "it has no steps" in out
    assert "No step was timed" in page.read_text()


def test_errors_of_the_report(run, runs, tmp_path):
    for arguments, says in (
        ([str(tmp_path / "nowhere")], "no file and no folder"),
        ([str(tmp_path)], "there is no hetero_run.jsonl"),
        ([runs["fast"], "-o", str(tmp_path / "no" / "x.html")], "x.html: No such file or directory"),
        ([runs["untimed"], "-o", str(tmp_path / "x.html"), "--png", str(tmp_path)], "directory"),
        ([runs["fast"], "-o", f"{runs['fast']}/version_0/hetero_run.jsonl"], "is the record itself"),
        ([runs["fast"], "-o", f"{runs['fast']}/version_0/../version_0/hetero_run.jsonl"], "is the record itself"),
        ([], "the following arguments are required: RUN"),
    ):
        code, _, err = run("report", *arguments)
        assert code == 2
        assert says in err


def test_two_runs_in_a_table_and_as_json(run, runs):
    code, out, _ = run("compare", runs["fast"], runs["slow"])
    assert code == 0, "without a limit, nothing is exceeded"
    assert "slower than A" in out
    code, out, _ = run("compare", runs["fast"], runs["slow"], "--json", "--max-regression", "0.05")
    found = json.loads(out)
    assert code == 1
    assert (found["exceeded"], found["max_regression"]) == (True, 0.05)
    assert found["regression"] == pytest.approx(1 - found["figures"]["rate"]["b"] / found["figures"]["rate"]["a"])


def test_the_exit_code_says_whether_the_second_run_is_slower(run, runs):
    code, out, _ = run("compare", runs["fast"], runs["slow"], "--max-regression", "5%")
    assert (code, out.splitlines()[-1]) == (1, "That is more than the 5 % that --max-regression allows.")
    assert run("compare", runs["fast"], runs["slow"], "--max-regression", " 5% ")[0] == 1
    code, out, _ = run("compare", runs["fast"], runs["slow"], "--max-regression", "80%")
    assert (code, out.splitlines()[-1]) == (0, "That is within the 80 % that --max-regression allows.")
    code, out, _ = run("compare", runs["slow"], runs["fast"], "--max-regression", "0%")
    assert (code, out.splitlines()[-1]) == (0, "That is within the 0 % that --max-regression allows.")
    assert 0 <= out.index(runs["slow"]) < out.index(runs["fast"])


def test_errors_of_the_comparison(run, runs):
    for arguments, says in (
        ([runs["fast"], "nowhere"], "no file and no folder"),
        ([runs["fast"], runs["untimed"], "--max-regression", "5%"], "needs steps that were timed in both runs"),
        ([runs["fast"], runs["damaged"], "--max-regression", "5%"], "B has none"),
        ([runs["fast"], runs["newer"], "--max-regression", "5%"], "Update lightning-hetero"),
        ([runs["fast"], runs["slow"], "--max-regression", "five"], "'five' is no share"),
        ([runs["fast"], runs["slow"], "--max-regression", "150%"], "'150%' is no share"),
        ([runs["fast"], runs["slow"], "--max-regression", "100%"], "'100%' is no share"),
        ([runs["fast"], runs["slow"], "--max-regression=-5%"], "'-5%' is no share"),
        ([runs["fast"]], "the following arguments are required: B"),
    ):
        code, _, err = run("compare", *arguments)
        assert code == 2
        assert says in err
    code, out, _ = run("compare", runs["fast"], runs["untimed"])
    assert code == 0
    assert "not known" in out
