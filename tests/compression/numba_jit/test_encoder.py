"""Numba's loops against the reference: the same packs and residuals bit by bit, and nothing that is not finite."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hetero import BlockTopK
from lightning_hetero.compression import Layout, MessageFormat, Pack, TorchEncoder, block_scores, compress, merge
from lightning_hetero.compression.host import encoder
from lightning_hetero.compression.value_codecs import CODECS
from tests.compression.host import test_encoder
from tests.compression.host.test_encoder import DTYPES, padded, step_of, unaligned
from tests.compression.messages import FAULTS, nothing_is_applied, written
from tests.helpers import run_ranks
from tests.modes.test_compression import train

pytest.importorskip("numba", exc_type=ImportError)

from lightning_hetero.compression.numba_jit.encoder import NumbaEncoder

made = partial(test_encoder.made, kind=NumbaEncoder)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    density=st.floats(0.001, 1.0),
    block=st.sampled_from([1, 2, 8, 16, 32, 128]),
    values=st.sampled_from(list(CODECS)),
    dtype=st.sampled_from(DTYPES),
    weight=st.sampled_from([0.5, 1 / 3, 1.0, 2.0**-18]),
    scale=st.sampled_from([1.0, 1e-30, 1e34]),
    seed=st.integers(0, 2**16),
)
def test_same_as_the_reference_and_nothing_is_lost(sizes, density, block, values, dtype, weight, scale, seed):
    assume(block >= 8 or dtype == torch.float32)  # single elements of 16 bits tie, and any of them may be taken
    enc, message = made(sizes, density, block, values)
    generator = torch.Generator().manual_seed(seed)
    reference = torch.zeros(enc.layout.numel)
    for step in range(3):
        gradients = [torch.randn(n, generator=generator) for n in sizes]
        gradients = [unaligned((g * scale if dtype == torch.float32 else g).to(dtype)) for g in gradients]
        before = enc.residual.clone()
        flat = padded(enc.layout, gradients)
        pack = step_of(enc, message, gradients, weight, step)
        expected = compress(reference, flat, weight, enc.form.k, block=block, value_dtype=values)
        assert torch.equal(pack.indices, expected.indices)
        assert torch.equal(pack.values, expected.values)
        assert torch.equal(enc.residual, reference)
        due = before.add(flat, alpha=weight)
        assert torch.equal(merge([pack], enc.layout.num_blocks, block=block) + enc.residual, due)


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_scores_and_threads(threads, bucket, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(NumbaEncoder, "elements_per_thread", 64)
    enc, _ = made([1000, 7], 0.1)
    gradients = [torch.randn(1000), torch.randn(7)]
    if bucket:
        assert enc.accumulate_bucket(enc.layout.slots[::-1], torch.cat(gradients[::-1]), 0.5)
    else:
        assert all(enc.accumulate(*one, 0.5) for one in zip(enc.layout.slots, gradients, strict=True))
    torch.testing.assert_close(enc.residual, padded(enc.layout, gradients) * 0.5, rtol=0, atol=0)
    torch.testing.assert_close(enc.scores, block_scores(enc.residual))
    assert (enc._threads is not None) == (threads > 1)


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 7, 16, 150, 199, 208], ids=str)
def test_a_gradient_that_is_not_finite_enters_no_residual(bad, at, bucket, monkeypatch):
    """Whole vectors, half ones and single elements, in the first thread's part and in the last one's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(NumbaEncoder, "elements_per_thread", 64)
    enc, message = made([20, 209], 0.2)
    step_of(enc, message, [torch.randn(20), torch.randn(209)], 0.5)
    before = enc.residual.clone()
    gradients = [torch.randn(20), torch.randn(209)]
    gradients[1][at] = bad
    if bucket:
        assert not enc.accumulate_bucket(enc.layout.slots, torch.cat(gradients), 0.5)
    else:
        finite = [enc.accumulate(s, g, 0.5) for s, g in zip(enc.layout.slots, gradients, strict=True)]
        assert finite == [True, False]
    assert torch.isfinite(enc.residual).all()
    enc.give_up(message, step=1)
    assert enc.read(message[None], step=1) is None
    enc.undo()
    enc.finish()
    torch.testing.assert_close(enc.residual, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", CODECS)
def test_a_step_that_another_rank_leaves_out_is_undone(values):
    enc, message = made([20, 300], 0.2, values=values)
    step_of(enc, message, [torch.randn(20), torch.randn(300)], 0.5)
    before = enc.residual.clone()
    for slot, gradient in zip(enc.layout.slots, [torch.randn(20), torch.randn(300)], strict=True):
        enc.accumulate(slot, gradient, 0.5)
    enc.encode(message, step=1)
    assert not torch.equal(enc.residual, before)
    enc.undo()
    enc.finish()
    torch.testing.assert_close(enc.residual, before, rtol=1e-6, atol=1e-6)


def test_an_unused_parameter_is_held_back_and_merging_is_the_references():
    enc, _ = made([32, 32], 0.25)
    enc.residual[40] = 5.0
    enc.accumulate(enc.layout.slots[1], torch.zeros(32), 1.0, hold=True)
    assert enc.scores[2:].abs().sum() == 0
    packs = [Pack(torch.tensor(i), torch.randn(len(i), 16)) for i in ([0, 2, 3], [2])]
    enc.merge(packs)
    assert torch.equal(enc.merged, merge(packs, 4))
    enc.finish()
    assert enc.merged.abs().sum() == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_applied_if_one_message_is_malformed(fault):
    enc, message = made([64], 1.0)
    step_of(enc, message, [torch.randn(64)], 1.0)
    assert len(enc.read(message[None], step=0)) == 1
    nothing_is_applied(enc, written()[0], fault)


def test_it_is_chosen_where_numba_is_and_the_model_is_large(monkeypatch):
    def chosen(numel, dtype=torch.float32):
        layout = Layout.of([("p", numel)], 16)
        return type(encoder.cpu_encoder(layout, MessageFormat(layout.num_blocks, 5, 16, "float32"), dtype=dtype))

    assert chosen(encoder.NUMBA_MIN_ELEMENTS) is NumbaEncoder
    assert chosen(1000) is TorchEncoder
    assert chosen(encoder.NUMBA_MIN_ELEMENTS, torch.float64) is TorchEncoder
    monkeypatch.setattr(encoder, "find_spec", lambda name: None)
    assert chosen(encoder.NUMBA_MIN_ELEMENTS) is TorchEncoder


def _trained(rank, least):
    encoder.NUMBA_MIN_ELEMENTS = least
    return train(rank, BlockTopK(density=0.2), max_epochs=7)


def test_training_is_the_same_bit_by_bit():
    """On both ranks, after 100 steps, with loops and without."""
    plain, fast = run_ranks(_trained, 2, 10**9), run_ranks(_trained, 2, 0)
    assert plain[0]["steps"] >= 100
    for result in fast:
        np.testing.assert_array_equal(result["weights"], plain[0]["weights"])
