"""Cross-validation: a new model, optimizer and loaders for each fold, with memory freed in between."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator()
batch_size = int(sys.argv[1])
data, errors = loaders(batch_size)[0].dataset, []
for fold in range(2):
    held = [i for i in range(len(data)) if i % 2 == fold]
    rest = [i for i in range(len(data)) if i % 2 != fold]
    generator = torch.Generator().manual_seed(fold)
    loader = DataLoader(Subset(data, rest), batch_size=batch_size, shuffle=True, generator=generator)
    evaluation = DataLoader(Subset(data, held), batch_size=5)
    model, optimizer = model_and_optimizer()
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    for _ in range(2):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x) - y) ** 2) for x, y in evaluation]
    errors.append(float(torch.cat(found).mean()))
    kept = model
    if fold == 0:
        model, optimizer, loader, evaluation = accelerator.free_memory(model, optimizer, loader, evaluation)
report(accelerator, kept, errors=errors)
