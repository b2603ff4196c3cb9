"""The simulator against runs on emulated devices: same profiles, same seeds, the same steps and splits.

    python benchmarks/balance.py && python benchmarks/validation.py

reads ``results/balance_runs.json`` and writes ``results/validation.json``. A simulated device and an emulated one draw
the same jitter, so that what differs is what the emulation adds: the host's own time, and what measuring it does to
decisions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from balance import CLUSTERS, steps_on
from hardware import write_table

from lightning_hetero.simulate import ClusterSimulator

RESULTS = Path(__file__).parent / "results"


def compared(run: dict[str, Any]) -> dict[str, Any]:
    """One run on emulated devices beside the simulation of the same devices."""
    profiles, total, _ = CLUSTERS[run["cluster"]]
    simulator = ClusterSimulator(profiles, total, policy=run["policy"], seed=100 * run["seed"])
    steps = steps_on(run["cluster"])[run["policy"]]
    result = simulator.run(steps)
    sizes, simulated = np.array(run["plans"][-1][1]), np.array(result.plans[-1].plan.local_batch_sizes)
    late = slice(steps // 2, None)
    seconds = 1e3 * float(np.mean(result.seconds[late]))
    return {
        "cluster": run["cluster"],
        "policy": run["policy"],
        "seed": run["seed"],
        "emulated_split": "/".join(map(str, sizes)),
        "simulated_split": "/".join(map(str, simulated)),
        "samples_apart": int(np.abs(sizes - simulated).max()),
        **{f"emulated_to_{share}%": run[f"steps_to_{share}%"] for share in (5, 1)},
        **{f"simulated_to_{share}%": _finite(result.first_within(share / 100, for_good=True)) for share in (5, 1)},
        "emulated_ms": run["device_ms"],
        "simulated_ms": seconds,
        "apart_%": 100 * abs(seconds / run["device_ms"] - 1),
        "measured_ms": run["measured_ms"],
        "apart_of_measured_%": 100 * abs(seconds / run["measured_ms"] - 1),
    }


def _finite(steps: float) -> int | None:
    return None if np.isinf(steps) else int(steps)


def main() -> None:
    runs = json.loads((RESULTS / "balance_runs.json").read_text())["rows"]
    rows = [compared(run) for run in runs if run["policy"] in ("perf_model", "pid")]
    times, splits = [row["apart_%"] for row in rows], [row["samples_apart"] for row in rows]
    title = (
        f"simulator and emulated devices: step times {np.median(times):.2f} % apart (most {max(times):.2f} %), splits "
        f"{np.median(splits):.0f} samples (most {max(splits)})"
    )
    write_table(rows, RESULTS / "validation.json", title)


if __name__ == "__main__":
    main()
