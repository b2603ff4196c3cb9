"""How checks are run: each ends, whatever it does; what came out is said, written, and in the exit status."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import kernels
from tests.gpu.main import CHECKS
from tests.gpu.outcome import NotHere

PROGRAM = Path(__file__).parent / "broken.py"


def call(folder, *arguments, program=PROGRAM):
    """Exit status, what was said, and the results by name."""
    command = [sys.executable, str(program), "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads((folder / "gpu.json").read_text())["checks"] if (folder / "gpu.json").exists() else []
    return done.returncode, done.stdout, {check["name"]: check for check in found}


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return folder, *call(folder, "--without-gpu")


def test_each_check_has_its_outcome_and_figures_whatever_the_others_do(all_of_them):
    _, status, _, found = all_of_them
    assert status == 1
    outcomes = {name: (check["outcome"], check["figures"]) for name, check in found.items()}
    child = outcomes["hangs"][1]["child"]
    assert outcomes == {
        "passes": ("passed", {"two": 2, "half": 0.5, "list": [1, 2]}),
        "misses": ("failed", {"three": 3, "after": True}),
        "raises": ("failed", {"before": True}),
        "dies": ("died", {"before": True}),
        "hangs": ("timed out", {"child": child}),
        "absent": ("skipped", {}),
        "unknown": ("skipped", {}),
        "knows": ("passed", {"known": 2}),
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("misses", "two is not three; nor is it four"),
        ("raises", "ValueError: an error"),
        ("dies", "exit status 3"),
        ("hangs", "3 s"),
        ("absent", "it rains"),
        ("unknown", "no-such-package"),
    ],
)
def test_a_check_that_does_not_go_well_says_why(all_of_them, name, why):
    _, _, said, found = all_of_them
    assert why in found[name]["why"]
    assert why in next(line for line in said.splitlines() if f" {name} " in line)


def test_a_check_that_hangs_is_ended_with_all_that_it_started_and_says_where_it_was(all_of_them):
    folder, _, _, found = all_of_them
    state = Path(f"/proc/{found['hangs']['figures']['child']}/stat")
    assert "in hangs" in (folder / "hangs.log").read_text()
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_page_has_all_checks(all_of_them):
    folder, _, said, found = all_of_them
    page = (folder / "gpu.html").read_text()
    assert "shows &lt;nothing&gt;" in page
    assert all(name in page for name in found)
    assert "failed: misses, raises, dies, hangs;" in said


def test_what_no_longer_fits_in_the_budget_is_skipped_by_name_in_order(tmp_path):
    status, said, found = call(tmp_path, "--without-gpu", "--budget", "600", "--only", "passes", "hangs", "knows")
    assert status == 0
    assert {name: check["outcome"] for name, check in found.items()} == {
        "passes": "passed",
        "hangs": "skipped",
        "knows": "passed",
    }
    assert "10000 s" in found["hangs"]["why"]
    assert "skipped: hangs" in said


def test_no_check_begins_after_the_budget(tmp_path):
    status, _, found = call(tmp_path, "--without-gpu", "--budget", "0.5")
    assert status == 0
    assert {check["outcome"] for check in found.values()} == {"skipped"}


def test_a_killed_run_keeps_the_figures_it_had(tmp_path):
    command = [sys.executable, str(PROGRAM), "--out", str(tmp_path), "--without-gpu", "--only", "passes", "hangs"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "hangs.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    child = json.loads((tmp_path / "hangs.json").read_text())["figures"]["child"]
    os.killpg(os.getpgid(child), signal.SIGKILL)
    (check,) = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert check["figures"]["two"] == 2
    assert "passes" in (tmp_path / "gpu.html").read_text()


def test_a_table_has_figures_of_a_gpu_alone(tmp_path):
    def row(stand_in, **figures):
        return {"name": "a|b", "must": "m", "outcome": "passed", "figures": figures, "stand_in": stand_in}

    machine = {"GPUs": "none", "system": "Linux", "packages": "torch 2", "date": "today"}
    written = tmp_path / "gpu.json"
    assert call(tmp_path, "--table")[0] == 2
    for gpus, rows in (("none", [row(False, x=1)]), ("A100", [row(True, x=1)]), ("A100", [])):
        written.write_text(json.dumps({"machine": {**machine, "GPUs": gpus}, "checks": [*rows]}))
        assert call(tmp_path, "--table")[0] == 2
    rows = [row(False, ratio=0.98765, all=[1]), {**row(True, x=1), "name": "c"}]
    written.write_text(json.dumps({"machine": {**machine, "GPUs": "A100"}, "checks": rows}))
    status, said, _ = call(tmp_path, "--table")
    assert status == 0
    assert said.startswith("A100, Linux, torch 2, today\n")
    assert said.splitlines()[-1] == "| a/b | m | passed | ratio: 0.9877 |"


def test_every_check_exists_and_fits_its_limit():
    for check in CHECKS:
        assert callable(getattr(importlib.import_module(f"tests.gpu.{check.module}"), check.name))
        assert check.takes < check.limit
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_the_machine_is_described_without_a_gpu(tmp_path):
    status, _, found = call(tmp_path, "--without-gpu", "--only", "machine", program=PROGRAM.with_name("main.py"))
    assert status == 0
    assert found["machine"]["stand_in"]
    assert found["machine"]["figures"]["ranks over NCCL"] == 2


def test_the_kernels_stand_in_says_that_the_interpreter_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LOOP", "raise TypeError('only 0-dimensional arrays')")
    with pytest.raises(NotHere, match=r"interpreter runs no loop: TypeError: only 0-dimensional arrays"):
        kernels.interpret(tmp_path)


def test_the_interpreter_here_runs_a_loop(tmp_path):
    kernels.interpret(tmp_path)
