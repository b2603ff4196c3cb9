"""Batch sampler of a session: the batch size that frameworks read from it."""

from types import SimpleNamespace

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.frontend.session.batches import SessionBatches


def test_the_batch_size_is_the_total_of_all_ranks():
    engine = SimpleNamespace(plan=BatchPlan(10, (7, 3)))
    assert SessionBatches(SimpleNamespace(engine=engine)).batch_size == 10
    engine.plan = None
    assert SessionBatches(SimpleNamespace(engine=engine)).batch_size == 0
