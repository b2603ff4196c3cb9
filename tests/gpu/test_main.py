"""How checks are run: each ends, whatever it does; what came out is said, written, and in the exit status."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import main as module
from tests.gpu import native
from tests.gpu.main import CHECKS, Check, run
from tests.gpu.outcome import NotHere


def outcome(tmp_path, monkeypatch, how, limit=60.0, needs=()):
    monkeypatch.setenv("HOW", how)
    return run(Check("broken", "shows nothing", limit, needs), on_gpu=False, folder=tmp_path)


def test_a_check_that_passes_has_its_figures(tmp_path, monkeypatch):
    result = outcome(tmp_path, monkeypatch, "well")
    assert (result.outcome, result.figures, result.bad) == ("passed", {"two": 2, "half": 0.5, "list": [1, 2]}, False)
    assert "two 2, half 0.5" in result.line()


@pytest.mark.parametrize(
    ("how", "expected", "why"),
    [
        ("misses", "failed", "two is not three"),
        ("dies", "died", "exit status 3"),
        ("not here", "skipped", "it rains"),
    ],
)
def test_a_check_that_does_not_go_well_says_why(tmp_path, monkeypatch, how, expected, why):
    result = outcome(tmp_path, monkeypatch, how)
    assert result.outcome == expected
    assert why in result.why
    assert result.bad is (expected != "skipped")
    assert result.figures == ({"two": 2} if how == "misses" else {})


@pytest.mark.alone
def test_a_check_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.5)
    result = outcome(tmp_path, monkeypatch, "hangs", limit=8.0)
    assert result.outcome == "timed out"
    log = (tmp_path / "broken.log").read_text()
    assert "stand_in" in log  # where it was
    child = int(log.split("child ")[1].split()[0])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        raise AssertionError("a child of the check lives on")


def test_a_check_without_its_packages_is_skipped_by_name(tmp_path, monkeypatch):
    result = outcome(tmp_path, monkeypatch, "well", needs=("torch", "no-such-package"))
    assert (result.outcome, result.why) == ("skipped", "not installed: no-such-package")


@pytest.mark.parametrize(("how", "status"), [("well", 0), ("misses", 1)])
def test_results_are_written_and_the_exit_status_tells(tmp_path, monkeypatch, capsys, how, status):
    monkeypatch.setenv("HOW", how)
    monkeypatch.setattr(module, "CHECKS", (Check("broken", "shows <nothing>", 60.0, ()), Check("quiet", "", 60.0, ())))
    monkeypatch.setattr(sys, "argv", ["main.py", "--without-gpu", "--out", str(tmp_path)])
    assert module.main() == status
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [check["outcome"] for check in written["checks"]] == ["failed" if status else "passed", "skipped"]
    assert written["machine"]["GPUs"] == "none"
    assert "shows &lt;nothing&gt;" in (tmp_path / "gpu.html").read_text()
    said = capsys.readouterr().out
    assert "skipped: quiet (needs a GPU)" in said
    assert f"failed: {'broken' if status else 'nothing'}" in said


def test_every_check_has_its_module_and_all_together_are_bounded():
    import importlib

    for check in CHECKS:
        importlib.import_module(f"tests.gpu.{check.name}").gpu  # noqa: B018
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_the_machine_is_described_without_a_gpu(tmp_path):
    (check,) = (check for check in CHECKS if check.name == "machine")
    result = run(check, on_gpu=False, folder=tmp_path)
    assert (result.outcome, result.stand_in) == ("passed", True)


def test_the_kernels_stand_in_says_that_the_interpreter_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "LOOP", "raise TypeError('only 0-dimensional arrays')")
    with pytest.raises(NotHere, match=r"interpreter runs no loop: TypeError: only 0-dimensional arrays"):
        native.interpret(tmp_path)


def test_the_interpreter_here_runs_a_loop(tmp_path):
    native.interpret(tmp_path)
