"""The header of a message: what its sums cover, and what a reader says of another one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.compression.message_header import (
    FORMAT_VERSION,
    HEADER_BYTES,
    HEADER_WEIGHTS,
    MAGIC,
    MESSAGE_KIND,
    Header,
    address,
    checksum,
    foreign,
    refusal,
    seal,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.tuples(*[INT64] * 8))
def test_words_are_read_as_they_were_written(words):
    data = np.zeros(HEADER_BYTES + 16, np.uint8)
    data[:HEADER_BYTES].view(np.int64)[:] = words
    header = Header.of(data)
    assert tuple(header) == words
    assert header.sealed_fields == (header.address, header.step, header.flags, header.blocks) == words[1:5]


@given(first=INT64, fields=st.tuples(*[INT64] * 4), at=st.integers(0, 3), other=INT64)
def test_the_first_sum_covers_every_field_modulo_2_to_the_64(first, fields, at, other):
    sealed = seal(first, fields)
    assert -(2**63) <= sealed < 2**63
    assert (sealed - first - sum(w * f for w, f in zip(HEADER_WEIGHTS, fields, strict=True))) % 2**64 == 0
    changed = (*fields[:at], other, *fields[at + 1 :])
    assert (seal(first, changed) == sealed) == (other == fields[at]), "weights are odd, so no change of a field is lost"


def test_checksums_tell_values_and_places():
    payload = np.arange(16, dtype=np.int32)
    positions = np.arange(1, 17)
    sums = checksum(payload.view(np.uint8), positions)
    assert sums == (120, int((payload * positions).sum()))
    swapped = payload[[1, 0, *range(2, 16)]].copy()
    assert checksum(swapped.view(np.uint8), positions) == (sums[0], sums[1] - 1)


def test_addresses_of_all_ranks_and_buckets_differ():
    assert len({address(rank, bucket) for rank in range(5) for bucket in range(7)}) == 35
    assert divmod(address(3, 2**31), 2**32) == (3, 2**31)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(5, "no message of this program"), (MAGIC | (FORMAT_VERSION + 1), f"not {FORMAT_VERSION}; install the same")],
)
def test_what_is_foreign_says_so(kind, words):
    assert kind != MESSAGE_KIND
    assert words in foreign(kind)
    assert "rank 1, bucket 2, step 3 is refused: it" in str(refusal(foreign(kind), rank=1, bucket=2, step=3))
