"""A batch size that is lowered until it fits, with accumulation up to the wanted one."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from toy import loaders, model_and_optimizer, report

wanted = int(sys.argv[1])
accelerator = Accelerator()


@find_executable_batch_size(starting_batch_size=2 * wanted, reduce_batch_size_fn=lambda: wanted)
def run(batch_size):
    accelerator.free_memory()
    loader, _ = loaders(batch_size)
    model, optimizer = model_and_optimizer()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            if batch_size > wanted:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    report(accelerator, model)


run()
