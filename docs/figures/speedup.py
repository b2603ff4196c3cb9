"""Draw ``speedup.png`` from ``benchmarks/results/balance.json``: one step of 16 emulated GPUs under each policy."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NAMES = {
    "ddp": "ddp: equal batches",
    "static": "static, by peak FLOP/s",
    "lb_bsp": "LB-BSP after 100 steps",
    "pid": "hetero_ddp, policy pid",
    "perf_model": "hetero_ddp (default)",
    "fixed": "exact optimum",
}
COLORS = dict.fromkeys(NAMES, "#999999") | {"pid": "#56B4E9", "perf_model": "#0072B2", "fixed": "#E69F00"}


def main():
    """Read the results and draw."""
    data = json.loads((HERE.parents[1] / "benchmarks" / "results" / "balance.json").read_text())
    rows = {row["policy"]: row for row in data["rows"] if row["cluster"] == "B"}
    order = [name for name in NAMES if name in rows]
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for y, name in enumerate(reversed(order)):
        row = rows[name]
        axis.barh(y, row["measured_ms"], color=COLORS[name], height=0.62)
        gain = rows["ddp"]["measured_ms"] / row["measured_ms"]
        axis.text(row["measured_ms"] * 1.01, y, f"{gain:.2f}x", va="center", fontsize=9)
    axis.set_yticks(range(len(order)), [NAMES[name] for name in reversed(order)])
    axis.set_xlim(0, 1.15 * max(row["measured_ms"] for row in rows.values()))
    axis.set_xlabel("measured milliseconds per step of 512 samples (less is better)")
    axis.set_title("BERT on 4 A100, 4 V100 and 8 RTX 6000, emulated", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "speedup.png", dpi=150)


if __name__ == "__main__":
    main()
