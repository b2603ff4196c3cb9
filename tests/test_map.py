"""What `make map` writes is up to date; in the picture of the packages, arrows lead downward."""

import functools
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_hetero"
SCRIPT = runpy.run_path(str(ROOT / "docs" / "figures" / "packages.py"))
INSIDES = ("", *SCRIPT["OPENED"])


@functools.cache
def pairs():
    return SCRIPT["statements"](ROOT)


def test_the_picture_is_that_of_the_imports():
    assert (ROOT / "docs" / "figures" / "packages.svg").read_text() == SCRIPT["picture"](), "run make map"


@pytest.mark.parametrize("inside", INSIDES)
def test_arrows_lead_downward(inside):
    found, _ = SCRIPT["without_circles"](SCRIPT["graph"](pairs(), inside))
    level = SCRIPT["levels"](found)
    assert all(level[box] > level[target] for box, target in SCRIPT["arrows"](found))


@pytest.mark.parametrize("inside", INSIDES)
def test_leaving_out_arrows_leaves_what_is_reached(inside):
    found, _ = SCRIPT["without_circles"](SCRIPT["graph"](pairs(), inside))
    drawn = {box: {target for start, target in SCRIPT["arrows"](found) if start == box} for box in found}
    for box in found:
        assert SCRIPT["reached"](drawn, box) == SCRIPT["reached"](found, box)


@pytest.mark.parametrize("inside", INSIDES)
def test_no_box_covers_another_or_leaves_the_picture(inside):
    panel = SCRIPT["Panel"](SCRIPT["graph"](pairs(), inside), inside, SCRIPT["OPENED"].get(inside, 800))
    edges = {
        box: (panel.x[box] - panel.box_width(box) / 2, panel.x[box] + panel.box_width(box) / 2) for box in panel.boxes
    }
    assert all(low >= -1 and high <= panel.width + 1 for low, high in edges.values())
    rows = sorted((panel.level[box], *edges[box]) for box in panel.boxes)
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in zip(rows, rows[1:], strict=False))


def test_nothing_is_drawn_beyond_the_picture():
    text = (ROOT / "docs" / "figures" / "packages.svg").read_text()
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups())
    boxes = [tuple(map(int, b)) for b in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)" rx', text)]
    assert len(boxes) > 30
    assert [b for b in boxes if b[0] < 0 or b[1] < 0 or b[0] + b[2] > width or b[1] + b[3] > height] == []


def test_every_box_says_what_it_is_for():
    boxes = {f"{inside}.{box}" if inside else box for inside in INSIDES for box in SCRIPT["graph"](pairs(), inside)}
    assert boxes == set(SCRIPT["ROLES"]), "ROLES has a line for each"


@pytest.mark.parametrize("name", ["equations", "modules"])
def test_the_page_is_up_to_date(name):
    script, text = runpy.run_path(str(ROOT / "docs" / f"{name}.py")), (ROOT / "docs" / f"{name}.md").read_text()
    assert text == script["page"](text), "run make map"


NAMED = re.compile(r"`([\w/]+(?:\.py|/))`")


def test_the_walks_name_files_that_exist():
    """By their path below the package, or beside the file, or in the folder, that was named before."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    folder = PACKAGE
    for name in NAMED.findall(text[text.index("## The walk of a batch") :]):
        path = (ROOT if name.startswith(("benchmarks/", "docs/", "tests/")) else PACKAGE) / name
        if path.is_dir():
            folder = path
        elif name.endswith(".py"):
            folder = path.parent if "/" in name else folder
            assert (folder / path.name).is_file() or path.is_file(), name


def test_the_layers_are_all_in_the_page():
    text = (ROOT / "docs" / "architecture.md").read_text()
    layers = text[text.index("| package | question") : text.index("## The walk of a batch")]
    for inside in INSIDES:
        for box in SCRIPT["graph"](pairs(), inside):
            if inside != "core" or (PACKAGE / "core" / box).is_dir():
                assert f"`{box}`" in layers, box
