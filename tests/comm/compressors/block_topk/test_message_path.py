"""What the paths of both devices share: which residual a gradient goes into, which row a message, what is saved."""

import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass
from lightning_hetero.core.compression.settings import blocks_per_rank
from tests.comm.compressors.block_topk.paths import BLOCK, PADDED, SIZES, backward, cluster, flat_of, model_blocks

ONES = [torch.full((size,), float(i + 1)) for i, size in enumerate(SIZES.values())]


def test_parameters_lie_one_after_the_other_in_whole_blocks():
    model, parameters = model_blocks()
    starts = [model.slots[p].start for p in parameters.values()]
    assert starts == [0, 12, 20]
    assert model.layout.num_blocks == sum(PADDED.values()) // BLOCK
    assert model.num_bytes == 4 * sum(SIZES.values())


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("receivers", [1, 2, 3])
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16", "int8"])
def test_the_size_of_a_message_is_what_is_sent(density, receivers, value_dtype):
    model, _ = model_blocks()
    settings = BlockTopK(density=density, block=BLOCK, value_dtype=value_dtype)
    form = model.message_format(settings, density, receivers)
    assert form.k == blocks_per_rank(6, density, receivers)
    sent = (receivers - 1) * form.num_bytes
    assert model.message_size(settings, receivers).bytes(density) == sent


def test_a_gradient_goes_into_the_residual_with_its_weight():
    (path,) = cluster(1, 0.5)
    running = BackwardPass(weight=0.25)
    slots = list(path.model.layout.slots)
    for slot, gradient in zip(slots, ONES, strict=True):
        running.add(gradient.clone(), [slot], torch.futures.Future(), None)
        path.accumulate(running, everything=False)
    torch.testing.assert_close(path.encoder.residual, flat_of(ONES) / 4)
    assert len(running.spans) == 3
    assert path.seconds(running) > 0


def test_only_a_leader_has_a_residual_and_a_message():
    paths = cluster(4, 0.5, clusters=((0, 1), (2, 3)))
    assert [path.topology.is_leader for path in paths] == [True, False, True, False]
    for path in paths:
        backward(path, [one.clone() for one in ONES])
    assert [bool(path.encoder.residual.any()) for path in paths] == [True, False, True, False]
    written = [[bool(row.any()) for row in path.rows] for path in paths]
    assert written == [[True, False], [False, False], [False, True], [False, False]]


def test_nothing_more_is_added_once_a_gradient_is_not_finite():
    (path,) = cluster(1, 0.5)
    first, second, third = path.model.layout.slots
    running = BackwardPass()
    for slot, gradient in ((first, ONES[0]), (second, torch.full((8,), float("inf"))), (third, ONES[2])):
        running.add(gradient.clone(), [slot], torch.futures.Future(), None)
    path.accumulate(running, everything=True)
    assert not running.finite
    assert not path.residuals()["third"].any()


def test_messages_of_a_later_step_have_rows_of_their_own():
    (path,) = cluster(1, 0.5)
    backward(path, [one.clone() for one in ONES])
    before = path.rows
    kept = before.clone()
    path.use_rows(torch.zeros_like(before))
    backward(path, [one.clone() for one in ONES], step=1)
    assert torch.equal(before, kept)
    assert path.rows.any()


def test_residuals_go_by_name():
    (path,), (other,) = cluster(1, 0.5), cluster(1, 0.5)
    backward(path, [one.clone() for one in ONES])
    saved = path.residuals()
    assert {name: len(r) for name, r in saved.items()} == SIZES
    other.load_residuals(saved)
    torch.testing.assert_close(other.encoder.residual, path.encoder.residual)
    other.load_residuals({"second": saved["second"]})
    found = other.residuals()
    assert not found["first"].any()
    torch.testing.assert_close(found["second"], saved["second"])


def test_what_is_not_trained_keeps_its_residual():
    (path,) = cluster(1, 0.5)
    frozen = {"frozen": torch.tensor([1.0, 2.0])}
    path.load_residuals({**frozen, "first": torch.ones(10)})
    assert torch.equal(path.residuals()["frozen"], frozen["frozen"])
    path.load_residuals({})
    assert set(path.residuals()) == set(SIZES)
    path.keep_frozen(frozen)
    assert torch.equal(path.residuals()["frozen"], frozen["frozen"])


def test_unused_parameters_hold_their_residual_back_if_they_are_to():
    for hold in (False, True):
        (path,) = cluster(1, 1.0)
        path.hold_unused = hold
        path.load_residuals({"first": torch.ones(10)})
        gradients = [torch.zeros(10), *(one.clone() for one in ONES[1:])]
        backward(path, gradients)
        assert bool(path.residuals()["first"].any()) == hold


def test_selection_goes_on_where_it_was():
    (path,), (other,) = cluster(1, 0.5), cluster(1, 0.5)
    backward(path, [one.clone() for one in ONES])
    assert path.state()["selector"]["threshold"] > 0
    other.load_state(path.state())
    assert other.state() == path.state()
