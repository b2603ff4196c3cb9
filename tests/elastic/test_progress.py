"""Progress of a rank in a mega-batch: what is drawn, trained on and counted."""

import pytest

from lightning_hetero.data.mega_batch import MegaBatch
from lightning_hetero.elastic.progress import MegaBatchProgress


def begun():
    progress = MegaBatchProgress()
    progress.begin(1, MegaBatch.at(0, samples=20, size=12, batch_sizes=(4, 2)), first=range(0, 4))
    return progress


def test_batches_are_counted_and_the_position_is_behind_the_last():
    progress = begun()
    for span in (range(0, 4), range(6, 9)):
        progress.claimed(span)
        assert progress.draw() == span
        assert progress.finish_batch().stop == 12
    assert (progress.position, progress.updates, progress.samples) == ((1, 9), 2, 7)
    assert progress.busy_seconds > 0.0
    progress.begin(1, MegaBatch.at(12, samples=20, size=8, batch_sizes=(4, 2)), first=range(12, 16))
    assert (progress.position, progress.updates, progress.samples) == ((1, 12), 0, 0)


def test_a_batch_is_trained_on_before_the_next_is_drawn_and_drawn_before_it_is_trained_on():
    progress = begun()
    with pytest.raises(RuntimeError, match="no batch drawn"):
        progress.finish_batch()
    progress.draw()
    with pytest.raises(RuntimeError, match="num_workers=0"):
        progress.draw()


def test_at_the_end_of_an_epoch_nothing_is_left_until_the_next_begins():
    progress = begun()
    progress.end_epoch(1, 20)
    assert (progress.draw(), progress.draw(), progress.epoch_over, progress.position) == (None, None, True, (1, 20))
    with pytest.raises(RuntimeError, match="no batch drawn"):
        progress.finish_batch()
    progress.begin(2, MegaBatch.at(0, samples=20, size=12, batch_sizes=(4, 2)), first=range(0, 4))
    assert not progress.epoch_over


def test_names_of_mega_batches_are_never_given_twice():
    progress = begun()
    assert len({progress.next_name() for _ in range(5)}) == 5
