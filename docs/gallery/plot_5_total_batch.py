"""
How large should the batch be?
==============================

A larger batch uses the hardware better, and each sample of it teaches less. The *goodput* weighs both: it is the
progress per second. The gradient noise scale, which ``GNSCallback`` measures, says how much a larger batch is worth.
"""

import matplotlib.pyplot as plt

from lightning_hetero import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core import candidate_totals, goodput_table

# %%
# Three unequal workers, and a first total of 24 samples.

workers = tuple(NodeTimeModel(q=0.0005 / v, s=0.005, k=0.001 / v, m=0.003) for v in (1.0, 0.5, 0.3))
cluster = ClusterTimeModel(workers, gamma=0.25, t_o=0.024, t_u=0.006)
totals = sorted({24, *candidate_totals(6, 1536, ratio=1.1)})

# %%
# Noisy gradients (a large noise scale) deserve large batches.

figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
for noise_scale in (30.0, 300.0, 3000.0):
    rows = goodput_table(cluster, totals, noise_scale=noise_scale, initial_total=24, min_local=(1, 1, 1))
    start = next(row.goodput for row in rows if row.total_batch_size == 24)
    best = max(rows, key=lambda row: row.goodput)
    gain = best.goodput / start
    print(f"noise scale {noise_scale:6g}: best total {best.total_batch_size}, {gain:.2f} times the progress per second")
    axis.plot(totals, [row.goodput / start for row in rows], label=f"noise scale {noise_scale:g}")
    axis.plot(best.total_batch_size, gain, "o", color=axis.lines[-1].get_color())
axis.set_xscale("log", base=2)
axis.set_xlabel("total batch, in samples")
axis.set_ylabel("goodput over that of 24")
axis.legend(frameon=False)
