"""Squared norms against float64 sums: of whatever lies where, in which parts, as Adam scales it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.comm.gradients.squared_norms import BucketSquares, GradientNorms
from lightning_hetero.optim import AdamPreconditioner

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
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


def test_norms_as_adam_scales_gradients(seed):
    """Of parameters one after the other, one of them in the order of channels last, as DDP lays buckets out."""
    weights = [
        torch.nn.Parameter(random(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(random(5)),
    ]
    adam = torch.optim.Adam(weights)
    for i, p in enumerate(weights):
        moment = torch.empty_like(p).copy_(random(*p.shape, seed=50 + i + seed).square() + 0.1)
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": moment}
    gradients = [random(*p.shape, seed=9 + i + seed) for i, p in enumerate(weights)]
    flat = torch.cat([random(3), gradients[0].permute(0, 2, 3, 1).reshape(-1), gradients[1]])[3:]
    expected = []
    for p, g in zip(weights, gradients, strict=True):
        moment = adam.state[p]["exp_avg_sq"].double() / (1 - 0.999**20)
        expected.append(exact(g.double() / (moment.sqrt() + 1e-8)))
        p.grad = g.clone()
    norms = GradientNorms()
    norms.divide(1, 2)
    assert norms.in_parts
    norms.precondition(AdamPreconditioner([adam]))
    assert not norms.in_parts, "a part of a bucket may begin in the middle of a parameter"
    squares = BucketSquares()
    squares.norms = norms
    squares.take_local(flat, lambda: weights)
    squares.take_averaged(flat, lambda: weights, stale=[True, False])
    local, averaged = squares.take()
    found = [total(one) for one in (local, norms.of_average(flat, lambda: weights), norms.of_parameters(weights))]
    assert found == pytest.approx([sum(expected)] * 3, rel=1e-4)
    assert [total(squares.take_stale()), total(averaged)] == pytest.approx(expected, rel=1e-4)


def test_norms_of_a_step_are_taken_once_and_those_of_a_failed_one_never():
    squares, flats = BucketSquares(), [random(6, seed=i) for i in range(3)]
    for failed in (True, False):
        squares.want(True)
        squares.take_local(flats[0], nobody)
        squares.take_averaged(flats[1], nobody, stale=False)
        squares.take_averaged(flats[2], nobody, stale=True)
        if failed:
            squares.forget()
        assert squares.due == (not failed)
        taken, stale = squares.take(), squares.take_stale()
        assert (taken is None and stale == []) == failed
    np.testing.assert_allclose([total(one) for one in (*taken, stale)], [exact(one) for one in flats], rtol=1e-5)
    assert (squares.take(), squares.averaged, squares.take_stale()) == (None, [], [])
