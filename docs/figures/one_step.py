"""Draw one training step of three unequal workers, with equal sizes and with the optimal split.

    python docs/figures/one_step.py

All lengths are the time model's (Cannikin, eq. 3-7): sizes by ``solve_optperf``, and an end of the step that has to be
``ClusterTimeModel.step_time``. Writes ``one_step.svg`` and ``one_step.png`` next to this file.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lightning_hetero import ClusterTimeModel, NodeTimeModel, solve_optperf
from lightning_hetero.core.batching.integer_split import even_sizes

HERE = Path(__file__).parent
SPEEDS = (1.0, 0.5, 0.3)
TOTAL = 96
BUCKETS = 5
NODES = tuple(NodeTimeModel(q=0.0005 / v, s=0.005, k=0.001 / v, m=0.003) for v in SPEEDS)
CLUSTER = ClusterTimeModel(NODES, gamma=0.25, t_o=0.024, t_u=0.006)

# The palette of Okabe and Ito, which the colour-blind can tell apart; waiting is hatched besides.
FORWARD, BACKWARD, SYNC, WAITING = "#0072B2", "#56B4E9", "#E69F00", "#F2F2F2"
HATCH = "////"


@dataclass(frozen=True)
class Step:
    """Moments of one step in seconds.

    Args:
        sizes: samples of each worker.
        forward: end of load, forward and update of each worker.
        backward: end of the backward pass of each worker.
        sync: start and end of the all-reduce of each bucket.
    """

    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sync: tuple[tuple[float, float], ...]


def walk(cluster: ClusterTimeModel, sizes: tuple[int, ...]) -> Step:
    """Let the step happen: a bucket is averaged once all workers have it and the one before it is done."""
    pairs = list(zip(cluster.nodes, sizes, strict=True))
    forward = [node.forward_time(b) for node, b in pairs]
    passes = [node.backward_time(b) for node, b in pairs]
    sync: list[tuple[float, float]] = []
    for j in range(BUCKETS):
        done = cluster.gamma + (1 - cluster.gamma) * j / (BUCKETS - 1)  # share of the backward pass behind bucket j
        ready = max(a + done * p for a, p in zip(forward, passes, strict=True))
        start = max(ready, sync[-1][1] if sync else 0.0)
        length = cluster.t_u if j == BUCKETS - 1 else cluster.t_o / (BUCKETS - 1)
        sync.append((start, start + length))
    step = Step(sizes, tuple(forward), tuple(a + p for a, p in zip(forward, passes, strict=True)), tuple(sync))
    if abs(sync[-1][1] - cluster.step_time(sizes)) > 1e-9:
        raise RuntimeError(f"the step drawn ends at {sync[-1][1]}, the model's at {cluster.step_time(sizes)}")
    return step


def draw(axes: Axes, step: Step, title: str) -> None:
    """One panel: a row for each worker, and one for the network."""
    ms = 1e3
    last_start, end = step.sync[-1]
    for row, (size, a, p) in enumerate(zip(step.sizes, step.forward, step.backward, strict=True)):
        axes.barh(row, a * ms, left=0, color=FORWARD, height=0.62)
        axes.barh(row, (p - a) * ms, left=a * ms, color=BACKWARD, height=0.62)
        axes.barh(
            row, (last_start - p) * ms, left=p * ms, color=WAITING, height=0.62, hatch=HATCH, edgecolor="#999999", lw=0
        )
        axes.barh(row, (end - last_start) * ms, left=last_start * ms, color=SYNC, height=0.62)
        axes.text(a / 2 * ms, row, str(size), color="white", ha="center", va="center", fontsize=9, fontweight="bold")
    for start, stop in step.sync:
        axes.barh(len(NODES), (stop - start) * ms, left=start * ms, color=SYNC, height=0.42, edgecolor="white", lw=0.8)
    axes.axvline(end * ms, color="black", lw=1.2)
    axes.text((end + 0.002) * ms, 1.0, f"step ends\n{end * ms:.0f} ms", ha="left", va="center", fontsize=9)
    axes.set_yticks(range(len(NODES) + 1), [*(f"worker {i}, speed {v}" for i, v in enumerate(SPEEDS)), "network"])
    axes.set_ylim(len(NODES) + 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draw both panels and write them."""
    plan = solve_optperf(CLUSTER, TOTAL)
    panels = (
        (walk(CLUSTER, even_sizes(TOTAL, len(NODES))), "Equal sizes (plain DDP): the fast workers wait"),
        (
            walk(CLUSTER, plan.local_batch_sizes),
            "Optimal split of the same total batch: all are ready together, to one sample",
        ),
    )
    plt.rcParams.update({"svg.hashsalt": "one_step", "hatch.linewidth": 0.6, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 1, figsize=(8.6, 4.9), sharex=True, constrained_layout=True)
    for panel, (step, title) in zip(axes, panels, strict=True):
        draw(panel, step, title)
    axes[0].set_xlim(0, panels[0][0].sync[-1][1] * 1e3 * 1.14)
    axes[1].set_xlabel(f"milliseconds by the time model; numbers are samples of {TOTAL}")
    legend = [
        Patch(color=FORWARD, label="load, forward, update"),
        Patch(color=BACKWARD, label="backward"),
        Patch(facecolor=WAITING, edgecolor="#999999", hatch=HATCH, lw=0, label="waiting for others"),
        Patch(color=SYNC, label="all-reduce of the buckets"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(HERE / "one_step.svg", metadata={"Date": None})
    figure.savefig(HERE / "one_step.png", dpi=150)


if __name__ == "__main__":
    main()
