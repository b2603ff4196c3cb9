"""Epochs cut into mega-batches: bounds, positions, and that every sample is in one of them."""

import pytest

from lightning_hetero.elastic.config import ElasticConfig
from lightning_hetero.elastic.epoch_layout import EpochLayout


def layout(samples=100, batch_size=4, world_size=3, mega=24, **more):
    return EpochLayout.of(ElasticConfig(mega_batch_size=mega), samples, batch_size, world_size, **more)


@pytest.mark.parametrize("samples", [12, 24, 25, 47, 48, 100])
def test_mega_batches_go_through_the_epoch(samples):
    found, position = layout(samples), 0
    while (mega := found.mega_batch(position, (4, 4, 4))) is not None:
        assert mega.start == position < mega.stop
        position = mega.stop
    assert position == samples
    assert found.steps_done((2, position)) == 3 * found.steps_per_epoch == 3 * -(-samples // 12)


def test_a_step_of_a_synchronous_run_is_at_its_samples():
    found = layout()
    assert [found.position_of(1, step) for step in (0, 3, 9)] == [(1, 0), (1, 36), (1, 100)]
    assert [found.steps_done(found.position_of(1, step)) for step in (0, 3, 9)] == [9, 12, 18]


def test_batch_sizes_are_within_the_bounds_and_equal_where_there_is_another_number():
    found = layout(batch_size=16, mega=48)
    assert found.bounded((1, 8, 99)) == (2, 8, 16)
    assert found.bounded((8, 8)) == found.bounded(()) == (16, 16, 16)
    assert layout(batch_size=16, mega=48, least=5).bounded((1, 8, 99)) == (5, 8, 16)


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="11 samples .* each of 3 workers"):
        layout(11, drop_last=True)
    with pytest.raises(ValueError, match="mega_batch_size=8 is less than a batch"):
        layout(mega=8)
