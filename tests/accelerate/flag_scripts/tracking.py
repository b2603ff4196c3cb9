"""Trackers, a progress of the learning curve, and an early stop on which all processes agree."""

import sys

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from toy import loaders, model_and_optimizer, report


class Kept(GeneralTracker):
    name, requires_logging_directory = "kept", False

    def __init__(self):
        super().__init__(_blank=True)
        self.values = []

    @property
    def tracker(self):
        return self.values

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.values.append(dict(values))


kept = Kept()
accelerator = Accelerator(log_with=kept)
accelerator.init_trackers("project", {})
loader, _ = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for _ in range(9):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        accelerator.log({"loss": loss.item()}, step=steps)
        if steps == 7 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
accelerator.end_training()
report(accelerator, model, steps=steps, logged=len([values for values in kept.values if "loss" in values]))
