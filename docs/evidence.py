"""Write ``evidence.md``: what the papers report, and what we found, from the committed results of the benchmarks.

make map
"""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
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
    by_result = {row.result: row.command for row in module.ROWS if row.result}
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


def page(text: str) -> str:
    """Return the page with the sections of now, behind the text that was written by hand."""
    modules = [module_of(name) for name in PAPERS]
    return "\n\n".join((text[: text.index(MARK)] + MARK, summary(modules), *map(section, modules))) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
