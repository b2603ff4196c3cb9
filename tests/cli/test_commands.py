"""The command line as a whole: help, typos, exit codes, completion, and what it does not import."""

import os
import subprocess
import sys
from functools import partial

import pytest

from lightning_hetero import __version__, cli
from lightning_hetero.cli import COMMANDS
from tests.cli.ran import ran


@pytest.fixture
def run(capsys):
    return partial(ran, capsys)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lunch", "'lunch'. Did you mean launch?"),
        ("--verison", "--verison. Did you mean --version?"),
        ("plan --workloda x", "--workloda. Did you mean --workload?"),
        ("launch --hetero_polcy pid t.py", "--hetero_polcy. Did you mean --hetero_policy"),
        ("doctor --precision int8", "--precision: invalid choice: 'int8'"),
    ],
)
def test_an_error_is_short_and_has_the_nearest_name(line, told, run):
    code, out, err = run(*line.split())
    usage, error, hint = err.splitlines()
    program = " ".join(["lightning-hetero", *(name for name in line.split()[:1] if name in COMMANDS)])
    assert (code, out) == (2, "")
    assert usage.startswith(f"usage: {program} ")
    assert error.startswith(f"{program}: error: ")
    assert told in error
    assert f"{program} --help" in hint


def test_help_lists_the_commands(run):
    code, text, _ = run("--help")
    assert code == 0
    assert all(f"\n    {name}" in text for name in COMMANDS)
    assert run("-h")[:2] == (0, text)
    assert run()[:2] == (2, text)
    assert run("-V")[:2] == run("--version")[:2] == (0, f"{__version__}\n")
    for name in COMMANDS.keys() - {"launch"}:
        code, text, _ = run(name, "--help")
        assert (code, text.startswith(f"usage: lightning-hetero {name} ")) == (0, True)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (FileNotFoundError(2, "No such file or directory", "letter.txt"), 1, "letter.txt"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'plotly'", name="plotly"), 2, "lightning-hetero[report]"),
        (OSError("Network is unreachable"), None, ""),
    ],
    ids=str,
)
def test_exit_codes_say_who_is_to_blame(error, code, told, monkeypatch, run):
    def fails(options):
        raise error

    monkeypatch.setattr("lightning_hetero.cli.report.run", fails)
    if code is None:  # an error of ours
        with pytest.raises(type(error)):
            run("report", "x")
    else:
        found, _, err = run("report", "x")
        assert (found, told in err) == (code, True)


def test_options_come_from_the_command_line_only(monkeypatch):
    """A user's own LightningCLI may read the environment by this variable of jsonargparse."""
    given = []
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("LIGHTNING_HETERO_SIMULATE__STEPS", "7")
    monkeypatch.setenv("LIGHTNING_HETERO_SIMULATE__LINK", "-1Gbit")
    monkeypatch.setattr("lightning_hetero.cli.simulate.run", lambda options: given.append(options) or 0)
    assert cli.main(["simulate", "B"]) == 0
    assert (given[0].cluster, given[0].steps, given[0].link) == ("B", 200, None)


@pytest.mark.slow("starts interpreters")
@pytest.mark.parametrize(
    ("line", "code", "told"),
    [("--help >&-", 0, ""), ("--help | true", 0, ""), ("config <&- >/dev/null", 2, "ended early")],
)
def test_streams_may_be_closed(line, code, told, tmp_path):
    command = ["bash", "-c", f"{sys.executable} -m lightning_hetero {line}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert (done.returncode, bool(done.stderr)) == (code, bool(told)), done.stderr
    assert told in done.stderr


PROGRAM = """
import contextlib, io, sys
from lightning_hetero.cli import COMMANDS, main
helps = [[name, "--help"] for name in COMMANDS if name != "launch"]
for arguments in ([], ["--help"], ["--version"], ["lunch"], *helps):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
print([name for name in ("torch", "lightning", "accelerate", "scipy", "shtab") if name in sys.modules])
"""


def test_help_and_typos_load_nothing_heavy():
    """In one fresh process: ``--help`` of every command but ``launch``, which lists Accelerate's options."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow("starts a shell")
def test_bash_completes_options(run):
    pytest.importorskip("shtab")
    _, script, _ = run("completion", "bash")
    typed = "COMP_WORDS=(lightning-hetero plan --wor); COMP_CWORD=2; _shtab_lightning_hetero; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{typed}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["--workload"]
