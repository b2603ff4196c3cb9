"""Profiles of random inputs, seeds, reasons of slow tests, names of cases, and how many ranks were started."""

import re
from collections import Counter

import pytest
from hypothesis import settings

from tests.ranks import STARTED

# The same inputs in every run: a failure is that of the change that is tested. `make test-slow` tries many more.
for name, examples in {"quick": 20, "slow": 300}.items():
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True, database=None)
settings.load_profile("quick")


def pytest_addoption(parser):
    parser.addoption("--seeds", type=int, default=3, help="how many seeds a test with an argument `seed` gets")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames and not any(
        "seed" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("slow"):
            if not (mark.args and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f"{item.nodeid}: say why it can wait, pytest.mark.slow('...')")
        if "seed" in getattr(getattr(item, "callspec", None), "params", ()):
            item.add_marker(pytest.mark.seeds)


def pytest_make_parametrize_id(val):
    """Name a value without its address: processes that share the tests must find the same names."""
    text = repr(val)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if " at 0x" in text else None


TOTAL = pytest.StashKey[Counter]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["started"] = STARTED
    else:
        config.stash.setdefault(TOTAL, Counter()).update(STARTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash.setdefault(TOTAL, Counter()).update(getattr(node, "workeroutput", {}).get("started", {}))


def pytest_terminal_summary(terminalreporter, config):
    total = config.stash.get(TOTAL, Counter())
    if total["jobs"]:
        terminalreporter.write_line(f"{total['ranks']} processes were started as ranks, for {total['jobs']} jobs")
