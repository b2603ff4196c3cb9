"""Time of the exact split of a batch, next to a linear programme of the same problem in the same run.

    python benchmarks/solver.py

Goals: a split of 1000 workers into whole samples in 1 ms, the step times of 100 candidate totals in 1 ms. A choice
of the total solves either all of them, or the four on which it rests if the others are kept. Results go to
``benchmarks/results/solver.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hardware import write_table
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

RESULTS = Path(__file__).parent / "results" / "solver.json"
WORKERS = (3, 16, 1000, 100_000)
LARGEST_PROGRAMME = 1000
SAMPLES_PER_WORKER = 64
CANDIDATES = 100


def cluster_of(workers: int, seed: int = 0) -> ClusterTimeModel:
    """Random workers: speeds that scatter by a factor of two, fixed times of milliseconds, some communication."""
    rng = np.random.default_rng(seed)
    sample = 1e-3 * np.exp(0.7 * rng.standard_normal(workers))
    fixed = rng.uniform(0.002, 0.03, workers)
    nodes = zip((0.4 * sample).tolist(), fixed.tolist(), (0.6 * sample).tolist(), (0.5 * fixed).tolist(), strict=True)
    return ClusterTimeModel(tuple(NodeTimeModel(*node) for node in nodes), gamma=0.3, t_o=0.03, t_u=0.004)


def by_linprog(cluster: ClusterTimeModel, total: int) -> float:
    """The least step time in real numbers by HiGHS: minimise ``T`` over shares of the batch."""
    n = len(cluster.nodes)
    alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
    rows = np.arange(2 * n)
    lines = coo_matrix(
        (
            np.concatenate([alpha_1 * total, alpha_2 * total, -np.ones(2 * n)]),
            (np.concatenate([rows, rows]), np.concatenate([np.tile(np.arange(n), 2), np.full(2 * n, n)])),
        )
    ).tocsr()
    result = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=lines,
        b_ub=-np.concatenate([beta_1, beta_2]),
        A_eq=np.append(np.ones(n), 0.0)[None],
        b_eq=[1.0],
        bounds=[(1 / total, 1.0)] * n + [(0.0, None)],
    )
    return float(result.fun)


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median time of one call, after a first one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def row(workers: int, repeats: int) -> dict[str, Any]:
    """All timings of one number of workers; few repetitions of what is slow."""
    cluster, total = cluster_of(workers), SAMPLES_PER_WORKER * workers
    repeats = max(3, repeats * 1000 // max(workers, 1000))
    candidates = np.geomspace(total / 16, total * 16, CANDIDATES).astype(int)
    result: dict[str, Any] = {
        "workers": workers,
        "optperf_ms": milliseconds(lambda: solve_optperf(cluster, total), repeats),
        "optperf_bounds_ms": milliseconds(
            lambda: solve_optperf(cluster, total, min_local=[1] * workers, max_local=[4 * total // workers] * workers),
            repeats,
        ),
        "100_candidates_ms": milliseconds(lambda: solve_step_times(cluster, candidates), repeats),
        "linprog_ms": None,
        "linprog_difference": None,
    }
    if workers <= LARGEST_PROGRAMME:
        real = float(solve_step_times(cluster, [total])[0])
        result["linprog_ms"] = milliseconds(lambda: by_linprog(cluster, total), max(3, repeats // 20))
        result["linprog_difference"] = abs(by_linprog(cluster, total) / real - 1.0)
    return result


def main() -> None:
    """Time every size and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200, help="timed calls of each solver (fewer for many workers)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    args = parser.parse_args()
    write_table([row(n, args.repeats) for n in WORKERS], args.json, "OptPerf: integer split, and 100 step times")


if __name__ == "__main__":
    main()
