"""Run the slow tests in order of value, as far as the time goes, and name what was left out.

    python tests/slow.py --budget 600

Tests with random inputs and seeds get many of them; with those, files with tests marked `slow` take turns, in the order
of ``VALUE``. Two files run at a time. What has not ended when the time is over is ended and named. The exit code says
whether a test failed, not whether all ran.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANY = ["--hypothesis-profile", "slow", "--seeds", "30"]
VALUE = (
    *("tests/promises", "tests/one_process", "tests/data", "tests/lightning", "tests/front_ends", "tests/decisions"),
    *("tests/modes", "tests/engine", "tests/gradients", "tests/elastic", "tests/equations", "tests/kernels"),
    *("tests/test_limits.py", "tests/test_pages.py", "tests/test_examples.py", "tests/simulate", "tests/cli"),
    *("tests/report", "tests/test_recipes.py", "tests/test_benchmarks.py", "tests"),
)
"""Places of slow tests: what would cost users most comes first."""


def collected(marks: str) -> list[str]:
    """Return the files that have tests with these marks, in order of value."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: nothing was collected
        raise SystemExit(done.stdout + done.stderr)
    files = dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    return sorted(files, key=lambda file: next(i for i, place in enumerate(VALUE) if file.startswith(place)))


def run(name: str, arguments: list[str], end: float) -> tuple[str, str]:
    """Run pytest until it ends, or until the time is over; return a name, and what came of it."""
    if (left := end - time.monotonic()) < 20:
        return name, "skipped"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return name, "ended by the budget"
    said = output.strip().splitlines()[-1].strip("= ") if output.strip() else ""
    if process.returncode not in (0, 5):  # 5: nothing was collected
        sys.stdout.write(output)
        said = f"FAILED: {said}"
    sys.stdout.write(f"{time.monotonic() - began:6.0f} s  {name}: {said}\n")
    sys.stdout.flush()
    return name, said


def main() -> int:
    """Return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of it (default: an hour)")
    parser.add_argument("--only", default="", help="files whose path contains this")
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    jobs = [(f"{file}, many inputs", [*MANY, "-m", "(hypothesis or seeds) and not slow", file])
            for file in collected("(hypothesis or seeds) and not (slow or gpu)")]  # fmt: skip
    slow = [(file, [*MANY, "-m", "slow", file]) for file in collected("slow and not gpu")]
    turns = [job for pair in zip(slow, jobs, strict=False) for job in pair]
    jobs = [job for job in [*turns, *slow[len(jobs) :], *jobs[len(slow) :]] if options.only in job[0]]
    with ThreadPoolExecutor(2) as two:
        done = list(two.map(lambda job: run(*job, end), jobs))
    left = [f"{name} ({said})" for name, said in done if said in ("skipped", "ended by the budget")]
    failed = [name for name, said in done if said.startswith("FAILED")]
    sys.stdout.write(
        f"{len(done) - len(left)} of {len(done)} parts ran; not run to the end: {', '.join(left) or '-'}\n"
    )
    sys.stdout.write(f"failed: {', '.join(failed) or '-'}\n")
    return len(failed) > 0


if __name__ == "__main__":
    raise SystemExit(main())
