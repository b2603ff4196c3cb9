"""The import law, and what an installation brings: all that is imported, and no release that steals credentials."""

import ast
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PACKAGE = Path(__file__).parents[1] / "lightning_hetero"
TRAINERS = {"lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers", "trl", "ray"}
ADAPTERS = ("strategies", "callbacks", "accelerate", "transformers", "cli", "simulate")
MATHEMATICS = ("core",)


def imported(source):
    """Full names of all that is imported or used of ``torch.distributed``, inside functions as well."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def broken(source, place):
    """What a file at a place below the package must not import."""
    room = place.split("/")[0].removesuffix(".py")
    for name in imported(source):
        first, _, rest = name.partition(".")
        trains = room not in ADAPTERS and (
            first in TRAINERS or (first == PACKAGE.name and rest.split(".")[0] in ("strategies", "callbacks"))
        )
        if not first or trains or (room in MATHEMATICS and name.startswith("torch.distributed")):
            yield name


def test_no_file_breaks_the_law():
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.stem.startswith("__")]
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    assert len(files) > 100
    assert {place: found for place, source in files.items() if (found := list(broken(source, place)))} == {}


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("engine/steps.py", "import lightning as L"),
        ("data/loaders.py", "def f():\n    from accelerate import Accelerator"),
        ("core/timing.py", "import torch.distributed as dist"),
        ("core/timing.py", "import torch\ntorch.distributed.get_rank()"),
        ("comm/hook.py", "from lightning_hetero.strategies import lightning_ddp"),
        ("core/timing.py", "from . import plan"),
    ],
)
def test_the_law_is_broken_by(place, source):
    assert list(broken(source, place))


# what an installation brings

REQUIRED = {re.sub("[-_.]+", "-", one.name).lower(): one for one in map(Requirement, requires("lightning-hetero"))}

OURS, SECOND = {PACKAGE.name, "_lightning_hetero_autoload"}, {"lightning_fabric", "pytorch_lightning"}
BROUGHT = {"llvmlite": "numba", "markupsafe": "jinja2", "pyarrow": "datasets"}


def test_all_that_is_imported_comes_with_the_package_or_one_of_its_extras():
    names = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for name in imported(path.read_text())}
    names -= {"", *OURS, *SECOND, *sys.stdlib_module_names}
    brings = {**packages_distributions(), **{name: [by] for name, by in BROUGHT.items()}}
    assert [name for name in names if not {one.lower() for one in brings.get(name, [name])} & REQUIRED.keys()] == []


def test_no_release_of_lightning_that_steals_credentials_may_be_installed():
    """GHSA-w37p-236h-pfx3: 2.6.2 and 2.6.3."""
    assert [v for v in ("2.6.1", "2.6.2", "2.6.3", "2.6.4") if v in REQUIRED["lightning"].specifier] == [
        "2.6.1",
        "2.6.4",
    ]
