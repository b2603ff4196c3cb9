"""State of PowerSGD by parameter: it follows its parameters into other buckets, and each gradient is a matrix."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_hetero.comm.compressors.powersgd_state import BucketState, Matrices

SHAPES = {"a": (8, 12), "b": (5,), "c": (12, 8), "d": (8, 12), "e": (), "f": (0, 3), "g": (9, 4, 3, 3)}
RANK = 2


def bucket_of(number, names, parameters, last=False):
    """A bucket as DDP hands it over; the gradient of a convolution lies as channels last."""
    flat = torch.arange(float(sum(parameters[name].numel() for name in names)))
    views, begin = [], 0
    for name in names:
        p = parameters[name]
        views.append(flat[begin : begin + p.numel()].as_strided(p.shape, p.stride(), begin))
        begin += p.numel()
    return SimpleNamespace(
        index=lambda: number,
        buffer=lambda: flat,
        gradients=lambda: views,
        parameters=lambda: [parameters[name] for name in names],
        is_last=lambda: last,
    )


@pytest.fixture
def parameters():
    made = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    made["g"] = made["g"].to(memory_format=torch.channels_last)
    return made


def state_of(parameters, seed=0):
    return BucketState(PowerSGDState(None, RANK, 2, random_seed=seed), {p: name for name, p in parameters.items()})


def test_every_gradient_is_a_view_that_torch_takes_for_a_matrix(parameters):
    bucket = bucket_of(0, list(SHAPES), parameters)
    found = Matrices(bucket).gradients()
    assert [tuple(g.shape) for g in found] == [(8, 12), (5,), (12, 8), (8, 12), (1,), (9, 3, 3, 4)]
    for gradient in found:
        gradient.view(gradient.shape[0], -1).fill_(-1.0)
    assert (bucket.buffer() == -1.0).all(), "each is a view of the bucket"


def test_state_follows_its_parameters_into_other_buckets(parameters):
    """Errors and matrices of each are what they were, whatever the buckets; what is new draws its own."""
    kept = state_of(parameters)
    for number, names in enumerate((["a", "b", "c"], ["d", "e", "f", "g"])):
        kept.lay_out(bucket_of(number, names, parameters))
    for number, error in kept.state.error_dict.items():
        error.copy_(torch.arange(float(len(error))) + 1000 * number)
    errors, matrices = kept.errors(), kept.matrices()
    assert errors.keys() == SHAPES.keys()
    assert {name: m.numel() for name, m in matrices.items()} == {"a": 24, "c": 16, "d": 24, "g": 72}
    errors = {name: e.clone() for name, e in errors.items()}
    for layout in (
        (["g", "c"], ["d"], ["e", "a", "b"]),
        (["a", "c", "d", "g"],),
        (["d", "b"], ["c", "g", "a", "f", "e"]),
    ):
        for number, names in enumerate(layout):
            kept.lay_out(bucket_of(number, names, parameters))
            first = kept.state.q_memory_dict[number][: len(matrices[names[0]])] if names[0] in matrices else None
            assert first is None or torch.equal(first, matrices[names[0]])
        for name, e in errors.items():
            assert torch.equal(kept.errors()[name], e), name
        for name, m in matrices.items():
            assert torch.equal(kept.matrices()[name], m), name
    assert kept.matrices()["d"].abs().sum() > 0


def test_matrices_lie_as_torch_takes_them_one_shape_after_another(parameters):
    kept = state_of(parameters)
    kept.lay_out(bucket_of(0, ["a", "c", "d"], parameters))
    matrices = kept.matrices()
    expected = torch.cat([matrices["a"], matrices["d"], matrices["c"]])
    assert torch.equal(kept.state.q_memory_dict[0], expected)
    assert kept.state.p_memory_dict[0].numel() == (8 + 8 + 12) * RANK


def test_the_device_takes_a_step_back_that_is_left_out(parameters):
    """On the host nothing is read: the state is chosen by the flag when it is needed next."""
    for finite in (0.0, 1.0):
        kept, bucket = state_of(parameters), bucket_of(0, ["a", "b"], parameters)
        kept.lay_out(bucket, torch.tensor(1.0))
        before = kept.matrices()["a"].clone()
        kept.lay_out(bucket, torch.tensor(finite))
        kept.state.error_dict[0] = torch.full_like(bucket.buffer(), float("nan") if finite == 0.0 else 7.0)
        kept.state.q_memory_dict[0].fill_(float("nan") if finite == 0.0 else 5.0)
        assert torch.equal(kept.errors()["a"], torch.full((96,), 7.0 * finite))
        assert torch.equal(kept.matrices()["a"], before if finite == 0.0 else torch.full((24,), 5.0))


def test_a_step_that_is_left_out_is_taken_back_before_the_next_begins(parameters):
    kept, bucket = state_of(parameters), bucket_of(0, ["a", "b"], parameters)
    kept.lay_out(bucket, torch.tensor(1.0))
    before = kept.matrices()["a"].clone()
    kept.lay_out(bucket, torch.tensor(0.0))
    kept.state.error_dict[0] = torch.full_like(bucket.buffer(), float("nan"))
    kept.state.q_memory_dict[0].fill_(float("nan"))
    kept.lay_out(bucket, torch.tensor(1.0))
    assert not kept.state.error_dict[0].any()
    assert torch.equal(kept.state.q_memory_dict[0], before)


def test_residuals_take_another_factor_wherever_they_are(parameters):
    """In a bucket, of a step that was left out, and of parameters whose new bucket has not come yet."""
    kept, first = state_of(parameters), bucket_of(0, ["a"], parameters)
    kept.lay_out(first)
    kept.lay_out(bucket_of(1, ["b", "c"], parameters))
    for error in kept.state.error_dict.values():
        error.fill_(3.0)
    kept.lay_out(first, torch.tensor(0.0))
    kept.state.error_dict[0] = torch.full_like(first.buffer(), float("nan"))
    kept.lay_out(bucket_of(1, ["c"], parameters))
    kept.scale_by(2.0)
    for name, error in kept.errors().items():
        assert (error == 6.0).all(), name


def test_what_is_loaded_takes_the_place_of_all_that_was_there(parameters):
    kept, bucket = state_of(parameters), bucket_of(0, ["a"], parameters)
    kept.lay_out(bucket, torch.tensor(0.0))
    kept.load({"a": torch.full((96,), 2.0)}, {"a": torch.full((24,), 4.0)})
    assert [kept.state.error_dict, kept.state.p_memory_dict, kept.state.q_memory_dict] == [{}, {}, {}]
    kept.lay_out(bucket)
    assert torch.equal(kept.errors()["a"], torch.full((96,), 2.0))
    assert torch.equal(kept.matrices()["a"], torch.full((24,), 4.0))


def test_dimensions_of_one_element_do_not_hide_those_of_more():
    """Of equal strides the longer one is the rows, else there would be one row and no thin matrix."""
    p = torch.zeros(12, 1, 8).transpose(0, 2)
    assert [tuple(g.shape) for g in Matrices(bucket_of(0, ["p"], {"p": p})).gradients()] == [(12, 1, 8)]


def test_a_matrix_that_thin_ones_would_not_make_smaller_is_sent_as_it_is(parameters):
    """As torch has it: 8 x 8 by rank 2 is half of its elements, which has to be more than a factor of 2."""
    parameters["h"] = torch.zeros(8, 8)
    kept = state_of(parameters)
    kept.lay_out(bucket_of(0, ["a", "h"], parameters))
    assert list(kept.matrices()) == ["a"]


def test_all_ranks_draw_the_same_and_another_rank_of_matrices_draws_anew(parameters):
    bucket = bucket_of(0, ["a", "d"], parameters)
    one, other = state_of(parameters), state_of(parameters)
    one.lay_out(bucket)
    other.lay_out(bucket)
    assert torch.equal(one.state.q_memory_dict[0], other.state.q_memory_dict[0])
    other.load(one.errors(), {"a": torch.ones(12), "d": torch.ones(24)})
    other.lay_out(bucket)
    assert torch.equal(other.matrices()["d"], torch.ones(24))
    assert other.matrices()["a"].numel() == 24
