"""What a training adds to a process in its steps: nothing but a few objects of Python, as its history grows.

What trainings leave in a process that trains again is in ``tests/comm/agreement/test_group_lifetime.py``.
"""

import importlib.util
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers import run_ranks

FOLDER = Path(__file__).parents[1] / "benchmarks"
FIRST, LAST = 300, 400  # the times of 256 steps are kept
SHORT = 45, 65
MEMORY = 8192
"""KiB by which a process may grow between the two."""
COUNTED = ("files", "threads", "groups", "keys", "hooks")
KEYS = {"elastic": 3}  # of the mega-batch that runs: what was claimed, and the ranks that are at its end
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


def _counts(rank, leaks, mode, marks, add):
    leaks._modes.settle(rank)
    leaks._modes.quiet()
    os.environ.update(ACCELERATE_USE_CPU="true")
    watch, kept = leaks.Watch(marks), []

    def after_step(number, model):
        if add is not None:
            kept.append(add(number, model))
        watch(number, model)

    leaks._modes.train(mode, marks[1] + 1, after_step)
    return watch.counts


@pytest.mark.parametrize(
    "mode", ["plain", "stale block top-k", "adaptive", "hierarchy", "elastic", "fsdp", "fabric", "accelerate"]
)
def test_steps_leave_nothing(leaks, mode):
    """Arrays, of which Python keeps no account, would show in the memory of the process."""
    for first, last in run_ranks(_counts, 2, leaks, mode, (FIRST, LAST), None):
        grown = {name: last[name] - first[name] for name in COUNTED}
        assert abs(grown.pop("keys")) <= KEYS.get(mode, 0)
        assert set(grown.values()) == {0}, grown
        most = OBJECTS.get(mode, LAST - FIRST)
        assert last["objects"] - first["objects"] < most, "at least one object in each step"
        assert last["tensor_bytes"] - first["tensor_bytes"] < 4 * (LAST - FIRST), "at least one number in each step"
        assert last["rss_kib"] - first["rss_kib"] < MEMORY


def _file(number, model):
    return open(os.devnull)  # noqa: SIM115


def _thread(number, model):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


def _group(number, model):
    return dist.new_group()


def _key(number, model):
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().set(f"of step {number}", "")
    dist.barrier()  # rank 0 goes no further than to its next backward pass before the other has counted


def _hook(number, model):
    return model.register_forward_hook(lambda *_: None)


def _hook_of_a_parameter(number, model):
    return next(model.parameters()).register_hook(lambda gradient: None)


def _hook_of_optimizers(number, model):
    return register_optimizer_step_post_hook(lambda *_: None)


def _object(number, model):
    return []


def _tensor(number, model):
    return torch.zeros(16)


def _view(number, model):
    """Of a storage that nobody else has; its size counts, once for all its views."""
    whole = torch.zeros(16)
    return whole[:1], whole[1:]


def _memory(number, model):
    fresh = mmap.mmap(-1, 2**20)
    fresh.write(b"1" * 2**20)
    return fresh


@pytest.mark.parametrize(
    ("add", "kind", "each"),
    [
        *((_file, "files", 1), (_thread, "threads", 1), (_group, "groups", 1), (_key, "keys", 1), (_hook, "hooks", 1)),
        *((_hook_of_a_parameter, "hooks", 1), (_hook_of_optimizers, "hooks", 1)),
        *((_tensor, "tensor_bytes", 64), (_view, "tensor_bytes", 64)),
    ],
)
def test_what_each_step_leaves_is_counted_exactly(leaks, add, kind, each):
    """A group has keys of its own."""
    for first, last in run_ranks(_counts, 2, leaks, "ddp", SHORT, add):
        assert last[kind] - first[kind] == each * (SHORT[1] - SHORT[0])


@pytest.mark.parametrize(("add", "kind", "each"), [(_object, "objects", 1), (_memory, "rss_kib", 1024)])
def test_what_each_step_leaves_is_counted_at_least(leaks, add, kind, each):
    """Python and torch make and free some of it themselves."""
    for first, last in run_ranks(_counts, 2, leaks, "ddp", SHORT, add):
        assert last[kind] - first[kind] >= 0.8 * each * (SHORT[1] - SHORT[0])


def test_the_least_within_two_sync_rounds_counts(leaks, monkeypatch):
    """What lives in the middle of a round comes and goes."""
    watch, found = leaks.Watch((50, 100)), {}
    monkeypatch.setattr(leaks, "census", lambda model, device: dict(found))
    for number in range(1, 121):
        found.update(keys=abs(number - 30), hooks=-number)
        watch(number, None)
    assert watch.counts == [{"keys": 0, "hooks": -50}, {"keys": 31, "hooks": -100}]


def test_the_least_within_a_second_counts_after_trainings(leaks, monkeypatch):
    """The other end of a socket closes it a little later."""
    files = iter([5, 4, 4, 6, *[5] * 6])
    monkeypatch.setattr(leaks, "census", lambda model, device: {"files": next(files), "hooks": 7})
    monkeypatch.setattr(leaks.time, "sleep", lambda seconds: None)
    assert leaks.settled(None, "cpu") == {"files": 4, "hooks": 7}
