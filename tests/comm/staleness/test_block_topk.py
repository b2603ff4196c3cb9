"""A simulation for `tests/strategies/test_delayed_blocks.py`; the tests of stale blocks are in `tests/gradients`.

To be removed with that file.
"""

import torch
from torch import nn

from lightning_hetero.compression import Layout, compress, merge
from lightning_hetero.core.compression.settings import blocks_per_rank


class Simulation:
    """Delay-1 SGD with block top-k and error feedback on every worker, in one process.

    Args:
        model: whose parameters are trained.
        optimizer: of these parameters.
        settings: of the compressor.
        world_size: workers.
        clip: greatest norm of the gradient that the optimizer gets.
    """

    def __init__(self, model, optimizer, settings, world_size, clip=None):
        self.model, self.optimizer, self.settings, self.clip = model, optimizer, settings, clip
        self.layout = Layout.of([(name, p.numel()) for name, p in model.named_parameters()], settings.block)
        self.k = blocks_per_rank(self.layout.num_blocks, settings.density, world_size)
        self.residuals = [torch.zeros(self.layout.numel) for _ in range(world_size)]
        self.owed, self.returning, self.given, self.steps = None, [], [], 0

    def step(self, gradients, delayed, bad=None):
        """One step: weighted gradients of all workers, whether it is delayed, and whose gradient is not finite."""
        settings, number = self.settings, self.steps
        self.steps += 1
        every = settings.dense_every
        if number < settings.warmup_steps or (every is not None and number % every == 0):
            now = sum(gradients)
            self._return()
            delivered, self.owed = now if self.owed is None else now + self.owed, None
        elif bad is not None and not delayed:
            self._return()
            delivered, self.owed = self.owed, None
        else:
            packs = [
                None
                if rank == bad
                else compress(r, g, 1.0, self.k, block=settings.block, value_dtype=settings.value_dtype)
                for rank, (r, g) in enumerate(zip(self.residuals, gradients, strict=True))
            ]
            self._return()
            now = None if bad is not None else merge(packs, self.layout.num_blocks, block=settings.block)
            self.returning = [] if bad is None else [(r, p) for r, p in zip(self.residuals, packs, strict=True) if p]
            if delayed:
                delivered, self.owed = self.owed, now
            else:
                delivered, self.owed = now if self.owed is None else now + self.owed, None
        self.apply(delivered)

    def _return(self):
        """Workers learn of a message that nobody applied only after they have sent the next one."""
        for residual, pack in self.returning:
            residual.view(-1, self.settings.block).index_add_(0, pack.indices, pack.values)
        self.returning = []

    def apply(self, delivered):
        delivered = torch.zeros(self.layout.numel) if delivered is None else delivered
        for p, slot in zip(self.model.parameters(), self.layout.slots, strict=True):
            p.grad = delivered[slot.start : slot.start + slot.numel].view_as(p).to(p.dtype).clone()
        self.given.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).numpy().copy())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def flat(self):
        """The model's gradients as a padded flat tensor."""
        out = torch.zeros(self.layout.numel)
        for p, slot in zip(self.model.parameters(), self.layout.slots, strict=True):
            out[slot.start : slot.start + slot.numel] = p.grad.flatten()
        return out
