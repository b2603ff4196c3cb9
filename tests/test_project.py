"""The files around the code agree with it and with each other: versions, workflow, templates, settings of tools."""

import re
from pathlib import Path

import pytest
import yaml

import lightning_hetero

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
CI = re.findall(r"^(make .+?)(?: #.*)?$", (ROOT / ".ci" / "run").read_text(), re.M)
YAML = sorted(
    path
    for folder in (ROOT, ROOT / "examples", *(ROOT / ".github").rglob("."))
    for pattern in ("*.yaml", "*.yml", "*.cff")
    for path in folder.glob(pattern)
)
PAGES = [ROOT / name for name in ("RELEASING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
NAMED_FILE = r"`((?:tests|benchmarks|examples|docs|lightning_hetero)/[\w./-]+|[\w.-]+\.(?:md|txt|cff|toml))`"
# The kinds of elements, and keys of a form, that GitHub knows.
ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
FORM = {"name", "description", "title", "labels", "assignees", "projects", "type", "body"}


def loaded(path):
    return yaml.safe_load((ROOT / path).read_text())


def table(name):
    """Text of a table of ``pyproject.toml``; Python 3.10 has no parser for it."""
    return re.search(rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[)", PYPROJECT, re.M | re.S)[1]


def relative(path):
    return path.relative_to(ROOT).as_posix()


def test_there_are_such_files():
    found = {relative(path) for path in YAML}
    assert {"CITATION.cff", ".readthedocs.yaml", ".pre-commit-config.yaml", ".github/workflows/ci.yml"} <= found
    assert len(FORMS) == 3


@pytest.mark.parametrize("path", YAML, ids=relative)
def test_yaml_is_read_as_a_mapping(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_there_is_one_version():
    version = lightning_hetero.__version__
    cited = loaded("CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.M)[0]
    assert version == newest == cited["version"]
    assert date == cited["date-released"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{version}]")
    for name in ("Unreleased", version):
        assert re.search(rf"^\[{re.escape(name)}\]: https://github.com/\S+{re.escape(version)}", changelog, re.M)


def test_the_citation_has_what_its_format_requires():
    cited = loaded("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == re.search(r'^license = "(.+)"$', PYPROJECT, re.M)[1]
    assert cited["authors"] == [{"name": re.search(r'^authors = \[\{ name = "(.+)" \}\]$', PYPROJECT, re.M)[1]}]


def test_the_workflow_runs_the_commands_of_ci():
    steps = loaded(".github/workflows/ci.yml")["jobs"]["pinned"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == CI
    assert {"make venv", "make lint", "make dist", "make test"} <= set(CI)


def test_every_command_of_ci_is_a_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split()
    listed = re.search(r'@echo "make (.+)"', makefile)[1]
    for command in CI:
        target = command.split()[1]
        assert re.search(rf"^{target}:", makefile, re.M), command
        assert target in phony
        assert re.search(rf"\b{target}\b", listed), f"make help does not name {target}"


def test_the_pythons_that_are_named_are_those_that_are_tried():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    jobs = loaded(".github/workflows/ci.yml")["jobs"]
    tried = jobs["newest"]["strategy"]["matrix"]["python-version"]
    pinned = [step["with"]["python-version"] for step in jobs["pinned"]["steps"] if "with" in step]
    assert sorted([*tried, *pinned], key=lambda version: int(version[2:])) == named
    assert re.search(r'^requires-python = ">=(.+)"$', PYPROJECT, re.M)[1] == named[0]


def test_the_newest_versions_are_tried_with_tests_that_exist():
    steps = loaded(".github/workflows/ci.yml")["jobs"]["newest"]["steps"]
    (command,) = (step["run"] for step in steps if "pytest" in step.get("run", ""))
    paths = re.findall(r"\S+/\S+", command)
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_hooks_run_the_pinned_ruff():
    (ours,) = (repo for repo in loaded(".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"])
    assert ours["rev"] == f"v{PINNED['ruff']}"


def test_read_the_docs_installs_the_tested_versions():
    settings = loaded(".readthedocs.yaml")
    assert (ROOT / settings["sphinx"]["configuration"]).is_file()
    assert settings["sphinx"]["fail_on_warning"]
    commands = settings["build"]["jobs"]["install"]
    assert all("-c constraints.txt" in command for command in commands)
    extras = {extra for names in re.findall(r"'\.\[(.+)\]'", " ".join(commands)) for extra in names.split(",")}
    assert "docs" in extras
    assert extras <= set(re.findall(r"^([\w-]+) = \[", table("project.optional-dependencies"), re.M))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(path):
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form) <= FORM
    assert {element["type"] for element in form["body"]} <= ELEMENTS
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert len({element["id"] for element in asked}) == len(asked)
    assert all(element["attributes"]["label"] for element in asked)
    for element in asked:
        for option in element["attributes"].get("options", ()):
            assert isinstance(option, dict if element["type"] == "checkboxes" else str), "quote Yes and No"


@pytest.mark.parametrize("name", ["bug", "benchmark"])
def test_what_is_reported_comes_with_the_machine(name):
    asked = {element.get("id"): element for element in loaded(f".github/ISSUE_TEMPLATE/{name}.yml")["body"]}
    assert "lightning-hetero doctor --json" in asked["doctor"]["attributes"]["label"]
    assert asked["doctor"]["validations"]["required"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_files_that_exist(page):
    text = page.read_text()
    named = re.findall(
        r"`((?:tests|benchmarks|examples|docs|lightning_hetero)/[\w./-]+|[\w.-]+\.(?:md|txt|cff|toml))`", text
    )
    assert not [name for name in named if not (ROOT / name).exists()]
    targets = [target for target in re.findall(r"\]\((\S+)\)", text) if not target.startswith("https://")]
    assert not [target for target in targets if not (ROOT / target).exists()]
    assert set(re.findall(r"`make (\w+)`", text)) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))


def test_an_address_is_everywhere_the_same():
    pages = [*PAGES, *YAML, ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "CHANGELOG.md"]
    found = {address for path in pages for address in re.findall(r"github\.com/([\w-]+/[\w-]+)", path.read_text())}
    tools = {"astral-sh/ruff-pre-commit", "pre-commit/pre-commit-hooks"}
    assert found - tools == {"lightning-hetero/lightning-hetero"}
