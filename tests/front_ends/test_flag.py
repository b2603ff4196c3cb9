"""``ACCELERATE_USE_HETERO=true``: scripts for plain Accelerate and Transformers, unchanged, on unequal workers."""

import importlib
import inspect
import itertools
import json
import os
import pickle
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

import accelerate.accelerator
import numpy as np
import pytest
import torch
import transformers.trainer as trainer_module
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_hetero.accelerate import HeteroAccelerator, flag
from lightning_hetero.transformers import HeteroTrainer, adapt, restore
from tests.front_ends.test_launch import SCRIPTS, execute
from tests.helpers import collected
from tests.ranks import run_ranks

CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
ON = {**CPU, "ACCELERATE_USE_HETERO": "true"}


def sizes(text):
    return {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": text}


@contextmanager
def hook(on=True):
    if on:
        flag.install(accelerate.accelerator)
    try:
        yield
    finally:
        flag.uninstall(accelerate.accelerator)


def prepared(accelerator, samples=16, batch_size=4):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(samples, 1))
    return accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size, shuffle=True))


LEFT = []
"""What scripts have left: freeing a group that was just used, torch may wait for a thread that waits for the lock of
the interpreter."""


def script(rank, name, batch_size, folder, on):
    """Run a script in this process as it is; what the main process reports. None of them knows of us."""
    path = Path(folder) / f"{name}-{os.environ['WORLD_SIZE']}.json"
    with hook(on), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.setattr(sys, "argv", ["script", str(batch_size)])
        patch.setenv("REPORT", str(path))
        LEFT[:] = [runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")]
    return json.loads(path.read_text()) if rank == 0 else None


def numbers(value):
    """All numbers of a report, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)]


CASES = {"metrics": {}, "checkpointing": {}, "tokens": {"ACCELERATE_HETERO_LOSS_REDUCTION": "sum"}}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {name: run_ranks(script, 1, name, 16, folder, False, env=CPU)[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_unchanged_script_gives_the_results_of_one_process(name, one_process, tmp_path):
    two = run_ranks(script, 2, name, 8, tmp_path, True, env={**ON, **sizes("13,3"), **CASES[name]})[0]
    assert set(one_process[name]) == set(two)
    np.testing.assert_allclose(numbers(two), numbers(one_process[name]), rtol=1e-11, atol=1e-13)


# what an accelerator becomes


class Others(Accelerator):
    """An ``Accelerator`` that another library has derived."""

    def __init__(self, *args, extra=3, **kwargs):
        self.extra = extra
        super().__init__(*args, **kwargs)


def kinds(rank):
    with hook():
        first, theirs = Accelerator(), Others(extra=4)
        if rank == 0:
            assert Accelerator().is_main_process  # one rank may make a further one by itself
        seen = [len(batch[0]) for batch in prepared(theirs)[2]]
        copy, others = (pickle.loads(pickle.dumps(one)) for one in (first, theirs))
    ours = [isinstance(one, HeteroAccelerator) and isinstance(one, Accelerator) for one in (first, theirs, copy)]
    return ours, (isinstance(theirs, Others), theirs.extra, type(others) is type(theirs), others.extra), seen


def test_accelerators_of_scripts_and_of_libraries_become_uneven():
    """A further accelerator begins no session before something is prepared with it."""
    for rank, found in enumerate(run_ranks(kinds, 2, env={**ON, **sizes("6,2")})):
        assert found == ([True] * 3, (True, 4, True, 4), [(6, 2)[rank]] * 2)


def alone(rank):
    with hook():
        lines, accelerator = collected(), Accelerator()
        return [len(batch[0]) for batch in prepared(accelerator, 8)[2]], lines, accelerator.hetero_session


def test_one_process_stays_plain_and_is_told_why():
    seen, lines, session = run_ranks(alone, 1, env=ON)[0]
    assert (seen, session) == ([4, 4], None)
    assert any("ACCELERATE_USE_HETERO=true" in line for line in lines)


# the hook, in interpreters of their own

UNTOUCHED = """
import sys, torch, accelerate, accelerate.accelerator as owner
from types import ModuleType
assert accelerate.Accelerator is owner.Accelerator and type(owner) is ModuleType
assert owner.Accelerator.__init__.__module__ == "accelerate.accelerator"
assert not [name for name in sys.modules if name.partition(".")[0] == "lightning_hetero"]
print("done")
"""
HOOKED = """
{first}
from accelerate import Accelerator
from accelerate.accelerator import Accelerator as same
from lightning_hetero.accelerate import flag
import accelerate.accelerator
assert Accelerator is same and Accelerator.__module__ == "accelerate.accelerator"
assert type(Accelerator(cpu=True)) is not Accelerator
flag.uninstall(accelerate.accelerator)
assert type(Accelerator(cpu=True)) is Accelerator
print("done")
"""
LATE = """
from accelerate import Accelerator
assert type(Accelerator(cpu=True)) is Accelerator
import lightning_hetero
assert type(Accelerator()) is not Accelerator
print("done")
"""
WRONG = """
import torch
from accelerate import Accelerator
try: Accelerator(cpu=True)
except ValueError as e: print(e, "done")
"""
ADAPTED = """
{first}
import sys
from transformers import Trainer as stock
print([cls.__module__ for cls in globals().get("Trainer", stock).__mro__])
print(type(sys.modules["transformers.trainer"]).__name__, "done")
"""
MISSING = """
import sys; sys.modules["transformers"] = None
import importlib.util as util; find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "transformers" else find(name, *rest)
try: import lightning_hetero.transformers
except ImportError as e: print(e, "done")
"""
OURS = "lightning_hetero.transformers.trainer"
SHOWN = "{}; import logging; log = logging.getLogger('lightning_hetero'); print(log.level, len(log.handlers), 'done')"
SET_UP = "import logging; logging.basicConfig(level=30); logging.getLogger('lightning_hetero').setLevel(40)"
INTERPRETERS = [
    (HOOKED.format(first="import torch"), "", ON),
    (HOOKED.format(first="import accelerate.utils"), "", ON),
    *((UNTOUCHED, "", {"ACCELERATE_USE_HETERO": text}) for text in ("", "0")),
    (WRONG, "ACCELERATE_USE_HETERO='perhaps'", {"ACCELERATE_USE_HETERO": "perhaps"}),
    (LATE, "was made before", {**ON, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    (ADAPTED.format(first="import torch; from trl import SFTTrainer as Trainer"), OURS, ON),
    (ADAPTED.format(first="from transformers import Trainer"), OURS, ON),
    (ADAPTED.format(first="from lightning_hetero.transformers import hetero_trainer"), OURS, ON),
    (MISSING, "lightning-hetero[transformers]", {}),
    (SHOWN.format("from lightning_hetero import HeteroDDPStrategy"), "20 1", {}),
    (SHOWN.format("from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy"), "20 1", {}),
    (SHOWN.format("from lightning_hetero.accelerate import HeteroAccelerator"), "20 1", {}),
    (SHOWN.format(f"{SET_UP}; from lightning_hetero.session import HeteroSession"), "40 0", {}),
]


@pytest.mark.parametrize(
    ("code", "says", "env"),
    [INTERPRETERS[0], *(pytest.param(*row, marks=pytest.mark.slow("a cold interpreter")) for row in INTERPRETERS[1:])],
)
def test_an_interpreter_is_hooked_by_the_variable_and_only_by_it(code, says, env):
    """Whatever is imported first; lines of ours are shown from then on, unless logging was set up."""
    exit_code, output = execute(sys.executable, "-W", "ignore", "-c", code, **env)
    assert exit_code == 0, output
    assert "done" in output
    assert says in output, output


def test_adapting_transformers_is_undone():
    original = trainer_module.Trainer
    try:
        adapt()
        mine = trainer_module.Trainer
        adapt()
        assert trainer_module.Trainer is importlib.import_module("transformers").Trainer is mine
        assert issubclass(mine, HeteroTrainer)
        assert issubclass(mine, original)
        assert inspect.signature(mine) == inspect.signature(original)
    finally:
        restore()
    restore()
    assert importlib.import_module("transformers").Trainer is trainer_module.Trainer is original


# Accelerate's own tests of an Accelerator on two processes, as they are installed


def _sync(script):
    for function in (script.test_gradient_accumulation, script.test_gradient_accumulation_with_opt_and_scheduler):
        for split, dispatch, each in itertools.product((True, False), repeat=3):
            function(split, dispatch, each)
    script.main()


def _ops(script):
    accelerate.Accelerator(cpu=True)
    script.main()


def _loaders(script):
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    script.test_pickle_accelerator()
    data = script.DummyDataset()
    sampler = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
    for settings in ({"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_sampler": sampler}):
        GradientState._reset_state()
        script.test_data_loader(DataLoader(data, **settings), script.create_accelerator())


PARTS = {"test_sync": _sync, "test_ops": _ops, "test_distributed_data_loop": _loaders}


def own_scripts(rank, name):
    with hook():
        PARTS[name](importlib.import_module(f"accelerate.test_utils.scripts.{name}"))


@pytest.mark.slow("a quarter of a minute of Accelerate's own tests; flag_scripts has the quick ones")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("test_sync", {"ACCELERATE_HETERO_MAX_LOCAL_BATCH_SIZES": "20,12"}),
        ("test_ops", {}),
        ("test_distributed_data_loop", {}),
        ("test_distributed_data_loop", sizes("5,3")),
    ],
    ids=str,
)
def test_accelerates_own_scripts_pass(name, settings):
    env = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_HETERO": "true", **settings}
    run_ranks(own_scripts, 2, name, env=env)
