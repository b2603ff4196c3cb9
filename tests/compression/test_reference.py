"""The definition of block top-k: what is sent and what stays, sums of packs, and ties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.compression import Pack, block_scores, compress, merge, select_exact
from lightning_hetero.compression.reference import merge_sparse
from lightning_hetero.compression.value_codecs import CODECS


@pytest.mark.parametrize("values", CODECS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), k=st.integers(1, 12), numel=st.integers(1, 180))
def test_what_is_sent_and_what_stays_make_up_what_there_was(values, seed, k, numel):
    generator = torch.Generator().manual_seed(seed)
    residual, gradient = torch.randn(192, generator=generator), torch.randn(numel, generator=generator)
    due = residual.clone()
    due[:numel].add_(gradient, alpha=0.25)
    pack = compress(residual, gradient, 0.25, k, value_dtype=values)
    assert len(pack.indices) == k
    assert (pack.indices.diff() > 0).all()
    assert torch.equal(merge([pack], 12) + residual, due)
    scores = block_scores(due)
    assert scores[pack.indices].min() >= scores.sort(descending=True).values[k - 1]


def test_a_block_scores_by_the_sum_of_its_magnitudes():
    """The one with the largest element is not the one with the largest sum."""
    flat = torch.zeros(48)
    flat[:16], flat[20], flat[33:35] = -0.5, 3.0, torch.tensor([2.0, -2.5])
    assert block_scores(flat).tolist() == [8.0, 3.0, 4.5]
    assert compress(flat, torch.zeros(48), 1.0, 1, value_dtype="float32").indices.tolist() == [0]


def test_of_equal_scores_the_first_blocks_are_taken_and_none_of_0():
    assert select_exact(torch.tensor([2.0, 3.0, 2.0, 0.0, 2.0]), 3).tolist() == [0, 1, 2]
    assert select_exact(torch.tensor([0.0, 1.0, 0.0]), 3).tolist() == [1]
    assert select_exact(torch.zeros(4), 2).tolist() == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 2**16))
def test_a_sparse_sum_is_the_dense_one_bitwise(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    packs = [
        Pack(torch.tensor(sorted(rows), dtype=torch.int64), torch.randn(len(rows), 16, generator=generator))
        for rows in blocks
    ]
    total = merge_sparse(packs)
    assert total.indices.tolist() == sorted(set().union(*blocks))
    assert torch.equal(merge([total], 10), merge(packs, 10))
