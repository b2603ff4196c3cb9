"""The rules of the house, read from the source: rooms import downward, nothing prints, everything says what it is."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_hetero"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

# A room may import the rooms on its right, never one on its left.
ROOMS = (
    *("cli", "simulate"),
    *("accelerate", "strategies", "callbacks"),
    "session",
    "frontend",
    *("engine", "elastic"),
    *("comm", "optim", "compression", "data", "datasets", "config", "hardware", "probe_job"),
    "core",
)
TRAINERS = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")
FREE_OF_TRAINERS = ROOMS[ROOMS.index("session") :]
MAX_LINES = 420


def room_of(path):
    """Room of a file of the package, ``None`` for the files that open the package itself."""
    first = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
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


def wrong_imports(tree, room):
    """What a module of ``room`` must not import."""
    for line, name in imports(tree):
        if name.startswith("."):
            yield line, f"imports {name}: imports are absolute"
        elif is_in(name, PACKAGE):
            other = name.split(".")[1] if "." in name else ""
            if other not in (*ROOMS[ROOMS.index(room) :], "__version__"):
                yield line, f"imports {name}: {room} may import only {', '.join(ROOMS[ROOMS.index(room) :])}"
        elif room in FREE_OF_TRAINERS and any(is_in(name, trainer) for trainer in TRAINERS):
            yield line, f"imports {name}: {room} is free of any trainer"
        elif room == "core" and is_in(name, "torch.distributed"):
            yield line, f"imports {name}: core knows no process group"


def distributed_in_core(tree, room):
    """Uses of ``torch.distributed`` that need no import of it."""
    for node in ast.walk(tree):
        if room == "core" and isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "uses torch.distributed: core knows no process group"


def prints(tree, _room):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "prints: use the module's logger, or sys.stdout.write in the command line"


def asserts(tree, _room):
    """Assertions other than ``x is not None``, which only tells the type checker what the code ensures."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not ast.unparse(node.test).endswith(" is not None"):
            yield node.lineno, "asserts: raise an error that says what was got and what to do"


RULES = (wrong_imports, distributed_in_core, prints, asserts)


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


def test_every_file_is_in_a_room():
    homeless = [relative(path) for path in FILES if room_of(path) not in (None, *ROOMS)]
    assert not homeless, "give these a place in ROOMS"


def test_every_room_is_a_package():
    folders = {path.parent for path in FILES}
    assert not [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    broken = [
        f"{relative(path)}:{line} {what}"
        for path in FILES
        if room_of(path) in ROOMS
        for line, what in rule(ast.parse(path.read_text()), room_of(path))
    ]
    assert not broken


@pytest.mark.parametrize(
    ("room", "source"),
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
    ],
)
def test_a_rule_is_broken_by(room, source):
    tree = ast.parse(source)
    assert [found for rule in RULES for found in rule(tree, room)]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import torch\nfrom lightning_hetero.core.batching.plan import BatchPlan"),
        ("comm", "import torch.distributed as dist\nfrom lightning_hetero.compression import reference"),
        ("strategies", "from lightning_hetero.callbacks import PerfModelCallback\nimport lightning.pytorch"),
        ("callbacks", "from lightning_hetero import core\nfrom lightning.pytorch import Callback"),
        ("cli", "import lightning_hetero_of_another\nfrom lightning_hetero import __version__"),
    ],
)
def test_no_rule_is_broken_by(room, source):
    tree = ast.parse(source)
    assert not [found for rule in RULES for found in rule(tree, room)]


def test_every_public_module_says_what_it_is_and_what_it_offers():
    silent = []
    for path in filter(is_public, FILES):
        tree = ast.parse(path.read_text())
        silent += [f"{relative(path)} has no docstring"] * (ast.get_docstring(tree) is None)
        silent += [f"{relative(path)} has no __all__"] * ("__all__" not in assigned_names(tree))
    assert not silent


def without_example(tree):
    """Public classes and functions that have no interactive example; protocols cannot be run."""
    (offered,) = (node.value for node in tree.body if "__all__" in assigned_names(ast.Module([node], [])))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in ast.literal_eval(offered):
            protocol = isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
            if not protocol and not doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""):
                yield node.name


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "core" and is_public(path)], ids=relative)
def test_all_that_the_mathematics_offers_has_an_example(path):
    assert list(without_example(ast.parse(path.read_text()))) == []


def test_no_file_is_long():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


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
