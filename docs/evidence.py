"""Write ``evidence.md``: what the papers report, and what we found, from the committed results of the benchmarks.

make map
"""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "evidence.md"
ROOT = HERE.parent
BENCHMARKS = ROOT / "benchmarks"
PAPERS = ("cannikin", "dynamic_batching", "adaptive_sgd", "stellatrain")
MARK = "<!-- what follows is written by docs/evidence.py -->\n"


def module_of(name: str) -> ModuleType:
    """Return the rows of a paper as a module."""
    folder = BENCHMARKS / "evidence"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"evidence_of_{name}", folder / f"{name}.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{folder / name}.py does not exist; write its PAPER and ROWS.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def record(result: str) -> dict[str, Any]:
    """Return a committed result with its hardware and date."""
    found: dict[str, Any] = json.loads((BENCHMARKS / "results" / result).read_text())
    return found


def found_in(row: Any) -> str:
    """Return our figure and the note of a row."""
    return f"{row.found()} *{row.note}*" if row.note else row.found()


def section(module: ModuleType) -> str:
    """Return a paper's section: its rows, then its commands."""
    rows = [(row.where, row.reported, found_in(row), row.how, f"**{row.verdict}**") for row in module.ROWS]
    by_result = {row.result: row.command for row in module.ROWS if row.result}  # each result has one command
    commands = [
        (f"`{command}`", f"`{result}`", record(result)["date"][:10], hardware(result))
        for result, command in sorted(by_result.items())
    ]
    return "\n\n".join(
        (
            f"## {module.PAPER.name}",
            module.PAPER.citation,
            table(("in the paper", "it reports", "we find", "how", "verdict"), rows),
            table(("command", "writes, in `benchmarks/results`", "last run", "on"), commands),
        )
    )


def hardware(result: str) -> str:
    """Return what machine a result was measured on."""
    of = record(result)["hardware"]
    return f"{of['cpu']}, {of['cores']} cores" if isinstance(of, dict) else str(of)


def summary(modules: list[ModuleType]) -> str:
    """Return how many rows of each paper hold."""
    verdicts = ("holds", "holds in part", "does not hold", "open")
    rows = []
    for module in modules:
        counts = Counter(row.verdict for row in module.ROWS)
        rows.append((module.PAPER.name, str(len(module.ROWS)), *(str(counts[verdict]) for verdict in verdicts)))
    return table(("paper", "rows", *verdicts), rows)


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with some digits, ``never`` for none."""
    return "never" if value is None else f"{value:.{digits}f}"


def balance() -> str:
    """Return the table of splits found on emulated devices."""
    names = {"ddp": "`ddp`", "fixed": "the optimum, given", "perf_model": "time model (default)", "pid": "`pid`"}
    names |= {"static": "static, by peak FLOP/s", "lb_bsp": "LB-BSP"}
    rows = []
    for row in record("balance.json")["rows"]:
        least = f" ({row['least_share_%']:.1f})" if row["seed"] > 1 else ""
        within = [
            number(row[f"steps_to_{part}%"])
            + (f" ({number(row[f'most_steps_to_{part}%'])})" if row["seed"] > 1 else "")
            for part in (5, 1)
        ]
        rows.append(
            (
                row["cluster"],
                names[row["policy"]],
                f"{row['share_of_optimum_%']:.1f}{least} %",
                *(within if row["policy"] not in ("ddp", "static", "fixed") else ("", "")),
                f"{row['changes']:.0f} ({row['most_changes']})",
                f"{row['over_even']:.2f}x",
                f"{row['device_ms']:.1f}",
                f"{row['host_ms']:.1f}",
            )
        )
    columns = (
        "cluster",
        "policy",
        "share of the optimum",
        "steps to 5 %",
        "steps to 1 %",
        "changes",
        "over even sizes",
    )
    return table((*columns, "step (ms)", "host adds (ms)"), rows)


def prediction() -> str:
    """Return the errors of predicted step times, by cluster."""
    rows = record("prediction.json")["rows"]
    lines = []
    for name in [*dict.fromkeys(row["cluster"] for row in rows), "all"]:
        of = [row for row in rows if name in (row["cluster"], "all") and row["used"] == "predicted"]
        cells = [
            f"{statistic([row[key] for row in of]):.2f} %"
            for key in ("error_%", "error_of_device_%")
            for statistic in (median, max)
        ]
        lines.append((name, *cells))
    return table(
        ("cluster", "against measured: median", "largest", "against the devices alone: median", "largest"), lines
    )


def validation() -> str:
    """Return how far the simulator is from runs on emulated devices."""
    rows = record("validation.json")["rows"]
    lines = []
    for name in [*dict.fromkeys(row["cluster"] for row in rows), "all"]:
        of = [row for row in rows if name in (row["cluster"], "all")]
        times, splits = [row["apart_%"] for row in of], [row["samples_apart"] for row in of]
        measured = [row["apart_of_measured_%"] for row in of]
        models = [row for row in of if row["policy"] == "perf_model"]
        reached = [[row[f"{kind}_to_1%"] for row in models] for kind in ("emulated", "simulated")]
        lines.append(
            (
                name,
                str(len(of)),
                f"{median(times):.2f} % ({max(times):.2f})",
                f"{median(measured):.2f} % ({max(measured):.2f})",
                f"{median(splits):.0f} ({max(splits)})",
                *("never" if None in steps else number(max(steps)) for steps in reached),
            )
        )
    head = ("cluster", "runs", "step time apart, median (most)", "the same, host included", "samples apart")
    return table((*head, "most steps of the time model to 1 %, emulated", "the same, simulated"), lines)


def scaling() -> str:
    """Return what sync rounds and the solver cost, by the number of workers."""
    lines = [
        (
            f"{row['workers']:,}",
            f"{row['gathered_mb']:.3g}",
            f"{row['round_ms']:.3g}",
            f"{row['step_ms']:.0f}",
            f"{row['interval_steps']}",
            f"{row['share_of_time_%']:.3f} %",
            f"{row['solver_over_step_%']:.3f} %",
        )
        for row in record("scaling.json")["rows"]
    ]
    columns = ("workers", "MB gathered", "round (ms)", "step (ms)", "steps between rounds", "rounds over time")
    return table((*columns, "solver over step"), lines)


def contention() -> str:
    """Return the table of splits found by processes that share cores."""
    rows = [
        (
            row["strategy"],
            row["split"],
            f"{row['step_ms']:.0f}",
            f"{row['over_even']:.2f}x",
            f"{row['share_of_optimum_%']:.0f} %",
            "" if row.get("steps_to_5%") is None else number(row["steps_to_5%"]),
        )
        for row in record("contention.json")["rows"]
    ]
    columns = ("strategy", "split", "step (ms)", "over equal sizes", "share of the optimum found by search")
    return table((*columns, "steps to 5 %"), rows)


OWN = {
    "Splits found on emulated devices": (
        balance,
        "python benchmarks/balance.py",
        "Runs through Lightning and gloo, one process per device ([emulated devices](emulation.md)), 3 % jitter. "
        "Clusters A, B and C are Cannikin's, with ResNet-50 or BERT; *fixed costs* has four devices, two of them with "
        "long fixed times; *25:1* is two devices, of which one is 25 times as fast. Policies that learn have several "
        "seeds: medians, and in parentheses the worst of them. In LB-BSP, with which the Cannikin paper compares, the "
        "slowest worker hands five samples to the fastest at each decision. Runs have 150 steps, those of 16 workers "
        "100; LB-BSP has 200 and 100. C and the equal devices were run earlier, on an Intel Xeon and with the former "
        "time model; fixed costs and 25:1 before the last changes of its rule.",
        "balance.json",
    ),
    "Predicted step times": (
        prediction,
        "python benchmarks/balance.py --part prediction",
        "Totals over a tenfold range that the model has not seen; it has learned from every other total. A measured "
        "step contains what the host adds to the devices' time.",
        "prediction.json",
    ),
    "Processes that share cores": (
        contention,
        "python benchmarks/contention.py",
        "Does real contention break it? Three workers with 1.0, 0.5 and 0.3 of a core compute in earnest, on two cores "
        "that they share. The optimum is the fastest of about ten splits that take turns, chosen by every other turn "
        "and timed by the rest, so a share above 100 % is luck. A split is only right for the moment in which it was "
        "learned: medians of three rounds. This is a check and no headline.",
        "contention.json",
    ),
    "The simulator against emulated devices": (
        validation,
        "python benchmarks/validation.py",
        "Each run of the first table again in the simulator, with the same profiles and seeds.",
        "validation.json",
    ),
    "Thousands of workers": (
        scaling,
        "python benchmarks/scaling.py",
        "What a sync round and the solver cost, by the package's own code on the numbers of that many workers.",
        "scaling.json",
    ),
}
"""Tables of our own measurements: how each is made, with which command, what a reader has to know, and the result."""


def own(title: str) -> str:
    """Return the section of one of our own tables."""
    make, command, text, result = OWN[title]
    return f"## {title}\n\n{text}\n\n{make()}\n\n`{command}`, {record(result)['date'][:10]}, {hardware(result)}"


def page(text: str) -> str:
    """Return the page with the sections of now, behind the text that was written by hand."""
    modules = [module_of(name) for name in PAPERS]
    parts = (summary(modules), *map(own, OWN), *map(section, modules))
    return "\n\n".join((text[: text.index(MARK)] + MARK.rstrip(), *parts)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
