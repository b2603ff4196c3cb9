"""What goes wrong on the way of block top-k: messages, backward passes, parameters that nobody uses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import BlockTopK
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.gradients.ddp_hook import gradient_hook
from tests.gradients.runs import Run, Way
from tests.ranks import run_ranks

EXACT = BlockTopK(density=0.5, block=8, value_dtype="float32", selector="exact", warmup_steps=0)


def _fails(rank, how):
    """Residuals before and after a backward pass that failed half-way, or whose messages cannot be read; the error."""
    run = Run(rank, Way(replace(EXACT, density=0.3)))
    for step in range(3):
        run.step(step)
    before, plain = run.left(), async_ops.async_all_gather

    def spoiled(rows, *args):
        plain(rows, *args).wait()
        rows[1].fill_(255)
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def failing(gradient):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        if how == "spoiled":
            patch.setattr(async_ops, "async_all_gather", spoiled)
        else:
            run.model.get_submodule("0").weight.register_hook(failing)
        with pytest.raises((ValueError, ZeroDivisionError, RuntimeError)) as error:
            run.step(3)
    between = run.left()
    run.hook.active.undo_failed()
    return before, between, run.left(), str(error.value)


@pytest.mark.parametrize("how", ["spoiled", "half-way"])
def test_a_backward_pass_that_failed_leaves_residuals_as_they_were(how):
    """Its step is done again. A message that cannot be read is an error on all ranks that names whose it is."""
    for rank, (before, between, after, text) in enumerate(run_ranks(_fails, 2, how)):
        assert not np.allclose(between, before, atol=1e-6)
        assert how != "spoiled" or "rank 1" in text
        if how != "spoiled" or rank == 0:  # what the other has sent is no more
            np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)


class Parts(nn.Module):
    """Of its two parameters one may be left out."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Parameter(torch.linspace(1, 2, 64)), nn.Parameter(torch.linspace(2, 3, 64))

    def forward(self, both):
        return self.used.square().sum() + (self.spare.square().sum() if both else 0.0)


def _unused(rank):
    """The residual of a parameter, and what it gets, in steps of which the second uses it on no rank."""
    run = Run(rank, Way(replace(EXACT, density=0.25)), model=Parts())
    run.compression.attach(run.model, hold_unused=True)
    ddp = DistributedDataParallel(run.model, find_unused_parameters=True)
    ddp.register_comm_hook(run.hook, gradient_hook)
    found = []
    for both in (True, False, True):
        run.optimizer.zero_grad()
        ddp(both).backward()
        run.compression.after_backward()
        left = run.compression.averager.residuals()["spare"]
        found.append((left.sum().item(), run.model.spare.grad is not None and bool(run.model.spare.grad.any())))
    return found


def test_the_residual_of_an_unused_parameter_waits():
    """DDP drops the gradient of a parameter that no rank has used, and what was sent of it would be lost."""
    for (first, got), (second, nothing), (third, again) in run_ranks(_unused, 2):
        assert got
        assert first == second > 0
        assert not nothing
        assert again
        assert third != second
