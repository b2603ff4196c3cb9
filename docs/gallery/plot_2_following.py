"""
A split that follows the workers
================================

Somebody starts a second job on one of your GPUs, and ends it later. The simulator runs the package's own planner on a
virtual clock, so that 300 steps take a second.
"""

import matplotlib.pyplot as plt

from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile


# %%
# Worker 0 is slowed down by a factor of two in step 100 and gets its speed back in step 200. All times vary by 3 % from
# step to step.
def device(speed, **more):
    return DeviceProfile(q=0.001 / speed, s=0.01, k=0.002 / speed, m=0.01, jitter=0.03, **more)


devices = [device(1.0, slowdown={100: 2.0, 200: 1.0}), device(0.6), device(0.25)]
link = LinkProfile(gradient_bytes=100e6, rate=1.25e9)
result = ClusterSimulator(devices, 120, link=link, seed=1).run(300)

# %%
# Every change of the split comes with its reason.

for plan in result.plans:
    print(plan.describe())

# %%
# The upper picture shows the samples of each worker. The lower one shows how close each step is to the shortest step
# that any split could give at that moment.

figure, (sizes, share) = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
sizes.step(range(300), result.sizes, where="post", label=["worker 0", "worker 1", "worker 2"])
sizes.set_ylabel("samples")
sizes.legend(ncols=3, loc="upper right", frameon=False)
share.plot(100 * result.optimum / result.exact, color="black", lw=1)
share.set_ylabel("% of the optimum")
share.set_xlabel("step")
print(f"over all 300 steps: {100 * result.share_of_optimum:.1f} % of the optimum")
