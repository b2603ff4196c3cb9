"""Rules of the source, read from it: packages import downward, nothing prints."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_hetero"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

# A package may import the packages on its right, never one on its left.
LAYERS = (
    *("cli", "keeper", "report", "simulate"),
    "transformers",
    *("accelerate", "strategies", "callbacks"),
    "session",
    "frontend",
    *("engine", "elastic"),
    *("comm", "optim", "compression", "data", "datasets", "config", "hardware", "probe_job"),
    "core",
    "lazy_exports",
)
TRAINERS = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")
FREE_OF_TRAINERS = LAYERS[LAYERS.index("session") :]

# The same inside two packages, for their sub-packages and modules.
SUB_LAYERS = {
    "core": (
        "report",
        *("metrics", "as_published"),
        "policies",
        *("batching", "compression", "merging", "stragglers"),
        *("timing", "noise", "link"),
        "newest_speed",
        *(
            "observations",
            "checkpoint_state",
            "no_effect",
            "paper_index",
            "validation",
            "keywords",
            "normal",
            "rounded",
            "whole_file",
        ),
    ),
    "comm": (
        *("staleness", "compressors"),
        *("noise", "link", "gradients"),
        *("collectives", "timing"),
        "agreement",
        "membership",
        "failures",
    ),
}


def below(path):
    """Path of a file below the package."""
    return path.relative_to(ROOT / PACKAGE).as_posix()


def layer_of(path):
    """Layer of a file of the package, ``None`` for the files that open the package itself."""
    first = below(path).split("/")[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imports(tree):
    """Line and full name of everything that is imported, under ``if TYPE_CHECKING`` and inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_in(name, package):
    return name == package or name.startswith(package + ".")


def wrong_imports(tree, layer):
    """What a module of a layer must not import."""
    for line, name in imports(tree):
        if name.startswith("."):
            yield line, f"imports {name}: imports are absolute"
        elif is_in(name, PACKAGE):
            other = name.split(".")[1] if "." in name else ""
            if other not in (*LAYERS[LAYERS.index(layer) :], "__version__"):
                yield line, f"imports {name}: {layer} may import only {', '.join(LAYERS[LAYERS.index(layer) :])}"
        elif layer in FREE_OF_TRAINERS and any(is_in(name, trainer) for trainer in TRAINERS):
            yield line, f"imports {name}: {layer} is free of any trainer"
        elif layer == "core" and is_in(name, "torch.distributed"):
            yield line, f"imports {name}: core knows no process group"


def distributed_in_core(tree, layer):
    """Uses of ``torch.distributed`` that need no import of it."""
    for node in ast.walk(tree):
        if layer == "core" and isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "uses torch.distributed: core knows no process group"


def prints(tree, _layer):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "prints: use the module's logger, or sys.stdout.write in the command line"


def asserts(tree, _layer):
    """Assertions other than ``x is not None``, which only tells the type checker what the code ensures."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not ast.unparse(node.test).endswith(" is not None"):
            yield node.lineno, "asserts: raise an error that says what was got and what to do"


UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NO_FILE = {"pickle.loads(offer.pickled)", "pickle.loads(pickle.dumps(error))"}
"""Of objects that a rank of this run has just sent, and of our own."""


def unpickles(tree, _layer):
    """Readers that run what a file says, which may come from anywhere."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node) in NO_FILE:
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if (
            (module in UNPICKLERS and name in ("load", "loads", "Unpickler", "open"))
            or (module == "torch" and name == "load" and given.get("weights_only") != "True")
            or (module == "yaml" and name.removesuffix("_all") in ("load", "unsafe_load", "full_load"))
            or (module in ("np", "numpy") and given.get("allow_pickle", "False") != "False")
        ):
            yield node.lineno, "may run code of a file: torch.load(..., weights_only=True), JSON, or yaml.safe_load"


RULES = (wrong_imports, distributed_in_core, prints, asserts, unpickles)


def relative(path):
    return str(path.relative_to(ROOT))


def is_public(path):
    names = (part.removesuffix(".py") for part in path.relative_to(ROOT / PACKAGE).parts)
    return all(name == "__init__" or not name.startswith("_") for name in names)


def assigned_names(tree):
    """Names that are assigned at the top level of a module."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_package_is_found():
    assert FILES


def test_every_file_is_in_a_layer():
    nowhere = [relative(path) for path in FILES if layer_of(path) not in (None, *LAYERS)]
    assert not nowhere, "give these a place in LAYERS"


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert not [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    broken = [
        f"{relative(path)}:{line} {what}"
        for path in FILES
        if layer_of(path) in LAYERS
        for line, what in rule(ast.parse(path.read_text()), layer_of(path))
    ]
    assert not broken


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "from lightning_hetero.data import sampler"),
        ("core", "import lightning_hetero.engine"),
        ("core", "from lightning_hetero import engine"),
        ("core", "from lightning_hetero import HeteroDDPStrategy"),
        ("core", "import lightning_hetero"),
        ("core", "def f():\n    from .. import engine"),
        ("core", "import torch.distributed as dist"),
        ("core", "from torch import distributed"),
        ("core", "import torch\nrank = torch.distributed.get_rank()"),
        ("core", "from lightning.pytorch import Trainer"),
        ("engine", "import accelerate"),
        ("engine", "from lightning_hetero.callbacks import PerfModelCallback"),
        ("data", "from lightning_hetero.comm import hook"),
        ("callbacks", "if TYPE_CHECKING:\n    from lightning_hetero.strategies import mixin"),
        ("callbacks", "print(1)"),
        ("cli", "assert argv"),
        ("cli", "torch.load(path)"),
        ("cli", "torch.load(path, weights_only=False)"),
        ("cli", "pickle.loads(content)"),
        ("cli", "yaml.load(text, Loader=yaml.Loader)"),
        ("cli", "yaml.full_load_all(text)"),
        ("cli", "np.load(path, allow_pickle=True)"),
    ],
)
def test_a_rule_is_broken_by(layer, source):
    tree = ast.parse(source)
    assert [found for rule in RULES for found in rule(tree, layer)]


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import torch\nfrom lightning_hetero.core.batching.plan import BatchPlan"),
        ("comm", "import torch.distributed as dist\nfrom lightning_hetero.compression import reference"),
        ("strategies", "from lightning_hetero.callbacks import PerfModelCallback\nimport lightning.pytorch"),
        ("callbacks", "from lightning_hetero import core\nfrom lightning.pytorch import Callback"),
        ("cli", "import lightning_hetero_of_another\nfrom lightning_hetero import __version__"),
        ("cli", "torch.load(path, weights_only=True)\nyaml.safe_load(text)\nnp.load(path)\njson.loads(text)"),
    ],
)
def test_no_rule_is_broken_by(layer, source):
    tree = ast.parse(source)
    assert not [found for rule in RULES for found in rule(tree, layer)]


def test_every_public_module_says_what_it_is_and_what_it_offers():
    silent = []
    for path in filter(is_public, FILES):
        tree = ast.parse(path.read_text())
        silent += [f"{relative(path)} has no docstring"] * (ast.get_docstring(tree) is None)
        silent += [f"{relative(path)} has no __all__"] * ("__all__" not in assigned_names(tree))
    assert not silent


FACADES = {  # modules whose names others have to find here
    "session.py": {"CopiedSession", "SessionBatches"},  # split from it, and public under this path
    "compression/numba_jit/simd.py": {"WIDTH", "Value"},  # one vocabulary for kernels
}


def offered(tree):
    """Names that ``__all__`` of a module lists."""
    values = [node.value for node in tree.body if "__all__" in assigned_names(ast.Module([node], []))]
    return {part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)}


def borrowed(tree):
    """Names that a module offers and imports from elsewhere."""
    imported = (node.names for node in tree.body if isinstance(node, ast.ImportFrom))
    return offered(tree) & {alias.asname or alias.name for names in imported for alias in names}


def test_a_module_offers_what_it_defines():
    """A name has one home, and its package may offer it as well; a file that only passes names on hides them."""
    found = {below(path): borrowed(ast.parse(path.read_text())) for path in FILES if path.name != "__init__.py"}
    assert {name: names for name, names in found.items() if names} == FACADES


def without_example(tree):
    """Public classes and functions that have no interactive example; protocols cannot be run."""
    names = offered(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            protocol = isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
            if not protocol and not doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""):
                yield node.name


@pytest.mark.parametrize("path", [path for path in FILES if layer_of(path) == "core" and is_public(path)], ids=relative)
def test_all_that_the_mathematics_offers_has_an_example(path):
    assert list(without_example(ast.parse(path.read_text()))) == []


def part_of(name, package):
    """Sub-package or module of a package that a full name is in, ``None`` if it is in none."""
    prefix = f"{PACKAGE}.{package}."
    part = name.removeprefix(prefix).split(".")[0]
    return part if name.startswith(prefix) and part in SUB_LAYERS[package] else None


def upward(path, tree, package):
    """What a file imports of the sub-packages above its own."""
    order = SUB_LAYERS[package]
    own = below(path).split("/")[1].removesuffix(".py")
    for _, name in imports(tree):
        part = part_of(name, package)
        if own in order and part is not None and order.index(part) < order.index(own):
            yield below(path), part


@pytest.mark.parametrize("package", SUB_LAYERS)
def test_sub_packages_import_downward(package):
    files = [path for path in FILES if layer_of(path) == package]
    found = {edge for path in files for edge in upward(path, ast.parse(path.read_text()), package)}
    assert not found, f"the order is {', '.join(SUB_LAYERS[package])}"


@pytest.mark.parametrize("package", SUB_LAYERS)
def test_every_sub_package_has_its_place(package):
    inside = {below(path).split("/")[1].removesuffix(".py") for path in FILES if layer_of(path) == package}
    assert inside - {"__init__"} == set(SUB_LAYERS[package]), "SUB_LAYERS has them all, in order"


FRAMEWORKS = {  # attributes of torch, numpy and Lightning whose names ours have, too
    *("p.grad", "parameter.grad", "target.grad"),
    "self.rng.bit_generator.state",
    *("loop._data_fetcher.done", "loop._data_fetcher.length", "progress.ready"),
    *("trainer._results.batch_size", "trainer.fit_loop.epoch_loop.max_steps", "shown.total", "given.checkpoint_io"),
}


def assigned(tree):
    """Attributes that are assigned: of the class itself, and of other objects."""
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    fields = [n.target for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    own = {n.attr for n in stored if ast.unparse(n.value) in ("self", "cls")} | {field.id for field in fields}
    return own, {ast.unparse(n) for n in stored if ast.unparse(n.value) not in ("self", "cls")}


def test_an_attribute_is_assigned_by_its_own_class():
    found = {below(path): assigned(ast.parse(path.read_text())) for path in FILES}
    ours = set().union(*(own for own, _ in found.values()))
    outside = {(path, name) for path, (_, others) in found.items() for name in others if name.split(".")[-1] in ours}
    assert {name for _, name in outside} >= FRAMEWORKS, "take these off FRAMEWORKS"
    assert not {(path, name) for path, name in outside if name not in FRAMEWORKS}, "let the object have a method for it"


@pytest.mark.parametrize(
    ("file", "source", "edges"),
    [
        ("core/timing/x.py", "from lightning_hetero.core.policies.base import Planner", {"policies"}),
        ("core/timing/x.py", "from lightning_hetero.core import policies, validation", {"policies"}),
        ("core/policies/x.py", "from lightning_hetero.core.timing.times import Times", set()),
        ("comm/agreement/x.py", "if TYPE_CHECKING:\n    from lightning_hetero.comm.noise import collector", {"noise"}),
    ],
)
def test_imports_against_the_order_are_found(file, source, edges):
    found = upward(ROOT / PACKAGE / file, ast.parse(source), file.split("/")[0])
    assert {part for _, part in found} == edges


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=" ".join,
)
def test_tool_finds_nothing(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, timeout=280, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
