"""Triton's kernels against the reference; `test_kernels.py` runs this file in a process of its own, interpreted on CPU.

Natively, on a machine with a GPU: ``python -m pytest tests/compression/interpreted.py`` with no TRITON_INTERPRET.
"""

import os

import numpy as np
import pytest
import torch

from lightning_hetero.compression import SELECT, Layout, MessageFormat, merge
from lightning_hetero.compression import triton_encoder as module
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.triton_encoder import TritonEncoder
from lightning_hetero.compression.values import CODECS

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
CASES = [
    (torch.float32, (1,), 1.0, "float32"),
    (torch.float32, (16,), 0.5, "int8"),
    (torch.float32, (17, 5), 0.3, "bfloat16"),
    (torch.float32, (700, 1, 33), 0.04, "int8"),
    (torch.float32, (700, 1, 33), 0.3, "float32"),
    (torch.float32, (1100,), 1.0, "float32"),
    (torch.bfloat16, (700, 1, 33), 0.06, "bfloat16"),
    (torch.float16, (700, 33), 0.2, "int8"),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Small tiles, so that the interpreter has several of them to run without taking minutes."""
    monkeypatch.setattr(module, "TILE", 16)
    monkeypatch.setattr(module, "ITERS", 2)
    monkeypatch.setattr(module, "SCORES", 32)


def made(sizes, density, block=16, values="float32"):
    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block)
    k = max(1, int(layout.num_blocks * density))
    form = MessageFormat(layout.num_blocks, k, block, values, layout.fingerprint())
    return TritonEncoder(layout, form, DEVICE), torch.zeros(form.num_bytes, dtype=torch.uint8, device=DEVICE)


def gradients_of(sizes, dtype, seed):
    """Small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-40, 40, (n,), generator=generator).to(dtype).to(DEVICE) for n in sizes]


def padded(layout, gradients):
    flat = torch.zeros(layout.numel)
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        flat[slot.start : slot.start + slot.numel] = gradient.float().cpu()
    return flat


def accumulate(enc, gradients, weight=0.5):
    for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
        enc.accumulate(slot, gradient, weight)


def test_what_was_sent_in_vain_returns_after_the_next_gradient():
    """And a gradient that is not finite says so in its own message, before others read it."""
    enc, message = made((40, 17), 0.3)
    first, second = (gradients_of((40, 17), torch.float32, seed) for seed in (0, 1))
    accumulate(enc, first)
    enc.encode(message, step=0)
    assert not enc.form.gave_up(message)
    sent, _ = enc.form.read(message, rank=0, bucket=0, step=0)
    assert len(sent.indices) == enc.form.k
    enc.finish()
    accumulate(enc, second)
    enc.take_back(message)
    expected = 0.5 * (padded(enc.layout, first) + padded(enc.layout, second))
    np.testing.assert_array_equal(enc.residual.cpu(), expected)
    enc.finish()
    other = torch.zeros_like(message)
    accumulate(enc, [torch.full_like(g, float("nan")) for g in first])
    enc.give_up(other, step=1)
    assert enc.form.gave_up(other)


@pytest.mark.parametrize(("dtype", "sizes", "density", "values"), CASES, ids=str)
def test_a_step_is_that_of_the_reference(dtype, sizes, density, values):
    enc, message = made(sizes, density, values=values)
    reference = torch.zeros(enc.layout.numel)
    for step in range(3):
        gradients = gradients_of(sizes, dtype, step)
        accumulate(enc, gradients)
        enc.encode(message, step=step)
        pack = enc.read(message[None], step=step)[0]
        reference += 0.5 * padded(enc.layout, gradients)
        blocks = reference.view(-1, 16)
        expected = SELECT["histogram"](blocks.abs().sum(1).numpy(), enc.form.k, SelectorState())
        np.testing.assert_array_equal(pack.indices.cpu(), expected)
        codec = CODECS[values]
        sent = codec.decode(codec.encode(blocks[expected]))
        assert torch.equal(pack.values.cpu(), sent)
        before = reference.clone()
        blocks[expected] -= sent
        assert torch.equal(enc.residual.cpu(), reference)
        total = merge([type(pack)(pack.indices.cpu(), pack.values.cpu())], enc.layout.num_blocks) + enc.residual.cpu()
        assert torch.equal(total, before)
        enc.finish()


@pytest.mark.parametrize("block", [8, 64])
def test_other_blocks(block):
    enc, message = made((700, 3), 0.2, block=block)
    accumulate(enc, gradients_of((700, 3), torch.float32, 0))
    scores = enc.scores.cpu().clone()
    enc.encode(message, step=0)
    pack = enc.read(message[None], step=0)[0]
    np.testing.assert_array_equal(pack.indices.cpu(), SELECT["histogram"](scores.numpy(), enc.form.k, SelectorState()))


@pytest.mark.parametrize("kind", ["equal", "zero", "wide"])
def test_ties_zeros_and_a_wide_range(kind):
    enc, message = made((1600,), 0.1)
    gradient = torch.zeros(1600)
    if kind == "equal":
        gradient.fill_(2.0)
    if kind == "wide":
        gradient = 2.0 ** torch.randint(-120, 120, (100, 1), generator=torch.Generator().manual_seed(0)).repeat(1, 16)
    accumulate(enc, [gradient.flatten().to(DEVICE)], 1.0)
    scores = enc.scores.cpu().numpy().copy()
    enc.encode(message, step=0)
    pack = enc.read(message[None], step=0)[0]
    assert len(pack.indices) == (0 if kind == "zero" else enc.form.k)
    exact = np.sort(scores)[::-1][: enc.form.k].sum()
    assert scores[pack.indices.cpu()].sum() >= 0.95 * exact


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_flagged_and_undone(bad):
    enc, message = made((300, 40), 0.2, values="int8")
    accumulate(enc, gradients_of((300, 40), torch.float32, 0))
    enc.encode(message, step=0)
    enc.finish()
    before = enc.residual.clone()
    gradients = gradients_of((300, 40), torch.float32, 1)
    gradients[0][17] = bad
    accumulate(enc, gradients)
    enc.encode(message, step=1)
    assert enc.read(message[None], step=1) is None
    enc.undo()
    enc.finish()
    torch.testing.assert_close(enc.residual, before, rtol=1e-5, atol=1e-5)
    accumulate(enc, gradients_of((300, 40), torch.float32, 2))
    enc.encode(message, step=2)
    assert enc.read(message[None], step=2) is not None


def test_messages_of_the_cpu_path_are_read_and_merged():
    """Ranks with and without a GPU understand each other."""
    from lightning_hetero.compression import BlockEncoder

    enc, message = made((700, 3), 0.05, values="bfloat16")
    other = BlockEncoder(enc.layout, enc.form)
    gradients = gradients_of((700, 3), torch.float32, 4)
    accumulate(enc, gradients)
    for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
        other.accumulate(slot, gradient.cpu(), 0.5)
    theirs = torch.zeros(enc.form.num_bytes, dtype=torch.uint8)
    enc.encode(message, step=0)
    other.encode(theirs, step=0)
    rows = torch.stack([message.cpu(), theirs])
    enc.merge(enc.read(rows.to(DEVICE), step=0))
    other.merge(other.read(rows, step=0))
    assert torch.equal(enc.merged.cpu(), other.merged)
    assert enc.merged.abs().sum() > 0
    enc.finish()
    assert enc.merged.abs().sum() == 0
