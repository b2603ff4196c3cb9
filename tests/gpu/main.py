"""Prove the GPU paths on the machine at hand: checks in order of value, each in a process with a hard limit.

    make gpu                                      all checks
    make gpu BUDGET=480                           what fits in so many seconds; the rest is skipped by name
    python tests/gpu/main.py --only delays clock  some of them
    python tests/gpu/main.py --table              the figures of the last run on a GPU as a table in Markdown

Each check says one line when it is over. Its figures are written one by one: `gpu.json`, which is written anew after
each check, has all of them with the machine and the software. The exit status is 1 if a check failed, ran out of time
or died, else 0; what was skipped is listed with the reason.

The packages are imported once, by a process that never uses the GPU; checks are forked from it, and their ranks from
them. Without a GPU, each check runs the same code on CPUs at a small size, which proves that it runs and no speed. It
runs from the source tree and downloads nothing; a check whose packages are missing is skipped by name.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.outcome import Check, Figures  # noqa: E402

FORK = get_context("fork")
GRACE = 3.0
"""Seconds that a check has beyond its limit to say where it hangs."""
PACKAGES = (
    *("torch", "triton", "lightning", "pytorch-lightning", "accelerate", "numpy", "numba", "torchmetrics", "scipy"),
    *("transformers", "pytest", "pytest-timeout", "hypothesis"),
)
LIGHTNING = ("torch", "numpy", "lightning", "torchmetrics")
LOOPS = (*LIGHTNING, "accelerate", "transformers")

# In order of value for a short budget. First what all else stands on: right kernels, and no missing wait. Then the one
# figure that this project is about. Then times and costs, of which a split is made. Last what is rare, what waits for
# timeouts, and what takes longest and is known from CPUs.
CHECKS = (
    Check("machine", "machine", "versions and tools, ranks over NCCL on one GPU", 15, 90, ("torch",)),
    Check("kernels", "kernels", "kernels equal their references", 40, 150, ("pytest",)),
    Check("delays", "exchanges", "weights are the CPU's though every collective comes late", 60, 180, LIGHTNING),
    Check("unequal", "unequal", "the learned split reaches 0.97 of the measured optimum", 90, 240, LIGHTNING),
    Check("clock", "steps", "the parts of a step are the wall clock's within 3 %", 30, 120, LIGHTNING),
    Check("overhead", "steps", "dense costs at most 1 % over torch's DDP; cost of each mode", 70, 240, LIGHTNING),
    Check("precision", "precision", "loss scaling, SyncBatchNorm and memory probe hold", 30, 120, LIGHTNING),
    Check("faults", "faults", "a rank that fails is named within 90 s", 40, 110, LIGHTNING),
    Check("elastic", "elastic", "workers of 25 and 100 ms a batch claim four to one", 10, 60, ("torch", "numpy")),
    Check("leaks", "leaks", "steps of each mode and front end keep nothing on the GPU", 60, 400, LOOPS),
)


@dataclass
class Result:
    """Outcome of a check: ``passed``, ``failed``, ``timed out``, ``died`` or ``skipped``."""

    name: str
    must: str
    outcome: str
    seconds: float = 0.0
    figures: dict = field(default_factory=dict)
    why: str = ""
    stand_in: bool = False

    @property
    def bad(self):
        return self.outcome in ("failed", "timed out", "died")

    def line(self):
        where = " on CPUs" if self.stand_in else ""
        return f"{self.outcome:9} {self.name:10} {self.seconds:5.1f} s{where}  {self.why or self.shown()}"

    def shown(self):
        """The plain figures in one line."""
        return ", ".join(f"{key} {brief(value)}" for key, value in self.figures.items() if plain(value))


def plain(value):
    return not isinstance(value, list | dict)


def brief(value):
    """A figure in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def missing(packages):
    """Those of the packages that are not installed."""
    found = []
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            found.append(package)
    return found


def warm():
    """Import once what all checks need, so that none that is forked has to; nothing here may ask for the GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    os.environ.update(own, PYTHONPATH=path, PYTHONUNBUFFERED="1")
    for name in ("torch", "tests.helpers", "lightning_hetero"):
        with suppress(ImportError):
            importlib.import_module(name)


def names_of_gpus():
    """Names of the GPUs, asked for by a process of its own."""
    try:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError):
        return []


def perform(check, report, log, kind, known):
    """Inside the process of a check: call it and write what came out."""
    os.setsid()
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import faulthandler

    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    figures = Figures(report, known)
    try:
        import torch

        function = getattr(importlib.import_module(f"tests.gpu.{check.module}"), check.name)
        function(figures, torch.device(kind))
        figures.end()
    except BaseException as error:  # whatever it is, it is the result
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        figures.end(f"{type(error).__name__}: {text[-1 if 'Rank' in type(error).__name__ else 0]}")
    sys.stdout.flush()
    os._exit(0)


def run(check, folder, kind, known, limit):
    """Run a check in a process of its own; everything that it started is ended with it."""
    report, log = folder / f"{check.name}.json", folder / f"{check.name}.log"
    report.unlink(missing_ok=True)
    begin = time.monotonic()
    process = FORK.Process(target=perform, args=(check, report, log, kind, known))
    process.start()
    try:
        process.join(limit)
        late = process.is_alive()
        if late:
            os.kill(process.pid, signal.SIGUSR1)  # it writes where it is
            process.join(GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    found = {"outcome": "died", **(json.loads(report.read_text()) if report.exists() else {})}
    if late:
        found |= {"outcome": "timed out", "why": f"not done within {limit:.0f} s, see {log}"}
    elif found["outcome"] == "died":
        found["why"] = f"exit status {process.exitcode}, see {log}"
    return Result(check.name, check.must, seconds=time.monotonic() - begin, stand_in=kind == "cpu", **found)


def table(found):
    """The figures of a run on a GPU in Markdown, below the hardware; ``None`` if there are none."""
    machine = found["machine"]
    rows = [row for row in found["checks"] if row["figures"] and not row["stand_in"]]
    if machine["GPUs"] == "none" or not rows:
        return None
    lines = [f"{machine['GPUs']}, {machine['system']}, {machine['packages']}, {machine['date']}", ""]
    lines += ["| check | must show | outcome | figures |", "|---|---|---|---|"]
    for row in rows:
        shown = "; ".join(f"{key}: {brief(value)}" for key, value in row["figures"].items() if plain(value))
        cells = [row["name"], row["must"], row["outcome"], shown]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def describe(gpus):
    """The machine and the software, without asking the GPU from here."""
    versions = {package: metadata.version(package) for package in PACKAGES if not missing([package])}
    return {
        "GPUs": ", ".join(gpus) or "none",
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "missing": ", ".join(missing(PACKAGES)) or "nothing",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def one(check, left, folder, kind, known):
    """The result of a check for which so many seconds are left."""
    absent = missing(check.needs)
    if absent:
        return Result(check.name, check.must, "skipped", why=f"not installed: {', '.join(absent)}")
    if check.takes > left:
        return Result(check.name, check.must, "skipped", why=f"takes {check.takes:g} s, {max(left, 0):.0f} s are left")
    return run(check, folder, kind, known, min(check.limit, left - GRACE))


def arguments(checks):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [check.name for check in checks]
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="for all together")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--table", action="store_true", help="print the figures that are there, and run nothing")
    return parser.parse_args()


def main(checks=CHECKS):
    begin, args = time.monotonic(), arguments(checks)
    if args.table:
        path = args.out / "gpu.json"
        text = table(json.loads(path.read_text())) if path.exists() else None
        say(text or f"no figures of a GPU in {path}: run `make gpu` on a machine with one")
        return 0 if text else 2
    args.out.mkdir(parents=True, exist_ok=True)
    warm()
    with FORK.Pool(1) as pool:
        gpus = pool.apply(names_of_gpus)
    machine, results = describe(gpus), []
    for key, value in machine.items():
        say(f"{key}: {value}")
    if not gpus:
        say("no GPU is used: the same checks on CPUs, at a small size")
    for check in checks:
        if args.only and check.name not in args.only:
            continue
        left = args.budget - (time.monotonic() - begin)
        known = {result.name: result.figures for result in results}
        results.append(one(check, left, args.out, "cuda" if gpus else "cpu", known))
        say(results[-1].line())
        rows = [asdict(result) for result in results]
        (args.out / "gpu.json").write_text(json.dumps({"machine": machine, "checks": rows}, indent=1) + "\n")
    skipped = [f"{result.name} ({result.why})" for result in results if result.outcome == "skipped"]
    bad = [result.name for result in results if result.bad]
    say(f"skipped: {', '.join(skipped) or 'nothing'}")
    say(f"failed: {', '.join(bad) or 'nothing'}; {time.monotonic() - begin:.0f} s; {args.out / 'gpu.json'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
