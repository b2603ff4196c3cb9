"""Limits of the detection of stragglers make sense together."""

from lightning_hetero.core.stragglers.settings import StragglerSettings


def test_a_lasting_straggler_has_to_cost_more_than_one_that_began():
    settings = StragglerSettings()
    assert 0 < settings.min_cost < settings.min_lasting_cost < 1
    assert 0 < settings.min_deviation < settings.first_deviation < 1
    assert 0 < settings.ended < 1
