"""Prove the GPU paths on the machine at hand: ordered checks, each in a process of its own with a hard limit.

    make gpu                                     all checks
    python tests/gpu/main.py --only nccl clock   some of them
    python tests/gpu/main.py --without-gpu       what runs without a GPU, as on a machine that has none

Each check says one line when it is over, and writes what it measured: `gpu.json` has all figures with the machine and
the software, `gpu.html` is the same as a page. The exit status is 1 if a check failed, ran out of time or died, else 0;
what was skipped is listed with the reason. No parent process uses the GPU, and its settings are left alone. Without a
GPU the checks run that need none, or a stand-in on CPUs, so that their code is exercised.

It runs from the source tree and downloads nothing. It needs torch and numpy; a check whose packages are missing is
skipped by name.
"""

import argparse
import html
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PACKAGES = (
    *("torch", "triton", "lightning", "pytorch-lightning", "accelerate", "numpy", "numba", "torchmetrics", "scipy"),
    *("transformers", "pytest", "pytest-timeout", "hypothesis"),
)
GRACE = 5.0
"""Seconds that a check has beyond its limit to say where it hangs."""


@dataclass(frozen=True)
class Check:
    """One check: a module of tests/gpu with a function ``gpu()`` and, for machines without one, ``stand_in()``.

    Args:
        name: of the module.
        must: what it shows.
        limit: seconds after which it is ended.
        needs: packages without which it is skipped.
    """

    name: str
    must: str
    limit: float
    needs: tuple[str, ...] = ("torch", "numpy")


LIGHTNING = ("torch", "numpy", "lightning", "torchmetrics")
CHECKS = (
    Check("machine", "the machine and the software; bandwidth of a copy, speed of a bf16 product", 60),
    Check("compiled", "all kernels compile; another density or optimizer compiles nothing", 120, ("torch", "triton")),
    Check(
        "native",
        "kernels and sparse steps equal the CPU's, bit by bit or within rounding",
        150,
        ("torch", "triton", "pytest"),
    ),
    Check("clock", "each part of a step within 5 % of the truth, a + P within 3 %", 90, (*LIGHTNING, "accelerate")),
    Check("nccl", "one rank over NCCL: weights of the CPU, a sum's time, an exit in peace", 100, LIGHTNING),
    Check("quiet", "steps allocate nothing, wait for nothing, and memory stays flat", 60, ("torch", "triton")),
    Check(
        "leaks",
        "steps of each mode and front end keep nothing on the GPU; a number of each step is found",
        400,
        (*LIGHTNING, "accelerate", "transformers"),
    ),
    Check("mixed", "a CPU beside a GPU: replicas stay equal, a non-finite step is dropped by both", 150, LIGHTNING),
    Check("unequal", "workers of speeds 1:2 and 1:2:4 get the analytic split, steps as predicted", 120, LIGHTNING),
    Check("precision", "loss scaling, SyncBatchNorm, refusals, and a memory probe that holds", 100, LIGHTNING),
    Check("elastic", "workers of 25 and 100 ms a batch claim four to one", 60, ("torch", "numpy")),
    Check("speed", "kernels at 88 M and 1 G elements; real models' launches; overhead of a step", 150, LIGHTNING),
)


@dataclass
class Result:
    """Outcome of a check: ``passed``, ``failed``, ``timed out``, ``died`` or ``skipped``."""

    name: str
    must: str
    outcome: str
    seconds: float
    figures: dict = field(default_factory=dict)
    why: str = ""
    stand_in: bool = False

    @property
    def bad(self):
        return self.outcome in ("failed", "timed out", "died")

    def line(self):
        shown = ", ".join(
            f"{key} {brief(value)}" for key, value in self.figures.items() if not isinstance(value, list | dict)
        )
        where = " on CPUs" if self.stand_in else ""
        return f"{self.outcome:9} {self.name:10} {self.seconds:5.1f} s{where}  {self.why or shown}"


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


def gpus():
    """Names of the GPUs, found by a process of its own, and why there are none."""
    code = "import torch; print('\\n'.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def environment():
    """What checks run with: the source tree, no thread pools that fight each other, no rendezvous of somebody else."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def run(check, *, on_gpu, folder):
    """Run a check in a process of its own; everything that it started is ended with it."""
    absent = missing(check.needs)
    if absent:
        return Result(check.name, check.must, "skipped", 0.0, why=f"not installed: {', '.join(absent)}")
    report, log = folder / f"{check.name}.json", folder / f"{check.name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-X", "faulthandler", __file__, "--run", check.name, "--report", str(report)]
    command += [] if on_gpu else ["--without-gpu"]
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(check.limit)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)  # it writes where it is
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    known = json.loads(report.read_text()) if report.exists() else {}
    result = Result(check.name, check.must, **{"outcome": "died", "seconds": seconds, **known})
    if code is None:
        result.outcome, result.why = "timed out", f"not done within {check.limit:.0f} s, see {log}"
    elif code != 0 or not known:
        result.outcome, result.why = "died", f"exit status {code}, see {log}"
    return result


def perform(name, *, on_gpu, report):
    """Inside the process of a check: call it and write what came out."""
    import faulthandler

    from tests.gpu.outcome import NotHere

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    outcome = {"outcome": "passed", "figures": {}, "stand_in": not on_gpu}
    try:
        module = importlib.import_module(f"tests.gpu.{name}")
        function = module.gpu if on_gpu else getattr(module, "stand_in", None)
        if function is None:
            outcome |= {"outcome": "skipped", "why": "needs a GPU", "stand_in": False}
        else:
            outcome["figures"] = function() or {}
    except NotHere as reason:
        outcome |= {"outcome": "skipped", "why": str(reason)}
    except BaseException as error:  # whatever it is, it is the result
        traceback.print_exc()
        text = str(error).strip().splitlines()
        outcome |= {"outcome": "failed", "why": f"{type(error).__name__}: {text[0] if text else ''}"}
        outcome["figures"] = getattr(error, "figures", {})
    Path(report).write_text(json.dumps(outcome, default=str))


def page(machine, results):
    """The results as one HTML page."""
    colours = {"passed": "#1a7f37", "skipped": "#6e7781"}
    rows = []
    for result in results:
        colour = colours.get(result.outcome, "#cf222e")
        shown = [f"{html.escape(key)}: <b>{html.escape(brief(value))}</b>" for key, value in result.figures.items()]
        text = "<br>".join(filter(None, [html.escape(result.why), *shown]))
        outcome = result.outcome + (" on CPUs" if result.stand_in and not result.bad else "")
        rows.append(
            f"<tr><td style='color:{colour}'>{outcome}</td><td>{html.escape(result.name)}</td>"
            f"<td>{html.escape(result.must)}</td><td>{text}</td><td>{result.seconds:.1f} s</td></tr>"
        )
    facts = "<br>".join(f"{html.escape(key)}: {html.escape(str(value))}" for key, value in machine.items())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>GPU checks</title><style>"
        "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
        "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #d0d7de;padding:.45rem .6rem;"
        "text-align:left;vertical-align:top}td:first-child,td:last-child{white-space:nowrap}td:first-child{font-weight:600}"
        "</style></head><body><h1>GPU checks of lightning-hetero</h1>"
        f"<p>{facts}</p><table><tr><th>outcome</th><th>check</th><th>must show</th><th>figures</th><th>time</th></tr>"
        f"{''.join(rows)}</table></body></html>\n"
    )


def describe(found):
    """The machine and the software, without asking the GPU from here."""
    versions = {package: metadata.version(package) for package in PACKAGES if not missing([package])}
    return {
        "GPUs": ", ".join(found) or "none",
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "missing": ", ".join(missing(PACKAGES)) or "nothing",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write(folder, machine, results):
    """Both files anew, so that they are there whatever the next check does."""
    rows = [asdict(result) for result in results]
    (folder / "gpu.json").write_text(json.dumps({"machine": machine, "checks": rows}, indent=1) + "\n")
    (folder / "gpu.html").write_text(page(machine, results))


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--without-gpu", action="store_true", help="as on a machine that has none")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        perform(args.run, on_gpu=not args.without_gpu, report=args.report)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    found = [] if args.without_gpu else gpus()
    machine, results = describe(found), []
    for key, value in machine.items():
        say(f"{key}: {value}")
    if not found:
        say("no GPU is used: checks that need none, and stand-ins on CPUs")
    for check in CHECKS:
        if args.only and check.name not in args.only:
            continue
        results.append(run(check, on_gpu=bool(found), folder=args.out))
        say(results[-1].line())
        write(args.out, machine, results)
    skipped = [f"{result.name} ({result.why})" for result in results if result.outcome == "skipped"]
    bad = [result.name for result in results if result.bad]
    say(f"skipped: {', '.join(skipped) or 'nothing'}")
    say(f"failed: {', '.join(bad) or 'nothing'}; {sum(r.seconds for r in results):.0f} s; {args.out / 'gpu.html'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
