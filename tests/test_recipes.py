"""The diffs of docs/extending.md apply to the package, and what they add trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("copies the package and starts interpreters, for pages that rarely change")
ROOT = Path(__file__).parents[1]
RECIPE = re.compile(r"^## Adding (an? [\w ]+)$.*?^```diff\n(.*?)^```$", re.M | re.S)
RECIPES = dict(RECIPE.findall((ROOT / "docs" / "extending.md").read_text()))

TRAIN = """
from tests.ranks import run_ranks
from tests.loops import FRONT_ENDS

def train(rank, settings):
    return FRONT_ENDS["fabric"](rank, settings, 5, world_size=2, epochs=1)["weights"]

def trained(**settings):
    return run_ranks(train, 2, settings)
"""
CHECKS = {
    "a policy": """
import numpy as np
from lightning_hetero import BatchPlan
from lightning_hetero.core import StepObservations
from lightning_hetero.core.policies import POLICIES, policy_name
from lightning_hetero.core.policies.base import PlanContext, check_planner

planner = check_planner(POLICIES["by_speed"].factory())
assert policy_name(planner) == "by_speed"
sizes = np.full((4, 2), 6.0)
zeros = np.zeros_like(sizes)
seen = StepObservations(sizes, zeros, sizes * [1.0, 2.0], zeros, zeros, zeros, zeros)
decision = planner.decide(seen, BatchPlan(12, (6, 6)), PlanContext(12, ("a", "b"), (1, 1)))
assert decision.proposal.plan.local_batch_sizes == (8, 4)
assert np.array_equal(*trained(policy="by_speed", replan=2))
""",
    "a compressor": """
import numpy as np
from lightning_hetero.config import HeteroConfig

first, second = trained(compression="sign(step=0.01)", policy="even")
assert np.array_equal(first, second)
assert not np.array_equal(first, trained(policy="even")[0])
for wrong in ({"staleness": 1}, {"hierarchy": [[0], [1]]}, {"sparse_optimizer": True}):
    try:
        HeteroConfig(compression="sign", **wrong)
    except ValueError as error:
        assert "compression=" in str(error)
    else:
        raise AssertionError(wrong)
""",
    "a merge rule": """
import subprocess
import sys

import tests.elastic.test_engine as elastic
import tests.equations.test_merging as equations

elastic.check_loop("inverse_norm")
subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", equations.__file__], check=True)
""",
    "a front end": """
from pytorch_lightning.strategies import StrategyRegistry

assert type(StrategyRegistry.get("hetero_replicas")).__module__.endswith("pytorch_lightning_replicas")
""",
}


def hunks(diff):
    """Files of a diff, each with its lines."""
    for part in re.split(r"^--- .*\n", diff, flags=re.M)[1:]:
        head, *lines = part.splitlines()
        yield head.removeprefix("+++ b/"), [line for line in lines if not line.startswith("@@")]


def applied(root, diff):
    """Apply a diff whose context stands in the file once; line numbers, which move, are not looked at."""
    for name, lines in hunks(diff):
        path = root / name
        before = [line[1:] for line in lines if not line.startswith("+")]
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        if before:
            text, old = path.read_text(), "".join(f"{line}\n" for line in before)
            assert text.count(old) == 1, f"{name} has other lines than the recipe:\n{old}"
            after = text.replace(old, after)
        path.write_text(after)


def copied(folder):
    """A copy of the package to which a recipe is applied."""
    for name in ("lightning_hetero", "_lightning_hetero_autoload.py", "_lightning_hetero_entry.py", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


@pytest.mark.parametrize("what", CHECKS)
def test_the_recipe_works(what, tmp_path):
    copied(tmp_path)
    applied(tmp_path, RECIPES[what])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    script = f"import lightning_hetero\nassert lightning_hetero.__file__.startswith({str(tmp_path)!r})\n"
    command = [sys.executable, "-c", script + TRAIN + CHECKS[what]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recipe_is_followed():
    assert set(RECIPES) == set(CHECKS)
