"""Draw the packages in layers, with arrows to what they import, as ``packages.svg`` next to this file.

    make map

Reads the import statements and imports nothing of the package. An arrow says "imports"; where a longer chain of arrows
leads to the same box, the direct one is left out. Arrows lead downward; a circle of imports would be broken at its
rarest import, drawn red and dashed. Boxes without any arrow are left out.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "lightning_hetero"
OPENED = {"comm": 260, "core": 700}  # packages whose sub-packages have a panel of their own, and its width

Graph = dict[str, Counter[str]]  # box -> what it imports, and by how many statements
Point = tuple[int, int]

ROLES = {
    "accelerate": "Accelerate adapter",
    "callbacks": "policies in Lightning",
    "cli": "commands",
    "comm": "between ranks",
    "compression": "block top-k",
    "config": "settings",
    "core": "mathematics",
    "data": "order and batches",
    "datasets": "sparse data sets",
    "elastic": "averages models",
    "engine": "averages gradients",
    "frontend": "shared by adapters",
    "hardware": "identity, capacity",
    "keeper": "starts lost workers",
    "lazy_exports": "imports on first use",
    "optim": "optimizer steps",
    "probe_job": "probe trainings",
    "report": "page, trace, compare",
    "session": "your own loop",
    "simulate": "stragglers, links",
    "strategies": "Lightning, Fabric, Ray",
    "transformers": "Trainer and TRL",
    "comm.agreement": "sync rounds",
    "comm.collectives": "all-reduce, topology",
    "comm.compressors": "one file, one compressor",
    "comm.failures": "who failed first",
    "comm.gradients": "DDP hook, weighting",
    "comm.link": "measured link",
    "comm.membership": "lost and new workers",
    "comm.noise": "gradient norms",
    "comm.staleness": "one step late",
    "comm.timing": "clocks, step times",
    "core.as_published": "printed forms",
    "core.batching": "split and total",
    "core.checkpoint_state": "states",
    "core.compression": "density",
    "core.keywords": "misspelt names",
    "core.link": "bandwidth, staleness",
    "core.merging": "merge rules",
    "core.metrics": "names of metrics",
    "core.no_effect": "unused settings",
    "core.noise": "gradient noise scale",
    "core.normal": "normal distribution",
    "core.observations": "measured steps",
    "core.planning": "times and split",
    "core.policies": "decisions",
    "core.report": "record of a run",
    "core.rounded": "numbers in log lines",
    "core.stragglers": "who makes others wait",
    "core.timing": "time model",
    "core.validation": "argument checks",
    "core.whole_file": "atomic writes",
}

MARGIN, GAP, BOX_HEIGHT, LEVEL = 10, 14, 38, 66  # around panels, between boxes, of a box, from layer to layer
WIDTH = MARGIN + sum(width + MARGIN for width in OPENED.values())  # of the picture
BENT = 8  # width that an arrow takes in a layer that it crosses
COLORS = {"front": "#DCEBF7", "mechanism": "#FBE8CF", "parts": "#E3F1E4", "core": "#EFE4F3"}
LAYERS = {
    **dict.fromkeys(("cli", "report", "simulate", "transformers", "accelerate"), "front"),
    **dict.fromkeys(("strategies", "callbacks", "session", "frontend"), "front"),
    **dict.fromkeys(("engine", "elastic"), "mechanism"),
    "core": "core",
}


def imported(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else str(node.module)


def statements(root: Path) -> list[tuple[str, str]]:
    """Return importing and imported module of each import inside the package; each module imports itself."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / PACKAGE).rglob("*.py"))
        if path.name != "__main__.py"  # which opens the package itself, as `__init__.py` does
    }
    return [
        (name, other)
        for name, path in files.items()
        for other in (name, *imported(ast.parse(path.read_text()), set(files)))
    ]


def graph(pairs: Iterable[tuple[str, str]], inside: str = "") -> Graph:
    """Return what each package imports, or each sub-package and module of one package."""
    prefix = f"{PACKAGE}.{inside}." if inside else f"{PACKAGE}."
    found: Graph = {}
    for name, other in pairs:
        if name.startswith(prefix) and other.startswith(prefix):
            box, target = (module.removeprefix(prefix).split(".")[0] for module in (name, other))
            found.setdefault(box, Counter()).update([target] if target != box else [])
    return {box: found[box] for box in sorted(found)}


def reached(found: Graph, start: str) -> set[str]:
    """Return all boxes to which arrows lead from a box."""
    seen: set[str] = set()
    waiting = list(found[start])
    while waiting:
        box = waiting.pop()
        if box not in seen:
            seen.add(box)
            waiting += found[box]
    return seen


def without_circles(found: Graph) -> tuple[Graph, list[tuple[str, str]]]:
    """Break each circle at its rarest import; return what is left, and the imports that were taken out."""
    left, taken = {box: Counter(targets) for box, targets in found.items()}, []
    while True:
        in_circle = [
            (count, box, target)
            for box, targets in left.items()
            for target, count in targets.items()
            if box in reached(left, target)
        ]
        if not in_circle:
            return left, taken
        _, box, target = min(in_circle)
        del left[box][target]
        taken.append((box, target))


def arrows(found: Graph) -> list[tuple[str, str]]:
    """Return the imports to which no longer chain of imports leads."""
    return [
        (box, target)
        for box, targets in found.items()
        for target in sorted(targets)
        if not any(target in reached(found, other) for other in targets if other != target)
    ]


def levels(found: Graph) -> dict[str, int]:
    """Return the layer of each box, 0 at the bottom: one above the highest that it imports."""
    known: dict[str, int] = {}

    def level(box: str) -> int:
        if box not in known:
            known[box] = 1 + max(map(level, found[box]), default=-1)
        return known[box]

    for box in found:
        level(box)
    return known


def spread(wished: list[float], widths: list[int]) -> list[float]:
    """Return centres as near to the wished ones as boxes can stand that keep their order and a gap (least squares)."""
    offsets, at = [], 0.0
    for i, width in enumerate(widths):
        at += 0.0 if i == 0 else (widths[i - 1] + width) / 2 + GAP
        offsets.append(at)
    blocks: list[list[float]] = []  # mean of what its boxes wish for their first one, and their number
    for wish, offset in zip(wished, offsets, strict=True):
        blocks.append([wish - offset, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks.pop(-2), blocks.pop(-1)
            blocks.append([(a * n + b * m) / (n + m), n + m])
    starts = [mean for mean, count in blocks for _ in range(int(count))]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


class Panel:
    """Boxes and arrows of one graph, laid out in layers.

    Args:
        found: what each box imports.
        inside: the package whose inside it is; empty for the packages themselves.
        width: of the panel.
    """

    def __init__(self, found: Graph, inside: str, width: int) -> None:
        self.inside, self.width = inside, width
        linked = {box for pair in found.items() if pair[1] for box in (pair[0], *pair[1])}
        found, self.circles = without_circles({box: found[box] for box in found if box in linked})
        self.level, self.arrows, self.boxes = levels(found), arrows(found), list(found)
        self.height = LEVEL * max(self.level.values()) + BOX_HEIGHT
        self.paths = [
            [box, *((box, target, n) for n in range(self.level[box] - 1, self.level[target], -1)), target]
            for box, target in self.arrows
        ]
        self.x = self._lay_out()

    def box_width(self, item: object) -> int:
        """Width of a box by its text, or of an arrow that crosses a layer."""
        if not isinstance(item, str):
            return BENT
        return max(len(item) * 8, round(len(self.role(item)) * 5.5)) + 16

    def role(self, box: str) -> str:
        """Return the few words below the name of a box."""
        return ROLES.get(f"{self.inside}.{box}" if self.inside else box, "")

    def y(self, item: object) -> int:
        """Upper edge of what stands in a layer."""
        level = self.level[item] if isinstance(item, str) else item[2]  # type: ignore[index]
        return (max(self.level.values()) - level) * LEVEL

    def _lay_out(self) -> dict[object, float]:
        """Place each layer below the middle of its neighbours in the layers around it, in turns."""
        rows: dict[int, list[object]] = {}
        near: dict[object, list[object]] = {}
        for item in [*self.boxes, *(bend for path in self.paths for bend in path[1:-1])]:
            rows.setdefault(self.y(item), []).append(item)
        for path in self.paths:
            for a, b in zip(path, path[1:], strict=False):
                near.setdefault(a, []).append(b)
                near.setdefault(b, []).append(a)
        x: dict[object, float] = {}
        for row in rows.values():
            x |= dict(zip(row, spread([self.width / 2] * len(row), [self.box_width(i) for i in row]), strict=True))
        for turn in range(60):
            for at in sorted(rows, reverse=turn % 2 == 1):
                row = rows[at]
                wished = {}
                for item in row:
                    beside = [x[other] for other in near.get(item, [])]
                    wished[item] = sum(beside) / len(beside) if beside else x[item]
                if turn < 30:
                    row.sort(key=lambda item: wished[item])
                centres = spread([wished[item] for item in row], [self.box_width(item) for item in row])
                low = min(c - self.box_width(i) / 2 for c, i in zip(centres, row, strict=True))
                high = max(c + self.box_width(i) / 2 for c, i in zip(centres, row, strict=True))
                shift = max(-low, 0.0) + min(self.width - high, 0.0)
                x |= {item: centre + shift for item, centre in zip(row, centres, strict=True)}
        low = min(x[box] - self.box_width(box) / 2 for box in self.boxes)
        high = max(x[box] + self.box_width(box) / 2 for box in self.boxes)
        return {item: centre + (self.width - high - low) / 2 for item, centre in x.items()}

    def ports(self, upper: bool) -> dict[tuple[str, str], float]:
        """Return where each arrow leaves a box (its lower edge) or enters it (its upper edge), side by side."""
        found: dict[tuple[str, str], float] = {}
        for box in self.boxes:
            own = [path for path in self.paths if path[-1 if upper else 0] == box]
            own.sort(key=lambda path: self.x[path[-2 if upper else 1]])
            step = min(14.0, (self.box_width(box) - 20) / max(len(own), 1))
            for i, path in enumerate(own):
                found[path[0], path[-1]] = self.x[box] + (i - (len(own) - 1) / 2) * step  # type: ignore[index]
        return found

    def draw(self, title: str, left: int, top: int, head: int) -> Iterator[str]:
        """Yield the elements of the panel, its upper left corner at a place, below a head with its title."""
        yield f'<text x="{left}" y="{top + 14}" class="title">{title}</text>'
        top += head
        leave, enter = self.ports(upper=False), self.ports(upper=True)
        for path in self.paths:
            pair = path[0], path[-1]
            points = [(leave[pair], self.y(path[0]) + BOX_HEIGHT)]  # type: ignore[index]
            for bend in path[1:-1]:
                points += [(self.x[bend], self.y(bend)), (self.x[bend], self.y(bend) + BOX_HEIGHT)]
            points.append((enter[pair], self.y(path[-1]) - 5))  # type: ignore[index]
            yield curve([(round(a + left), round(b + top)) for a, b in points], 'class="arrow"')
        for box, target in self.circles:
            points = [(self.x[box], self.y(box)), (self.x[target], self.y(target) + BOX_HEIGHT + 5)]
            yield curve([(round(a + left), round(b + top)) for a, b in points], 'class="circle"')
        for box in self.boxes:
            middle, y, width = round(self.x[box] + left), self.y(box) + top, self.box_width(box)
            color = COLORS[LAYERS.get(self.inside or box, "parts")]
            yield (
                f'<rect x="{middle - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="5" fill="{color}"/>'
            )
            yield f'<text x="{middle}" y="{y + 16}" class="name">{box}</text>'
            yield f'<text x="{middle}" y="{y + 30}" class="role">{self.role(box)}</text>'


def curve(points: list[Point], style: str) -> str:
    """Return an arrow through points, which runs downward at each of them."""
    (x, y), *others = points
    text = f"M{x} {y}"
    for a, b in others:
        text += f" C{x} {(y + b) // 2} {a} {(y + b) // 2} {a} {b}"
        x, y = a, b
    return f'<path d="{text}" {style} marker-end="url(#tip)"/>'


STYLE = """<style>
text { font-family: "DejaVu Sans", Verdana, sans-serif; text-anchor: middle; fill: #222222 }
.name { font-size: 12px; font-weight: bold }
.role { font-size: 10px; fill: #555555 }
.title { font-size: 13px; text-anchor: start }
rect { stroke: #888888 }
.arrow { fill: none; stroke: #777777; stroke-width: 1.1 }
.circle { fill: none; stroke: #C00000; stroke-width: 1.1; stroke-dasharray: 4 3 }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#777777"/></marker></defs>"""


def picture(root: Path = ROOT) -> str:
    """Return the picture as SVG: all packages, and below them the insides of two, side by side."""
    pairs, margin, title = statements(root), MARGIN, 30
    whole = Panel(graph(pairs), "", WIDTH - 2 * margin)
    opened = [Panel(graph(pairs, inside), inside, width) for inside, width in OPENED.items()]
    below = margin + title + whole.height + 2 * margin
    elements, left = [*whole.draw("packages", margin, margin, title)], margin
    for panel in opened:
        elements += panel.draw(f"inside {panel.inside}", left, below, title)
        left += panel.width + margin
    height = below + title + max(panel.height for panel in opened) + margin
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#FFFFFF" style="stroke: none"/>'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, background, *elements, "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "packages.svg").write_text(picture())
