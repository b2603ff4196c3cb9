"""Write the tables of ``modules.md``: every module of the package with the first line of its docstring.

make map
"""

import ast
import re
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "modules.md"
ROOT = HERE.parent
PACKAGE = "lightning_hetero"


def described(path: Path) -> str:
    """Return the first line of a module's docstring, as Markdown."""
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", lines[0] if lines else "")
    return text.replace("``", "`").replace("|", "\\|")


def sections() -> str:
    """Return a section with a table for each folder."""
    files = sorted(ROOT.joinpath(PACKAGE).rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    parts = []
    for folder, inside in groupby(files, key=lambda path: path.parent):
        rows = [f"| `{path.name}` | {described(path)} |" for path in inside]
        below = folder.relative_to(ROOT / PACKAGE).as_posix()
        name = PACKAGE if below == "." else f"{below}/"
        parts.append("\n".join((f"## {name}", "", "| file | what it is |", "|---|---|", *rows)))
    return "\n\n".join(parts) + "\n"


def page(text: str) -> str:
    """Return the page with the sections of now, behind what stands before the first of them."""
    return text[: text.index("\n## ") + 1] + sections()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
