"""Messages: where their parts lie, that they arrive as they were sent, and which are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.compression import MessageFormat
from lightning_hetero.compression.message_header import FORMAT_VERSION, HEADER_BYTES, MAGIC
from lightning_hetero.compression.value_codecs import CODECS
from tests.compression.messages import FAULTS, written


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize(("num_blocks", "k"), [(1, 1), (1000, 7), (70_001, 333), (1000, 333), (131_073, 1)])
def test_every_part_of_every_row_begins_where_a_gpu_reads_16_bytes_at_once(num_blocks, k, values):
    for block in (1, 3, 16):
        form = MessageFormat(num_blocks, k, block, values)
        places = [HEADER_BYTES, HEADER_BYTES + form.counts_bytes, *form.parts_at, form.num_bytes]
        assert [at % 16 for at in places] == [0] * len(places)


def one_block(form):
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    form.write(message, np.array([1]), torch.ones(1, form.block), bucket=0, step=3, rank=1)
    return message


@pytest.mark.parametrize("less", [0, 16])
def test_a_message_of_another_version_is_refused_by_name_whatever_its_size(less):
    form = MessageFormat(100, 2, 16, "bfloat16")
    message = one_block(form)
    message[:8].view(torch.int64)[0] = MAGIC | 2
    version = (
        f"rank 1, bucket 0, step 3 is refused: it is in version 2 of the message format, not {FORMAT_VERSION}; install"
    )
    with pytest.raises(ValueError, match=version):
        form.read(message[: len(message) - less], rank=1, bucket=0, step=3)


def test_a_message_of_another_size_says_so():
    form = MessageFormat(100, 2, 16, "bfloat16")
    with pytest.raises(ValueError, match="where .* are due"):
        replace(form, k=40).read(one_block(form), rank=1, bucket=0, step=3)


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_message_is_refused_with_rank_and_bucket(fault):
    form, message, _ = written(rank=3)
    assert form.read(message, rank=3, bucket=0, step=7)
    with pytest.raises(ValueError, match=r"rank 3, bucket 0, step 7 is refused"):
        form.read(FAULTS[fault](form, message), rank=3, bucket=0, step=7)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 431), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(at, bit):
    form, message, _ = written(num_blocks=1000, indices=(1, 2, 900))
    message[at % form.num_bytes] ^= 1 << bit
    with pytest.raises(ValueError, match="refused"):
        form.read(message, rank=0, bucket=0, step=7)
