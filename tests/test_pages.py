"""What README and docs tell a reader to run runs, and shows what they show. `make docs` checks all else of them."""

import doctest
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.cli import main
from tests.page_blocks import FENCE, PAGES

ROOT = Path(__file__).parents[1]
GALLERY = sorted((ROOT / "docs" / "gallery").glob("plot_*.py"))
LONG = pytest.mark.slow("starts an interpreter, and trains for many seconds; pages change less often than code")


def blocks(page, kind):
    return [match[2] for match in FENCE.finditer(page.read_text()) if match[1] == kind]


def sessions():
    return [pytest.param("\n".join(found), id=page.name) for page in PAGES if (found := blocks(page, "pycon"))]


@pytest.mark.parametrize("source", sessions())
def test_sessions_give_what_is_shown(source):
    """The interactive sessions of a page are one, so that a later one may use the names of an earlier one."""
    test = doctest.DocTestParser().get_doctest(source, {}, "page", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def run(*command, cwd=None):
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@LONG
def test_blocks_of_python_run(tmp_path):
    """All in one process, each page's after another; what they take for granted is in the script."""
    count = sum(len(blocks(page, "python")) for page in PAGES)
    assert f"{count} blocks ran, 0 failed" in run(ROOT / "tests" / "page_blocks.py", tmp_path)


@LONG
def test_the_first_script_of_the_readme_learns_the_split(tmp_path):
    (script,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "first.py").write_text(script.replace("4800", "1920"))
    output = run(tmp_path / "first.py", cwd=tmp_path)
    splits = [(int(a), int(b)) for a, b in re.findall(r"^0 \d+ \((\d+), (\d+)\) ", output, re.M)]
    assert splits[0] == (40, 40), output
    assert splits[-1][0] > 50
    assert all(sum(split) == 80 for split in splits)


@LONG
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_scripts_of_the_gallery_draw(path, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    runpy.run_path(str(path))
    drawn = plt.get_fignums()
    plt.close("all")
    assert drawn
    assert capsys.readouterr().out


def test_the_script_of_the_quickstart_is_the_example():
    script, *_ = blocks(ROOT / "docs" / "quickstart.md", "python")
    assert (ROOT / "examples" / "quickstart.py").read_text().endswith(script)


def test_the_page_on_mixed_gpus_shows_what_the_command_writes(capsys):
    text = (ROOT / "docs" / "mixed-gpus.md").read_text()
    command, shown = re.search(r"^```console\n\$ lightning-hetero (.+)\n((?s:.*?))^```$", text, re.M).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown
