"""``ACCELERATE_USE_HETERO=true``: scripts for plain Accelerate, unchanged, on unequal workers."""

import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import accelerate.accelerator
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType

from lightning_hetero.accelerate import HeteroAccelerator, flag
from lightning_hetero.core import BatchPlan
from tests.helpers import collected, run_ranks

SCRIPTS = Path(__file__).parent / "flag_scripts"
ROOT = Path(__file__).parents[2]
CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
FLAG = "ACCELERATE_USE_HETERO"
ON = {**CPU, FLAG: "true"}


def script(rank, name, batch_size, folder, on=True):
    """Run a script in this process as it is, with or without the hook of the flag."""
    os.environ["REPORT"] = str(Path(folder) / f"{name}-{os.environ['WORLD_SIZE']}.json")
    if on:
        flag.install(accelerate.accelerator)
    sys.path.insert(0, str(SCRIPTS))
    sys.argv = [name, str(batch_size)]
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return json.loads(Path(os.environ["REPORT"]).read_text()) if rank == 0 else None


def numbers(value):
    """All numbers of a report, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)]


CASES = {
    "accumulation": {},
    "metrics": {},
    "checkpointing": {},
    "tracking": {},
    "folds": {},
    "denoiser": {},
    "hooked": {},
    "largest_batch": {},
    "tokens": {"ACCELERATE_HETERO_LOSS_REDUCTION": "sum"},
}


def test_every_script_of_the_folder_is_run():
    assert {path.stem for path in SCRIPTS.glob("*.py")} - {"toy"} == set(CASES)
    texts = [path.read_text() for path in SCRIPTS.glob("*.py")]
    assert not any("hetero" in text.lower() for text in texts), "these are scripts for plain Accelerate"


@pytest.mark.parametrize("name", CASES)
def test_an_unchanged_script_gives_the_results_of_one_process(name, tmp_path):
    one = run_ranks(script, 1, name, 16, tmp_path, False, env=CPU)[0]
    sizes = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "13,3"}
    two = run_ranks(script, 2, name, 8, tmp_path, env={**ON, **sizes, **CASES[name]})[0]
    assert set(one) == set(two)
    np.testing.assert_allclose(numbers(two), numbers(one), rtol=1e-11, atol=1e-13)


def test_without_the_hook_the_same_comparison_fails(tmp_path):
    """The comparison above is one that plain Accelerate does not pass at unequal sizes, nor with a ragged tail."""
    one = run_ranks(script, 1, "accumulation", 16, tmp_path, False, env=CPU)[0]
    two = run_ranks(script, 2, "accumulation", 8, tmp_path, False, env=CPU)[0]
    assert not np.allclose(numbers(two["weights"]), numbers(one["weights"]), rtol=1e-6)


# what the hook is


def python(code, **env):
    """Output of a fresh interpreter that runs ``code``."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    path = os.pathsep.join([str(ROOT), variables.pop("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**variables, "PYTHONPATH": path, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip() + done.stderr.strip()


UNTOUCHED = """
import sys, torch, accelerate, accelerate.accelerator as owner
from types import ModuleType
assert accelerate.Accelerator is owner.Accelerator
assert type(owner) is ModuleType
assert owner.Accelerator.__init__.__module__ == "accelerate.accelerator"
assert not hasattr(owner.Accelerator.__init__, "before_hetero")
assert not [name for name in sys.modules if name.partition(".")[0] == "lightning_hetero"]
print("untouched")
"""


@pytest.mark.parametrize("text", [None, "false", "0", ""])
def test_without_the_flag_nothing_of_accelerate_is_touched(text):
    assert python(UNTOUCHED, **({} if text is None else {FLAG: text})) == "untouched"


HOOKED = """
{first}
import torch
from accelerate import Accelerator
from accelerate.accelerator import Accelerator as same
assert Accelerator is same and Accelerator.__module__ == "accelerate.accelerator"
assert hasattr(Accelerator.__init__, "before_hetero")
import accelerate.accelerator
from lightning_hetero.accelerate import flag
flag.uninstall(accelerate.accelerator)
assert not hasattr(Accelerator.__init__, "before_hetero")
assert type(Accelerator(cpu=True)) is Accelerator
print("hooked")
"""


@pytest.mark.parametrize("first", ["", "import accelerate", "import torch", "import accelerate.utils"])
def test_the_hook_is_there_whatever_is_imported_first_and_can_be_taken_out(first):
    assert python(HOOKED.format(first=first), **ON) == "hooked"


def test_an_invalid_flag_is_an_error_where_an_accelerator_is_made_and_not_before():
    code = (
        "import torch\nfrom accelerate import Accelerator\ntry: Accelerator(cpu=True)\nexcept ValueError as e: print(e)"
    )
    assert "ACCELERATE_USE_HETERO='perhaps'" in python(code, **{FLAG: "perhaps"})


LATE = """
import torch
from accelerate import Accelerator
plain = Accelerator(cpu=True)
import lightning_hetero
assert type(plain) is Accelerator
print(type(Accelerator()).__name__)
"""


def test_without_the_entry_point_an_import_of_ours_installs_the_hook_and_tells_of_accelerators_before():
    said = python(LATE, **ON, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "FlagAccelerator" in said
    assert "an Accelerator was made before lightning-hetero could see it" in said


LAUNCHED = """
import torch
from accelerate import Accelerator, debug_launcher

def train():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(16.0), batch_size=4, shuffle=True)
    loader = accelerator.prepare(model, optimizer, loader)[2]
    print(accelerator.process_index, [len(batch) for batch in loader], flush=True)

debug_launcher(train, num_processes=2)
"""


def test_a_launcher_of_functions_hands_the_flag_on():
    sizes = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "6,2", "GLOO_SOCKET_IFNAME": "lo"}
    said = python(LAUNCHED, **ON, **sizes)
    assert "[6, 6]" in said  # ranks may write into each other's lines
    assert "[2, 2]" in said


# what an accelerator becomes


class Others(Accelerator):
    """An ``Accelerator`` that another library has derived."""

    def __init__(self, *args, extra=3, **kwargs):
        self.extra = extra
        super().__init__(*args, **kwargs)


def kinds(rank):
    flag.install(accelerate.accelerator)
    first, second, theirs = Accelerator(), Accelerator(), Others(extra=4)
    model, optimizer = torch.nn.Linear(1, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    loader = theirs.prepare(model, optimizer, loader)[2]
    sizes = [len(batch[0]) for batch in loader]
    copy, others = (pickle.loads(pickle.dumps(one)) for one in (Accelerator(), theirs))
    return (
        [isinstance(one, HeteroAccelerator) and isinstance(one, Accelerator) for one in (first, second, theirs)],
        isinstance(theirs, Others) and theirs.extra == 4,
        sizes,
        (type(copy).__name__, type(others) is type(theirs), others.extra),
        second.hetero_session is None,
    )


def test_accelerators_of_scripts_and_of_libraries_become_uneven():
    results = run_ranks(kinds, 2, env={**ON, "ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "6,2"})
    for rank, (uneven, theirs, sizes, copied, postponed) in enumerate(results):
        assert uneven == [True, True, True]
        assert theirs
        assert sizes == [(6, 2)[rank]] * 2
        assert copied == ("FlagAccelerator", True, 4)
        assert postponed, "a further accelerator begins no session before something is prepared with it"


def decided(rank):
    flag.install(accelerate.accelerator)
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes = []
    for step, (x,) in enumerate(loader):
        sizes.append(len(x))
        accelerator.backward(model(x).mean())
        optimizer.step()
        if step == 1:
            accelerator.adopt(BatchPlan(8, (7, 1)))
    return sizes


def test_a_decision_changes_the_batches_that_follow():
    sizes = run_ranks(decided, 2, env=ON)
    assert sizes == [[4, 4, 4, 7], [4, 4, 4, 1]], "Accelerate draws a batch ahead of the running one"


def one_rank_alone(rank):
    flag.install(accelerate.accelerator)
    accelerator = Accelerator()
    if rank == 0:
        assert Accelerator().is_main_process
    accelerator.wait_for_everyone()
    return accelerator.gather(torch.ones(rank + 1)).sum().item()


def test_one_rank_may_make_a_further_accelerator_by_itself():
    assert run_ranks(one_rank_alone, 2, env=ON) == [3.0, 3.0]


def alone(rank):
    flag.install(accelerate.accelerator)
    lines = collected()
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=4, shuffle=True))
    return type(accelerator).__name__, [len(batch) for batch in loader], lines


def test_one_process_stays_plain_and_is_told_why():
    name, sizes, lines = run_ranks(alone, 1, env=ON)[0]
    assert (name, sizes) == ("FlagAccelerator", [4, 4])
    assert any("ACCELERATE_USE_HETERO=true" in line for line in lines)


def contradictory(rank):
    flag.install(accelerate.accelerator)
    Accelerator.distributed_type = property(lambda self: DistributedType.FSDP)  # which Accelerate has on GPUs only
    Accelerator()


def test_other_parallelism_beside_the_flag_is_an_error_on_every_rank():
    errors = run_ranks(contradictory, 2, env=ON, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("ACCELERATE_USE_HETERO=false" in message for *_, message in errors), errors


def local_sgd(rank):
    flag.install(accelerate.accelerator)
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    )
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for (x,) in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            local.step()


def test_local_sgd_is_refused_by_name():
    errors = run_ranks(local_sgd, 2, env={**ON, "ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "3,1"}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("LocalSGD averages the models of all workers alike" in message for *_, message in errors)
