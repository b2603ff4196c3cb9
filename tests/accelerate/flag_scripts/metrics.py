"""Metrics gathered over all processes, in training and in an evaluation after each epoch."""

import sys

import torch
from accelerate import Accelerator
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator()
loader, evaluation = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
squares, seen = 0.0, 0
for _ in range(2):
    model.train()
    for x, y in loader:
        prediction = model(x)
        accelerator.backward(torch.nn.functional.mse_loss(prediction, y))
        optimizer.step()
        optimizer.zero_grad()
        errors = accelerator.gather_for_metrics((prediction.detach() - y) ** 2)
        squares, seen = squares + float(errors.sum()), seen + len(errors)
    model.eval()
    found = []
    for x, y in evaluation:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics((model(x) - y) ** 2))
    found = torch.cat(found)
report(accelerator, model, squares=squares, seen=seen, evaluated=len(found), error=float(found.mean()))
