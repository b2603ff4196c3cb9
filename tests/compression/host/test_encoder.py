"""The CPU path against the reference, conservation, messages that arrive as they were sent, and those that do not."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hetero.compression import Layout, MessageFormat, Pack, TorchEncoder, compress, merge
from lightning_hetero.compression.layout import flat_view
from lightning_hetero.compression.message_header import HEADER_BYTES, MAGIC, address, checksum, seal
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


def test_merge_is_that_of_the_reference_and_is_cleared():
    enc, _ = made([100], 0.3)
    packs = [Pack(torch.tensor(i), torch.randn(len(i), 16)) for i in ([0, 2, 6], [2, 5])]
    enc.merge(packs)
    assert torch.equal(enc.merged, merge(packs, 7))
    enc.finish()
    assert enc.merged.abs().sum() == 0


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


# messages


def written(k=10, num_blocks=200_000, values="bfloat16", indices=(3, 65_535, 65_536, 199_999), rank=0):
    form = MessageFormat(num_blocks, k, 16, values)
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    blocks = torch.randn(len(indices), 16)
    sent = form.write(message, np.array(indices, dtype=np.int64), blocks, bucket=0, step=7, rank=rank)
    return form, message, Pack(torch.tensor(indices), sent)


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("k", [4, 10, 30_000])
def test_messages_arrive_as_they_were_sent(k, values):
    form, message, pack = written(k, values=values, rank=1)
    assert form.bitmap == (k == 30_000)
    got, flags = form.read(message, rank=1, bucket=0, step=7)
    assert flags == 0
    assert torch.equal(got.indices, pack.indices)
    assert torch.equal(got.values, pack.values)


@pytest.mark.parametrize(("values", "most"), [("bfloat16", 36), ("int8", 20.5), ("float32", 68)])
def test_bytes_of_a_block(values, most):
    form = MessageFormat(5_500_000, 55_000, 16, values)
    assert form.num_bytes / form.k <= most


def resealed(form, message):
    """The message with a checksum that fits what is in it, as a faulty sender would write it."""
    data = message.numpy()
    first, second = checksum(data[HEADER_BYTES:], form.positions)
    data[40:56].view(np.int64)[:] = seal(first, data[8:40].view(np.int64).tolist()), second
    return message


def change(begin, dtype, value):
    def apply(form, message):
        at = begin(form) if callable(begin) else begin
        message[at : at + dtype.itemsize].view(dtype).fill_(value)
        return resealed(form, message)

    return apply


def first_index(form):
    return HEADER_BYTES + form.counts_bytes


FAULTS = {
    "truncated": lambda form, m: m[:-16],
    "empty": lambda form, m: m[:0],
    "another type": lambda form, m: m.view(torch.int32),
    "one bit": lambda form, m: m.index_fill(0, torch.tensor([form.values_at + 5]), 255),
    "magic": change(0, torch.int64, 5),
    "version": change(0, torch.int64, MAGIC | 2),
    "bucket": lambda form, m: change(8, torch.int64, int(m[8:16].view(torch.int64)) + 1)(form, m),
    "another rank's": change(8, torch.int64, address(5, 0)),
    "step (duplicate of an earlier one)": change(16, torch.int64, 6),
    "flags": change(24, torch.int64, 64),
    "too many blocks": change(32, torch.int64, 11),
    "negative blocks": change(32, torch.int64, -1),
    "fewer blocks than indices": change(32, torch.int64, 3),
    "format": change(56, torch.int64, 1),
    "counts of segments": change(HEADER_BYTES, torch.int32, -1),
    "index out of range": lambda form, m: change(first_index(form) + 6, torch.int16, -1)(form, m),
    "index not ascending": change(lambda form: first_index(form) + 2, torch.int16, 1),
    "index twice": change(lambda form: first_index(form) + 2, torch.int16, 3),
    "value not finite": change(lambda form: form.values_at, torch.bfloat16, float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_message_is_refused_with_rank_and_bucket(fault):
    form, message, _ = written(rank=3)
    assert form.read(message, rank=3, bucket=0, step=7)
    with pytest.raises(ValueError, match=r"rank 3, bucket 0, step 7 is refused"):
        form.read(FAULTS[fault](form, message), rank=3, bucket=0, step=7)


def test_a_message_that_comes_twice_is_refused():
    """Rank 0's in the row of rank 1 as well, as a faulty link or a wrong row would bring it."""
    form, message, _ = written()
    enc, _ = made([64], 1.0)
    enc.form = form
    with pytest.raises(ValueError, match=r"rank 1, bucket 0, step 7 is refused: sender and bucket is \(0, 0\)"):
        enc.read(torch.stack([message, message]), step=7)


def nothing_is_applied(enc, form, fault):
    """A good message first, a bad one behind it: neither sum nor marks nor residual know of either."""
    enc.form = form
    _, good, _ = written()
    _, message, _ = written(rank=1)
    bad = FAULTS[fault](form, message)
    fits = bad.shape == good.shape and bad.dtype == good.dtype
    before = enc.residual.clone()
    with pytest.raises(ValueError, match=rf"rank {int(fits)}, bucket 0, step 7 is refused"):
        enc.read(torch.stack([good, bad]) if fits else bad[None], step=7)
    assert not enc.written
    assert enc.merged.abs().sum() == 0
    assert torch.equal(enc.residual, before)


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_applied_if_one_message_is_malformed(fault):
    enc, message = made([100], 0.3)
    step_of(enc, message, [torch.randn(100)], 1.0)
    nothing_is_applied(enc, written()[0], fault)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 431), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(at, bit):
    form, message, _ = written(num_blocks=1000, indices=(1, 2, 900))
    message[at % form.num_bytes] ^= 1 << bit
    with pytest.raises(ValueError, match="refused"):
        form.read(message, rank=0, bucket=0, step=7)


def test_layout_pads_and_is_the_same_in_any_memory_format():
    layout = Layout.of([("a", 1), ("b", 16), ("c", 17)], 16)
    assert [s.start for s in layout.slots] == [0, 16, 32]
    assert layout.num_blocks == 4
    assert Layout.from_state_dict(layout.state_dict()) == layout
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert flat_view(image).data_ptr() == image.data_ptr()
    assert torch.equal(flat_view(image).sort().values, image.flatten().sort().values)
    with pytest.raises(ValueError, match="not dense"):
        flat_view(torch.randn(4, 4)[:, ::2])
