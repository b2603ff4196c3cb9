"""Plans of a run through any front end: a given plan begins no earlier than the front end allows."""

from lightning_hetero.frontend.plan_access import PlanAccess
from tests.engine.test_sync_rounds import SMALLER, alone


def test_a_given_plan_begins_where_the_front_end_has_got_to():
    class Front(PlanAccess):
        engine = alone()
        _reached = (1, 4)

    entry = Front().adopt(SMALLER)
    assert (entry.epoch, entry.step) == (1, 4)
