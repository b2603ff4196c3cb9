"""A loss that is divided by the number of all processes' tokens, as for language models with accumulation."""

import sys

from accelerate import Accelerator
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator(gradient_accumulation_steps=2)
loader, _ = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def counted(targets):
    return targets > 0  # the others are padding


batches, micro = iter(loader), []
for number in range(len(loader)):
    micro.append(next(batches))
    if len(micro) < 2 and number + 1 < len(loader):
        continue
    total = accelerator.gather(sum(counted(y).sum() for _, y in micro).reshape(1)).sum()
    for i, (x, y) in enumerate(micro):
        with accelerator.no_sync(model) if i + 1 < len(micro) else accelerator.accumulate():
            losses = (model(x) - y) ** 2
            loss = (losses * counted(y)).sum() / total
            accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps)
    optimizer.step()
    optimizer.zero_grad()
    micro = []
report(accelerator, model)
