"""Triton's kernels against the reference; `test_kernels.py` runs this file in a process of its own, interpreted on CPU.

Natively, on a machine with a GPU: ``python -m pytest tests/compression/triton_gpu/interpreted.py`` with no
TRITON_INTERPRET.
"""

import importlib
import itertools
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from lightning_hetero.compression import SELECT, Layout, MessageFormat, TorchEncoder, merge
from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.message_header import HEADER_BYTES, MAGIC, address, checksum, seal
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.triton_gpu import (
    apply_kernels,
    encode_kernels,
    header_kernels,
    launch,
    receive_kernels,
)
from lightning_hetero.compression.triton_gpu import warmup as triton_warm
from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
from lightning_hetero.compression.triton_gpu.status import FAULTS as FAULTS_BY_CODE
from lightning_hetero.compression.value_codecs import CODECS

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
    (torch.float32, (0, 35), 0.4, "bfloat16"),
    (torch.bfloat16, (0,), 1.0, "float32"),
]


LARGE = [  # several segments of 65 536 blocks, and many programs of the size that training has
    (torch.float32, (3_000_000, 2_100_001), 0.01, "bfloat16"),
    (torch.bfloat16, (5_100_001,), 0.01, "int8"),
    (torch.float16, (2_100_001, 3_000_000), 0.2, "float32"),
]
if DEVICE.type == "cuda":
    CASES += LARGE


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Small tiles, so that the interpreter has several of them to run without taking minutes; GPUs have true ones."""
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(launch, "TILING", launch.Tiling(blocks=16, repeats=2, scores=32))


def made(sizes, density, block=16, values="float32", world_size=1):
    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block)
    k = max(1, int(layout.num_blocks * density))
    form = MessageFormat(layout.num_blocks, k, block, values, layout.fingerprint())
    rows = torch.zeros(world_size, form.num_bytes, dtype=torch.uint8, device=DEVICE)
    return TritonEncoder(layout, form, DEVICE, world_size), rows


def pack_of(enc, message, step=0):
    """What the host reads in a message, as a receiver without a GPU."""
    return enc.form.read(message.cpu(), rank=0, bucket=0, step=step)[0]


def gradients_of(sizes, dtype, seed):
    """Small integers, whose sums are exact in any order; none begins where memory does."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-40, 40, (n + 1,), generator=generator).to(dtype).to(DEVICE)[1:] for n in sizes]


def padded(layout, gradients):
    flat = torch.zeros(layout.numel)
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        flat[slot.start : slot.start + slot.numel] = gradient.float().cpu()
    return flat


def accumulate(enc, gradients, weight=0.5):
    for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
        enc.accumulate(slot, gradient, weight)


@pytest.mark.parametrize(("dtype", "sizes", "density", "values"), CASES, ids=str)
def test_a_step_is_that_of_the_reference(dtype, sizes, density, values):
    enc, rows = made(sizes, density, values=values)
    reference = torch.zeros(enc.layout.numel)
    for step in range(2):
        gradients = gradients_of(sizes, dtype, step)
        accumulate(enc, gradients)
        enc.encode(rows[0], step=step)
        pack = pack_of(enc, rows[0], step)
        reference += 0.5 * padded(enc.layout, gradients)
        blocks = reference.view(-1, 16)
        expected = SELECT["histogram"](blocks.abs().sum(1).numpy(), enc.form.k, SelectorState())
        np.testing.assert_array_equal(pack.indices, expected)
        codec = CODECS[values]
        sent = codec.decode(codec.encode(blocks[expected]))
        assert torch.equal(pack.values, sent)
        before = reference.clone()
        blocks[expected] -= sent
        assert torch.equal(enc.residual.cpu(), reference)
        enc.receive(rows, rank=0, step=step)
        merged = merge([pack], enc.layout.num_blocks)
        assert torch.equal(enc.merged.cpu(), merged)
        assert torch.equal(enc.merged.cpu() + enc.residual.cpu(), before)
        np.testing.assert_array_equal(enc.touched.cpu().numpy().nonzero()[0], expected)
        for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
            enc.deliver(slot, gradient, 0.5, scale=2.0, fill=0.0)
            due = (2.0 * merged[slot.start : slot.start + slot.numel]).to(dtype)
            assert torch.equal(gradient.cpu(), due)
        enc.finish()
        assert enc.merged.abs().sum() == 0
        assert enc.outcome() == Outcome(step, False, len(expected))
        assert enc.outcome() is None


def test_a_bucket_is_one_launch_or_two_and_gives_what_its_parameters_would(monkeypatch):
    """Parameters that begin between two units of 16 bytes are in the second; held back is who has no gradient."""
    sizes = (700, 32, 3, 64, 0, 1100, 48)
    launches = []
    for room in (encode_kernels, apply_kernels):
        for name in room.__all__:
            kernel = getattr(room, name)
            if hasattr(kernel, "run"):
                monkeypatch.setattr(room, name, Counted(kernel, name, launches))
    enc, rows = made(sizes, 0.3)
    twin, its_rows = made(sizes, 0.3)
    for dtype in (torch.float32, torch.bfloat16):
        gradients = gradients_of(sizes, dtype, 3)
        gradients[3].zero_()
        flat = torch.cat(gradients)
        for one, message in ((enc, rows), (twin, its_rows)):
            launches.clear()
            if one is enc:
                enc.accumulate_bucket(enc.layout.slots, flat, 0.5, hold=True)
                assert sorted(launches) == ["accumulate"] * 2 + ["hold"] * 2
            else:
                for slot, gradient in zip(twin.layout.slots, gradients, strict=True):
                    twin.accumulate(slot, gradient, 0.5, hold=True)
            assert one.scores[47:51].abs().sum() == 0
            one.encode(message[0], step=0)
            one.receive(message, rank=0, step=0)
        assert torch.equal(rows, its_rows)
        assert torch.equal(enc.residual, twin.residual)
        launches.clear()
        enc.deliver_bucket(enc.layout.slots, flat, 0.5, scale=2.0, fill=0.0)
        assert launches == ["deliver"] * 2
        for slot, gradient in zip(twin.layout.slots, gradients, strict=True):
            twin.deliver(slot, gradient, 0.5, scale=2.0, fill=0.0)
        assert torch.equal(flat, torch.cat(gradients))
        assert flat.abs().sum() > 0
        for one in (enc, twin):
            one.finish()


class Counted:
    """A kernel that notes when it is launched."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]


def test_the_host_that_stands_in_writes_the_same_bytes():
    """What a rank does whose GPU cannot compile the kernels; the sums of these gradients are exact in any order."""
    sizes = (700, 1, 33)
    for values, density in itertools.product(CODECS, (0.04, 0.3)):
        enc, rows = made(sizes, density, values=values)
        host = TorchEncoder(enc.layout, enc.form, "histogram")
        for step in range(3):
            message = torch.zeros(enc.form.num_bytes, dtype=torch.uint8)
            for slot, gradient in zip(enc.layout.slots, gradients_of(sizes, torch.float32, step), strict=True):
                enc.accumulate(slot, gradient, 0.5)
                host.accumulate(slot, gradient.cpu(), 0.5)
            enc.encode(rows[0], step=step)
            host.encode(message, step=step)
            assert torch.equal(rows[0].cpu(), message)
            assert torch.equal(enc.residual.cpu(), host.residual)
            host.finish()


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("values", CODECS)
def test_all_kernels_are_tried_before_training(values, hold):
    triton_warm.warm(16, values, 2, DEVICE, {torch.float32, torch.bfloat16}, hold=hold)


def test_kernels_that_compute_something_else_are_found_before_training(monkeypatch):
    monkeypatch.setattr(encode_kernels, "pick", Counted(encode_kernels.count, "pick", []))
    monkeypatch.setattr(Counted, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="was expected"):
        triton_warm.warm(16, "float32", 2, DEVICE, {torch.float32}, hold=False)


def test_another_density_takes_the_residual_along():
    """From indices to a bitmap and back: what is merged and what is left make up all gradients."""
    sizes, total, merged = (700, 33), 0.0, 0.0
    enc, _ = made(sizes, 0.04)
    for step, k in enumerate((2, 30, 1, 2)):
        enc.reform(MessageFormat(enc.layout.num_blocks, k, 16, "float32", enc.layout.fingerprint()))
        rows = torch.zeros(1, enc.form.num_bytes, dtype=torch.uint8, device=DEVICE)
        gradients = gradients_of(sizes, torch.float32, step)
        total = total + 0.5 * padded(enc.layout, gradients)
        accumulate(enc, gradients)
        enc.encode(rows[0], step=step)
        enc.receive(rows, rank=0, step=step)
        merged = merged + enc.merged.cpu()
        for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
            enc.deliver(slot, gradient, 0.5, scale=1.0, fill=0.0)
        enc.finish()
        assert enc.outcome() == Outcome(step, False, k)
    assert torch.equal(merged + enc.residual.cpu(), total)


@pytest.mark.parametrize("block", [1, 8, 64])
def test_other_blocks(block):
    enc, rows = made((700, 3), 0.2, block=block)
    accumulate(enc, gradients_of((700, 3), torch.float32, 0))
    scores = enc.scores.cpu().clone()
    enc.encode(rows[0], step=0)
    expected = SELECT["histogram"](scores.numpy(), enc.form.k, SelectorState())
    np.testing.assert_array_equal(pack_of(enc, rows[0]).indices, expected)


@pytest.mark.parametrize("kind", ["equal", "zero", "wide"])
def test_ties_zeros_and_a_wide_range(kind):
    enc, rows = made((1600,), 0.1)
    gradient = torch.zeros(1600)
    if kind == "equal":
        gradient.fill_(2.0)
    if kind == "wide":
        gradient = 2.0 ** torch.randint(-120, 120, (100, 1), generator=torch.Generator().manual_seed(0)).repeat(1, 16)
    accumulate(enc, [gradient.flatten().to(DEVICE)], 1.0)
    scores = enc.scores.cpu().numpy().copy()
    enc.encode(rows[0], step=0)
    pack = pack_of(enc, rows[0])
    assert len(pack.indices) == (0 if kind == "zero" else enc.form.k)
    exact = np.sort(scores)[::-1][: enc.form.k].sum()
    assert scores[pack.indices].sum() >= 0.95 * exact


def test_an_unused_parameter_is_held_back():
    for held, expected in ((True, []), (False, [2])):
        enc, rows = made((32, 32), 0.25)
        enc.residual[40] = 5.0
        small, none = (torch.full((32,), value, device=DEVICE) for value in (0.01, 0.0))
        enc.accumulate(enc.layout.slots[0], small, 1.0, hold=held)
        enc.accumulate(enc.layout.slots[1], none, 1.0, hold=held)
        enc.encode(rows[0], step=0)
        assert (pack_of(enc, rows[0]).indices.tolist() == [2]) == bool(expected)


@contextmanager
def beginning_with(program):
    """Let the interpreter's first program be another one than 0, as far as it can tell.

    It works on the tensors themselves: to copy them back, which changes nothing, would touch all of their memory.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (x + program, y, z)))
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


def untouched(length, dtype):
    """Zeros that take memory where they are written only."""
    return torch.from_numpy(np.zeros(length * dtype.itemsize, np.uint8)).view(dtype)


FAR = 2**31 // 16
"""A slot of a message whose first element is not counted by 32 bits. What nobody touches takes no memory."""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has no programs that begin late")
def test_a_message_of_more_than_2_to_the_31_elements_is_written_and_merged():
    chosen, values = untouched(FAR + 16, torch.int32), untouched(16 * FAR + 256, torch.int8)
    scales, counts = untouched(FAR + 16, torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    index, residual = untouched(FAR + 16, torch.int16), torch.full((32,), 127.0)
    chosen[FAR:] = -1
    chosen[FAR + 3] = 1
    shape = {"BLOCK": 16, "TILE": 16, "INT8": True}
    with beginning_with(FAR // 16):
        encode_kernels.pack[(1,)](
            chosen, residual, values, scales, index, counts, FAR + 16, **shape, SEGMENTS=True, **launch.OPTIONS
        )
        assert values[16 * (FAR + 3) :][:16].tolist() == [127] * 16
        assert residual.tolist() == [127.0] * 16 + [0.0] * 16
        merged, touched, verdict = torch.zeros(32), torch.zeros(2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        apply_kernels.merge[(1,)](
            chosen, values, scales, merged, touched, verdict, 0, 0, 0, FAR + 16, **shape, **launch.OPTIONS
        )
        assert merged.tolist() == [0.0] * 16 + [127.0] * 16
        assert touched.tolist() == [0, 1]
        apply_kernels.wipe[(1, 1)](chosen, merged, verdict, 0, FAR + 16, BLOCK=16, TILE=16, **launch.OPTIONS)
        assert not merged.any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has no programs that begin late")
def test_the_checksum_of_more_than_2_to_the_31_words():
    words = untouched(2**31 + 64, torch.int32)
    words[16 + 2**31 : 16 + 2**31 + 2] = torch.tensor([-7, 5], dtype=torch.int32)
    sums, units = torch.zeros(2, dtype=torch.int64), 2**29 + 8
    with beginning_with(2**31 // 16):
        header_kernels.word_sums[(1, 1)](words, sums, units, 0, TILE=16, ITERS=1, **launch.OPTIONS)
    assert sums.tolist() == [-2, -7 * (2**31 + 1) + 5 * (2**31 + 2)]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what comes before the second row would have to be there")
def test_rows_of_several_messages_lie_further_apart_than_32_bits_count():
    k = 2**30
    numbers, ends = untouched(3 * k, torch.int32), torch.ones(3, dtype=torch.int32)
    places, status = torch.tensor([9] * 3 * 16, dtype=torch.int16), torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 0]).int()
    with beginning_with(0):
        receive_kernels.expand[(1, 3)](places, ends, status, numbers, 2, k // 4, 1, 1, k, 3, TILE=16, **launch.OPTIONS)
    assert [numbers[row * k : row * k + 2].tolist() for row in range(3)] == [[9, -1]] * 3


# several ranks

SIZES = (700, 3)


def three(values="bfloat16", density=0.05, step=0):
    """This rank's encoder, the messages of three ranks, two of which have no GPU, and this rank's gradients."""
    enc, rows = made(SIZES, density, values=values, world_size=3)
    mine = gradients_of(SIZES, torch.float32, 4)
    accumulate(enc, mine)
    enc.encode(rows[1], step=step, rank=1)
    others = []
    for rank in (0, 2):
        other = TorchEncoder(enc.layout, enc.form)
        for slot, gradient in zip(enc.layout.slots, gradients_of(SIZES, torch.float32, rank), strict=True):
            other.accumulate(slot, gradient.cpu(), 0.5)
        message = torch.zeros(enc.form.num_bytes, dtype=torch.uint8)
        other.encode(message, step=step, rank=rank)
        rows[rank].copy_(message)
        others.append(other)
    return enc, rows, mine, others


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize("values", CODECS)
def test_messages_of_ranks_without_a_gpu_are_merged_as_there(values, density):
    enc, rows, _, (other, _) = three(values, density)
    packs = other.read(rows.cpu(), step=0)
    other.merge(packs)
    enc.receive(rows, rank=1, step=0)
    assert torch.equal(enc.merged.cpu(), other.merged)
    assert other.merged.abs().sum() > 0
    touched = torch.cat([pack.indices for pack in packs]).unique()
    assert torch.equal(enc.touched.cpu().nonzero().view(-1), touched)
    assert enc.outcome() == Outcome(0, False, sum(len(pack.indices) for pack in packs))
    enc.finish()
    assert enc.merged.abs().sum() == 0


def nothing_was_written(enc, mine, before, fill=0.0):
    """Neither sum nor mark nor gradient, and the residual is what it was before the step."""
    assert enc.merged.abs().sum() == 0
    assert not enc.touched.any()
    for slot, gradient in zip(enc.layout.slots, mine, strict=True):
        enc.deliver(slot, gradient, 0.5, scale=1.0, fill=fill)
        assert (gradient == fill).all()
    enc.finish()
    assert enc.merged.abs().sum() == 0
    torch.testing.assert_close(enc.residual, before, rtol=1e-5, atol=1e-5)


def changed(begin, dtype, value):
    """Another value somewhere, under a checksum that fits, as a faulty sender would write it."""

    def apply(form, message):
        at = begin(form) if callable(begin) else begin
        message[at : at + dtype.itemsize].view(dtype).fill_(value)
        data = message.cpu().numpy()
        first, second = checksum(data[HEADER_BYTES:], form.positions)
        sums = torch.tensor([seal(first, data[8:40].view(np.int64).tolist()), second])
        message[40:56].view(torch.int64).copy_(sums)

    return apply


def index(number):
    return lambda form: HEADER_BYTES + form.counts_bytes + 2 * number


FAULTS = {
    "truncated": (16, lambda form, m: m[form.num_bytes // 2 :].zero_()),
    "one bit": (16, lambda form, m: m[form.values_at + 5 : form.values_at + 6].bitwise_xor_(4)),
    "a bit of the header": (16, lambda form, m: m[33:34].bitwise_xor_(4)),
    "magic": (1, changed(0, torch.int64, 5)),
    "version": (1, changed(0, torch.int64, MAGIC | 2)),
    "format": (2, changed(56, torch.int64, 1)),
    "bucket": (4, lambda form, m: changed(8, torch.int64, int(m[8:16].view(torch.int64)) + 1)(form, m)),
    "another rank's": (4, changed(8, torch.int64, address(5, 0))),
    "a message of the step before": (8, changed(16, torch.int64, 2**40)),
    "flags": (32, changed(24, torch.int64, 64)),
    "too many blocks": (32, changed(32, torch.int64, 2**33)),
    "negative blocks": (32, changed(32, torch.int64, -1)),
    "fewer blocks than indices": (64, changed(32, torch.int64, 1)),
    "counts of segments": (64, changed(HEADER_BYTES, torch.int32, -1)),
    "index out of range": (128, changed(index(1), torch.int16, -1)),
    "index not ascending": (128, changed(index(1), torch.int16, 0)),
    "index twice": (128, lambda form, m: changed(index(1), torch.int16, int(m[index(0)(form)]))(form, m)),
    "value not finite": (256, changed(lambda form: form.values_at, torch.bfloat16, float("nan"))),
}


@pytest.mark.parametrize(("fault", "rank"), [(fault, 2 * (i % 2)) for i, fault in enumerate(FAULTS)])
def test_a_malformed_message_is_found_and_nothing_is_written(fault, rank):
    code, spoil = FAULTS[fault]
    enc, rows, mine, _ = three(step=7)
    before = torch.zeros_like(enc.residual)
    message = rows[rank].cpu()
    assert enc.form.read(message, rank=rank, bucket=0, step=7)
    spoil(enc.form, message)
    with pytest.raises(ValueError, match=f"rank {rank}, bucket 0, step 7 is refused"):
        enc.form.read(message, rank=rank, bucket=0, step=7)  # the host's judgement is the same
    rows[rank].copy_(message)
    enc.receive(rows, rank=1, step=7)
    nothing_was_written(enc, mine, before)
    what = {"magic": "no message of this program", "version": "version 2 of the message format, not 3"}
    what = what.get(fault, FAULTS_BY_CODE[code])
    with pytest.raises(ValueError, match=f"rank {rank}, bucket 0, step 7 is refused: .*{what}"):
        enc.outcome()
    assert enc.outcome() is None


@pytest.mark.parametrize("bad", ["bit", "too many", "beyond"])
def test_a_malformed_bitmap_is_found_and_nothing_is_written(bad):
    enc, rows, mine, _ = three(density=0.3, step=7)
    assert enc.form.bitmap
    message = rows[0].cpu()
    spoil = {
        "bit": lambda form, m: m[HEADER_BYTES + 1 : HEADER_BYTES + 2].bitwise_xor_(8),
        "too many": changed(HEADER_BYTES, torch.int32, -1),
        "beyond": changed(lambda form: form.values_at - 1, torch.uint8, 128),
    }[bad]
    spoil(enc.form, message)
    rows[0].copy_(message)
    enc.receive(rows, rank=1, step=7)
    nothing_was_written(enc, mine, torch.zeros_like(enc.residual))
    with pytest.raises(ValueError, match="rank 0, bucket 0, step 7 is refused"):
        enc.outcome()


def test_messages_of_another_size_are_refused_at_once():
    enc, rows, *_ = three()
    with pytest.raises(ValueError, match="where 3 messages of"):
        enc.receive(rows[:, :-16].contiguous(), rank=1, step=0)


@pytest.mark.parametrize("fill", [0.0, float("inf")])
def test_a_step_that_another_rank_gives_up_is_taken_back(fill):
    """Also without a GPU on that rank; the gradient becomes what a loss scaler has to see."""
    enc, rows, mine, (_, other) = three(values="int8")
    enc.receive(rows, rank=1, step=0)
    enc.finish()
    before = enc.residual.clone()
    second = gradients_of(SIZES, torch.float32, 9)
    accumulate(enc, second)
    enc.encode(rows[1], step=1, rank=1)
    messages = rows.cpu()
    for rank in (0, 2):
        give = other.give_up if rank == 2 else other.encode
        give(messages[rank], step=1, rank=rank)
    rows.copy_(messages)
    assert not torch.equal(enc.residual, before)
    enc.receive(rows, rank=1, step=1)
    nothing_was_written(enc, second, before, fill)
    assert enc.outcome() == Outcome(1, True, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_enters_no_residual(bad):
    enc, rows = made((300, 40), 0.2, values="int8")
    for step in range(3):
        gradients = gradients_of((300, 40), torch.float32, step)
        before = enc.residual.clone()
        if step == 1:
            gradients[0][17] = bad
        accumulate(enc, gradients)
        enc.encode(rows[0], step=step)
        enc.receive(rows, rank=0, step=step)
        if step == 1:
            nothing_was_written(enc, gradients, before)
        else:
            enc.finish()
        assert enc.outcome().dropped == (step == 1)


def test_buffers_are_of_float32_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.float64)
    try:
        layout = Layout.of([("weight", 100)], block=16)
        encoder = TritonEncoder(layout, MessageFormat(layout.num_blocks, 1, 16, "float32"), DEVICE, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in (encoder.residual, encoder.scores, encoder.merged)} == {torch.float32}
