"""Draw mutants of the package with a seed, and run tests against each: ``python tests/mutants.py --help``.

A mutant is the package with one change of one line: an operator, a constant, a dropped call, swapped ranks or
arguments, a decision that is ignored. It is *killed* if a test fails. The same mutants against two suites say which of
them sees more::

    python tests/mutants.py cover                                  # which test runs which line; needs `coverage`
    python tests/mutants.py draw --seed 43 --count 60 > mutants.json
    python tests/mutants.py run mutants.json                        # each against the tests that run its line

or against what you name (``--tests tests/equations``). Each mutant is written into the tree at ``--root`` and taken out
again, so give it a worktree of its own.
"""

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

PACKAGE = "lightning_hetero"
PLACE = Path("build", "mutants")
"""Where ``cover`` leaves what it found, below the root."""

SETTINGS = """
[run]
parallel = true
concurrency = multiprocessing,thread
patch = subprocess,_exit,fork
source_pkgs = lightning_hetero
plugins = tests.mutants
data_file = {data}
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported,no-ctracer
"""


def coverage_init(registry, options):
    """Say which test runs, in processes that a test has started as well; coverage calls it by this name."""
    import coverage

    class ByTest(coverage.CoveragePlugin):
        def dynamic_context(self, frame):
            test = os.environ.get("PYTEST_CURRENT_TEST")
            return test and test.rsplit(" ", 1)[0].partition("[")[0]

    registry.add_dynamic_context(ByTest())


def cover(root, python, given):
    """Run tests under coverage, with the time that each takes."""
    place = root / PLACE
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    settings = place / "settings"
    settings.write_text(SETTINGS.format(data=place / "data"))
    tests = given or ["-n", "2", "--dist", "loadfile", "-m", "not (slow or gpu)"]
    measured = [python, "-m", "coverage"]
    command = [
        *measured,
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        "-q",
        f"--junitxml={place / 'times.xml'}",
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, env=env, check=False)
    subprocess.run([*measured, "combine", "-q", f"--rcfile={settings}"], cwd=root, env=env, check=True)
    report = [*measured, "report", f"--rcfile={settings}"]
    (place / "report.txt").write_bytes(
        subprocess.run(report, cwd=root, env=env, check=True, capture_output=True).stdout
    )


def nearest(root, mutants, limit):
    """Give each mutant the tests that run its line, those that run few lines first, as many as the time allows."""
    import coverage

    data = coverage.CoverageData(str(root / PLACE / "data"))
    data.read()
    seconds, breadth = {}, {}
    for case in ElementTree.parse(root / PLACE / "times.xml").iter("testcase"):
        parts, name = case.get("classname").split("."), case.get("name").partition("[")[0]
        test = f"{'/'.join(parts)}.py::{name}"
        seconds[test] = seconds.get(test, 0.0) + float(case.get("time"))
    found = {name: data.contexts_by_lineno(name) for name in data.measured_files()}
    for lines in found.values():
        for tests in lines.values():
            for test in tests:
                breadth[test] = breadth.get(test, 0) + 1
    for mutant in mutants:
        lines = found.get(str(root / mutant["file"]), {})
        chosen, left = [], limit
        for test in sorted(filter(None, lines.get(mutant["line"], ())), key=lambda test: (breadth[test], test)):
            if (needed := seconds.get(test, 1.0)) <= left:
                chosen.append(test)
                left -= needed
        mutant["tests"] = chosen


COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
QUIET = {"warning", "info", "debug", "warn", "error", "exception", "log", "say", "add_argument"}


def constant(value):
    """Return another value of the same kind, or ``None``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    return None


def is_rank(node):
    return isinstance(node, (ast.Name, ast.Attribute)) and "rank" in (
        getattr(node, "id", "") + getattr(node, "attr", "")
    )


class Sites(ast.NodeVisitor):
    """Collect ``(kind, line, node as it is, node as it becomes)`` of a module."""

    def __init__(self):
        self.found = []

    def add(self, kind, node, **changes):
        other = copy.deepcopy(node)
        for name, value in changes.items():
            setattr(other, name, value)
        self.found.append((kind, node, other))

    def visit_Raise(self, node):
        """What an error says is nobody's contract."""

    def visit_arguments(self, node):
        for default in [*node.defaults, *filter(None, node.kw_defaults)]:
            self.visit(default)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node):
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node):
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self.found.append(("ignored decision", node.test, ast.Constant(False)))
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.found.append(("ignored decision", node, node.orelse))
        self.generic_visit(node)

    def visit_Compare(self, node):
        (op, *more), (right, *_) = node.ops, node.comparators
        if not more:
            if is_rank(node.left) and isinstance(right, ast.Constant) and type(right.value) is int:
                self.add("swapped ranks", node, comparators=[ast.Constant(right.value + 1)])
            elif type(op) in COMPARED:
                self.add("operator", node, ops=[COMPARED[type(op)]()])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        text = isinstance(node.left, (ast.JoinedStr, ast.Constant)) and not isinstance(
            getattr(node.left, "value", None), (int, float)
        )
        if type(node.op) in COMPUTED and not text:
            self.add("operator", node, op=COMPUTED[type(node.op)]())
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.add("operator", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        self.found.append(("operator", node, node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if (other := constant(node.value)) is not None:
            self.add("constant", node, value=other)

    def visit_JoinedStr(self, node):
        """A sentence."""

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in QUIET:
            return
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]) and name != "isinstance":
            self.add("swapped arguments", node, args=[node.args[1], node.args[0], *node.args[2:]])
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            if name in QUIET:
                return
            self.found.append(("dropped call", node, ast.Pass()))
        self.generic_visit(node)

    def visit_Assign(self, node):
        names = [getattr(target, "id", "") for target in node.targets]
        if "__all__" in names:
            return
        if any(isinstance(target, ast.Attribute) for target in node.targets):
            self.found.append(("dropped assignment", node, ast.Pass()))
        self.generic_visit(node)


def sites(path):
    visitor = Sites()
    visitor.visit(ast.parse(path.read_text()))
    return [s for s in visitor.found if s[1].lineno == s[1].end_lineno and ast.unparse(s[1]) != ast.unparse(s[2])]


def span(source, node):
    """Return offsets of a node in the bytes of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def described(path, root, kind, node, other):
    source = path.read_bytes()
    begin, end = span(source, node)
    text = ast.unparse(other)
    if isinstance(other, ast.expr):
        text = f"({text})"
    return {
        "file": str(path.relative_to(root)),
        "line": node.lineno,
        "kind": kind,
        "begin": begin,
        "old": source[begin:end].decode(),
        "new": text,
        "context": source.decode().splitlines()[node.lineno - 1].strip(),
    }


def draw(root, seed, count, under):
    """Return ``count`` mutants: each package gets a number by the places where it can be changed, at least one."""
    chance = random.Random(seed)
    rooms = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        if under and not any(relative.is_relative_to(place) for place in under):
            continue
        room = relative.parts[1] if len(relative.parts) > 2 else "(top)"
        rooms.setdefault(room, []).extend((path, *site) for site in sites(path))
    rooms = {room: found for room, found in rooms.items() if found}
    total = sum(map(len, rooms.values()))
    shares = {room: max(1, round(count * len(found) / total)) for room, found in rooms.items()}
    while sum(shares.values()) > max(count, len(rooms)):
        shares[max(shares, key=shares.get)] -= 1
    while sum(shares.values()) < count:
        shares[max(rooms, key=lambda room: len(rooms[room]) / shares[room])] += 1
    chosen = []
    for room, found in sorted(rooms.items()):
        kinds = sorted({kind for _, kind, *_ in found})
        for _ in range(shares[room]):
            kind = chance.choice(kinds)
            left = [site for site in found if site[1] == kind and site not in chosen]
            chosen.append(chance.choice(left or found))
    return [described(path, root, *site) for path, *site in chosen]


def run_one(root, mutant, tests, limit, python):
    if not tests:
        return {"result": "no tests"}
    path = root / mutant["file"]
    source = path.read_bytes()
    begin, old = mutant["begin"], mutant["old"].encode()
    if source[begin : begin + len(old)] != old:
        return {"result": "not there"}
    path.write_bytes(source[:begin] + mutant["new"].encode() + source[begin + len(old) :])
    began = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "--tb=line", *tests]
    try:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            output, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code, output = None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        path.write_bytes(source)
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    result = {None: "time", 0: "SURVIVED", 1: "killed", 2: "killed", 5: "no tests"}.get(code, f"ended by {code}")
    return {"result": result, "by": by[:160], "seconds": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=43)
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--under", nargs="*", default=[], help="folders or files of the package, all by default")
    covering = commands.add_parser("cover")
    covering.add_argument("given", nargs="*", help="what pytest gets in place of all that `make test` runs")
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument(
        "--tests", nargs="*", default=[], help="what pytest gets; by default each mutant's own `tests`"
    )
    running.add_argument("--limit", type=float, default=180.0)
    running.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    root = options.root.resolve()
    if options.command == "draw":
        json.dump(draw(root, options.seed, options.count, options.under), sys.stdout, indent=1)
        return
    if options.command == "cover":
        cover(root, sys.executable, options.given)
        return
    mutants = json.loads(options.mutants.read_text())
    if not options.tests:
        nearest(root, mutants, options.limit)
    for number, mutant in enumerate(mutants):
        tests = options.tests or mutant["tests"]
        result = run_one(root, mutant, tests, options.limit, options.python)
        place = f"{mutant['file']}:{mutant['line']}"
        print(
            f"{number:3} {result['result']:9} {place} {mutant['kind']}: {mutant['context']!r} {mutant['old']!r} -> "
            f"{mutant['new']!r} | {result.get('seconds')} s {result.get('by', '')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
