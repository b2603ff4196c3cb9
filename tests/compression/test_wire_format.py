"""The message's format: where its parts lie, and which messages are of another."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_hetero.compression import MessageFormat
from lightning_hetero.compression.message_header import FORMAT_VERSION, HEADER_BYTES, MAGIC
from lightning_hetero.compression.value_codecs import CODECS


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize(("num_blocks", "k"), [(1, 1), (1000, 7), (70_001, 333), (1000, 333), (131_073, 1)])
def test_every_part_of_every_row_begins_where_a_gpu_reads_16_bytes_at_once(num_blocks, k, values):
    for block in (1, 3, 16):
        form = MessageFormat(num_blocks, k, block, values)
        places = [HEADER_BYTES, HEADER_BYTES + form.counts_bytes, *form.parts_at, form.num_bytes]
        assert [at % 16 for at in places] == [0] * len(places)


def written(form):
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    form.write(message, np.array([1]), torch.ones(1, form.block), bucket=0, step=3, rank=1)
    return message


@pytest.mark.parametrize("less", [0, 16])
def test_a_message_of_another_version_is_refused_by_name_whatever_its_size(less):
    form = MessageFormat(100, 2, 16, "bfloat16")
    message = written(form)
    message[:8].view(torch.int64)[0] = MAGIC | 2
    version = (
        f"rank 1, bucket 0, step 3 is refused: it is in version 2 of the message format, not {FORMAT_VERSION}; install"
    )
    with pytest.raises(ValueError, match=version):
        form.read(message[: len(message) - less], rank=1, bucket=0, step=3)


def test_a_message_of_another_size_says_so():
    form = MessageFormat(100, 2, 16, "bfloat16")
    with pytest.raises(ValueError, match="where .* are due"):
        replace(form, k=40).read(written(form), rank=1, bucket=0, step=3)
