"""Profiles of random inputs, seeds, reasons of slow tests, and names of cases."""

import re

import pytest
from hypothesis import settings

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
