"""Messages that are in order, and those that are not, for all who read some."""

import numpy as np
import pytest
import torch

from lightning_hetero.compression import MessageFormat, Pack
from lightning_hetero.compression.message_header import HEADER_BYTES, MAGIC, address, checksum, seal


def written(k=10, num_blocks=200_000, values="bfloat16", indices=(3, 65_535, 65_536, 199_999), rank=0):
    form = MessageFormat(num_blocks, k, 16, values)
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    blocks = torch.randn(len(indices), 16)
    sent = form.write(message, np.array(indices, dtype=np.int64), blocks, bucket=0, step=7, rank=rank)
    return form, message, Pack(torch.tensor(indices), sent)


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
