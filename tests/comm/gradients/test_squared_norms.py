"""Squared norms against float64 sums: of whatever lies where, in which parts, before and after averaging."""

from functools import partial

import pytest
import torch

from lightning_hetero.comm.gradients import squared_norms
from lightning_hetero.comm.gradients.squared_norms import BucketSquares, GradientNorms, square
from lightning_hetero.optim import AdamPreconditioner


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact(*tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def total(squares):
    return float(sum(value.double() for value in squares))


def nobody():
    raise AssertionError("the parameters of a bucket are looked up only for a preconditioner")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tensor", [random(7, 5), random(7, 5).t()[::2], random(1)], ids=["whole", "gaps", "one"])
def test_square(tensor, dtype, monkeypatch):
    monkeypatch.setattr(squared_norms, "CHUNK", 8)
    tensor = tensor.to(dtype)
    squares = square(tensor)
    assert {value.dtype for value in squares} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert total(squares) == pytest.approx(exact(tensor), rel=1e-5)


def test_a_large_tensor_is_summed_in_chunks(monkeypatch):
    monkeypatch.setattr(squared_norms, "CHUNK", 8)
    flat = random(20)
    expected = [exact(flat[i : i + 8]) for i in (0, 8, 16)]
    assert [float(value) for value in square(flat)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", [lambda: 8.0, lambda: torch.tensor(8.0)], ids=["number", "tensor"])
def test_the_factor_of_a_loss_scaler_is_left_out(scale):
    flat, weight = random(10), torch.nn.Parameter(torch.zeros(10))
    weight.grad = flat * 8
    norms = GradientNorms()
    norms.scaled_by(scale)
    for squares in (norms.of_bucket(flat * 8, nobody), norms.of_parameters([weight])):
        assert total(squares) == pytest.approx(exact(flat), rel=1e-5)
    norms.scaled_by(None)
    assert total(norms.of_bucket(flat, nobody)) == pytest.approx(exact(flat), rel=1e-5)


@pytest.mark.parametrize(("size", "ranks"), [(10, 1), (10, 3), (2, 4)])
def test_parts_of_an_averaged_bucket_are_the_whole(size, ranks):
    """Each element belongs to one rank, and ranks have as many as each other, to one."""
    flat, parts = random(size), []
    for rank in range(ranks):
        norms = GradientNorms()
        norms.divide(rank, ranks)
        assert norms.in_parts == (ranks > 1)
        parts.append(total(norms.of_average(flat, nobody)))
    assert sum(parts) == pytest.approx(exact(flat), rel=1e-5)
    ones = [total(GradientNorms(rank=r, ranks=ranks).of_average(torch.ones(size), nobody)) for r in range(ranks)]
    assert max(ones) - min(ones) <= 1


@pytest.mark.parametrize("size", [5, 8, 21])
def test_a_bucket_is_weighted_behind_its_norm_piece_by_piece(size, monkeypatch):
    monkeypatch.setattr(squared_norms, "CACHED", 8)
    flat = random(size)
    given = flat.clone()
    squares = GradientNorms().of_weighted(given, 0.25, nobody)
    assert len(squares) == -(-size // 8)
    assert total(squares) == pytest.approx(exact(flat), rel=1e-5)
    assert torch.equal(given, flat * 0.25)


def sparse():
    """Rows 1 and 4, the first of them twice, as an embedding gives it."""
    return torch.sparse_coo_tensor([[1, 4, 1]], random(3, 2), (6, 2), check_invariants=True)


def test_a_row_that_several_samples_share_counts_once():
    dense = exact(sparse().to_dense())
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    weight.grad = sparse()
    halves = [GradientNorms(rank=rank, ranks=2).of_average(sparse(), nobody) for rank in range(2)]
    given = sparse()
    for squares in (
        GradientNorms().of_bucket(sparse(), nobody),
        GradientNorms().of_parameters([weight]),
        [*halves[0], *halves[1]],
        GradientNorms().of_weighted(given, 0.5, nobody),
    ):
        assert total(squares) == pytest.approx(dense, rel=1e-5)
    assert exact(given.to_dense()) == pytest.approx(dense / 4, rel=1e-5)


def adam_of(weights):
    adam = torch.optim.Adam(weights)
    for i, p in enumerate(weights):
        moment = torch.empty_like(p).copy_(random(*p.shape, seed=50 + i).square() + 0.1)
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": moment}
    return adam, AdamPreconditioner([adam])


def test_norms_as_adam_scales_gradients():
    """Of parameters one after the other, where one is in the order of channels last, as DDP lays buckets out."""
    weights = [
        torch.nn.Parameter(random(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(random(5)),
    ]
    adam, preconditioner = adam_of(weights)
    gradients = [random(*p.shape, seed=9 + i) for i, p in enumerate(weights)]
    flat = torch.cat([gradients[0].permute(0, 2, 3, 1).reshape(-1), gradients[1]])
    expected = 0.0
    for p, g in zip(weights, gradients, strict=True):
        moment = adam.state[p]["exp_avg_sq"].double() / (1 - 0.999**20)
        expected += exact(g.double() / (moment.sqrt() + 1e-8))
        p.grad = g.clone()
    norms = GradientNorms(rank=1, ranks=2)
    norms.precondition(preconditioner)
    assert not norms.in_parts, "a part of a bucket may begin in the middle of a parameter"
    for squares in (
        norms.of_bucket(flat, lambda: weights),
        norms.of_average(flat, lambda: weights),
        norms.of_parameters(weights),
    ):
        assert total(squares) == pytest.approx(expected, rel=1e-4)
    norms.precondition(None)
    assert norms.in_parts


def test_parameters_without_a_gradient_give_nothing():
    assert GradientNorms().of_parameters([torch.nn.Parameter(torch.zeros(3))]) == []


def test_norms_of_a_step_are_taken_once():
    squares = BucketSquares()
    assert squares.take() is None
    flats = [random(6, seed=i) for i in range(4)]
    squares.take_local(flats[0], nobody)
    squares.take_weighted(flats[1].clone(), 0.5, nobody)
    squares.take_averaged(flats[2], nobody, stale=False)
    squares.take_averaged(flats[3], nobody, stale=True)
    local, averaged = squares.take()
    assert total(local) == pytest.approx(exact(*flats[:2]), rel=1e-5)
    assert total(averaged) == pytest.approx(exact(flats[2]), rel=1e-5)
    assert squares.take() is None
    assert squares.averaged == [], "the next step begins with nothing"
    assert total(squares.take_stale()) == pytest.approx(exact(flats[3]), rel=1e-5)
    assert squares.take_stale() == []


def test_parameters_of_one_bucket_may_belong_to_two_steps():
    owners = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 4, 2)]
    flat, squares = random(9), BucketSquares()
    squares.take_averaged(flat, partial(list, owners), stale=[False, True, False])
    assert total(squares.averaged) == pytest.approx(exact(flat[:3], flat[7:]), rel=1e-5)
    assert total(squares.stale) == pytest.approx(exact(flat[3:7]), rel=1e-5)


def test_what_a_failed_step_has_left_is_gone():
    squares = BucketSquares()
    squares.want(True)
    assert squares.due
    squares.take_local(random(3), nobody)
    for stale in (False, True):
        squares.take_averaged(random(3), nobody, stale=stale)
    squares.forget()
    assert not squares.due
    assert (squares.take(), squares.averaged, squares.take_stale()) == (None, [], [])
