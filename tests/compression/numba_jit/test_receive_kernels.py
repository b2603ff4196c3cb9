"""Numba's loops that read and add up messages, against the format and the reference."""

import pytest
import torch

from lightning_hetero.compression import MessageFormat, Pack
from lightning_hetero.compression.reference import merge_sparse
from lightning_hetero.compression.value_codecs import CODECS
from tests.compression.messages import written

pytest.importorskip("numba", exc_type=ImportError)

from tests.compression.numba_jit.test_encoder import made


@pytest.mark.parametrize("values", CODECS)
def test_messages_are_read_by_the_loops_as_the_format_reads_them(values, monkeypatch):
    form, message, pack = written(values=values)
    enc, _ = made([64], 1.0)
    enc.form = form
    second = written(values=values, rank=1)[1]
    expected = [form.read(row, rank=rank, bucket=0, step=7)[0] for rank, row in enumerate((message, second))]
    monkeypatch.setattr(MessageFormat, "read", lambda *args, **kwargs: pytest.fail("was asked"))
    packs = enc.read(torch.stack([message, second]), step=7)
    assert torch.equal(packs[0].values, pack.values)
    for got, due in zip(packs, expected, strict=True):
        assert torch.equal(got.indices, due.indices)
        assert torch.equal(got.values, due.values)


def test_packs_are_merged_as_the_reference_merges_them():
    enc, _ = made([16 * 50], 0.2)
    generator = torch.Generator().manual_seed(0)
    for sizes in ((5, 9), (0, 4, 50), (7,), (0, 0), (20, 1, 30, 30)):
        rows = [torch.randperm(50, generator=generator)[:n].sort().values for n in sizes]
        packs = [Pack(row, torch.randn(len(row), 16, generator=generator)) for row in rows]
        ours, expected = enc.merge_sparse(packs), merge_sparse(packs)
        assert torch.equal(ours.indices, expected.indices)
        assert torch.equal(ours.values, expected.values)
