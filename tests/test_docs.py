"""README and docs keep to the code: what they link, name, import, list and quote exists."""

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lightning_hetero
from lightning_hetero import BatchPlan, HeteroDDPStrategy
from lightning_hetero.callbacks._elastic import merge_metrics
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.link.link_state import LinkState
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.core import StepObservations
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.goodput import Candidate
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.core.metrics import noise_metrics as noise_scale_metrics
from lightning_hetero.core.metrics import plan_metrics
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.elastic import MergeRecord
from lightning_hetero.engine.watch.watch import RunWatch
from lightning_hetero.frontend.adaptive_total import AdaptiveTotal
from lightning_hetero.strategies._lightning.ddp import HeteroDDPMixin
from lightning_hetero.strategies._lightning.elastic.strategy import HeteroElasticMixin
from tests.preemption import runs
from tests.warm.interpreter import warmed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path: path.read_text() for path in PAGES}
README = TEXTS[ROOT / "README.md"]
BENCHMARKS = TEXTS[ROOT / "docs" / "benchmarks.md"]
NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())

ADAPTIVE = TEXTS[ROOT / "docs" / "adaptive-batch.md"]

# Made from the benchmarks' results; it may be missing as long as the numbers are.
PICTURES_TO_COME = {"docs/figures/speedup.png"} if "TBD" in BENCHMARKS else set()

LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:tests|benchmarks|examples|docs)/[\w./-]+\.(?:py|json|md|png|svg)\b")
NAMED_TEST = re.compile(r"`(test_\w+)`\s+in\s+`(tests/[\w/]+\.py)`")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
METRIC = re.compile(r"hetero/\w+(?:/rank\{i\})?")
NUMBERS = re.compile(r"<!-- numbers: (benchmarks/results/\w+\.json) -->\n\n((?:\|.*\n)+)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(page):
    """A page without its blocks of code."""
    return FENCE.sub("", TEXTS[page])


def anchor(heading):
    """What a heading is called in a link, as GitHub and MyST do."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def python_blocks():
    for page, text in TEXTS.items():
        for match in FENCE.finditer(text):
            if match[1] == "python":
                line = text[: match.start()].count("\n") + 1
                yield pytest.param(match[2], id=f"{page.relative_to(ROOT).as_posix()}:{line}")
    cells = ("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    yield pytest.param("\n".join(cells), id="docs/notebook.ipynb")


def rows(table):
    """Cells of the body of a table."""
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def settings(strategy=HeteroDDPMixin):
    """Keywords of a strategy's own, with their defaults."""
    parameters = inspect.signature(strategy.__init__).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if name != "self" and p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }


@every_page
def test_named_files_exist(page):
    missing = {name for name in NAMED.findall(TEXTS[page]) if not (ROOT / name).is_file()}
    results_to_come = {name for name, table in NUMBERS.findall(TEXTS[page]) if "TBD" in table}
    assert missing <= PICTURES_TO_COME | results_to_come


@every_page
def test_named_tests_exist(page):
    for name, file in NAMED_TEST.findall(TEXTS[page]):
        assert re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.M), f"{file} has no {name}"


def test_there_are_blocks_of_code():
    assert len(list(python_blocks())) > 5


@pytest.mark.parametrize("source", list(python_blocks()))
def test_code_compiles_and_its_names_exist(source):
    tree = ast.parse(source)
    ours = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lightning_hetero":
            ours |= {alias.name: getattr(importlib.import_module(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            keywords = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(ours[node.func.id]).bind(*node.args, **keywords)


def test_code_runs(tmp_path):
    """All blocks in one process, each page's after another; what they take for granted is in the script."""
    done = subprocess.run(
        warmed(sys.executable, ROOT / "tests" / "page_blocks.py", tmp_path),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{len(list(python_blocks())) - 1} blocks ran, 0 failed" in done.stdout, "all but the notebook"


def test_the_first_script_of_the_readme_does_what_is_said_below_it(tmp_path):
    (script,) = (match[2] for match in FENCE.finditer(README) if match[1] == "python")
    assert "4800" in script
    (tmp_path / "first.py").write_text(script.replace("4800", "1920"))
    command, env = warmed(sys.executable, tmp_path / "first.py"), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    splits = [(int(a), int(b)) for a, b in re.findall(r"^0 \d+ \((\d+), (\d+)\) ", done.stdout, re.M)]
    assert splits[0] == (40, 40), done.stdout
    assert len(splits) > 1
    assert all(sum(split) == 80 for split in splits)
    assert splits[-1][0] > 50


def sessions():
    for page, text in TEXTS.items():
        source = "".join(match[2] + "\n" for match in FENCE.finditer(text) if match[1] == "pycon")
        if source:
            yield pytest.param(source, id=page.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("source", list(sessions()))
def test_sessions_give_what_is_shown(source):
    """The interactive sessions of a page are one, so that a later one may use the names of an earlier one."""
    test = doctest.DocTestParser().get_doctest(source, {}, "page", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def metrics_written():
    """Names of all metrics that a comparison of the ranks can write."""
    seen = StepObservations.from_array(np.ones((3, 2, len(StepObservations.FIELDS))))
    metrics = plan_metrics(seen, BatchPlan(8, (6, 2), cost=CostWeights((1.0, 0.0, 0.0, 0.0, 0.0))), 0.5, error=0.01)
    names = {re.sub(r"rank\d+", "rank{i}", name) for name in metrics}
    sources = inspect.getsource(DenseStaleAverager.metrics) + inspect.getsource(RunWatch.metrics)
    return names | set(METRIC.findall(sources))


def adaptive_metrics():
    """Names of the metrics of a total batch that moves."""
    return set(METRIC.findall(inspect.getsource(AdaptiveTotal.metrics)))


def test_metrics_are_all_in_the_quickstart():
    quickstart = TEXTS[ROOT / "docs" / "quickstart.md"]
    listed = set(re.findall(r"^\| `(hetero/[^`]+)` \|", quickstart, re.M))
    assert listed == metrics_written() | adaptive_metrics()


def noise_metrics():
    """Names of the metrics of the gradient noise scale."""
    return set(noise_scale_metrics(RunningNoiseScale()))


def compression_metrics():
    """Names of the metrics of compressed gradients."""
    sources = inspect.getsource(GradientCompression.metrics) + inspect.getsource(LinkState.metrics)
    return set(METRIC.findall(sources))


def elastic_metrics():
    """Names of the metrics of a merge."""
    record = MergeRecord(0, 2, (1, 1), (1, 1), (1, 1), (0.5, 0.5), False, (1.0, 1.0))
    return {re.sub(r"rank\d+", "rank{i}", name) for name in merge_metrics(record, (1, 1))}


@every_page
def test_metrics_named_are_written(page):
    written = metrics_written() | noise_metrics() | adaptive_metrics() | compression_metrics() | elastic_metrics()
    assert set(METRIC.findall(re.sub(r"https://\S+", "", prose(page)))) <= written


def test_metrics_of_compression_are_all_in_their_page():
    page = TEXTS[ROOT / "docs" / "compression.md"]
    assert set(re.findall(r"^\| `(hetero/[^`]+)` \|", page, re.M)) == compression_metrics()


def test_metrics_and_settings_of_elastic_averaging_are_all_in_their_page():
    page = TEXTS[ROOT / "docs" / "elastic.md"]
    assert set(re.findall(r"^\| `(hetero/[^`]+)` \|", page, re.M)) == elastic_metrics()
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.M)
    assert {name: ast.literal_eval(default) for name, default in listed} == settings(HeteroElasticMixin)
    rules = re.findall(r'^\| `"(\w+)"` \|', page, re.M)
    assert rules == list(MERGES)


def test_metrics_of_the_noise_scale_are_all_in_their_page():
    page = TEXTS[ROOT / "docs" / "noise-scale.md"]
    assert set(re.findall(r"^\| `(hetero/[^`]+)` \|", page, re.M)) == noise_metrics()


def test_columns_of_the_candidates_are_in_their_page():
    fields = [field.name for field in dataclasses.fields(Candidate)]
    page = TEXTS[ROOT / "docs" / "adaptive-batch.md"]
    table = page.partition("| column | is |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == ["step", *fields, "running"]


def test_table_of_settings_is_the_strategys():
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", TEXTS[ROOT / "docs" / "quickstart.md"], re.M)
    assert {name: ast.literal_eval(default) for name, default in listed} == settings()
    assert set(settings()) <= set(inspect.signature(HeteroDDPStrategy).parameters)


REFERENCE = re.findall(r"^   ~([\w.]+)$", TEXTS[ROOT / "docs" / "api.md"], re.M)


def test_reference_lists_every_public_name():
    for name in REFERENCE:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    public = {f"lightning_hetero.{name}" for name in lightning_hetero.__all__ if not name.startswith("_")}
    moved = {f"lightning_hetero.{name.rpartition('.')[2]}" for name in REFERENCE}
    assert public <= moved
    assert [name.rpartition(".")[2] for name in REFERENCE[:2]] == ["HeteroDDPStrategy", "HeteroElasticStrategy"]


def test_reference_describes_what_a_page_imports_or_names_as_an_error():
    api = TEXTS[ROOT / "docs" / "api.md"]
    described = {name.rpartition(".")[2] for name in re.findall(r"\blightning_hetero\.[\w.]+", api)}
    imported = re.findall(r"^(?:>>> )?from lightning_hetero[\w.]* import (.+)$", "\n".join(TEXTS.values()), re.M)
    used = {name for names in imported for name in names.split(", ") if not name.isupper()}
    assert {"HeteroDDPStrategy", "read_run", "gradient_hook"} <= used
    modules = (ROOT / "lightning_hetero").rglob("*.py")
    errors = re.findall(r"^class (\w+Error)\(", "\n".join(path.read_text() for path in modules), re.M)
    used |= {name for name in errors if any(f"`{name}`" in text for text in TEXTS.values())}
    assert used - described == set()


def test_members_that_the_reference_describes_exist():
    members = runpy.run_path(str(ROOT / "docs" / "members.py"))["MEMBERS"]
    assert set(members) <= set(REFERENCE)
    for name, described in members.items():
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assigned = re.findall(r"^        self\.(\w+)(?:: .*)? = ", inspect.getsource(found), re.M)
        assert set(described.split(", ")) <= {*dir(found), *assigned}, name


def test_no_description_of_a_value_is_taken_for_its_type():
    """Napoleon takes what stands before a colon in the first line of such a description for a type."""
    for name, described in runpy.run_path(str(ROOT / "docs" / "members.py"))["MEMBERS"].items():
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        for member in described.split(", "):
            value = inspect.getattr_static(found, member, None)
            if isinstance(value, property | functools.cached_property):
                first = (inspect.getdoc(value) or "").partition("\n")[0]
                assert not re.search(r"(?<!:):(?!:)", re.sub(r"``.*?``|:\w+:`", "", first)), (name, member, first)
        noted = re.findall(r'^        self\.\w+(?:: .*)? = .*\n        """(.*)', inspect.getsource(found), re.M)
        assert not [text for text in noted if ": " in text], name


OWN_MODULES = {  # one class for each namespace of Fabric, and what needs a package of its own
    *("lightning_hetero.strategies.fabric_ddp", "lightning_hetero.strategies.ray"),
    "lightning_hetero.core.batching.lr_scaling",  # of LR_RULES: Sphinx finds what describes a value beside it only
}


def test_what_the_reference_names_is_imported_from_a_package():
    """So that a name keeps its path when the modules inside a package move."""
    for module in {name.rpartition(".")[0] for name in REFERENCE} - OWN_MODULES:
        assert module.count(".") <= 1, f"{module} is deep inside a package; let the package offer the name"
        offered = importlib.import_module(module).__all__
        assert {name.rpartition(".")[2] for name in REFERENCE if name.rpartition(".")[0] == module} <= set(offered)


def test_every_page_is_in_the_index():
    trees = re.findall(r"```\{toctree\}\n(.*?)```", TEXTS[ROOT / "docs" / "index.md"], re.S)
    assert re.findall(r":caption: (.*)", "".join(trees)) == ["Start", "Guides", "How it works", "Evidence", "Reference"]
    listed = [line for line in "".join(trees).splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in PAGES[1:]} - {"index"}
    assert sorted(listed) == sorted({*pages, "notebook", "examples/index"})


def test_solver_numbers_are_those_of_the_benchmark():
    table = dict(NUMBERS.findall(BENCHMARKS))["benchmarks/results/solver.json"]
    measured = json.loads((ROOT / "benchmarks" / "results" / "solver.json").read_text())["rows"]
    columns = ("workers", "optperf_ms", "optperf_bounds_ms", "100_candidates_ms", "linprog_ms")
    for cells, row in zip(rows(table), measured, strict=True):
        for cell, column in zip(cells, columns, strict=True):
            expected = row[column]
            assert (not cell) if expected is None else float(cell) == pytest.approx(expected, rel=0.05), (cell, column)


def test_time_of_the_candidates_is_that_of_the_benchmark():
    said = re.search(r"takes\s+(\S+) ms for 100 candidates with 1000 workers\s+and (\S+) ms with 100 000", ADAPTIVE)
    found = json.loads((ROOT / "benchmarks" / "results" / "solver.json").read_text())["rows"]
    measured = {row["workers"]: row["100_candidates_ms"] for row in found}
    assert [float(value) for value in said.groups()] == pytest.approx([measured[1000], measured[100_000]], rel=0.05)


def measured_in(name):
    """Rows of a benchmark's result, and the tables of the page on compression that were taken from it."""
    path = f"benchmarks/results/{name}.json"
    tables = [table for file, table in NUMBERS.findall(TEXTS[ROOT / "docs" / "compression.md"]) if file == path]
    assert tables
    if "TBD" in "".join(tables):
        pytest.skip("not measured yet")
    return json.loads((ROOT / path).read_text())["rows"], tables


def same_numbers(cells, values):
    for cell, value in zip(cells, values, strict=True):
        none = value is None or math.isnan(value)
        assert cell == "-" if none else float(cell) == pytest.approx(value, rel=0.05), (cells, values)


def test_costs_of_compression_are_those_of_the_benchmark():
    measured, tables = measured_in("compression")
    for table in tables:
        what = table.split("|")[1].strip()
        found = [row for row in measured if row["what"] == what and row["elements"] == 88_000_000]
        for candidate, *cells in rows(table):
            of_it = {row["density"]: row for row in found if row["candidate"] == candidate}
            assert of_it, candidate
            if what == "budget":
                same_numbers(cells, [of_it[0.01]["limit"], of_it[0.01]["measured"]])
            else:
                same_numbers(cells, [of_it[0.01]["ratio"], of_it[0.1]["ratio"]])


def test_thin_links_are_those_of_the_benchmark():
    measured, (table,) = measured_in("wan")
    columns = ("mean_step_ms", "over_computing", "seconds_to_target", "kB_a_step")
    for (mbit, kind, *cells), row in zip(rows(table), measured, strict=True):
        assert (mbit, kind) == (row["mbit"], row["kind"])
        same_numbers(cells, [row[column] for column in columns])


def of_the_trace(name):
    """Rows of a result on the link that fluctuates, and the tables that were taken from it."""
    path = f"benchmarks/results/{name}.json"
    found = [table for file, table in NUMBERS.findall(TEXTS[ROOT / "docs" / "thin-networks.md"]) if file == path]
    return json.loads((ROOT / path).read_text())["rows"], found


def test_a_link_that_fluctuates_is_that_of_the_benchmark():
    measured, found = of_the_trace("wan_trace")
    times = ("step_ms", "mean_step_ms", "over_computing", "seconds_to_target")
    losses = (*(f"loss_at_{mark}" for mark in (100, 200, 400, 800)), "kept_out_at_800")
    trained = [row for row in measured if row["kind"] != "computing only"]
    for table, shown, columns in zip(found, (measured, trained), (times, losses), strict=True):
        for (_, *cells), row in zip(rows(table), shown, strict=True):
            same_numbers(cells[: len(columns)], [row.get(column) for column in columns])


def test_the_controller_over_dense_sums_is_that_of_the_benchmark():
    measured, (table,) = of_the_trace("wan_trace_loss")
    names = ("dense", "controller", "over_dense", "scatter", "least", "most")
    columns = ("steps", *(f"loss_{name}" for name in names), "kept_out_over_dense")
    for cells, row in zip(rows(table), measured, strict=True):
        same_numbers(cells, [row[column] for column in columns])
    assert measured[-1]["loss_most"] < 1.06, "the page says so"
    assert measured[-1]["loss_over_dense"] < 1.025, "the page says so"


def test_the_loss_of_many_seeds_is_that_of_the_benchmark():
    measured, (table,) = of_the_trace("replay")
    ends = ("", "_low", "_high", "_most")
    columns = (*(f"{name}{end}" for name in ("over_dense", "tenth") for end in ends), "kept_out")
    for (kind, *cells), row in zip(rows(table), measured, strict=True):
        assert kind == row["kind"]
        same_numbers(cells, [row["steps"], *(row[column] for column in columns)])


def test_what_follows_the_link_is_that_of_the_benchmark():
    measured, (table,) = of_the_trace("wan_trace_link")
    columns = (
        "link_changes", "density_changes", "density_first_s", "density_last_s", "density_taken_back", "split_changes",
        "split_last_s", "split_taken_back", "share_least_later", "share_most_later",
    )  # fmt: skip
    for (_, *cells), row in zip(rows(table), measured, strict=True):
        same_numbers(cells, [row[column] for column in columns])
    assert not any(row["split_taken_back"] for row in measured), "the page says so"
    assert max(row["density_taken_back"] for row in measured) == 2, "the page says so"
    changes = [row["density_changes"] for row in measured]
    assert (min(changes), max(changes)) == (2, 9), "the page says so"


CLUSTERS, EQUAL = ("A B C", "100"), tuple(f"equal {workers}" for workers in (2, 8, 16, 32, 100))
MOVING = ("ramp 1.3", "ramp 2.2", "walk", "swing")
TOTALS = ("total stands", "total jumps", "total walks")
CLOSED_LOOP = (  # of each row: kinds and noises of its runs; then figure, which of them, and workers, number by number
    ("steady", "0 2 8", [("share", "median", CLUSTERS), ("share", "least", CLUSTERS)]),
    ("steady", "2", [(f"to {n} %", which, CLUSTERS) for n in (5, 1) for which in ("median", "most")]),
    ("steady", "8", [("changes", which, CLUSTERS) for which in ("median", "most")]),
    ("steady", "8 15", [("changes", "most", EQUAL)]),
    (MOVING, "2", [("moving share", "least", CLUSTERS)]),
    (MOVING, "2", [("share", "least", CLUSTERS)]),
    ("jump 1.3", "2 8", [("for good 5 %", which, CLUSTERS) for which in ("median", "most")]),
    ("jump 3", "2 8", [("for good 5 %", which, CLUSTERS) for which in ("median", "most")]),
    ("steady", "2 8", [("decision ms", "median", (workers,)) for workers in ("100", "1000")]),
    ("prediction", "2", [("off", "median", CLUSTERS), ("worst off", "most", CLUSTERS)]),
    (TOTALS, "2 8", [("goodput of total", which, CLUSTERS) for which in ("median", "least")]),
    (TOTALS, "2 8", [("time", which, CLUSTERS) for which in ("median", "least")]),
)


def test_closed_loop_is_that_of_the_benchmark():
    """To the last digit that is given; the record has groups of runs, and the median of all lies between theirs."""
    record = json.loads((ROOT / "benchmarks/results/closed_loop.json").read_text())["rows"]
    page = TEXTS[ROOT / "docs" / "how-it-works.md"]
    table = rows(page[page.index("| clusters of 3, 16, 16 and 100 workers") :].partition("\n\n")[0])
    for (name, *cells), (kinds, noises, expected) in zip(table, CLOSED_LOOP, strict=True):
        for cell, policy in zip(cells, ("perf_model", "perf_model before"), strict=True):
            shown = re.findall(r"never|\d+(?:\.\d+)?(?: %)?", cell)
            for text, (figure, which, workers) in zip(shown, expected if cell else (), strict=True):
                runs = (row for row in record if row["policy"] == policy and row["workers"] in workers)
                pairs = [
                    row["figures"][figure]
                    for row in runs
                    if row["kind"] in kinds and row["noise"][:-2] in noises.split()
                ]
                some = [math.inf if pair[which != "median"] is None else pair[which != "median"] for pair in pairs]
                low, high = (max if which == "most" else min)(some), (min if which == "least" else max)(some)
                number, unit = text.removesuffix(" %"), 0.01 if text.endswith("%") else 1.0
                off = 0.501 * 10.0 ** -len(number.partition(".")[2])
                given = math.inf if text == "never" else float(number)
                assert low / unit - off <= given <= high / unit + off, (name, policy, figure, which)


def test_short_changes_of_speed_are_those_of_the_benchmark():
    record = json.loads((ROOT / "benchmarks/results/bursts.json").read_text())["rows"]
    share = {(row["policy"], row["noise"]): row["figures"]["moving share"][0] for row in record}
    page = TEXTS[ROOT / "docs" / "how-it-works.md"].replace("\n", " ")
    said = page[page.index("Proportional control, whose decisions") : page.index("(`benchmarks/results/bursts.json`)")]
    found = [float(number) for number in re.findall(r"0\.\d+", said)]
    wanted = [share[policy, noise] for policy in ("pid", "perf_model", "oracle") for noise in ("2 %", "8 %")]
    assert found == pytest.approx([*wanted, share["even", "2 %"]], abs=0.00051)


def test_what_can_be_had_at_all_is_that_of_the_benchmark():
    record = json.loads((ROOT / "benchmarks/results/closed_loop.json").read_text())["rows"]
    figures = {(r["kind"], r["noise"], r["workers"], r["policy"]): r["figures"] for r in record}
    page = TEXTS[ROOT / "docs" / "how-it-works.md"].replace("\n", " ")
    said = page[page.index("no planner can reach a share of 1") : page.index("Speeds that change for a few steps")]
    walks = [
        figures["walk", "2 %", workers, policy]["moving share"][1]
        for workers in CLUSTERS
        for policy in ("oracle", "perf_model")
    ]
    slow = [figures["steady", "8 % half slow", "A B C", policy]["share"] for policy in ("perf_model", "oracle")]
    off = figures["prediction", "8 %", "A B C", "perf_model"]
    off = [100 * off["off"][0], 100 * off["worst off"][1]]
    found = [float(number) for number in re.findall(r"\d+\.\d+", said)]
    assert found == pytest.approx([*walks, *slow[0], *slow[1], *off], abs=0.06)
    assert found[:8] == pytest.approx([*walks, *slow[0], *slow[1]], abs=0.00051)


def test_samples_are_those_of_the_benchmark():
    measured, (table,) = measured_in("convergence")
    columns = ("rate", "samples_over_dense", "loss_above_dense")
    for (kind, *cells), row in zip(rows(table), measured, strict=True):
        assert kind == row["kind"]
        same_numbers(cells, [row[column] for column in columns])


def quoted(name):
    """Cells of a table of the page on benchmarks, and the rows of the result that it was taken from."""
    path = f"benchmarks/results/{name}.json"
    table = dict(NUMBERS.findall(BENCHMARKS))[path]
    return rows(table), json.loads((ROOT / path).read_text())


def same_when_rounded(cell, *values):
    """All numbers of a cell are these, to the last digit that is given; an empty one has none."""
    found = re.findall(r"[-+]?\d+(?:\.\d+)?", cell)
    given = [value for value in values if value is not None]
    assert len(found) == len(given), (cell, values)
    for text, value in zip(found, given, strict=True):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(float(value), rel=1e-9, abs=0.501 * 10**-digits), (cell, values)


def test_balance_is_that_of_the_benchmark():
    table, result = quoted("balance")
    clusters = {}
    for row in result["rows"]:
        clusters.setdefault(row["cluster"], {})[row["policy"]] = row
    for (name, *gains, share, near, nearer), (cluster, found) in zip(table, clusters.items(), strict=True):
        assert name.split(":")[0] == cluster.split(":")[0]
        for cell, policy in zip(gains, ("static", "lb_bsp", "pid", "perf_model", "fixed"), strict=True):
            same_when_rounded(cell, found[policy]["over_even"])
        model = found["perf_model"]
        same_when_rounded(share, model["share_of_optimum_%"], model["least_share_%"])
        same_when_rounded(near, model["steps_to_5%"], model["most_steps_to_5%"])
        same_when_rounded(nearer, model["steps_to_1%"], model["most_steps_to_1%"])


def test_prediction_is_that_of_the_benchmark():
    ((_, middle, largest),), result = quoted("prediction")
    errors = [row["error_%"] for row in result["rows"] if row["used"] == "predicted"]
    same_when_rounded(middle, np.median(errors))
    same_when_rounded(largest, max(errors))


def test_overhead_is_that_of_the_benchmark():
    table, result = quoted("overhead")

    def with_quartiles(row, name, of):
        return (row[f"{name}{of}_%"], *map(float, row[f"{name}_quartiles{of}_%"].split(" to ")))

    for (name, step, by_clock, processor, noise, noise_cpu, again), row in zip(table, result["rows"], strict=True):
        kind, _, size = name.partition(", ")
        assert kind == row["model"]
        same_when_rounded(size, row["parameters"] / 1e6)
        same_when_rounded(step, row["ddp_ms"])
        same_when_rounded(by_clock, *with_quartiles(row, "hetero_ddp", ""))
        same_when_rounded(processor, *with_quartiles(row, "hetero_ddp", "_cpu"))
        same_when_rounded(noise, row["noise_scale_%"], row["noise_scale_error_%"])
        same_when_rounded(noise_cpu, row["noise_scale_cpu_%"], row["noise_scale_error_cpu_%"])
        same_when_rounded(again, *with_quartiles(row, "ddp_again", "_cpu"))


def test_cost_of_the_record_is_that_of_the_benchmark():
    table, result = quoted("recording")
    for (name, step, clock, processor, own, most), row in zip(table, result["rows"], strict=True):
        assert name == f"{row['model']}, batch {row['batch']}"
        same_when_rounded(step, row["step_ms"])
        same_when_rounded(clock, row["recording_%"], row["recording_error_%"])
        same_when_rounded(processor, row["recording_cpu_%"], row["recording_error_cpu_%"])
        same_when_rounded(own, row["own_%"])
        same_when_rounded(most, row["most_own_%"])


def test_cost_of_a_recorded_round_is_that_of_the_benchmark():
    table, result = quoted("recording_rounds")
    for (name, cost, between, share, most), row in zip(table, result["rows"], strict=True):
        assert name == f"{row['model']}, batch {row['batch']}"
        same_when_rounded(cost, row["round_ms"], row["round_ms_error"])
        same_when_rounded(between, row["steps_between"])
        same_when_rounded(share, row["share_%"])
        same_when_rounded(most, row["share_below_%"])
        assert row["round_ms"] - row["round_ms_error"] < 0.0, "no cost can be told from zero"
        assert row["share_below_%"] < 0.5


def test_cost_of_the_noise_scale_is_that_of_the_benchmark():
    (_, table), *others = NUMBERS.findall(TEXTS[ROOT / "docs" / "noise-scale.md"])
    assert not others
    _, result = quoted("overhead")
    found = {(row["model"], f"{row['parameters'] / 1e6:.2g} M"): row for row in result["rows"]}
    assert len(rows(table)) == len(found)
    for name, *cells in rows(table):
        row = found[name.partition(",")[0], re.search(r"[\d.]+ M", name)[0]]
        for cell, kind in zip(cells, ("%", "cpu_%"), strict=True):
            same_when_rounded(cell, row[f"noise_scale_{kind}"], row[f"noise_scale_error_{kind}"])


def test_time_to_accuracy_is_that_of_the_benchmark():
    """The benchmark reads no total from ``ddp``, whose total is that of ``hetero_ddp`` where it is fixed."""
    table, result = quoted("adaptive")
    fixed = {row["task"]: row["last_total"] for row in result["rows"] if row["strategy"] == "fixed"}
    for (task, name, *cells), row in zip(table, result["rows"], strict=True):
        assert task == row["task"]
        assert ("Adaptive" in name, "hetero_ddp" in name) == {
            "ddp": (False, False),
            "fixed": (False, True),
            "adaptive": (True, True),
        }[row["strategy"]]
        total = fixed[task] if row["strategy"] == "ddp" else row["last_total"]
        values = (row["seconds"], row["over_ddp"], row["samples"], row["steps"], total)
        for cell, value in zip(cells, values, strict=True):
            same_when_rounded(cell, value)


ELASTIC = {
    "`ddp`": "ddp",
    "`hetero_ddp`": "hetero_ddp",
    "`hetero_elastic`": "adaptive",
    '`hetero_elastic`, `merge="elastic"`': "elastic",
    **{f'`merge="{name}"`': name for name in MERGES},
    "as printed in the paper": "adaptive, as printed",
    "Elastic SGD of the paper": "elastic, even",
    "CROSSBOW, merged after every batch": "crossbow, every batch",
}


def best_elastic(result, cluster):
    """Best row of each method on the sparse data of Amazon's shape."""
    chosen = (row for row in result["rows"] if row["best"] and row["shape"] == "amazon" and row["cluster"] == cluster)
    return {row["method"]: row for row in chosen}


def same_rate(cell, row):
    optimizer, _, rate = cell.partition(", ")
    assert (optimizer, float(rate)) == (row["optimizer"], row["lr"])


def test_elastic_averaging_is_that_of_the_benchmark():
    table, result = quoted("adaptive_sgd_time")
    best = best_elastic(result, "unequal")
    for name, rate, *cells in table:
        row = best[ELASTIC[name]]
        same_rate(rate, row)
        for cell, column in zip(cells, ("seconds_1", "over_ddp_1", "over_ddp_0", "over_ddp_3"), strict=True):
            same_when_rounded(cell, row[column])


def test_elastic_averaging_in_its_page_is_that_of_the_benchmark():
    tables = dict(NUMBERS.findall(TEXTS[ROOT / "docs" / "elastic.md"]))
    path = "benchmarks/results/adaptive_sgd_time.json"
    result = json.loads((ROOT / path).read_text())
    places = [best_elastic(result, cluster) for cluster in ("unequal", "paper")]
    shown = rows(tables[path])
    assert len(shown) == len(places[0])
    for name, *cells in shown:
        (method,) = {method for text, method in ELASTIC.items() if text == name or (text in name and "`" not in text)}
        for best, (rate, seconds, samples) in zip(places, (cells[:3], cells[3:]), strict=True):
            row = best.get(method)
            if row is None:
                assert not any((rate, seconds, samples))
                continue
            same_rate(rate, row)
            for cell, value in ((seconds, row["seconds_1"]), (samples, row["samples"])):
                assert (cell == "never") == (value is None)
                same_when_rounded(cell, value)


def test_more_workers_in_the_page_on_elastic_averaging_are_those_of_the_benchmark():
    path = "benchmarks/results/adaptive_sgd_scaling.json"
    table = dict(NUMBERS.findall(TEXTS[ROOT / "docs" / "elastic.md"]))[path]
    found = {(r["workers"], r["method"]): r for r in json.loads((ROOT / path).read_text())["rows"]}
    for workers, *cells in rows(table):
        count = int(workers)
        pair = [found[count, "ddp"] if count == 1 else found[count, "adaptive"], found[count, "ddp"]]
        for cell, value in zip(cells, [r[c] for r in pair for c in ("seconds_1", "samples")], strict=True):
            same_when_rounded(cell, value)


def test_thin_link_is_that_of_the_benchmark():
    table, result = quoted("wan")
    thin = {row["kind"]: row for row in result["rows"] if row["mbit"] == "100"}
    kinds = ("ddp", "fp16", "powersgd", "density 0.1", "density 0.01", "density 0.003", "density 0.01, late")
    for (name, step, over, computing, sent), kind in zip(table, kinds, strict=True):
        row = thin[kind]
        assert all(
            word in name for word in kind.replace(", late", " staleness").replace("density ", "density=").split()
        )
        same_when_rounded(step, row["mean_step_ms"])
        same_when_rounded(over, thin["ddp"]["mean_step_ms"] / row["mean_step_ms"])
        same_when_rounded(computing, row["over_computing"])
        same_when_rounded(sent, row["kB_a_step"] / 1000)


@pytest.mark.parametrize("name", ["leaks", "leaks_fits"])
def test_what_trainings_leave_is_that_of_the_benchmark(name):
    table, result = quoted("leaks") if name == "leaks" else quoted("leaks_fits")
    ((counted, tensors, memory, plain),) = table
    plains, ours = ([row for row in result["rows"] if (row["mode"] == "ddp") is of_ddp] for of_ddp in (True, False))
    assert len(ours) == 15, "the page says so"
    assert {row[kind] for row in ours for kind in ("files", "threads", "groups", "keys", "hooks")} == {int(counted)}
    assert max(row["tensor_bytes"] for row in ours) == int(tensors)
    assert all(row["tensor_bytes"] % 24 == 0 for row in ours), "the page says so"
    same_when_rounded(memory, max(row["rss_kib"] for row in ours) / 1024)
    same_when_rounded(plain, plains[0]["rss_kib"] / 1024)
    most = max(ours, key=lambda row: row["rss_kib"])
    assert most["mode"] == ("elastic" if name == "leaks" else "fsdp"), "the page says so"


def test_lost_workers_are_those_of_the_benchmarks():
    table, result = quoted("recovery")
    for (_, kills, resumed, ratio, newcomer, redone), row in zip(table, result["rows"], strict=True):
        same_when_rounded(kills, row["kills"])
        same_when_rounded(resumed.replace("to", ""), *(row[f"{which}resume_s"] for which in ("", "least_", "most_")))
        same_when_rounded(ratio, row["over_keeper"])
        same_when_rounded(newcomer.replace("to", ""), *(row[f"{which}newcomer_s"] for which in ("", "least_", "most_")))
        same_when_rounded(redone, row["redone"])
    keeper = result["rows"][0]
    assert keeper["way"] == "keeper"
    assert keeper["redone"] <= 1, "the page says so"
    table, chaos = quoted("chaos")
    *kinds, total = chaos["rows"]
    for (_, events, stall, whole), row in zip(table, kinds, strict=True):
        same_when_rounded(events, row["events"])
        same_when_rounded(stall, row["stall_s"], row["longest_stall_s"])
        same_when_rounded(whole, row["whole_s"], row["longest_whole_s"])
    said = " ".join(BENCHMARKS[BENCHMARKS.index("The same training under") :].split())
    names = ("events", "mean_s", "load", "samples", "epochs", "steps", "void", "lives")
    names = (*names, "goodput", "calm_goodput", "ratio")
    pattern = (
        r"under (\S+) random faults, (\S+) s apart .*\(load (\S+) before.* All (\S+) samples of (\S+) epochs .* the "
        r"same (\S+) steps\. (\S+) steps? that .* Of (\S+) processes, .* With faults, (\S+) samples .* and (\S+) "
        r"without: a share of (\S+)\. A fault costs (\S+) s .* would be (\S+)\."
    )
    *found, cost, share = re.search(pattern, said).groups()
    for text, name in zip(found, names, strict=True):
        same_when_rounded(text, total[name])
    same_when_rounded(cost, total["cost_s"])
    same_when_rounded(share, 1 - total["cost_s"] / 3600)
    table, kills = quoted("kills")
    for (*cells, stall), row in zip(table, kills["rows"], strict=True):
        for cell, name in zip(cells, ("workers", "events", "steps", "groups", "void"), strict=True):
            same_when_rounded(cell, row[name])
        same_when_rounded(stall, row["stall_s"], row["longest_stall_s"])
    table, keepers = quoted("keepers")
    for (kills, lost, *cells), *rows in zip(table, *(keepers["rows"][i::3] for i in range(3)), strict=True):
        same_when_rounded(kills, rows[0]["events"])
        same_when_rounded(lost, rows[1]["events"])
        values = (
            rows[2]["steps"],
            rows[2]["void"],
            rows[1]["longest_stall_s"],
            rows[2]["store_ends_s"],
            rows[2]["redone"],
        )
        for cell, value in zip(cells, values, strict=True):
            same_when_rounded(cell, value)
    assert max(row["redone"] for row in keepers["rows"][2::3]) <= 10, "the page says so"


def test_the_hour_of_the_soak_is_that_of_the_benchmark():
    table, result = quoted("soak")
    kinds = ("kill", "segfault", "freeze", "pause", "link delay", "link cut")
    for (_, faults, *cells), row in zip(table, result["rows"], strict=True):
        same_when_rounded(faults, sum(row[kind] for kind in kinds))
        names = ("drifts", "cores", "goodput", "per_core", "ratio", "longest_stall_s")
        for cell, name in zip(cells, names, strict=True):
            same_when_rounded(cell, row[name])
    total = result["rows"][-1]
    assert (total["void"], total["files_before"], total["threads_before"]) == (
        0,
        total["files_after"],
        total["threads_after"],
    )
    said = " ".join(BENCHMARKS[BENCHMARKS.index("An hour of the demo's training") :].split())
    pattern = (
        r"All (\S+) samples of (\S+) epochs .*, in (\S+) steps .*; (\S+) of the test images .* Of (\S+) processes, "
        r"(\S+) were .* longest, (\S+) s, had (\S+) open files and (\S+) threads .* from (\S+) to (\S+) MiB"
        r".*\(load (\S+) before"
    )
    names = ("samples", "epochs", "steps", "accuracy", "lives", "restarts", "life_s", "files_before", "threads_before")
    names = (*names, "memory_before", "memory_after", "load")
    for text, name in zip(re.search(pattern, said).groups(), names, strict=True):
        same_when_rounded(text, (total | {"restarts": total["lives"] - 3})[name])


def test_trainings_that_are_told_to_end_are_those_of_the_benchmark():
    table, result = quoted("preemption")
    groups = {}
    for row in result["rows"]:
        groups.setdefault((row["launcher"], row["front_end"]), []).append(row)
    for (_, front_end, modes, *cells, longest), ((_, name), found) in zip(table, groups.items(), strict=True):
        assert name in front_end.lower()
        same_when_rounded(modes, len(found))
        for cell, column in zip(cells, ("runs", "hang", "code", "steps", "checkpoint"), strict=True):
            same_when_rounded(cell, sum(row[column] for row in found))
        same_when_rounded(longest, max(row["longest_s"] for row in found))
    assert {row["runs"] for row in result["rows"]} == {50}
    assert {(row["launcher"], row["front_end"], row["mode"]) for row in result["rows"]} == set(runs.CASES)
    faults = (ROOT / "docs" / "faults.md").read_text()
    said = re.search(r"Of (\d+) trainings that were told to end", faults)[1]
    assert int(said) == sum(row["runs"] for row in result["rows"])


def test_gains_in_the_readme_and_in_short_are_those_of_the_tables():
    """The README and the first table of the benchmarks repeat figures of the tables below."""
    balance = {(row["cluster"], row["policy"]): row for row in quoted("balance")[1]["rows"]}
    adaptive = {(row["task"], row["strategy"]): row for row in quoted("adaptive")[1]["rows"]}
    elastic = best_elastic(quoted("adaptive_sgd_time")[1], "unequal")
    thin = {row["kind"]: row for row in quoted("wan")[1]["rows"] if row["mbit"] == "100"}
    steps = [balance["B", policy]["measured_ms"] for policy in ("ddp", "perf_model")]
    tasks = [adaptive[task, "adaptive"] for task in ("digits", "synthetic")]
    gains = (steps[0] / steps[1], *(row["over_ddp"] for row in tasks), elastic["adaptive"]["over_ddp_1"])
    gains = (*gains, thin["ddp"]["mean_step_ms"] / thin["density 0.01"]["mean_step_ms"])
    section = README[README.index("## What you gain") : README.index("It does **not** help")]
    said = re.findall(r"\d+\.\d+", section)
    assert len(said) == len(gains)
    for text, value in zip(said, gains, strict=True):
        same_when_rounded(text, value)
    short = rows(BENCHMARKS[BENCHMARKS.index("| where | use |") :].partition("\n\n")[0])
    ddp = [adaptive[task, "ddp"]["seconds"] for task in ("digits", "synthetic")]
    same_when_rounded(short[0][2], steps[0])
    same_when_rounded(short[0][3].partition("x")[0], steps[1], steps[0] / steps[1])
    same_when_rounded(short[1][2].partition(" s ")[0], *ddp)
    same_when_rounded(short[1][3], *(row["seconds"] for row in tasks))
    same_when_rounded(short[2][2].partition(" s ")[0], elastic["ddp"]["seconds_1"])
    same_when_rounded(short[3][2], thin["ddp"]["mean_step_ms"])
    same_when_rounded(short[3][3].partition(" ms")[0], thin["density 0.01"]["mean_step_ms"])


def test_every_table_of_benchmarks_is_compared():
    source = Path(__file__).read_text()
    for name, _ in NUMBERS.findall(BENCHMARKS):
        assert f'quoted("{Path(name).stem}")' in source or f'"{name}"' in source


def test_the_reference_describes_nothing_twice():
    """Sphinx warns of it, and warnings fail `make docs`."""
    assert sorted(set(REFERENCE)) == sorted(REFERENCE)


def test_nothing_is_measured_by_hand():
    """Every table of measured numbers says which result it was taken from, and the benchmark that writes it exists."""
    names = [name for name, _ in NUMBERS.findall(BENCHMARKS)]
    assert len(names) == BENCHMARKS.count("<!-- numbers:") > 0
    source = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    assert not [name for name in names if Path(name).name not in source]
