"""The import law: nothing outside the adapters imports a trainer, and the mathematics knows no process group."""

import ast
from pathlib import Path

import pytest

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
