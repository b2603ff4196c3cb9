"""All names that users rely on are in ``names.txt``. One vanishes only with a reason in the changelog."""

import contextlib
import inspect
import io
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("names.txt")


def table_rows(page):
    """First cells of the tables of a page."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines if not line.startswith(("| Feature", "| ---"))]


def options(verb):
    from lightning_hetero.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([verb, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.getvalue())))


def arguments(cls):
    """Arguments of a class, those that `**kwargs` takes excepted."""
    parameters = inspect.signature(cls).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def metrics():
    text = "\n".join(path.read_text() for path in (ROOT / "lightning_hetero").rglob("*.py"))
    names = re.findall(r"""["'](hetero/[a-z_]+(?:/rank)?)""", text)
    return {f"{name}{{i}}" if name.endswith("/rank") else name for name in names}


def variables():
    text = "\n".join(path.read_text() for path in (ROOT / "lightning_hetero").rglob("*.py"))
    return set(re.findall(r"\bLIGHTNING_HETERO_[A-Z_]+\b", text))


def current():
    """Names of today, as `kind name`."""
    import lightning_hetero
    from _lightning_hetero_autoload import TARGETS
    from lightning_hetero import accelerate, transformers
    from lightning_hetero.accelerate.plugin import NAMES, PREFIX, SWITCH
    from lightning_hetero.cli import COMMANDS
    from lightning_hetero.config import HeteroConfig
    from lightning_hetero.core.compression.settings import COMPRESSORS
    from lightning_hetero.core.merging.rules import MERGES
    from lightning_hetero.core.policies import POLICIES
    from lightning_hetero.elastic import ElasticConfig

    found = {f"limit {row}" for row in table_rows("limits.md")}
    found |= {f"setting {one.name}" for config in (HeteroConfig, ElasticConfig) for one in fields(config)}
    for name in lightning_hetero.__all__:
        found.add(f"name lightning_hetero.{name}")
        value = getattr(lightning_hetero, name)
        if inspect.isclass(value):
            found |= {f"argument {name}({one})" for one in arguments(value)}
    for package in (accelerate, transformers):
        found |= {f"name {package.__name__}.{name}" for name in package.__all__}
    own = [one.name for one in fields(transformers.HeteroTrainingArguments) if one.name.startswith("hetero_")]
    found |= {f"flag --{name}" for name in own}
    found |= {f"variable {PREFIX}{name.upper()}" for name in NAMES} | {f"variable {SWITCH}"}
    found |= {f"variable {name}" for name in variables()}
    found |= {f"strategy {one.name}{alias}" for one in TARGETS for alias in one.aliases}
    found |= {f"command {verb}" for verb in COMMANDS}
    found |= {f"command {verb} {option}" for verb in COMMANDS for option in options(verb)}
    found |= {f"metric {name}" for name in metrics()}
    tables = {"policy": POLICIES, "compression": COMPRESSORS, "merge": MERGES}
    return found | {f"{kind} {name}" for kind, table in tables.items() for name in table}


@pytest.fixture(scope="module")
def names():
    return current(), set(FILE.read_text().splitlines())


def test_a_name_vanishes_only_with_a_reason(names):
    """The changelog has a line with the name, as it stands in the file, and a colon before the reason."""
    now, frozen = names
    changelog = (ROOT / "CHANGELOG.md").read_text().partition("## [0.2.0]")[0]
    explained = {name for name in frozen - now if re.search(rf"`{re.escape(name)}`[^\n]*: \S", changelog)}
    assert frozen - now == explained


def test_a_new_name_is_frozen(names):
    """`python -m tests.test_names` adds it."""
    now, frozen = names
    assert now <= frozen


if __name__ == "__main__":
    FILE.write_text("\n".join(sorted(set(FILE.read_text().splitlines() if FILE.exists() else ()) | current())) + "\n")
    sys.stdout.write(f"{FILE} has all names\n")
