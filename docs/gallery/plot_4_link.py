"""
How fast must the network be?
=============================

Two machines train together over Ethernet. At which rate does the network stop to be the bottleneck?
"""

import matplotlib.pyplot as plt

from lightning_hetero.simulate import Given, plan_cluster, read_cluster

# %%
# ``plan_cluster`` computes the best split at each rate. The model is ResNet-50, whose gradients have 102 MB in float32.

rates = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9, "10 Gbit/s": 1e10, "25 Gbit/s": 2.5e10}
speeds = []
for name, bits in rates.items():
    given = Given(workload="resnet50-imagenet", rate=bits / 8)  # bytes per second
    answer = plan_cluster(read_cluster("RTX 4090,RTX 3090", given), 256)
    speeds.append(100 * answer.link.share)
    print(f"{name:>10}: {answer.samples_per_second:6.0f} samples/s, {speeds[-1]:3.0f} % of an unlimited link")

# %%
# Where the bar is short, :doc:`gradient compression </compression>` or a larger batch helps more than a faster GPU.

figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
axis.barh(list(rates), speeds, color="#0072B2")
axis.invert_yaxis()
axis.set_xlabel("% of the speed with an unlimited link")
