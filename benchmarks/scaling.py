"""Cost of sync rounds and of the solver for 10 to 10,000 workers, over the time of a step and of training.

A round's parts are measured one by one in this process, with the package's own code on the numbers of that many
workers: each rank packs its table, all tables are gathered (their bytes; the seconds are those of a link of 10 Gbit/s
that takes in the tables of all other ranks), rank 0 matches them, decides, and the plan is pickled and broadcast. A
simulation of the same workers says how often rounds come. Processor time; medians.

    python benchmarks/scaling.py             # a minute or two
    python benchmarks/scaling.py --quick     # up to 1,000 workers
"""

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hardware import write_table

from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_rows import FIELDS, match_rows
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner

HERE = Path(__file__).parent
WORKERS, SAMPLES_PER_WORKER, STEPS = (10, 100, 1_000, 10_000), 64, 100
RATE, LATENCY = 1.25e9, 1e-3
"""Bytes per second that rank 0 takes in, and seconds of the collective calls of a round beside their bytes."""


def taken(call: Callable[[], Any], times: int = 3) -> float:
    """Median of the processor time of a call."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return statistics.median(found)


def devices_of(workers: int) -> list[DeviceProfile]:
    """Three generations of devices, each within 7 % of its kind; ResNet-50 takes 2.5 ms a sample on the newest."""
    rng, kinds = np.random.default_rng(1), np.resize([1.0, 0.5, 1 / 3.42, 1 / 3.42], workers)
    speeds = np.sort(kinds)[::-1] * rng.uniform(0.93, 1.07, workers)
    return [DeviceProfile(0.9e-3 / v, 0.01, 1.6e-3 / v, 0.008, jitter=0.02) for v in speeds]


def row_of(workers: int) -> dict[str, Any]:
    """Figures of so many workers."""
    planner, link = RecordingPlanner(PerfModelPlanner()), LinkProfile(gradient_bytes=102e6, rate=RATE)
    devices, total = devices_of(workers), SAMPLES_PER_WORKER * workers
    begin = time.process_time()
    simulator = ClusterSimulator(devices, total, link=link, policy=planner, seed=1)
    simulator.advance(STEPS)
    simulated = time.process_time() - begin
    kept = SETTINGS.of(workers).max_steps
    while workers > 100 and planner.log[-1].observations.num_steps < kept and simulator.step < 2000:
        simulator.advance(STEPS)  # until a round has full tables, as all have whose interval is as long
    result = simulator.result
    last = planner.log[-1]
    table = np.full((kept, 1 + FIELDS + link.buckets), np.nan)
    seen = last.observations
    rows = min(seen.num_steps, kept)
    tables = np.tile(table, (workers, 1, 1))
    tables[:, -rows:, 0] = np.arange(rows)
    for i, name in enumerate(seen.FIELDS):
        tables[:, -rows:, 1 + i] = getattr(seen, name)[-rows:].T
    tables[:, -rows:, 1 + FIELDS :] = seen.bucket_ends[-rows:].transpose(1, 0, 2)
    before = planner.log[-2].decision.planner if len(planner.log) > 1 else PerfModelPlanner()
    decide = taken(lambda: before.decide(seen, last.current, last.context), 3 if workers < 10_000 else 1)
    match = taken(lambda: match_rows(tables))
    entry = PlanEntry(0, STEPS, result.plans[-1].plan, result.plans[-1].reason)
    message = pickle.dumps(entry)
    send = taken(lambda: pickle.loads(pickle.dumps(entry)))
    nodes = tuple(NodeTimeModel(d.q, d.s, d.k, d.m) for d in devices)
    cluster = ClusterTimeModel(nodes, gamma=link.gamma, t_o=0.1, t_u=0.02)
    solve = taken(lambda: solve_optperf(cluster, total, min_local=(1,) * workers))
    gathered = tables.nbytes
    transfer = gathered / RATE + len(message) * np.ceil(np.log2(workers)) / RATE + LATENCY
    round_seconds = transfer + match + decide + send
    step = float(np.median(result.seconds[-20:]))
    interval = result.rounds[-1].following - result.rounds[-1].step
    settled = min(max(np.ceil(round_seconds / 0.005 / step), 8), 1000)  # as the schedule counts
    return {
        "workers": workers,
        "step_ms": 1e3 * step,
        "rows": kept,
        "gathered_mb": gathered / 1e6,
        "gather_ms": 1e3 * transfer,
        "match_ms": 1e3 * match,
        "decide_ms": 1e3 * decide,
        "solver_ms": 1e3 * solve,
        "send_plan_ms": 1e3 * send,
        "round_ms": 1e3 * round_seconds,
        "round_over_step_%": 100 * round_seconds / step,
        "solver_over_step_%": 100 * solve / step,
        "interval_steps": int(settled),
        "share_of_time_%": 100 * round_seconds / (settled * step),
        "share_at_1000_steps_%": 100 * round_seconds / (1000 * step),
        "simulated_interval": interval,
        "simulation_s": simulated,
        "share_of_optimum": result.share_since(STEPS // 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 workers, to see that it works")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "scaling.json", help="where the results go")
    args = parser.parse_args()
    rows = [row_of(workers) for workers in WORKERS if workers <= (1_000 if args.quick else 10_000)]
    write_table(rows, args.json, f"cost of a sync round and of the solver, {SAMPLES_PER_WORKER} samples per worker")


if __name__ == "__main__":
    main()
