"""Draw goodput over the total batch for three noise scales, and the totals at which it is highest.

    python docs/figures/goodput.py

All values are the model's: step times of the three workers of ``one_step.py`` at the optimal split of each total, and
``goodput_table`` on them. Prints the best totals, and writes ``goodput.svg`` and ``goodput.png`` next to this file.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter, NullLocator

from lightning_hetero import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.batching.goodput import Candidate, candidate_totals, goodput_table

HERE = Path(__file__).parent
SPEEDS = (1.0, 0.5, 0.3)
NODES = tuple(NodeTimeModel(q=0.0005 / v, s=0.005, k=0.001 / v, m=0.003) for v in SPEEDS)
CLUSTER = ClusterTimeModel(NODES, gamma=0.25, t_o=0.024, t_u=0.006)
INITIAL = 24
TOTALS = candidate_totals(6, 1536, ratio=1.02)

# The palette of Okabe and Ito, which the colour-blind can tell apart; the lines differ besides.
STYLES = {30.0: ("#D55E00", ":", 8), 300.0: ("#0072B2", "-", -18), 3000.0: ("#009E73", "--", -18)}


def table(noise_scale: float) -> tuple[Candidate, ...]:
    """All totals at one noise scale."""
    totals = sorted({*TOTALS, INITIAL})
    return goodput_table(CLUSTER, totals, noise_scale=noise_scale, initial_total=INITIAL, min_local=(1, 1, 1))


def main() -> None:
    """Draw the curves and write them."""
    plt.rcParams.update({"svg.hashsalt": "goodput", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(8.2, 4.4), layout="constrained")
    for noise_scale, (color, line, shift) in [*STYLES.items(), (float("inf"), ("black", "-", 0))]:
        rows = table(noise_scale)
        start = next(row.goodput for row in rows if row.total_batch_size == INITIAL)
        totals = np.array([row.total_batch_size for row in rows])
        gains = np.array([row.goodput for row in rows]) / start
        if np.isinf(noise_scale):
            axes.plot(totals, gains, line, color=color, lw=1.0, label="noise alone: throughput")
            continue
        best = int(gains.argmax())
        axes.plot(totals, gains, line, color=color, lw=2.0, label=f"noise scale {noise_scale:g}")
        axes.plot(totals[best], gains[best], "o", color=color, ms=8)
        axes.annotate(
            f"{totals[best]}: {gains[best]:.2f}x",
            (totals[best], gains[best]),
            (0, shift),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=color,
        )
        print(f"noise scale {noise_scale:>5g}: best total {totals[best]:>4}, {gains[best]:.3f} times the goodput")
    axes.axvline(INITIAL, color="#999999", lw=0.8, zorder=0)
    axes.text(INITIAL * 0.96, 0.06, f"initial total {INITIAL}", rotation=90, ha="right", fontsize=9, color="#666666")
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [6, 12, 24, 48, 96, 192, 384, 768, 1536], ["6", "12", "24", "48", "96", "192", "384", "768", "1536"]
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 2.4)
    axes.set_xlabel("total batch, in samples")
    axes.set_ylabel(f"goodput / goodput at {INITIAL}")
    axes.grid(color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(HERE / "goodput.svg", metadata={"Date": None})
    figure.savefig(HERE / "goodput.png", dpi=150)


if __name__ == "__main__":
    main()
