"""
Is the old card worth plugging in?
==================================

You have an RTX 4090, and an old card in a drawer. Does it help to train on both? With equal batches, adding a slow card
can make training *slower*. With the best split it helps, unless the card is too slow for its own overhead.
"""

import matplotlib.pyplot as plt

from lightning_hetero.simulate import Given, plan_cluster, read_cluster

# %%
# Times come from published figures of each device for ResNet-50 on ImageNet, not from measurements of ours. Gradients
# cross a link of 10 Gbit/s.

alone = plan_cluster(read_cluster("RTX 4090", Given(workload="resnet50-imagenet")), 96)
old_cards = ("RTX 3090", "RTX 2080 Ti", "T4", "P4")
equal, best = [], []
for card in old_cards:
    given = Given(workload="resnet50-imagenet", rate=1.25e9)
    both = plan_cluster(read_cluster(f"RTX 4090,{card}", given), 96)
    best.append(alone.step_time / both.step_time)
    equal.append(alone.step_time / both.even_step_time)
    sizes = [worker.local_batch_size for worker in both.workers]
    print(f"with a {card:12} {sizes} of 96 samples: {best[-1]:.2f} times as fast as alone, equal: {equal[-1]:.2f}")

# %%
# Below the line, the second card makes the job slower than the RTX 4090 alone: with equal batches three of them do, and
# with the best split only the P4, which ``plan_cluster`` then says to leave out.

figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
places = range(len(old_cards))
axis.bar([x - 0.2 for x in places], equal, 0.38, color="#999999", label="equal batches")
axis.bar([x + 0.2 for x in places], best, 0.38, color="#0072B2", label="best split")
axis.axhline(1, color="black", lw=1)
axis.set_xticks(places, [f"RTX 4090 + {card}" for card in old_cards])
axis.set_ylabel("speed over the RTX 4090 alone")
axis.legend(frameon=False)
