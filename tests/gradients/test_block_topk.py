"""What goes wrong on the way of block top-k: messages and backward passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.collectives import async_ops
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
