"""Squared norms against float64 sums: of whatever lies where, in which parts, as Adam scales it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.comm.gradients.squared_norms import BucketSquares, GradientNorms

LAYOUTS = {
    "whole": lambda t: t,
    "gaps": lambda t: t.t()[::2],
    "channels last": lambda t: t[None, None].expand(1, 2, *t.shape).contiguous(memory_format=torch.channels_last),
    "sparse": lambda t: torch.sparse_coo_tensor([[1, 4, 1]], t[:3], (6, *t.shape[1:]), check_invariants=True),
}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact(*tensors):
    return sum(float(tensor.to_dense().double().square().sum()) for tensor in tensors)


def total(squares):
    return float(sum(value.double() for value in squares))


def nobody():
    raise AssertionError("the parameters of a bucket are looked up only for a preconditioner")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_squared_norms_of_gradients_and_buckets(layout, dtype, seed):
    """A row that several samples share counts once; norms of 16-bit values have 32; a loss scale is divided out."""
    gradient = LAYOUTS[layout](random(7, 5, seed=seed, dtype=dtype))
    weight, bare = torch.nn.Parameter(torch.zeros_like(gradient.to_dense())), torch.nn.Parameter(torch.zeros(3))
    weight.grad = gradient
    norms = GradientNorms()
    assert norms.of_parameters([bare]) == []
    for scale in (None, lambda: 8.0, lambda: torch.tensor(8.0)):
        norms.scaled_by(scale)
        expected = pytest.approx(exact(gradient) / (64 if scale else 1), rel=1e-5)
        for squares in (norms.of_parameters([bare, weight]), norms.of_bucket(gradient, nobody)):
            assert {one.dtype for one in squares} == {torch.float64 if dtype == torch.float64 else torch.float32}
            assert total(squares) == expected


@pytest.mark.parametrize("layout", ["whole", "sparse"])
@given(rows=st.integers(5, 40), ranks=st.integers(1, 5))
def test_parts_of_an_averaged_bucket_are_the_whole(layout, rows, ranks):
    """Each element belongs to one rank, and ranks have as many as each other, to one."""
    bucket = LAYOUTS[layout](random(rows, 1)) if layout == "sparse" else random(rows)
    parts = [GradientNorms(rank=rank, ranks=ranks).of_average(bucket, nobody) for rank in range(ranks)]
    assert sum(map(total, parts)) == pytest.approx(exact(bucket), rel=1e-5)
    ones = [total(GradientNorms(rank=r, ranks=ranks).of_average(torch.ones(rows), nobody)) for r in range(ranks)]
    assert sum(ones) == rows
    assert max(ones) - min(ones) <= 1


@pytest.mark.parametrize("size", [5, 2**17, 3_000_001])
def test_a_bucket_is_weighted_behind_its_norm_which_is_exact_however_large_it_is(size):
    """A float32 sum over millions of elements in one go is wrong in the fourth digit, as the noise may be."""
    flat = random(size)
    weighted, squares = flat.clone(), BucketSquares()
    squares.take_weighted(weighted, 0.25, nobody)
    torch.testing.assert_close(weighted, flat * 0.25, rtol=0, atol=0)
    squares.take_averaged(flat, nobody, stale=False)
    for taken in squares.take():
        assert total(taken) == pytest.approx(exact(flat), rel=2e-5)
