"""``lightning-hetero doctor`` as a user starts it: alone, under torchrun, with a rank that fails or is lost."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero import cli
from lightning_hetero.cli.doctor import examine as module
from lightning_hetero.cli.doctor.autoload import NAMES, Autoload
from tests.ranks import at_end, free_port, run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
WORKS = Autoload(1, False, False, NAMES)


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs it alone for an instant, without the second program: exit code, and what it wrote."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "autoload_of", lambda: WORKS)

    def _doctor(*options, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return cli.main(["doctor", "--seconds", "0.03", *options]), capsys.readouterr().out

    return _doctor


def test_alone(doctor):
    code, text = doctor()
    assert code == 0
    assert re.search(r"^processes   this one, with 1 device$", text, re.M)
    assert re.search(r"^0 .* [\d.]+ [GT]FLOP/s ", text, re.M)
    assert "torchrun --nproc-per-node N -m lightning_hetero doctor" in " ".join(text.split())


def test_alone_as_json(doctor):
    code, text = doctor("--json")
    found = json.loads(text)
    assert code == 0
    assert {"schema", "versions", "autoload", "environment", "ranks", "link", "problems", "failures", "advice"} <= set(
        found
    )
    (row,) = found["ranks"]
    assert row["speed"]["flops"] > 0
    assert row["device"]["memory"] > row["device"]["free"] > 0
    assert os.uname().nodename not in re.findall(r"[\w.-]+", text)


def test_a_device_that_fails_is_said_and_the_rest_is_checked(doctor, monkeypatch):
    def broken(*given):
        raise RuntimeError("the driver is gone\nand more")

    monkeypatch.setattr(module, "measure_speed", broken)
    code, text = doctor()
    assert code == 1
    assert "- device 0: no speed: RuntimeError: the driver is gone." in text
    assert "versions" in text


def test_processes_that_do_not_come_are_a_failure_and_this_one_is_checked(doctor):
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, text = doctor("--timeout", "0.3", **place)
    assert code == 1
    assert "- WORLD_SIZE=2, and rank 1 did not come within 0.3 s." in text
    assert re.search(r"^0 .* [\d.]+ [GT]FLOP/s ", text, re.M)


@pytest.mark.parametrize(
    ("installed", "advisories"),
    [
        ({"lightning": "2.6.3", "torch": "2.5.1+cu121"}, 4 * [True]),
        ({"lightning": "2.6.1", "torch": "2.6.0"}, [False, True, False, True]),
        ({"lightning": "2.6.6", "torch": "2.10.0"}, 4 * [False]),
    ],
    ids=str,
)
def test_versions_with_published_vulnerabilities_are_problems(doctor, monkeypatch, tmp_path, installed, advisories):
    for name, version in installed.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = doctor("--json")
    problems = " ".join(json.loads(text)["problems"])
    names = ("GHSA-w37p-236h-pfx3", "CVE-2026-58659", "CVE-2025-32434", "CVE-2026-24747")
    assert ([name in problems for name in names], code) == (advisories, 0)


def checked(rank, fault):
    """Exit code and output of a rank, of which the second may have a fault in the measurement of speed."""
    patch = pytest.MonkeyPatch()
    at_end(patch.undo)
    patch.setattr(module, "autoload_of", lambda: WORKS)
    if rank == 1 and fault == "raise":
        patch.setattr(module, "measure_speed", lambda *given: 1 / 0)
    elif rank == 1 and fault == "lost":
        patch.setattr(module, "measure_speed", lambda *given: sys.exit("gone"))
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = cli.main(["doctor", "--seconds", "0.03", "--timeout", "3" if fault == "lost" else "60", "--json"])
        except SystemExit as ended:
            code = ended.code
    return code, output.getvalue(), errors.getvalue()


@pytest.mark.parametrize("fault", ["none", "raise", "lost"])
def test_ranks_together_whatever_one_of_them_does(fault):
    (code, text, _), (_, silent, _) = run_ranks(checked, 2, fault)
    found = json.loads(text)
    assert not silent
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert code == (0 if fault == "none" else 1)
    if fault == "lost":
        assert found["failures"] == [
            "rank 1 did not end 'speed' within 3.09 s, or was lost; the output of that process says why."
        ]
        return
    assert found["failures"] == ([] if fault == "none" else ["rank 1: no speed: ZeroDivisionError: division by zero."])
    assert [bool(row["speed"]) for row in found["ranks"]] == [True, fault == "none"]
    assert found["link"]["rate"][0][1] > 0
    assert [size for size, _ in found["link"]["sums"]][:2] == [4096, 65536]


def words(text):
    """What stays the same on every machine: the first word of each line, and the headers of the tables."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "- "))]
    return {line.split()[0] for line in lines if not line[0].isdigit()}


@pytest.mark.slow("torchrun starts interpreters; the same ranks are tested together above")
def test_under_torchrun_as_the_page_shows():
    """The real thing, with the second program; the page's output has the same parts."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    ]
    command += ["-m", "lightning_hetero", "doctor", "--seconds", "0.05", "--timeout", "120"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    assert text.count("lightning-hetero 0") == 1, "one table, that of rank 0"
    assert [line.split()[0] for line in text.splitlines() if " FLOP" in line or "FLOP/s" in line] == ["0", "1"]
    assert 'strategy="hetero_ddp" needs no import' in text
    assert "communication-bound from" in " ".join(text.split())
    (shown,) = re.findall(r"^\$ torchrun --nproc-per-node 2 -m lightning_hetero doctor\n(.*?)^```$", PAGE, re.M | re.S)
    assert words(shown) <= words(text) | {"Advice"}
