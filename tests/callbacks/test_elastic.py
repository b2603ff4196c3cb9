"""An elastic run ends with a summary of its merges, by whatever it ends; the rest is in the tests of its strategy."""

from types import SimpleNamespace

import pytest

from lightning_hetero.callbacks._elastic import ElasticCallback
from lightning_hetero.elastic import MergeRecord


def a_trainer(engine, rank=0):
    return SimpleNamespace(strategy=SimpleNamespace(engine=engine), world_size=2, is_global_zero=rank == 0)


def merged(count=1):
    merges = [
        MergeRecord(i, 64, (8, 8), (6, 2), (48, 16), (0.75, 0.25), perturbed=False, busy=(1.0, 1.0))
        for i in range(count)
    ]
    return SimpleNamespace(merges=merges, batch_sizes=(8, 6))


@pytest.mark.parametrize(
    ("error", "ending"), [(KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("boom\nmore"), "ValueError: boom")]
)
def test_an_exception_ends_a_run_with_the_summary_of_the_merges_so_far(caplog, error, ending):
    caplog.set_level("INFO", logger="lightning_hetero")
    callback, engine = ElasticCallback(), merged()
    callback.on_exception(a_trainer(engine, rank=1), None, error)
    callback.on_exception(a_trainer(None), None, error)
    callback.on_exception(a_trainer(merged(0)), None, error)
    assert caplog.messages == []
    callback.on_exception(a_trainer(engine), None, error)
    (text,) = caplog.messages
    assert text.startswith("hetero_elastic: 2.00x over equal shares of the samples")
    assert text.splitlines()[-1] == f"ended early: {ending}"


def test_a_run_is_summarized_once_and_a_further_run_again(caplog):
    caplog.set_level("INFO", logger="lightning_hetero")
    callback, trainer = ElasticCallback(), a_trainer(merged())
    callback.on_train_end(trainer, None)
    callback.on_exception(trainer, None, ValueError("in a later callback"))
    assert len(caplog.messages) == 1
    callback.on_train_end(a_trainer(merged()), None)
    assert len(caplog.messages) == 2
    assert "ended early" not in caplog.text
