"""Training data of a session: where a loaded state goes on, and which of its measurements still count."""

import pytest

from lightning_hetero.frontend.session.data import SessionData
from tests.engine.test_sync_rounds import alone


@pytest.mark.parametrize(("begins", "interval"), [(3, {"noise": 1}), (0, {}), (4, {})])
def test_a_saved_interval_counts_only_for_a_pass_that_begins_where_it_ends(begins, interval):
    data = SessionData(alone())
    data.load({"step": 3, "epoch": 0, "stream": None, "interval": {"noise": 1}})
    assert data.begin_pass(begins) == interval
    assert data.begin_pass(begins) == {}
