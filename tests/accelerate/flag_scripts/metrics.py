"""Metrics gathered over all processes, in training and in an evaluation after each epoch, and a stop of all."""

import sys

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from toy import loaders, model_and_optimizer, report

ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.NO, bucket_cap_mb=1)
accelerator = Accelerator(kwargs_handlers=[ddp])
loader, evaluation = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
losses, seen, stopped = [], 0, False
for _ in range(2):
    model.train()
    for x, y in loader:
        prediction = model(x)
        accelerator.backward(torch.nn.functional.mse_loss(prediction, y))
        optimizer.step()
        optimizer.zero_grad()
        errors = accelerator.gather_for_metrics((prediction.detach() - y) ** 2)
        losses, seen = [*losses, float(errors.mean())], seen + len(errors)
        if len(losses) == 7 and accelerator.is_main_process:
            accelerator.set_trigger()
        if stopped := accelerator.check_trigger():
            break
    model.eval()
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics((model(x) - y) ** 2) for x, y in evaluation])
    if stopped:
        break
accelerator.end_training()
report(accelerator, model, seen=seen, losses=losses, evaluated=len(found), error=float(found.mean()))
