"""What the paper on dynamic batching reports, checked: sub-commands that each write one result.

python benchmarks/papers/dynamic_batching.py emulated    # Lightning and gloo on emulated devices; about 12 minutes

"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from hardware import write_table

from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.simulate import DeviceProfile

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
Rows = list[dict[str, Any]]


def save(rows: Rows, name: str, title: str) -> None:
    """Print the table and write the result."""
    write_table(rows, RESULTS / f"dynamic_batching_{name}.json", title)


# Lightning and gloo on emulated devices

CORES = (3, 5, 12)
"""Cores of the three servers of Fig. 3."""
CORE_SECONDS, SERIAL, FIXED, JITTER = 0.012, 0.03, 0.003, 0.03
BATCH = 32
KINDS = ("ddp", "static", "as printed", "pid", "pid open loop", "perf_model")


def servers(jitter: float = JITTER, cores: Sequence[int] = CORES) -> list[dict[str, float]]:
    """Profiles of servers with these cores: Amdahl's law with 3 % of serial work, and fixed times."""
    seconds = [CORE_SECONDS * (SERIAL + (1 - SERIAL) / count) for count in cores]
    return [{"q": one / 3, "s": FIXED, "k": 2 * one / 3, "m": FIXED, "jitter": jitter} for one in seconds]


def launch(runs: list[dict[str, Any]], seed: int) -> tuple[list[list[dict[str, Any]]], float]:
    """Train with one process per device, run after run; what each rank saw of each run, and when they were started."""
    workers = len(runs[0]["profiles"])
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        command = [sys.executable, str(HERE / "_dynamic_batching_emulated.py"), "--runs", json.dumps(runs)]
        command += ["--seed", str(seed), "--out", out]
        port = str(random.SystemRandom().randrange(20_000, 32_000))
        world = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
        logs = [Path(f"{out}.log{rank}") for rank in range(workers)]
        begin, processes = time.time(), []
        for rank, log in enumerate(logs):
            environment = {**os.environ, **world, "RANK": str(rank), "NODE_RANK": str(rank)}
            with log.open("w") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        try:
            codes = [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}:\n" + "\n".join(log.read_text()[-2500:] for log in logs))
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(workers)]
        return [list(one) for one in zip(*ranks, strict=True)], begin


def true_seconds(profiles: list[DeviceProfile], sizes: Sequence[int]) -> float:
    """Seconds of a step without jitter, where synchronizing takes no time."""
    return max(profile.seconds(size) for profile, size in zip(profiles, sizes, strict=True))


def optimum(profiles: list[DeviceProfile], total: int) -> float:
    """Least seconds of a step over all integer splits of a total."""
    low, high = 0.0, max(profile.seconds(total) for profile in profiles)
    for _ in range(60):
        middle = (low + high) / 2
        room = sum(int((middle - one.s - one.m) / (one.q + one.k) + 1e-9) for one in profiles if middle > one.s + one.m)
        low, high = (low, middle) if room >= total else (middle, high)
    return high


def quantiles(milliseconds: np.ndarray) -> str:
    """5 %, 50 % and 95 % quantiles."""
    return "/".join(f"{value:.0f}" for value in np.quantile(milliseconds, [0.05, 0.5, 0.95]))


def policy_run(kind: str, dead_band: float, steps: int) -> dict[str, Any]:
    """One training of the three servers under a policy."""
    sizes = proportional_sizes(BATCH * len(CORES), CORES)
    run = {"kind": kind, "dead_band": dead_band, "steps": steps, "batch": BATCH, "sizes": sizes, "script": {}}
    return {**run, "profiles": servers()}


def policy_row(run: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of it; times by the truth are per sample, because a rule may move the total."""
    profiles = [DeviceProfile(**one) for one in run["profiles"]]
    sizes = np.array([rank["sizes"] for rank in ranks]).T
    computed = 1e3 * np.array([rank["computed"] for rank in ranks]).T[: len(sizes)]
    ends = np.array(ranks[0]["ends"])
    changes = np.flatnonzero((np.diff(sizes, axis=0) != 0).any(axis=1)) + 1
    exact = np.array([true_seconds(profiles, row) / row.sum() for row in sizes])
    total = run["batch"] * len(profiles)
    outside = np.flatnonzero(exact > 1.05 * optimum(profiles, total) / total)
    near, half = int(outside[-1]) + 1 if len(outside) else 0, len(sizes) // 2
    before, after = computed[: changes[0] if len(changes) else None], computed[changes[-1] if len(changes) else 0 :]
    return {
        "kind": run["kind"],
        "dead_band": run["dead_band"],
        "step_ms": 1e3 * float(np.mean(np.diff(ends)[half:])),
        "samples_s": float(sizes[half + 1 :].sum() / (ends[-1] - ends[half])),
        "seconds": float(ends[-1] - ends[0]),
        "share_of_optimum_%": 100 * optimum(profiles, total) / total / float(exact[-1]),
        "steps_to_5%": near if near < len(sizes) else None,
        "changes": len(changes),
        "first_sizes": "/".join(map(str, sizes[0])),
        "last_sizes": "/".join(map(str, sizes[-1])),
        "last_total": int(sizes[-1].sum()),
        "before_ms": "  ".join(quantiles(times) for times in before.T),
        "after_ms": "  ".join(quantiles(times) for times in after.T),
        "host_ms": 1e3 * float(np.median([rank["host"] for rank in ranks])),
    }


def script_run(changes: int, stretch: int = 8) -> dict[str, Any]:
    """One training of equal devices that changes its split again and again."""
    script = {i * stretch: [31, 32, 33] if i % 2 else [32, 32, 32] for i in range(1, changes + 1)}
    run = {"kind": "script", "dead_band": 0.0, "steps": stretch * (changes + 1), "batch": BATCH, "sizes": None}
    return {**run, "script": script, "profiles": [servers(0.0)[1]] * 3}


def script_row(run: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first step after a change takes beyond its device's time, against other steps."""
    profiles = [DeviceProfile(**one) for one in run["profiles"]]
    sizes, ends = np.array([rank["sizes"] for rank in ranks]).T, np.array(ranks[0]["ends"])
    beyond = 1e3 * (np.diff(ends) - [true_seconds(profiles, row) for row in sizes[1:]])
    changed = (np.diff(sizes, axis=0) != 0).any(axis=1)
    others = float(np.median(beyond[10:][~changed[10:]]))
    return {
        "kind": "changes of plan",
        "step_ms": 1e3 * float(np.median(np.diff(ends))),
        "changes": int(changed.sum()),
        "beyond_ms": others,
        "change_ms": float(np.median(beyond[changed])) - others,
        "change_95%_ms": float(np.quantile(beyond[changed], 0.95)) - others,
    }


def emulated(args: argparse.Namespace) -> None:
    rows = []
    policies = [(kind, 0.05) for kind in args.kinds.split(",")] + [("as printed", 0.0), ("pid", 0.0)]
    for seed in range(args.seeds):
        runs = [script_run(20), *(policy_run(kind, dead_band, args.steps) for kind, dead_band in policies)]
        found, begin = launch(runs, seed)
        start = max(rank["first"] for rank in found[0]) - begin
        rows.append({**script_row(runs[0], found[0]), "start_s": start, "seed": seed})
        rows += [{**policy_row(run, ranks), "seed": seed} for run, ranks in zip(runs[1:], found[1:], strict=True)]
        print(f"seed {seed} is done", file=sys.stderr, flush=True)
    save(rows, "emulated", "Three emulated servers of 3, 5 and 12 cores under Lightning and gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("emulated", help="Lightning and gloo on emulated devices")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--steps", type=int, default=160)
    command.add_argument("--kinds", default=",".join(KINDS))
    command.set_defaults(run=emulated)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
