"""Block top-k against a transcription in a few lines of numpy; each of its settings; what goes wrong on the way."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import BlockTopK
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.gradients.ddp_hook import gradient_hook
from lightning_hetero.core.compression.settings import blocks_per_rank
from tests.gradients.runs import Crossed, Run, Way
from tests.ranks import run_ranks

STEPS = 7
EXACT = BlockTopK(density=0.5, block=8, value_dtype="float32", selector="exact", warmup_steps=0)


# the equations


def by_hand(own, way):
    """What the optimizer gets, and what is left on each rank: ``r += g; send the k largest blocks; r -= sent``."""
    settings, sizes = way.compression, [p.numel() for p in Crossed().parameters()]
    block, ends = settings.block, np.cumsum([0, *sizes])
    padded = [-(-size // block) * block for size in sizes]
    places = np.concatenate([np.arange(n) + sum(padded[:i]) for i, n in enumerate(sizes)])
    k = blocks_per_rank(sum(padded) // block, settings.density, len(own))
    residuals, given, left, late = np.zeros((len(own), ends[-1])), [], [], np.zeros(ends[-1])
    for step in range(STEPS):
        total = np.zeros(ends[-1])
        for residual, gradient in zip(residuals, own[:, step], strict=True):
            residual += gradient
            flat = np.zeros(sum(padded))
            flat[places] = residual
            score = np.abs(flat.reshape(-1, block)).sum(1)
            chosen = np.isin(np.arange(len(score)), np.argsort(-score, kind="stable")[:k]).repeat(block)[places]
            total += np.where(chosen, residual, 0.0)
            residual[chosen] = 0.0
        given.append(late if way.stale else total)
        late = total
        left.append(residuals.copy())
    return np.stack(given), np.stack(left, axis=1)


EQUATIONS = [
    Way(replace(EXACT, density=density, block=block), stale=stale, cap=cap)
    for density, block, stale, cap in (
        *((0.05, 16, None, 25), (0.2, 8, None, 1e-5), (0.5, 1, None, 1e-5), (1.0, 4, None, 25)),
        *((0.2, 4, {0: True}, 1e-5), (1.0, 8, {0: True}, 25)),
    )
]


def _walk(rank):
    found = []
    for way in EQUATIONS:
        run = Run(rank, way)
        for step in range(STEPS):
            run.step(step, look=True)
        found.append(run.result())
    return found


def test_the_optimizer_gets_the_sum_of_the_largest_blocks_of_each_rank():
    for way, *results in zip(EQUATIONS, *run_ranks(_walk, 2), strict=True):
        given, left = by_hand(np.stack([result["own"] for result in results]), way)
        for result, mine in zip(results, left, strict=True):
            np.testing.assert_allclose(result["given"], given, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(result["left"], mine, rtol=1e-4, atol=1e-6)


# settings


HALF, SHOWN = 64, 9
BASE = replace(EXACT, density=0.25, warmup_steps=1)
"""Two of sixteen blocks a step, after one dense step: both ranks have the same gradients."""


class Pair(nn.Module):
    """Two parameters, of which the gradients of the second are a thousandth as large."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(HALF)), nn.Parameter(torch.zeros(HALF))

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)  # equal blocks at first, so that selectors have to choose
        large = torch.full((HALF,), (1.1, 1.1, -0.5)[step]) if step < 3 else torch.randn(HALF, generator=generator)
        small = 1e-3 * torch.randn(HALF, generator=generator)
        return (self.large * large).sum() + (self.small * small).sum()


class Shown(Run):
    def loss(self, model, step, bad):
        return model(step)


def _given(rank, cases):
    found = []
    for settings in cases:
        run = Shown(rank, Way(settings, cap=25), model=Pair())
        found.append(np.stack([run.backward(step) for step in range(SHOWN)]))
        run.close()
    return found


def sent(given):
    """Elements that each step has sent."""
    return [np.flatnonzero(step).tolist() for step in given]


def blocks(given, step):
    return sorted({i // 8 for i in sent(given)[step]})


def dense_steps(given):
    return [step for step, elements in enumerate(sent(given)) if len(elements) == 2 * HALF]


def rounded(given, base):
    return sent(given)[1] == sent(base)[1] and 0 < np.abs(given[1] - base[1]).max() < 0.01


CASES = {
    "density": {0.5: lambda given, base: len(blocks(given, 1)) == 4},
    "block": {4: lambda given, base: max(len(blocks(given, step)) for step in range(3, SHOWN)) > 2},
    "value_dtype": {"bfloat16": rounded, "int8": rounded},
    "selector": {
        "histogram": lambda given, base: blocks(given, 1) == [3, 7],  # an even share of those that are equal
        "sample": lambda given, base: blocks(given, 1) not in ([0, 1], [3, 7]) and len(blocks(given, 2)) == 2,
        "aimd": lambda given, base: len(blocks(given, 1)) == 2 and not sent(given)[2],  # its threshold has gone up
    },
    "warmup_steps": {0: lambda given, base: not dense_steps(given), 3: lambda g, base: dense_steps(g) == [0, 1, 2]},
    "dense_every": {4: lambda given, base: dense_steps(given) == [0, 4, 8]},
    "scores": {"balanced": lambda given, base: given[2:, HALF:].any()},
}


@pytest.fixture(scope="module")
def shown():
    cases = {(name, value): replace(BASE, **{name: value}) for name, values in CASES.items() for value in values}
    found, other = run_ranks(_given, 2, [BASE, *cases.values()])
    np.testing.assert_array_equal(found, other)
    return dict(zip([None, *cases], found, strict=True))


def test_the_settings_to_compare_with(shown):
    assert set(CASES) == {field.name for field in fields(BlockTopK)}
    base = shown[None]
    assert dense_steps(base) == [0]
    assert blocks(base, 1) == [0, 1]
    assert {len(elements) for elements in sent(base)[1:]} == {2 * 8}
    assert not base[1:, HALF:].any(), "the small gradients are never the largest"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CASES.items() for value in values])
def test_a_setting_changes_what_is_applied(name, value, shown):
    assert CASES[name][value](shown[name, value], shown[None])


# what goes wrong


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


def _densities(rank):
    run, said = Run(rank, Way(EXACT)), []
    blocks = run.compression.blocks
    for wrong in (0.0, 1.1, -1, float("nan"), "a", None, True):
        try:
            blocks.set_density(wrong)
        except (TypeError, ValueError) as error:
            said.append((type(error).__name__, "density" in str(error)))
    run.step(0)
    run.model.get_submodule("0").weight.register_hook(lambda gradient: blocks.set_density(0.1))
    try:
        run.step(1)
    except RuntimeError as error:
        said.append((type(error).__name__, "density" in str(error)))
    return said, blocks.density


def test_a_density_that_is_none_is_refused_and_so_is_one_inside_a_backward_pass():
    for said, density in run_ranks(_densities, 2):
        assert said == [("ValueError", True)] * 4 + [("TypeError", True)] * 3 + [("RuntimeError", True)]
        assert density == EXACT.density
