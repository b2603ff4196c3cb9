"""Draw ``speedup.png`` from ``benchmarks/results/balance.json``: one step with equal batches, policies, the optimum."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NAMES = {
    "ddp": "ddp: equal batches",
    "pid": "hetero_ddp, policy pid",
    "perf_model": "hetero_ddp (default)",
    "exact optimum": "exact optimum (search)",
}
COLORS = {"ddp": "#999999", "pid": "#56B4E9", "perf_model": "#0072B2", "exact optimum": "#E69F00"}


def main():
    """Read the results and draw."""
    data = json.loads((HERE.parents[1] / "benchmarks" / "results" / "balance.json").read_text())
    rows = {row["strategy"]: row for row in data["rows"]}
    order = [name for name in NAMES if name in rows]
    figure, axis = plt.subplots(figsize=(8, 2.9), layout="constrained")
    for y, name in enumerate(reversed(order)):
        row = rows[name]
        axis.barh(y, row["step_ms"], color=COLORS[name], height=0.62)
        axis.text(row["step_ms"] * 1.01, y, f"{row['over_even']:.2f}x   split {row['split']}", va="center", fontsize=9)
    axis.set_yticks(range(len(order)), [NAMES[name] for name in reversed(order)])
    axis.set_xlim(0, 1.3 * max(row["step_ms"] for row in rows.values()))
    axis.set_xlabel("milliseconds per step of 192 samples (less is better)")
    axis.set_title("One training step on workers with 1.0, 0.5 and 0.3 of a core", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "speedup.png", dpi=150)


if __name__ == "__main__":
    main()
