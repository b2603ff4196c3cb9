"""Splits that a run finds on devices of exactly known speed, through Lightning and gloo, against the exact optimum.

Each worker is a process that waits exactly as long as its device would compute (``lightning_hetero.simulate``). So the
optimum is known without a measurement, and workers do not fight for the cores of this machine. What a split is worth is
its true step time; what the host adds to it is measured and stands beside it.

    python benchmarks/balance.py [--only CLUSTER ...] [--seeds 5] [--part balance|prediction]

writes ``results/balance.json`` (``balance_runs.json`` has every run) and ``results/prediction.json``. It needs no root.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _emulated import Job, context_of, expected_time, first_within, learned, optimum, run, slowest, true_time
from hardware import write_record, write_table

from lightning_hetero import BatchPlan
from lightning_hetero.core.batching.integer_split import even_sizes, proportional_sizes
from lightning_hetero.simulate import DeviceProfile
from lightning_hetero.simulate.devices.catalog import cluster_profiles

RESULTS = Path(__file__).parent / "results"
JITTER = 0.03
STEPS = {"ddp": 40, "fixed": 40, "static": 40, "perf_model": 150, "pid": 150, "lb_bsp": 200}
STEPS_16 = {"ddp": 20, "fixed": 20, "static": 20, "perf_model": 100, "pid": 100, "lb_bsp": 100}
"""Steps of each training, and those of 16 workers, whose steps have to be long against what 16 processes need."""


def device(rate: float, outside: float = 4.0, inside: float = 6.0, backward: float = 0.62) -> DeviceProfile:
    """A device of some samples per second, with fixed milliseconds outside of and in the backward pass."""
    each = 1.0 / rate
    return DeviceProfile(
        (1 - backward) * each, outside / 1e3, backward * each, inside / 1e3, jitter=JITTER, name=f"{rate:g}/s"
    )


def cluster(name: str, workload: str = "resnet50-imagenet") -> tuple[DeviceProfile, ...]:
    """A cluster of Cannikin with one of its workloads."""
    return tuple(replace(p, jitter=JITTER, memory=None) for p in cluster_profiles(name, workload))


CLUSTERS: dict[str, tuple[tuple[DeviceProfile, ...], int, tuple[float, ...]]] = {
    "A": (cluster("A"), 96, (27.8, 19.2, 5.3)),
    "B": (cluster("B", "bert-squad"), 16 * 32, (19.5,) * 4 + (15.7,) * 4 + (16.3,) * 8),
    "C": (cluster("C"), 16 * 72, (16.3,) * 16),
    "fixed costs": (
        (device(500), device(350, outside=20.0), device(330, inside=25.0), device(60)),
        128,
        (4.0, 3.0, 3.0, 1.0),
    ),
    "25:1": ((device(1000), device(40)), 64, (4.0, 1.0)),
    "equal": ((device(300),) * 4, 128, (1.0,) * 4),
}
"""Profiles, total batch size, and rated speed of each device (peak TFLOP/s of float32) for the static split."""


def sizes_of(policy: str, name: str) -> tuple[int, ...] | None:
    """The split of policies that never change it."""
    profiles, total, rated = CLUSTERS[name]
    if policy == "static":
        return tuple(proportional_sizes(total, rated))
    return optimum(profiles, total)[1] if policy == "fixed" else None


def steps_on(name: str) -> dict[str, int]:
    """Steps of each policy's training on a cluster."""
    return STEPS_16 if len(CLUSTERS[name][0]) == 16 else STEPS


def jobs_of(name: str, seeds: int) -> list[Job]:
    """Trainings on a cluster: policies that learn with several seeds, splits that are given once."""
    profiles, total, _ = CLUSTERS[name]
    jobs = []
    for policy, steps in steps_on(name).items():
        given = sizes_of(policy, name)
        kind = "fixed" if given else policy
        for seed in range(seeds if policy in ("perf_model", "pid") else 1):
            jobs.append((policy, Job(kind, profiles, total, steps, seed, given)))
    return jobs


def row_of(name: str, policy: str, job: Job, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What one training found."""
    profiles, total, _ = CLUSTERS[name]
    first = results[0]
    plans = first["plans"] or [(0, even_sizes(total, len(profiles)), None, "ddp")]
    _, sizes, predicted, _ = plans[-1]
    late = slice(min(max(job.steps // 2, plans[-1][0] + 2), job.steps - 10), None)
    device, measured = float(np.mean(slowest(results)[late])), float(np.mean(first["seconds"][late]))
    expected, even = expected_time(profiles, sizes), expected_time(profiles, even_sizes(total, len(profiles)))
    return {
        "cluster": name,
        "policy": policy,
        "seed": job.seed,
        "split": "/".join(map(str, sizes)),
        "share_of_optimum_%": 100 * optimum(profiles, total)[0] / true_time(profiles, sizes),
        "steps_to_5%": first_within(plans, profiles, total, 0.05),
        "steps_to_1%": first_within(plans, profiles, total, 0.01),
        "changes": len(plans) - 1,
        "device_ms": 1e3 * device,
        "measured_ms": 1e3 * measured,
        "host_ms": 1e3 * (measured - device),
        "over_even": even / expected,
        "prediction_error_%": None if predicted is None else 100 * abs(predicted / (measured - device + expected) - 1),
        "plans": [[step, list(sizes)] for step, sizes, *_ in plans],
    }


def balance(name: str, seeds: int) -> list[dict[str, Any]]:
    """All trainings on one cluster."""
    rows: list[dict[str, Any]] = []
    jobs = jobs_of(name, seeds)

    def report(job: Job, results: list[dict[str, Any]]) -> None:
        rows.append(row_of(name, jobs[len(rows)][0], job, results))
        print(json.dumps(rows[-1]), flush=True)

    run([job for _, job in jobs], report)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cluster and policy: medians over seeds, and the worst of them."""
    out = []
    for cluster, policy in dict.fromkeys((row["cluster"], row["policy"]) for row in rows):
        of = [row for row in rows if (row["cluster"], row["policy"]) == (cluster, policy)]
        numbers = [key for key in of[0] if any(isinstance(row[key], int | float) for row in of)]
        middle = {key: _median([row[key] for row in of]) for key in numbers}
        out.append(
            {
                **{key: value for key, value in of[0].items() if key != "plans"},
                **middle,
                "seed": len(of),
                "least_share_%": min(row["share_of_optimum_%"] for row in of),
                "most_steps_to_5%": _most([row["steps_to_5%"] for row in of]),
                "most_steps_to_1%": _most([row["steps_to_1%"] for row in of]),
                "most_changes": max(row["changes"] for row in of),
            }
        )
    return out


def _median(values: list[Any]) -> float | None:
    """Median, where ``None`` is never."""
    middle = float(np.median([np.inf if value is None else value for value in values]))
    return middle if np.isfinite(middle) else None


def _most(values: list[Any]) -> Any:
    return None if None in values else max(values)


def prediction(name: str, seed: int, *, stretch: int = 24, cycles: int = 1) -> list[dict[str, Any]]:
    """Predicted against true step times over a 10x range of totals; every other total is learned from.

    A measured time is what the devices take on average, with what the host added in the run: the comparison does not
    depend on the luck of a few steps.
    """
    profiles, _, _ = CLUSTERS[name]
    n = len(profiles)
    speeds = [1 / (p.q + p.k) for p in profiles]
    totals = [int(n * t) for t in np.geomspace(24, 240, 7)]
    splits = {total: tuple(proportional_sizes(total, speeds)) for total in totals}
    order = totals * cycles
    script = {i * stretch: splits[total] for i, total in enumerate(order)}
    rows: list[dict[str, Any]] = []

    def report(job: Job, results: list[dict[str, Any]]) -> None:
        first = results[0]
        planner = learned(first["rows"], totals[::2], n)
        for total in totals:
            starts = [i * stretch for i, t in enumerate(order) if t == total]
            chosen = [step for at in starts for step in range(at + 3, at + stretch)]
            true = expected_time(profiles, splits[total])
            measured = true + float(np.mean(np.array(first["seconds"])[chosen] - slowest(results)[chosen]))
            predicted = planner.predict(BatchPlan(total, splits[total]), context_of(total, n))
            rows.append(
                {
                    "cluster": name,
                    "seed": seed,
                    "total": total,
                    "used": "learned from" if total in totals[::2] else "predicted",
                    "device_ms": 1e3 * true,
                    "measured_ms": 1e3 * measured,
                    "predicted_ms": 1e3 * predicted,
                    "error_%": 100 * abs(predicted / measured - 1),
                    "error_of_device_%": 100 * abs(predicted / true - 1),
                }
            )

    run([Job("script", profiles, max(totals), stretch * len(order), seed, script=script)], report)
    return rows


def write(rows: list[dict[str, Any]], path: Path, title: str, *, show: bool = True) -> None:
    """Write rows in place of those of the same clusters, and keep the others."""
    new = {row["cluster"] for row in rows}
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    every = [row for row in kept if row["cluster"] not in new] + rows
    every = sorted(every, key=lambda row: list(CLUSTERS).index(row["cluster"]))
    (write_table if show else write_record)(every, path, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--part", choices=("balance", "prediction"))
    args = parser.parse_args()
    if args.part != "prediction":
        rows = [row for name in args.only for row in balance(name, args.seeds)]
        write(rows, RESULTS / "balance_runs.json", f"emulated devices, {JITTER:.0%} jitter, every run", show=False)
        write(summary(rows), RESULTS / "balance.json", f"emulated devices, {JITTER:.0%} jitter, medians of seeds")
    if args.part != "balance":
        rows = [row for name in args.only for seed in range(2) for row in prediction(name, seed)]
        write(rows, RESULTS / "prediction.json", f"prediction over 10x, emulated devices, {JITTER:.0%} jitter")


if __name__ == "__main__":
    main()
