"""The table of policies: every line makes a planner, and none is imported before it is asked for."""

import subprocess
import sys

import pytest

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import DEFAULT, NAMED, POLICIES, policy_name, same_policy
from lightning_hetero.core.policies.base import check_planner
from lightning_hetero.core.policies.static import StaticPlanner

GIVEN = {"max_total_batch_size": 64}
"""Settings that planners cannot be made without."""


@pytest.mark.parametrize("name", POLICIES)
def test_each_makes_its_planner_and_knows_it_again(name):
    entry = POLICIES[name]
    planner = entry.factory(**{setting: GIVEN[setting] for setting in entry.needs if setting in GIVEN})
    assert (planner is None) == (entry.planner is None)
    assert policy_name(planner) == ("fixed" if planner is None else name)
    assert planner is None or check_planner(planner) is planner


@pytest.mark.parametrize("name", POLICIES)
def test_settings_name_those_that_need_nothing_else(name):
    if name in NAMED:
        assert HeteroConfig(policy=name).policy == name
    else:
        assert set(POLICIES[name].needs) <= set(HeteroConfig.__dataclass_fields__)
        with pytest.raises(ValueError, match=f"policy='{name}'"):
            HeteroConfig(policy=name)


def test_the_default_is_in_the_table():
    assert NAMED[0] == DEFAULT


def test_a_planner_of_the_users_has_the_name_of_its_class():
    class Mine(StaticPlanner):
        pass

    assert policy_name(Mine()) == f"{__name__}.{Mine.__qualname__}"


def test_policies_of_earlier_checkpoints_are_known():
    former = "lightning_hetero.core."
    for name, module in (
        ("goodput", "adaptive.GoodputPlanner"),
        ("time_to_accuracy", "tta_planner.TimeToAccuracyPlanner"),
    ):
        planner = POLICIES[name].factory(64) if name == "goodput" else POLICIES[name].factory()
        assert same_policy(name, planner)
        assert same_policy(former + module, planner)
        assert not same_policy(former + module, POLICIES["pid"].factory())
    assert not same_policy(None, POLICIES["pid"].factory())
    assert same_policy("fixed", None)


def test_the_table_imports_no_planner():
    code = """
import sys
from lightning_hetero.core.policies import POLICIES
print(*sorted(name for name in sys.modules if name == "scipy" or name.startswith("lightning_hetero.core.policies")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lightning_hetero.core.policies", "lightning_hetero.core.policies.base"]
