"""
Why equal batches waste time
============================

Three GPUs train together. The second has half the speed of the first, the third has 0.3 of it. What does one step look
like with equal batches, and what with uneven ones?
"""

import matplotlib.pyplot as plt

from lightning_hetero import ClusterTimeModel, NodeTimeModel, solve_optperf

# %%
# A worker takes ``q b + s`` seconds to load a batch of ``b`` samples, run the forward pass and update, and ``k b + m``
# seconds for the backward pass. The gradients are averaged at the same time, which takes ``t_o + t_u`` seconds.

speeds = (1.0, 0.5, 0.3)
workers = [NodeTimeModel(q=0.0005 / v, s=0.005, k=0.001 / v, m=0.003) for v in speeds]
cluster = ClusterTimeModel(tuple(workers), gamma=0.25, t_o=0.024, t_u=0.006)

# %%
# A total of 96 samples can be divided equally, or so that a step is as short as possible.

equal = (32, 32, 32)
best = solve_optperf(cluster, 96).local_batch_sizes
for sizes in (equal, best):
    print(f"{sizes}: {1000 * cluster.step_time(sizes):.0f} ms per step")

# %%
# With equal batches, the fast workers wait for the slowest one (grey). With the best split, all compute until the end.

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True, layout="constrained")
for axis, sizes in zip(axes, (equal, best), strict=True):
    step = cluster.step_time(sizes)
    for row, (worker, size) in enumerate(zip(workers, sizes, strict=True)):
        busy = worker.compute_time(size)
        axis.barh(row, 1000 * step, color="#dddddd")
        axis.barh(row, 1000 * busy, color="#0072B2")
        axis.text(4, row, f"{size} samples", va="center", color="white")
    axis.set_title(f"{1000 * step:.0f} ms per step")
    axis.set_xlabel("milliseconds")
    axis.set_xlim(0, 1000 * cluster.step_time(equal))
axes[0].set_yticks(range(3), [f"speed {v}" for v in speeds])
axes[0].invert_yaxis()
