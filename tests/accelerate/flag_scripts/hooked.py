"""A communication hook of DDP, a profiler around the passes, and an optimizer with modes of training and evaluation."""

import sys

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, ProfileKwargs
from toy import loaders, model_and_optimizer, report


class TwoModes(torch.optim.SGD):
    """As optimizers without a schedule have them: a step in evaluation mode is an error."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def step(self, closure=None):
        assert self.training
        return super().step(closure)


ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.NO, bucket_cap_mb=1)
accelerator = Accelerator(kwargs_handlers=[ddp, ProfileKwargs(activities=["cpu"])])
loader, _ = loaders(int(sys.argv[1]))
model, _ = model_and_optimizer()
model, optimizer, loader = accelerator.prepare(model, TwoModes(model.parameters(), lr=0.05), loader)
backwards = 0
for _ in range(2):
    optimizer.train()
    with accelerator.profile() as profile:
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.eval()
    backwards += sum(event.count for event in profile.key_averages() if event.key == "aten::mse_loss_backward")
report(accelerator, model, backwards=backwards)
