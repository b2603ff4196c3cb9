"""A state that is saved inside an epoch and loaded again, from which the rest of the epoch is trained."""

import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from toy import loaders, model_and_optimizer, report

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4))
loader, _ = loaders(int(sys.argv[1]))
model, optimizer = model_and_optimizer()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def train(batches):
    for x, y in batches:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        yield


loader.set_epoch(0)
folder = os.environ["REPORT"] + ".state"
for number, _ in enumerate(train(loader)):
    if number == 1:
        accelerator.save_state(folder)
accelerator.load_state(folder)
loader.set_epoch(0)
for _ in train(accelerator.skip_first_batches(loader, 2)):
    pass
report(accelerator, model)
