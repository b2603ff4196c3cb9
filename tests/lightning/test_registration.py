"""The names of the strategies are known to Lightning, whatever is imported first, at the cost of no import."""

import json
import os
import subprocess
import sys

import pytest

interpreters = pytest.mark.slow("starts interpreters")

REPORT = """
import json, sys
{imports}
heavy = sorted({{"torch", "lightning", "numpy", "pytorch_lightning"}} & set(sys.modules))
from {trainer} import Trainer
from {trainer}.strategies import ModelParallelStrategy, StrategyRegistry
from {fabric} import Fabric
from {fabric}.strategies import STRATEGY_REGISTRY

def aliases(registry, name):
    return {{key[len(name):]: entry["init_params"] for key, entry in registry.items()
            if key.startswith(name) and "zero" not in key}}

def kind(thing):
    return type(thing).__module__.removeprefix("lightning_hetero.strategies.")

def refused(name):
    try:
        Fabric(strategy=name, accelerator="cpu", devices=2)
    except ValueError as error:
        return str(error)

made = {{key: StrategyRegistry.get(key) for key in StrategyRegistry if key.startswith("hetero_")}}
print(json.dumps({{
    "heavy": heavy,
    "trainer": [aliases(StrategyRegistry, name) for name in ("ddp", "hetero_ddp")],
    "fabric": [aliases(STRATEGY_REGISTRY, name) for name in ("ddp", "hetero_ddp")],
    "made": {{key: kind(one) for key, one in made.items()}},
    "start": {{key: one._start_method for key, one in made.items() if key != "hetero_fsdp"}},
    "by name": [kind(Trainer(strategy="hetero_ddp", accelerator="cpu", devices=1, logger=False).strategy),
                kind(Fabric(strategy="hetero_ddp", accelerator="cpu", devices=1).strategy)],
    "sharded": isinstance(made["hetero_fsdp"], ModelParallelStrategy),
    "refused": [refused("hetero_elastic"), refused("hetero_fsdp")],
}}))
"""
NAMESPACES = {
    "lightning.pytorch": ("lightning.fabric", "lightning", "fabric"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning", "lightning_fabric"),
}


def run(command, cwd, autoload=True, **env):
    """Run a command away from the checkout, which has to succeed."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)), **env}
    done = subprocess.run(command, cwd=cwd, env=env, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def printed(code, cwd, **given):
    """What ``code`` prints in a fresh interpreter."""
    return run([sys.executable, "-c", code], cwd, **given).stdout.strip()


@pytest.mark.parametrize(
    ("trainer", "imports", "loads"),
    [
        ("lightning.pytorch", "import lightning_hetero", False),
        pytest.param("lightning.pytorch", "", True, marks=interpreters),
        pytest.param("pytorch_lightning", "", True, marks=interpreters),
        pytest.param("pytorch_lightning", "import lightning_hetero", False, marks=interpreters),
        pytest.param("lightning.pytorch", "import lightning, lightning_hetero", False, marks=interpreters),
    ],
)
def test_every_name_is_known_and_makes_the_strategy_of_its_namespace(trainer, imports, loads, tmp_path):
    pytest.importorskip(trainer)
    fabric, ours, ours_in_fabric = NAMESPACES[trainer]
    found = json.loads(
        printed(REPORT.format(trainer=trainer, fabric=fabric, imports=imports), tmp_path, autoload=loads)
    )
    assert found["heavy"] == [] or imports != "import lightning_hetero", "the package imports nothing heavy"
    for side, number in (("trainer", 12), ("fabric", 5)):
        plain, hetero = found[side]
        assert plain == hetero, "the aliases are those of ddp"
        assert len(hetero) == number
    assert found["by name"] == [f"{ours}_ddp", f"{ours_in_fabric}_ddp"]
    assert found["made"] == {name: f"{ours}_{name.split('_')[1]}" for name in found["made"]}
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    expected = {f"hetero_ddp{s}{u}": m for s, m in methods.items() for u in ("", *UNUSED)}
    assert found["start"] == {**expected, **{f"hetero_elastic{suffix}": method for suffix, method in methods.items()}}
    assert set(found["made"]) - set(found["start"]) == {"hetero_fsdp"}
    assert found["sharded"]
    elastic, fsdp = found["refused"]
    assert "lightning_hetero.elastic.ElasticEngine" in elastic
    assert "Trainer(strategy='hetero_fsdp')" in fsdp


UNUSED = ("_find_unused_parameters_true", "_find_unused_parameters_false")
# Prints the modules after `import torch`, and those after `import lightning_hetero`.
IMPORTED = """
import json, sys
import torch
torch_alone = sorted(sys.modules)
import lightning_hetero
print(json.dumps([torch_alone, sorted(sys.modules)]))
"""


@interpreters
def test_imports_load_no_more_than_they_need(tmp_path):
    (torch_alone, without), (autoloaded, with_it) = (
        map(set, json.loads(printed(IMPORTED, tmp_path, autoload=switch, ACCELERATE_USE_HETERO="")))
        for switch in (False, True)
    )
    assert autoloaded - torch_alone == {"_lightning_hetero_autoload", "_lightning_hetero_entry"}
    assert len(without - torch_alone) <= 4
    assert with_it - autoloaded <= without - torch_alone
    code = "import sys; from lightning_hetero import HeteroDDPStrategy; print('pytorch_lightning' in sys.modules)"
    assert printed(code, tmp_path) == "False", "a strategy leaves the other namespace alone"
    code = "from lightning.fabric.cli import _get_supported_strategies as f; print('hetero_ddp' in f())"
    assert printed(code, tmp_path) == "True"


@interpreters
def test_nothing_of_ours_breaks_an_import_of_torch(tmp_path):
    package = tmp_path / "lightning_hetero"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken installation')")
    code = """
import torch
from lightning.pytorch.strategies import StrategyRegistry
try:
    StrategyRegistry.get("hetero_ddp")
except RuntimeError as error:
    print(error)
"""
    assert printed(code, tmp_path, PYTHONPATH=str(tmp_path)) == "broken installation"
    code = "import sys; sys.meta_path = tuple(sys.meta_path); import torch; print(torch.ones(1).item())"
    assert printed(code, tmp_path) == "1.0", "nor an import system that refuses the hook"
