"""A training loop with Accelerate: ``HeteroAccelerator`` in place of ``Accelerator``, nothing else.

Start it with ``lightning-hetero launch --config_file examples/accelerate_loop.yaml examples/accelerate_loop.py``.
"""

import torch
from _model import Classifier, report_plans, slow_second_worker, train_loader
from torch import nn

from lightning_hetero.accelerate import HeteroAccelerator

if __name__ == "__main__":
    accelerator = HeteroAccelerator()
    model = Classifier().net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, train_loader())
    with slow_second_worker(accelerator.process_index):
        for _ in range(4):
            for x, y in loader:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        report_plans(accelerator.plan_history)
    accelerator.end_training()
