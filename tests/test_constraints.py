"""The constraints file names the versions that these tests run with, of everything that the package brings along."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("test", "demo", "accelerate", "transformers", "cli", "ray", "docs")
PINNED = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought_along(name, extras=("",), seen=None):
    """Distributions that are installed because this one is, without itself, and their versions."""
    seen = {} if seen is None else seen
    for line in metadata.requires(name) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        if canonical(wanted.name) not in seen:
            seen[canonical(wanted.name)] = version.partition("+")[0]  # a build of torch for a CPU is torch
            brought_along(wanted.name, ("", *wanted.extras), seen)
    return seen


def test_each_is_pinned_once():
    names = [canonical(name) for name, _ in PINNED]
    assert len(names) == len(set(names)) > 50


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="constraints.txt is for Python 3.11")
def test_versions_are_those_that_the_tests_run_with():
    pinned = {canonical(name): version for name, version in PINNED}
    installed = brought_along("lightning-hetero", ("", *EXTRAS))
    assert {"torch", "lightning", "pytest", "sympy"} <= set(installed)  # the last is torch's
    wrong = {name: (version, pinned.get(name)) for name, version in installed.items() if pinned.get(name) != version}
    assert not wrong, "installed, and in constraints.txt: install with -c constraints.txt, or write the new ones there"


def test_the_first_install_takes_the_pinned_torch():
    assert f"torch=={dict(PINNED)['torch']}" in (ROOT / "Makefile").read_text()
