"""Metrics gathered over all processes, in training and in an evaluation after each epoch; trackers, and an early stop
on which all processes agree.
"""

import sys

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.tracking import GeneralTracker
from toy import loaders, model_and_optimizer, report


class Kept(GeneralTracker):
    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self):
        super().__init__(_blank=True)
        self.losses = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.losses += [values["loss"]] if "loss" in values else []


kept = Kept()
ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.NO, bucket_cap_mb=1)
accelerator = Accelerator(log_with=kept, kwargs_handlers=[ddp])
accelerator.init_trackers("project", {})
loader, evaluation = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
squares, seen, stopped = 0.0, 0, False
for _ in range(2):
    model.train()
    for x, y in loader:
        prediction = model(x)
        accelerator.backward(torch.nn.functional.mse_loss(prediction, y))
        optimizer.step()
        optimizer.zero_grad()
        errors = accelerator.gather_for_metrics((prediction.detach() - y) ** 2)
        squares, seen = squares + float(errors.sum()), seen + len(errors)
        accelerator.log({"loss": float(errors.mean())})
        if len(kept.losses) == 7 and accelerator.is_main_process:
            accelerator.set_trigger()
        if stopped := accelerator.check_trigger():
            break
    model.eval()
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics((model(x) - y) ** 2) for x, y in evaluation])
    if stopped:
        break
accelerator.end_training()
evaluated = {"evaluated": len(found), "error": float(found.mean())}
report(accelerator, model, squares=squares, seen=seen, losses=kept.losses, **evaluated)
