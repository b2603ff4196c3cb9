"""Check the pages: links, files, tests and code that they name, numbers that they quote, and tables that are made.

    python docs/check.py

``make docs`` runs it before Sphinx, which checks what it builds. Every fault is a line, and the exit code says whether
there is one.
"""

import importlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0]
MADE = ("modules", "run_record", "evidence", "reliability")
"""Pages whose tables ``make map`` writes, each by the script of its name."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"\b(?:tests|benchmarks|examples|docs)/[\w./-]+\.(?:py|json|md|png|svg)\b")
TEST = re.compile(r"`(test_\w+)`\s+in\s+`(tests/[\w/]+\.py)`")
OURS = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/lightning-hetero/lightning-hetero/(?:blob/)?main/([^\s)#]+)"
    r"(?:#([\w-]+))?"
)
NUMBERS = re.compile(r"<!-- numbers: (benchmarks/results/\w+\.json)(?: derived: ([^>]*?))? -->\n\n((?:\|.*\n)+)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


@cache
def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Return the headings of a page as they are called in a link."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    """Links to pages of our own, by path or by address, lead to a file and a heading."""
    targets = [target.partition("#")[::2] for target in LINK.findall(prose(page)) if "://" not in target]
    places = [(page.parent / name if name else page, heading) for name, heading in targets if "mailto:" not in name]
    for place, heading in [*places, *((ROOT / name, heading) for name, heading in OURS.findall(page.read_text()))]:
        built = (
            re.fullmatch(r"examples/(plot_\w+)\.rst", place.relative_to(page.parent).as_posix())
            if (place.is_relative_to(page.parent))
            else None
        )
        path = page.parent / f"gallery/{built[1]}.py" if built else place
        if not path.exists():
            yield f"leads to {path.name}, which is no file"
        elif heading and heading not in anchors(path):
            yield f"leads to {path.name}#{heading}, which is no heading"


def readme(page: Path) -> Iterator[str]:
    """PyPI shows the README alone: its links are absolute, and its references defined."""
    if page != README:
        return
    text = prose(page)
    targets = [*LINK.findall(text), *re.findall(r"^\[[\w-]+\]: (\S+)$", text, re.M)]
    yield from (f"{target} is a relative link" for target in targets if not target.startswith("https://"))
    defined = set(re.findall(r"^\[([\w-]+)\]: ", text, re.M))
    used = {name.lower() for name in re.findall(r"\[([\w-]+)\](?![:(\[])", re.sub(r"`[^`]*`", "", text))}
    yield from (f"[{name}] is used or defined, and not both" for name in used ^ defined)


def named(page: Path) -> Iterator[str]:
    """Files, tests and places in the code exist."""
    text = page.read_text()
    yield from (f"{name} is no file" for name in sorted(set(FILE.findall(text))) if not (ROOT / name).is_file())
    for name, file in TEST.findall(text):
        if (ROOT / file).is_file() and not re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.M):
            yield f"{file} has no {name}"
    if page.stem == "equations":
        for place in re.findall(r"^\| [CDAS] .*\| `([\w.]+)` \|$", text, re.M):
            if not found(place):
                yield f"lightning_hetero.{place} does not exist"


def found(place: str) -> bool:
    """Return whether a name below the package exists."""
    parts = place.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(("lightning_hetero", *parts[:cut])))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name, None)
        return value is not None
    return False


def values(result: Any) -> Iterator[float]:
    """Yield all numbers of a result, those in names and keys among them."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield from values(key)
            yield from values(value)
    elif isinstance(result, list):
        for value in result:
            yield from values(value)
    elif isinstance(result, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", result))
    elif isinstance(result, int | float):
        yield float(result)


def quotes(text: str, measured: float) -> bool:
    """Return whether a number is a measured one as rounded, in another unit, or as a change in percent."""
    shown, digits = float(text.replace(",", "")), len(text.partition(".")[2])
    near = 0.5005 * 10**-digits if digits or shown < 1000 else 0.05 * shown
    told = [measured * unit for unit in (1, 1e-6, 1e-3, 1e2, 1e3, 1e6)]
    return any(abs(value - shown) <= near for value in (*told, 100 * (measured - 1), 100 * (1 - measured)))


def numbers(page: Path) -> Iterator[str]:
    """Every number of a table that names its result is in the result, or said to be derived from it."""
    text = page.read_text()
    if text.count("<!-- numbers:") != len(NUMBERS.findall(text)):
        yield "has a mark <!-- numbers: ... --> without a table"
    for name, derived, table in NUMBERS.findall(text):
        measured = sorted(set(values(json.loads((ROOT / name).read_text()))))
        cells = [cell for line in table.splitlines()[2:] for cell in line.strip("|").split("|")[1:]]
        for number in sorted({number for cell in cells for number in NUMBER.findall(cell)} - set(derived.split())):
            if not any(quotes(number, value) for value in measured):
                yield f"{number} is not in {name}"


def comments(page: Path) -> Iterator[str]:
    """To MyST, a line that begins with a per cent sign is a comment."""
    yield from (f"{line!r} is lost" for line in re.findall(r"^\s*%.*$", prose(page), re.M))


def walks(page: Path) -> Iterator[str]:
    """Files that a walk through the code names exist: below the package, or in the folder that was named before."""
    if page.stem != "architecture":
        return
    text, package = page.read_text(), ROOT / "lightning_hetero"
    folder = package
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text[text.index("## The walk of a batch") :]):
        path = (ROOT if name.startswith(("benchmarks/", "docs/", "tests/")) else package) / name
        folder = path if path.is_dir() else path.parent if "/" in name else folder
        if path.suffix and not (path.is_file() or (folder / path.name).is_file()):
            yield f"{name} is no file"


def made(page: Path) -> Iterator[str]:
    """Tables that are made are those of now."""
    if page.stem in MADE and page.read_text() != runpy.run_path(str(page.with_suffix(".py")))["page"](page.read_text()):
        yield "is due: run make map"


def commands(page: Path) -> Iterator[str]:
    """Commands of torchrun have options that it knows."""
    from torch.distributed.run import get_args_parser

    blocks = "\n".join(text for kind, text in FENCE.findall(page.read_text()) if kind in ("bash", "console"))
    lines = blocks.replace("\\\n", " ")
    for command in re.findall(r"^(?:\$ )?(?:\w+=\S+ )*torchrun (.+?)(?: &| \.\.\.)?$", lines, re.M):
        arguments, _ = get_args_parser().parse_known_args(shlex.split(command))
        if not (arguments.training_script.endswith(".py") or arguments.module):
            yield f"torchrun {command}: {arguments.training_script} is no script"


def index() -> Iterator[str]:
    """Every page is in the index, every public name in the reference; the picture of the packages is that of now."""
    listed = (ROOT / "docs" / "index.md").read_text()
    pages = [page for page in PAGES[2:] if page.stem != "index"]
    yield from (f"{page.name} is not in the index" for page in pages if page.stem not in listed.split())
    reference, exports = (ROOT / "docs" / "api.md").read_text(), importlib.import_module("lightning_hetero")._EXPORTS
    yield from (f"api.md lacks {name}" for name in exports if not re.search(rf"\b{name}\b", reference))
    picture = runpy.run_path(str(ROOT / "docs" / "figures" / "packages.py"))["picture"]()
    if (ROOT / "docs" / "figures" / "packages.svg").read_text() != picture:
        yield "figures/packages.svg is due: run make map"


def evidence() -> Iterator[str]:
    """Every row of evidence has a command whose script exists, and figures that come from its result."""
    script = runpy.run_path(str(ROOT / "docs" / "evidence.py"))
    for module in map(script["module_of"], script["PAPERS"]):
        for row in module.ROWS:
            scripts = [ROOT / word for word in shlex.split(row.command) if word.endswith(".py")]
            if not row.command and row.verdict != "open":
                yield f"evidence {row.where}: has no command"
            yield from (f"evidence {row.where}: {path} is no file" for path in scripts if not path.is_file())
            if row.result and re.search(r"\bnan\b|\bNone\b", row.found()):
                yield f"evidence {row.where}: a figure is missing"


CHECKS = (links, readme, named, numbers, comments, walks, made, commands)


def main() -> int:
    """Write what is wrong; return the exit code."""
    sys.path.insert(0, str(ROOT))
    faults = [f"{page.relative_to(ROOT)} {fault}" for page in PAGES for check in CHECKS for fault in check(page)]
    faults += [*index(), *evidence()]
    sys.stdout.write("".join(f"{fault}\n" for fault in faults) + f"{len(PAGES)} pages, {len(faults)} faults\n")
    return len(faults) > 0


if __name__ == "__main__":
    raise SystemExit(main())
