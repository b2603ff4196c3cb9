"""Gradient accumulation, clipping, a learning-rate schedule and a step-wise average of weights."""

import copy
import sys

import torch
from accelerate import Accelerator
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator(gradient_accumulation_steps=2)
loader, _ = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
average = copy.deepcopy(model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            for kept, p in zip(average.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
                kept.data.lerp_(p.data, 0.1)
report(accelerator, model, average=[p.tolist() for p in average.parameters()])
accelerator.end_training()
