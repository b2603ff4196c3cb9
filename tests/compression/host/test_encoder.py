"""The encoder on the host against the reference: conservation, and steps that are left out."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hetero.compression import Layout, MessageFormat, TorchEncoder, compress, merge
from lightning_hetero.compression.value_codecs import CODECS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(sizes, density, block=16, values="float32", kind=TorchEncoder, **settings):
    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block)
    k = max(1, int(layout.num_blocks * density))
    form = MessageFormat(layout.num_blocks, k, block, values, layout.fingerprint())
    return kind(layout, form, **settings), torch.zeros(form.num_bytes, dtype=torch.uint8)


def step_of(enc, message, gradients, weight, step=0):
    for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
        assert enc.accumulate(slot, gradient, weight)
    enc.encode(message, step=step)
    packs = enc.read(message[None], step=step)
    enc.finish()
    return packs[0]


def unaligned(gradient):
    """The same values one element further on than memory begins, as in a bucket after a parameter of odd size."""
    moved = torch.empty(len(gradient) + 1, dtype=gradient.dtype)[1:]
    return moved.copy_(gradient)


def padded(layout, gradients):
    flat = torch.zeros(layout.numel, dtype=gradients[0].dtype)
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        flat[slot.start : slot.start + slot.numel] = gradient
    return flat


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    density=st.floats(0.001, 1.0),
    block=st.sampled_from([1, 4, 8, 16, 32]),
    values=st.sampled_from(list(CODECS)),
    dtype=st.sampled_from(DTYPES),
    weight=st.sampled_from([0.5, 1 / 3, 1.0, 2.0**-18]),
    seed=st.integers(0, 2**16),
    chunk=st.sampled_from([32, 128, 131_072]),
)
def test_same_as_the_reference_and_nothing_is_lost(sizes, density, block, values, dtype, weight, seed, chunk):
    """Bitwise the reference's packs and residuals over steps; sent + residual is what there was, bitwise."""
    assume(block >= 8 or dtype == torch.float32)  # single elements of 16 bits tie, and any of them may be taken
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEncoder, "chunk_elements", chunk)
        enc, message = made(sizes, density, block, values)
        generator = torch.Generator().manual_seed(seed)
        reference = torch.zeros(enc.layout.numel)
        for step in range(3):
            gradients = [unaligned(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
            before = enc.residual + 0
            flat = padded(enc.layout, gradients)
            pack = step_of(enc, message, gradients, weight, step)
            expected = compress(reference, flat, weight, enc.form.k, block=block, value_dtype=values)
            assert torch.equal(pack.indices, expected.indices)
            assert torch.equal(pack.values, expected.values)
            assert torch.equal(enc.residual, reference)
            due = before.add(flat, alpha=weight)
            assert torch.equal(merge([pack], enc.layout.num_blocks, block=block) + enc.residual, due)
            assert len(pack.indices) <= enc.form.k


@pytest.mark.parametrize("values", CODECS)
def test_double_residuals_lose_nothing(values):
    enc, message = made([50, 3], 0.5, values=values, dtype=torch.float64)
    gradients = [torch.randn(n, dtype=torch.float64) for n in (50, 3)]
    pack = step_of(enc, message, gradients, 0.5)
    total = merge([pack], enc.layout.num_blocks).double() + enc.residual
    torch.testing.assert_close(total, padded(enc.layout, gradients) * 0.5, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("values", ["float32"])
def test_density_1_is_the_dense_sum(values):
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(n, generator=generator) for n in (70, 5)] for _ in range(3)]
    packs = []
    for part in parts:
        enc, message = made([70, 5], 1.0, values=values)
        packs.append(step_of(enc, message, part, 1 / 3))
        assert enc.residual.abs().sum() == 0
    dense = sum(padded(enc.layout, part) * (1 / 3) for part in parts)
    torch.testing.assert_close(merge(packs, enc.layout.num_blocks), dense, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 3), (1, 299), (1, 0)], ids=str)
def test_a_gradient_that_is_not_finite_enters_no_residual(bad, where, monkeypatch):
    monkeypatch.setattr(TorchEncoder, "chunk_elements", 64)
    enc, message = made([20, 300], 0.2)
    step_of(enc, message, [torch.randn(20), torch.randn(300)], 0.5)
    before = enc.residual.clone()
    gradients = [torch.randn(20), torch.randn(300)]
    gradients[where[0]][where[1]] = bad
    finite = [enc.accumulate(s, g, 0.5) for s, g in zip(enc.layout.slots, gradients, strict=True)]
    assert not all(finite)
    enc.give_up(message, step=1)
    assert enc.read(message[None], step=1) is None
    enc.undo()
    enc.finish()
    torch.testing.assert_close(enc.residual, before, rtol=1e-6, atol=1e-6)


def test_a_step_that_another_rank_leaves_out_is_undone():
    enc, message = made([20, 300], 0.2, values="int8")
    step_of(enc, message, [torch.randn(20), torch.randn(300)], 0.5)
    before = enc.residual.clone()
    for slot, gradient in zip(enc.layout.slots, [torch.randn(20), torch.randn(300)], strict=True):
        enc.accumulate(slot, gradient, 0.5)
    enc.encode(message, step=1)
    assert not torch.equal(enc.residual, before)
    enc.undo()
    enc.finish()
    torch.testing.assert_close(enc.residual, before, rtol=1e-6, atol=1e-6)


def test_an_unused_parameter_is_held_back():
    enc, message = made([32, 32], 0.25)
    for held, expected in ((True, 1), (False, 3)):
        enc.residual.zero_()
        enc.residual[40] = 5.0
        enc.accumulate(enc.layout.slots[0], torch.full((32,), 0.01), 1.0, hold=held)
        enc.accumulate(enc.layout.slots[1], torch.zeros(32), 1.0, hold=held)
        enc.encode(message, step=0)
        pack = enc.read(message[None], step=0)[0]
        assert (pack.indices.tolist() == [2]) == (not held), expected
        enc.finish()
