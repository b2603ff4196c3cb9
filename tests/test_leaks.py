"""What a training adds to a process in its steps: nothing but a few objects of Python, as its history grows.

What trainings leave in a process that trains again is in ``tests/comm/agreement/test_group_lifetime.py``.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import run_ranks

FOLDER = Path(__file__).parents[1] / "benchmarks"
FIRST, LAST = 100, 300
COUNTED = ("files", "threads", "groups", "keys", "hooks")
OBJECTS = {"adaptive": 5 * (LAST - FIRST)}  # its total still moves, and plans are kept


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def leaks():
    """The benchmark, whose trainings are the same ones."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield loaded("leaks")
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[name]


def _counts(rank, leaks, mode, add):
    leaks._modes.quiet()
    os.environ.update(LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    taken, kept = [], []

    def after_step(number, model):
        if add is not None:
            kept.append(add(model))
        if number in (FIRST, LAST):
            taken.append(leaks.census(model))

    leaks._modes.train(mode, LAST + 1, after_step)
    return taken


@pytest.mark.parametrize(
    "mode", ["plain", "stale block top-k", "adaptive", "hierarchy", "elastic", "fsdp", "fabric", "accelerate"]
)
def test_steps_leave_nothing(leaks, mode):
    for first, last in run_ranks(_counts, 2, leaks, mode, None):
        grown = {name: last[name] - first[name] for name in COUNTED}
        if mode == "elastic" and abs(grown["keys"]) == 1:
            grown["keys"] = 0  # of a merge that the other rank has not begun yet, or is past
        assert grown == dict.fromkeys(COUNTED, 0)
        most = OBJECTS.get(mode, LAST - FIRST)
        assert last["objects"] - first["objects"] < most, "at least one object in each step"


def _file(model):
    return open(os.devnull)  # noqa: SIM115


def _hook(model):
    return model.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(("add", "kind"), [(_file, "files"), (_hook, "hooks"), (lambda model: [], "objects")])
def test_what_each_step_leaves_is_counted(leaks, add, kind):
    for first, last in run_ranks(_counts, 2, leaks, "ddp", add):
        assert last[kind] - first[kind] >= LAST - FIRST - 2
