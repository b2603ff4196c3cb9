"""The names of the strategy are known to Lightning, whatever is imported first, and never at the cost of an import."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import _lightning_hetero_autoload as autoload
import lightning_hetero
from lightning_hetero import accelerate, comm, core, simulate
from lightning_hetero.simulate import planning
from lightning_hetero.strategies._registration import register

NAMESPACES = {
    "lightning.pytorch": "lightning_hetero.strategies.lightning_ddp",
    "pytorch_lightning": "lightning_hetero.strategies.pytorch_lightning_ddp",
}
namespaces = pytest.mark.parametrize("namespace", NAMESPACES)

# Prints, for `ddp` and for `hetero_ddp`, the arguments behind each alias, by the alias's suffix.
DUMP_ALIASES = """
import json
from {namespace}.strategies import StrategyRegistry
def aliases(name):
    return {{key[len(name):]: entry["init_params"] for key, entry in StrategyRegistry.items()
            if key.startswith(name) and "zero" not in key}}
print(json.dumps([aliases("ddp"), aliases("hetero_ddp")]))
"""

# Makes the strategy by each alias; prints its class's module and the start methods, ours and that of `ddp`.
MAKE_STRATEGIES = """
import json
from {namespace} import Trainer
from {namespace}.strategies import StrategyRegistry
strategy = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=1, logger=False).strategy
pairs = [[StrategyRegistry.get(prefix + key[len("hetero_ddp"):])._start_method for prefix in ("ddp", "hetero_ddp")]
         for key in StrategyRegistry if key.startswith("hetero_ddp")]
flags = [StrategyRegistry.get("hetero_ddp_find_unused_parameters_" + flag)._ddp_kwargs["find_unused_parameters"]
         for flag in ("true", "false")]
ours = [entry["strategy"] for key, entry in StrategyRegistry.items() if key.startswith("hetero_ddp")]
print(json.dumps([type(strategy).__module__, pairs, flags, [made is type(strategy) for made in ours]]))
"""


# Makes `hetero_elastic` by each alias; prints its class's module and the start methods.
MAKE_ELASTIC = """
import json
from {namespace}.strategies import StrategyRegistry
made = {{key: StrategyRegistry.get(key) for key in StrategyRegistry if key.startswith("hetero_elastic")}}
print(json.dumps([{{key: strategy._start_method for key, strategy in made.items()}},
                  sorted({{type(strategy).__module__ for strategy in made.values()}})]))
"""

# Makes `hetero_fsdp`, with the strategies that its name begins; prints its class's module and base.
MAKE_FSDP = """
import json
from {namespace}.strategies import ModelParallelStrategy, StrategyRegistry
names = [key for key in StrategyRegistry if key.startswith("hetero_fsdp")]
made = StrategyRegistry.get("hetero_fsdp")
print(json.dumps([names, type(made).__module__, isinstance(made, ModelParallelStrategy)]))
"""


def run(code, cwd, autoload=True, **env):
    """Run ``code`` in a fresh interpreter, away from the checkout; return what it printed."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)), **env}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module", params=NAMESPACES)
def printed(request, tmp_path_factory):
    """A namespace of Lightning, and what a process that imports nothing of ours finds and makes there."""
    parts = (DUMP_ALIASES, MAKE_STRATEGIES, MAKE_ELASTIC, MAKE_FSDP)
    code = "".join(part.format(namespace=request.param) for part in parts)
    return request.param, list(map(json.loads, run(code, tmp_path_factory.mktemp("away")).splitlines()))


def test_aliases_are_those_of_ddp_with_no_import(printed):
    ddp, hetero = printed[1][0]
    assert len(hetero) == 12
    assert hetero == ddp


@pytest.mark.parametrize("first", ["lightning_hetero", "lightning"])
@namespaces
def test_one_import_is_enough_without_autoload(namespace, first, tmp_path):
    imports = ["import lightning_hetero", f"import {namespace}"]
    code = "\n".join(imports if first == "lightning_hetero" else imports[::-1])
    ddp, hetero = json.loads(run(code + DUMP_ALIASES.format(namespace=namespace), tmp_path, autoload=False))
    assert len(hetero) == 12
    assert hetero == ddp


def test_every_alias_makes_the_strategy_of_its_namespace(printed):
    namespace, (_, (module, start_methods, flags, registered), *_) = printed
    assert module == NAMESPACES[namespace]
    assert len(start_methods) == 12
    assert all(ours == theirs for theirs, ours in start_methods)
    assert flags == [True, False]
    assert registered == [True] * 12, "the class takes the place of the lazy factory under all names"


def test_elastic_averaging_has_its_names(printed):
    namespace, (_, _, (made, modules), _) = printed
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    assert made == {f"hetero_elastic{suffix}": method for suffix, method in methods.items()}
    assert modules == [NAMESPACES[namespace].replace("_ddp", "_elastic")]


def test_sharded_models_have_their_name(printed):
    namespace, (*_, (names, module, derived)) = printed
    assert names == ["hetero_fsdp"], "subprocesses only, as with ModelParallelStrategy"
    assert (module, derived) == (NAMESPACES[namespace].replace("_ddp", "_fsdp"), True)


@pytest.mark.parametrize("namespace", ["lightning.fabric", "lightning_fabric"])
def test_fabric_is_told_that_sharded_models_are_of_the_trainer(namespace):
    fabric = pytest.importorskip(namespace)
    with pytest.raises(ValueError, match=r"hetero_fsdp.*use Trainer\(strategy='hetero_fsdp'\), or .*'hetero_ddp'"):
        fabric.Fabric(strategy="hetero_fsdp", accelerator="cpu", devices=2)


@pytest.mark.parametrize("namespace", ["lightning.fabric", "lightning_fabric"])
def test_fabric_is_told_what_there_is_in_place_of_elastic_averaging(namespace):
    fabric = pytest.importorskip(namespace)
    with pytest.raises(ValueError, match="of Lightning's Trainer only: .* use lightning_hetero.elastic.ElasticEngine"):
        fabric.Fabric(strategy="hetero_elastic", accelerator="cpu", devices=2)


def test_an_import_of_the_strategy_leaves_the_other_namespace_alone(tmp_path):
    code = "import sys; from lightning_hetero import HeteroDDPStrategy; print('pytorch_lightning' in sys.modules)"
    assert run(code, tmp_path) == "False"


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = "import sys; import lightning_hetero; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    assert run(code, tmp_path) == "[]"


# Prints the modules after `import torch`, and those after `import lightning_hetero`.
IMPORTED = """
import json, sys
import torch
torch_alone = sorted(sys.modules)
import lightning_hetero
print(json.dumps([torch_alone, sorted(sys.modules)]))
"""


def test_autoload_adds_two_small_modules_to_an_import_of_torch(tmp_path):
    """By names, not by seconds: neither SciPy, pandas, Matplotlib, Transformers nor Accelerate, nor the package."""
    (torch_alone, without), (autoloaded, with_it) = (
        map(set, json.loads(run(IMPORTED, tmp_path, autoload=switch, ACCELERATE_USE_HETERO="")))
        for switch in (False, True)
    )
    assert autoloaded - torch_alone == {"_lightning_hetero_autoload", "_lightning_hetero_entry"}
    ours = {"_lightning_hetero_autoload", "lightning_hetero", "lightning_hetero.lazy_exports"}
    assert without - torch_alone == ours
    assert with_it - autoloaded == ours - autoloaded


def test_a_broken_package_breaks_no_import_of_torch(tmp_path):
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
    assert run(code, tmp_path, PYTHONPATH=str(tmp_path)) == "broken installation"


def test_an_import_system_that_refuses_the_hook_breaks_no_import_of_torch(tmp_path):
    code = "import sys; sys.meta_path = tuple(sys.meta_path); import torch; print(torch.ones(1).item())"
    assert run(code, tmp_path) == "1.0"


def test_public_names_and_their_homes_agree():
    assert set(lightning_hetero.__all__) == {*lightning_hetero._EXPORTS, "__version__"}
    assert set(lightning_hetero.__all__) <= set(dir(lightning_hetero))


LAZY = [lightning_hetero, accelerate, comm, core, simulate, planning]


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_type_checkers_see_the_public_names(package):
    """They read imports only, and take those under another name, be it the same one, for public."""
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert all(isinstance(node, ast.ImportFrom) for node in block.body)
    seen = {(alias.name, alias.asname): node.module for node in block.body for alias in node.names}
    assert seen == {(name, name): home for name, home in package._EXPORTS.items()}


@pytest.mark.parametrize("name", core.__all__)
def test_a_name_of_the_mathematics_is_found(name):
    value = getattr(core, name)
    assert getattr(value, "__module__", core._EXPORTS[name]) == core._EXPORTS[name] or name.isupper()
    assert name in dir(core)


@pytest.mark.parametrize("name", lightning_hetero.__all__)
def test_public_name_resolves(name):
    assert getattr(lightning_hetero, name) is not None


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'HeteroDPStrategy'"):
        lightning_hetero.HeteroDPStrategy  # noqa: B018


class Registry(dict):
    """What of Lightning's registry is used here."""

    def register(self, name, strategy, description, override, **init_params):
        if name in self and not override:
            raise ValueError(name)
        self[name] = {"strategy": strategy, "init_params": init_params, "description": description}


class Strategy:
    """Stands for a strategy class."""

    def __init__(self, **arguments):
        self.arguments = arguments


@pytest.fixture
def target(monkeypatch):
    """A table of one line, for a registry in the module ``owner_of_registry``."""
    target = autoload.Target(
        "owner_of_registry", "REGISTRY", f"{__name__}:Strategy", "hetero_test", {"": {}, "_spawn": {"how": "spawn"}}
    )
    monkeypatch.setattr(autoload, "TARGETS", (target,))
    monkeypatch.setattr(autoload, "MODULES", {target.module})
    monkeypatch.setattr("lightning_hetero.strategies._registration.TARGETS", (target,))
    return target


@pytest.fixture
def loaded(target, monkeypatch):
    """The module of the target, loaded already."""
    module = types.ModuleType(target.module)
    module.REGISTRY = Registry()
    monkeypatch.setitem(sys.modules, target.module, module)
    return module


def test_boot_registers_at_once_with_a_loaded_registry(loaded):
    autoload.boot()
    assert {name: entry["init_params"] for name, entry in loaded.REGISTRY.items()} == {
        "hetero_test": {},
        "hetero_test_spawn": {"how": "spawn"},
    }
    entry = loaded.REGISTRY["hetero_test_spawn"]
    made = entry["strategy"](**entry["init_params"])
    assert type(made).__name__ == "Strategy"
    assert made.arguments == {"how": "spawn"}


def test_boot_twice_is_boot_once(loaded):
    autoload.boot()
    entries = dict(loaded.REGISTRY)
    autoload.boot()
    assert entries == loaded.REGISTRY
    assert sum(isinstance(finder, autoload.RegistryFinder) for finder in sys.meta_path) == 1


def test_class_replaces_factory_and_stays(loaded):
    autoload.boot()
    register(Strategy, loaded.REGISTRY)
    autoload.boot()
    assert {entry["strategy"] for entry in loaded.REGISTRY.values()} == {Strategy}


@pytest.mark.usefixtures("target")
def test_class_outside_the_table_is_refused():
    with pytest.raises(ValueError, match="Registry is in no line of the table .* Add a line to TARGETS"):
        register(Registry, Registry())


def test_a_registry_that_refuses_is_logged_not_raised(loaded, caplog):
    loaded.REGISTRY = None
    autoload.boot()
    assert "'hetero_test' was not registered with owner_of_registry" in caplog.text


def test_hook_registers_after_import_and_leaves_the_loader_as_it_was(target, tmp_path, monkeypatch):
    (tmp_path / f"{target.module}.py").write_text(f"from {__name__} import Registry\nREGISTRY = Registry()")
    monkeypatch.syspath_prepend(tmp_path)
    autoload.boot()
    try:
        module = importlib.import_module(target.module)
        assert set(module.REGISTRY) == {"hetero_test", "hetero_test_spawn"}
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(module.__spec__.loader)
        assert set(importlib.reload(module).REGISTRY) == {"hetero_test", "hetero_test_spawn"}
    finally:
        sys.modules.pop(target.module, None)


def test_hook_hides_no_missing_module(target):
    autoload.boot()
    with pytest.raises(ModuleNotFoundError, match=target.module):
        importlib.import_module(target.module)


# Installs a checkout in editable mode into a folder, as an installer does, without one: no network, no other package.
BUILD_EDITABLE = """
import sys, zipfile
from setuptools import build_meta
built, installed = sys.argv[1:]
zipfile.ZipFile(built + "/" + build_meta.build_editable(built)).extractall(installed)
"""

# Imports torch in an environment that has that installation and what the running one has, but not its .pth files.
IMPORT_TORCH = """
import site, sys
sys.path[:0] = [sys.argv[1]]
sys.path += sys.argv[2:]
site.addsitedir(sys.argv[1])
import torch
from lightning.pytorch.strategies import StrategyRegistry
print(torch.ones(2).sum().item(), "hetero_ddp" in StrategyRegistry)
"""


@pytest.mark.parametrize("moved", [False, True])
def test_a_moved_editable_checkout_breaks_no_import_of_torch(moved, tmp_path):
    checkout, installed, root = tmp_path / "checkout", tmp_path / "installed", Path(__file__).parents[1]
    shutil.copytree(root / "lightning_hetero", checkout / "lightning_hetero")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *root.glob("_lightning_hetero_*.py")):
        shutil.copy(root / name, checkout)
    installed.mkdir()
    build = [sys.executable, "-c", BUILD_EDITABLE, str(tmp_path), str(installed)]
    subprocess.run(build, cwd=checkout, timeout=120, check=True, capture_output=True)
    if moved:
        checkout.rename(tmp_path / "elsewhere")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", IMPORT_TORCH, str(installed), *packages],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "PYTHONPATH": ""},
        cwd=tmp_path,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", str(not moved)]
    assert ("pip install -e" in done.stderr) == moved
