"""Draw one run of the time model: step times, the exact optimum, and the samples of each worker.

    python docs/figures/learning.py

Three simulated workers of speeds 4, 2 and 1, with 4 % noise. The fastest shares its device from step 100 to 180.
Prints the changes, and writes ``learning.svg`` and ``learning.png`` next to this file.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile

HERE = Path(__file__).parent
STEPS, SHARED = 240, (100, 180)
DEVICES = [DeviceProfile(q=0.002 / v, s=0.01, k=0.004 / v, m=0.02, jitter=0.04, name=f"speed {v}") for v in (4, 2, 1)]
# The palette of Okabe and Ito, which the colour-blind can tell apart; the lines differ besides.
STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", ":"))


def main() -> None:
    """Run it, draw and write."""
    slower = lambda step: np.where([SHARED[0] <= step < SHARED[1], False, False], 2.0, 1.0)  # noqa: E731
    simulator = ClusterSimulator(DEVICES, 96, link=LinkProfile(20e6, rate=1e9), seed=3, slowdown=slower)
    result = simulator.run(STEPS)
    plt.rcParams.update({"svg.hashsalt": "learning", "font.family": "DejaVu Sans"})
    figure, (above, below) = plt.subplots(2, figsize=(8.2, 5.2), sharex=True, layout="constrained")
    above.plot(1e3 * result.seconds, ".", color="#999999", ms=4, label="step")
    above.plot(1e3 * result.optimum, color="black", lw=1.2, label="exact optimum")
    above.set_ylabel("milliseconds")
    for rank, (color, line) in enumerate(STYLES):
        below.step(range(STEPS), result.sizes[:, rank], line, color=color, where="post", label=DEVICES[rank].name)
    below.set_ylabel("samples")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.axvspan(*SHARED, color="#EEEEEE", zorder=0)
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper right")
    above.text(sum(SHARED) / 2, 20, "the fastest shares its device", ha="center", fontsize=9, color="#555555")
    for entry in result.plans:
        print(entry.step, entry.plan.local_batch_sizes, entry.reason)
    figure.savefig(HERE / "learning.svg", metadata={"Date": None})
    figure.savefig(HERE / "learning.png", dpi=150)


if __name__ == "__main__":
    main()
