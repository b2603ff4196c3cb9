"""What the paper on dynamic batching reports, checked: sub-commands that each write one result.

python benchmarks/papers/dynamic_batching.py levels    # gains at the H-levels, simulated; 45 s of processor time
python benchmarks/papers/dynamic_batching.py control   # controllers: dead bands, bounds, availability; 85 s
python benchmarks/papers/dynamic_batching.py mixed     # GPU and CPU, T4 and P4, simulated; 30 s
python benchmarks/papers/dynamic_batching.py curve     # throughput against batch size; 50 s
python benchmarks/papers/dynamic_batching.py accuracy  # time to accuracy, clock simulated; two minutes
python benchmarks/papers/dynamic_batching.py emulated  # Lightning and gloo on emulated devices; ten minutes
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from _clusters import Cluster, Noise, simulator
from _dynamic_batching import LEVELS, NEVER, WORKLOADS, Measured, bound, link_of, policies, server, simulate, trajectory
from _dynamic_batching_rule import AsPrinted
from hardware import write_table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.devices.catalog import device_profile

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


# simulations


def medians(rows: Sequence[Measured], name: str) -> float:
    """Median of a figure over the seeds."""
    return float(np.median([getattr(row, name) for row in rows]))


LEARNING = ("pid", "perf_model")
"""Policies that begin with equal batches, whose gain in the last third is a row's ``late``."""


def level_row(model: str, level: int, rate: float, serial: float, seeds: int, steps: int) -> dict[str, Any]:
    """Time of every policy at an H-level, as a gain over equal sizes on the same cluster."""
    cores, total = LEVELS[level], WORKLOADS[model][1] * 3
    devices = [server(count, model, serial, JITTER) for count in cores]
    link = link_of(model, rate)
    found = {
        name: [
            simulate(devices, total, planner, steps=steps, seed=seed, link=link, capacities=cores, every=every)
            for seed in range(seeds)
        ]
        for name, (planner, every) in policies(cores).items()
    }
    even = medians(found["even"], "seconds")
    row = {
        "model": model,
        "level": level,
        "cores": "/".join(map(str, cores)),
        "gbit": rate / 1e9,
        "serial_%": 100 * serial,
        "even_ms": 1e3 * total * even,
        "bound": bound([1 / (device.q + device.k) for device in devices]),
    }
    row |= {name: even / medians(rows, "seconds") for name, rows in found.items() if name != "even"}
    row |= {f"{name} late": medians(found["even"], "steady") / medians(found[name], "steady") for name in LEARNING}
    best = ClusterSimulator([server(count, model, serial) for count in cores], total, link=link, policy=None)
    row["optimum"] = best.run(1).seconds[0] / best.optimum()[0]
    return row | {"printed_total": medians(found["printed"], "total") / total}


def levels(args: argparse.Namespace) -> None:
    cases = [(model, level, math.inf, 0.0) for model in WORKLOADS for level in LEVELS]
    cases += [("ResNet-50", level, math.inf, SERIAL) for level in (2, 6, 10)]
    cases += [(model, level, 10e9, 0.0) for model in ("ResNet-50", "MNIST CNN") for level in (2, 10)]
    rows = [level_row(*case, args.seeds, args.steps) for case in cases]
    save(rows, "levels", "Gain over equal batches on three servers with 39 cores in all, simulated")


AS_PRINTED: tuple[tuple[str, dict[str, bool]], ...] = (
    ("as printed", {}),
    ("as printed, total kept", {"keeps_total": True}),
    ("as printed, total kept, no bounds", {"keeps_total": True, "learns_bounds": False}),
)
CONTROL_STEPS = 900
AWAY = {300: 2.0, 600: 1.0}
"""Half of the largest server is taken away, and given back (steps)."""


def control_row(
    kind: str, planner: Planner, every: int | None, jitter: float, seeds: int, away: bool
) -> dict[str, Any]:
    """Changes, steps to balance and loss of a controller on the servers of Fig. 3."""
    devices = [server(count, "ResNet-50", SERIAL, jitter) for count in CORES]
    if away:
        devices[2] = replace(devices[2], slowdown=AWAY)
    total = 3 * WORKLOADS["ResNet-50"][1]
    runs = [simulate(devices, total, planner, steps=CONTROL_STEPS, seed=seed, every=every) for seed in range(seeds)]
    return {
        "kind": kind,
        "every": {None: "auto", NEVER: "never"}.get(every, every),
        "jitter_%": 100 * jitter,
        "away": away,
        "dead_band": getattr(planner, "dead_band", None),
        "decay": getattr(planner, "decay", None),
        "changes": medians(runs, "changes"),
        "steps_to_5%": medians(runs, "near"),
        "total": medians(runs, "total") / total,
        "us_per_sample": 1e6 * medians(runs, "seconds"),
        "late_us_per_sample": 1e6 * medians(runs, "steady"),
        "optimum_us_per_sample": 1e6 * best_seconds(devices, total, away) / total,
    }


def best_seconds(devices: list[DeviceProfile], total: int, away: bool) -> float:
    """Mean over the steps of the least seconds, by an oracle that knows all speeds."""
    usual = optimum(devices, total)
    if not away:
        return usual
    slower = replace(devices[2], q=2 * devices[2].q, s=2 * devices[2].s, k=2 * devices[2].k, m=2 * devices[2].m)
    return (2 * usual + optimum([*devices[:2], slower], total)) / 3


def control(args: argparse.Namespace) -> None:
    rows = []
    for jitter, away in ((0.0, False), (0.01, False), (0.03, False), (0.08, False), (0.03, True)):
        for band in (0.0, 0.05, 0.1):
            for every in (1, 16):
                for kind, extra in AS_PRINTED[: 3 if away else 2]:
                    planner = AsPrinted(dead_band=band, **extra)
                    rows.append(control_row(kind, planner, every, jitter, args.seeds, away))
            pid = ProportionalPlanner(start="equal", dead_band=band)
            rows.append(control_row("pid", pid, None, jitter, args.seeds, away))
        rows.append(control_row("perf_model", PerfModelPlanner(), None, jitter, args.seeds, away))
        rows.append(control_row("even", AsPrinted(dead_band=math.inf), NEVER, jitter, args.seeds, away))
        opened = AsPrinted(dead_band=math.inf, start=tuple(map(float, CORES)))
        rows.append(control_row("static", opened, NEVER, jitter, args.seeds, away))
    save(rows, "control", "Controllers on three servers of 3, 5 and 12 cores, from equal batches, simulated")


# what the splits of fast and slow devices gain


MIXED = {
    # name: devices, and in proportion to what the open loop splits
    "P100 + 48 cores": (("P100", "48 cores"), (0.813, 0.187)),
    "T4 + P4": (("T4", "T4", "P4", "P4"), (65.0, 65.0, 5.5, 5.5)),
}
"""Open loop by FLOP/s: the paper's 0.813 : 0.187; half precision by data sheet (of the P4, float32)."""
RATIOS = {"P100 + 48 cores": (2.0, 4.35, 7.0, 10.0), "T4 + P4": (1.47, 3.0, 8.0, 11.8)}


def mixed_row(cluster: str, ratio: float, model: str, rate: float, seeds: int, steps: int) -> dict[str, Any]:
    """Gains over equal batches where the fast device is truly faster by a ratio."""
    names, peaks = MIXED[cluster]
    workload, batch = WORKLOADS[model]
    total = batch * len(names)
    fast = device_profile(names[0], workload, JITTER)
    slow = replace(fast, q=ratio * fast.q, k=ratio * fast.k, name=names[-1])
    devices = [fast if name == names[0] else slow for name in names]
    link = link_of(model, rate)
    found = {
        name: [
            simulate(devices, total, planner, steps=steps, seed=seed, link=link, capacities=peaks, every=every)
            for seed in range(seeds)
        ]
        for name, (planner, every) in policies(peaks).items()
    }
    even = medians(found["even"], "seconds")
    row = {"cluster": cluster, "model": model, "ratio": ratio, "gbit": rate / 1e9, "even_ms": 1e3 * total * even}
    row["bound"] = (ratio + 1) / 2
    row |= {name: even / medians(rows, "seconds") for name, rows in found.items() if name != "even"}
    row |= {f"{name} late": medians(found["even"], "steady") / medians(found[name], "steady") for name in LEARNING}
    exact = ClusterSimulator([replace(one, jitter=0.0) for one in devices], total, link=link, policy=None)
    row["optimum"] = exact.run(1).seconds[0] / exact.optimum()[0]
    row["printed_total"] = medians(found["printed"], "total") / total
    return row


def mixed(args: argparse.Namespace) -> None:
    rows = [
        mixed_row(cluster, ratio, model, math.inf, args.seeds, args.steps)
        for cluster in MIXED
        for model in ("ResNet-50", "MNIST CNN")
        for ratio in RATIOS[cluster]
    ]
    save(rows, "mixed", "Gain over equal batches on mixed devices, simulated")


# throughput against batch size


KNEE, BENT = 90, 1.6
"""Size above which the largest server is slower, and its factor on the seconds per sample (as D Fig. 5)."""


def bent(device: DeviceProfile, size: int) -> float:
    """Factor on a step of a device that is slower per sample above a size, as where memory runs out.

    The factor is that of the whole step, whose fixed seconds stay; a timer sees them in each part of it.
    """
    samples, fixed = (device.q + device.k) * size, device.s + device.m
    return (BENT * samples + fixed) / (samples + fixed) if size > KNEE else 1.0


def bent_optimum(cluster: Cluster, total: int) -> float:
    """Least seconds of a step: try every size of worker 2 and balance the others."""
    rest, last = cluster.part([0, 1]), cluster.part([2])
    device = last.devices[0]
    return min(max(rest.optimum(total - size), last.time([size]) * bent(device, size)) for size in range(1, total - 1))


def knee_row(kind: str, planner: Planner | None, jitter: float, seeds: int) -> dict[str, Any]:
    """Loss of a controller where more samples lower a worker's throughput."""
    cluster = Cluster(tuple(server(count, "ResNet-50", SERIAL) for count in CORES), LinkProfile())
    total = 3 * WORKLOADS["ResNet-50"][1]
    least, late, changes, sizes = bent_optimum(cluster, total), [], [], []
    for seed in range(seeds):
        run, slower = simulator(planner, cluster, total, Noise(jitter, seed=seed), cost=2e-3), 1.0
        for _ in range(CONTROL_STEPS):
            before, slower = slower, bent(cluster.devices[2], run.plan.local_batch_sizes[2])
            if slower != before:
                run.slow_down([1.0, 1.0, slower])
            run.advance(1)
        result = run.result
        late.append(100 * least / np.mean(result.exact[-300:] * total / result.totals[-300:]))
        changes.append(len(result.plans) - 1)
        sizes.append(run.plan.local_batch_sizes)
    row = {"kind": kind, "jitter_%": 100 * jitter, "late_share_of_optimum_%": float(np.median(late))}
    return row | {"changes": float(np.median(changes)), "sizes": "/".join(map(str, sizes[0]))}


class MnistCnn(nn.Module):
    """Two convolutions and two linear layers, as the paper's network for MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(64 * 49, 1024), nn.ReLU(), nn.Linear(1024, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def throughput_rows(seconds: float) -> Rows:
    """Images per second of training on one core against the batch size.

    Processor time counts, and the fastest of several steps, so that what else runs on the machine does not.
    """
    torch.set_num_threads(1)
    model, rows = MnistCnn(), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        x, y, times = torch.randn(size, 1, 28, 28), torch.zeros(size, dtype=torch.long), []
        while sum(times) < seconds or len(times) < 4:
            begin = time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.process_time() - begin)
        least = min(times[1:])
        rows.append({"kind": "measured", "batch": size, "step_ms": 1e3 * least, "images_s": size / least})
    sizes, taken = [np.array([row[name] for row in rows]) for name in ("batch", "step_ms")]
    weights = 1 / taken
    slope, fixed = np.polyfit(sizes, taken, 1, w=weights)
    for row in rows:
        row["error_of_line_%"] = 100 * ((slope * row["batch"] + fixed) / row["step_ms"] - 1)
    return rows


def curve(args: argparse.Namespace) -> None:
    rows = throughput_rows(args.seconds)
    for jitter in (0.0, 0.03):
        for kind, planner in (
            ("even", None),
            ("as printed, total kept", AsPrinted(keeps_total=True)),
            ("as printed, total kept, no bound", AsPrinted(keeps_total=True, learns_bounds=False)),
            ("pid", ProportionalPlanner(start="equal")),
            ("perf_model", PerfModelPlanner()),
        ):
            rows.append(knee_row(kind, planner, jitter, args.seeds if jitter else 1))
    save(rows, "curve", "Throughput against batch size, measured; controllers where it falls, simulated")


# time to accuracy


SGD_RATES, ADAM_RATES = (0.05, 0.1, 0.2, 0.4), (3e-3, 1e-2, 2e-2)
TARGET, DIGITS_BATCH, MOST_STEPS = 0.97, 32, 500


def steps_to_target(totals: np.ndarray, optimizer: str, rate: float, seed: int) -> float:
    """Steps of training on the digits until the mean of three test accuracies is reached; infinite if it is not.

    The weighted mean of the workers' gradients is the gradient of the whole batch, however it is divided. So one
    process takes the same steps as all of them, at the totals that a run had.
    """
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16.0, y, test_size=357, random_state=seed, stratify=y)
    x, x_test, y, y_test = [
        torch.tensor(part, dtype=torch.float32 if i < 2 else torch.long) for i, part in enumerate(parts)
    ]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    kinds = {"adam": lambda p: torch.optim.Adam(p, rate), "sgd": lambda p: torch.optim.SGD(p, rate, momentum=0.9)}
    stepper, order = kinds[optimizer](model.parameters()), torch.randperm(len(x))
    seen = [0.0] * 3
    for step, total in enumerate(totals.tolist(), 1):
        while len(order) < total:
            order = torch.cat([order, torch.randperm(len(x))])
        batch, order = order[:total], order[total:]
        stepper.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        stepper.step()
        if step % 5 == 0:
            with torch.no_grad():
                seen = [*seen[1:], float((model(x_test).argmax(dim=1) == y_test).float().mean())]
            if np.mean(seen) >= TARGET:
                return step
    return math.inf


TUNED = ("even", "static", "printed", "printed open", "pid", "perf_model")
"""Policies that also begin with smaller totals."""


def time_to_target(
    runs: Sequence[tuple[np.ndarray, np.ndarray]], optimizer: str, rate: float, known: dict[Any, float]
) -> tuple[float, float]:
    """Medians over the seeds of the seconds and steps until the accuracy, of totals and ends of steps."""
    seconds, steps = [], []
    for seed, (totals, clock) in enumerate(runs):
        key = (totals.tobytes(), rate, seed)
        if key not in known:
            known[key] = steps_to_target(totals, optimizer, rate, seed)
        steps.append(known[key])
        seconds.append(clock[int(known[key]) - 1] if math.isfinite(known[key]) else math.inf)
    return float(np.median(seconds)), float(np.median(steps))


def accuracy_rows(level: int, optimizer: str, rates: Sequence[float], seeds: int, known: dict[Any, float]) -> Rows:
    """Seconds until the accuracy for every policy, each at the learning rate that is best for it.

    Args:
        level: H-level.
        optimizer: ``"adam"`` or ``"sgd"``.
        rates: learning rates to try.
        seeds: number of seeds.
        known: steps of trainings so far; policies that keep the total share theirs.
    """
    cores, total = LEVELS[level], 3 * DIGITS_BATCH
    devices = [server(count, "MNIST CNN", SERIAL, JITTER) for count in cores]
    rows = []
    for name, (planner, every) in policies(cores).items():
        options = {"steps": MOST_STEPS, "capacities": cores, "every": every}
        for begin in (total, 2 * total // 3, total // 2) if name in TUNED else (total,):
            runs = [trajectory(devices, begin, planner, seed=seed, **options) for seed in range(seeds)]
            found = {rate: time_to_target(runs, optimizer, rate, known) for rate in rates}
            best = min(found, key=lambda rate: found[rate])
            row = {"level": level, "policy": name, "begins_with": begin, "optimizer": optimizer, "rate": best}
            row |= {"seconds": found[best][0], "steps": found[best][1], "total": runs[-1][0][-1] / total}
            rows.append(row)
    for row in rows:
        row["gain"] = rows[0]["seconds"] / row["seconds"]
    return rows


def accuracy(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows, known = [], {}
    for level in (2, 6, 10):
        rows += accuracy_rows(level, "adam", ADAM_RATES, args.seeds, known)
    totals = np.full(MOST_STEPS, 3 * DIGITS_BATCH)
    for rate in SGD_RATES:
        whole, third = (
            float(np.median([steps_to_target(totals, "sgd", one, seed) for seed in range(args.seeds)]))
            for one in (rate, rate / 3)
        )
        rows.append({"policy": "eq. 3", "optimizer": "sgd", "rate": rate, "steps": whole, "steps_with_1/K": third})
    save(rows, "accuracy", "Time to 97 % on scikit-learn's digits, gradients computed, clock simulated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for run, seeds, steps in (
        (levels, 3, 500),
        (control, 3, 0),
        (mixed, 3, 500),
        (curve, 9, 0),
        (accuracy, 6, 0),
        (emulated, 3, 120),
    ):
        command = commands.add_parser(run.__name__)
        command.add_argument("--seeds", type=int, default=seeds)
        if steps:
            command.add_argument("--steps", type=int, default=steps)
        if run is emulated:
            command.add_argument("--kinds", default=",".join(KINDS))
        if run is curve:
            command.add_argument("--seconds", type=float, default=1.0, help="of each batch size")
        command.set_defaults(run=run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
