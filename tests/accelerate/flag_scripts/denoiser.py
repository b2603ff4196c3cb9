"""The loop of a diffusion model's training: accumulation, clipping when gradients are synchronized, an average of the
weights, learning rate per synchronized step, checkpoints and a validation that only the main process runs.
"""

import os
import sys
from copy import deepcopy

import torch
from accelerate import Accelerator
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator(gradient_accumulation_steps=2)
loader, validation = loaders(int(sys.argv[1]), samples=64)
model, optimizer = model_and_optimizer()
averaged = deepcopy(model).requires_grad_(False)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step // accelerator.num_processes))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
steps, norms, losses, validated = 0, [], [], []
for _ in range(3):
    mean = 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            mean += accelerator.gather(loss.detach().repeat(len(x))).mean().item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            with torch.no_grad():
                for kept, new in zip(averaged.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
                    kept.lerp_(new, 0.1)
            losses.append(mean)
            mean = 0.0
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with torch.no_grad():
            validated.append(sum(float((averaged(x) - y).square().sum()) for x, y in validation))
    accelerator.save_state(os.environ["REPORT"] + f".state-{steps}")
accelerator.end_training()
kept = [p.tolist() for p in averaged.parameters()]
report(accelerator, model, kept=kept, steps=steps, norms=norms, losses=losses, validated=validated)
