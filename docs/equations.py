"""Write the table of ``equations.md``: where each equation of the papers is, and which test checks it.

    make map

The table is that of ``lightning_hetero/core/paper_index.py``, which is read as a file: nothing else is imported.
"""

import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "equations.md"
INDEX = HERE.parent / "lightning_hetero" / "core" / "paper_index.py"
HEAD = ("| | in the paper | code, below `lightning_hetero` | test, below `tests` |", "|---|---|---|---|")


def sections() -> str:
    """Return a section with a table for each paper."""
    known: dict[str, Any] = runpy.run_path(str(INDEX))
    parts = []
    for letter, paper in known["PAPERS"].items():
        rows = [
            f"| {entry.cited} | {entry.what} | `{entry.code.replace(':', '.')}` | `{entry.test.replace('::', ' ')}` |"
            for entry in known["INDEX"]
            if entry.paper == letter
        ]
        parts.append("\n".join((f"## {letter}: {paper}", "", *HEAD, *rows)))
    return "\n\n".join(parts) + "\n"


def page(text: str) -> str:
    """Return the page with the sections of now, behind what stands before the first of them."""
    return text[: text.index("\n## ") + 1] + sections()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
