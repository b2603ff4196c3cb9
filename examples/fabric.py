"""A training loop of one's own with Lightning Fabric: only ``strategy="hetero_ddp"`` is new."""

import torch
from _model import Classifier, report_plans, slow_second_worker, train_loader
from lightning.fabric import Fabric
from torch import nn

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="hetero_ddp")
    fabric.launch()
    model = Classifier().net
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(train_loader())
    with slow_second_worker(fabric.global_rank):
        for _ in range(2):
            for x, y in loader:
                fabric.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    if fabric.is_global_zero:
        report_plans(fabric.strategy.plan_history)
