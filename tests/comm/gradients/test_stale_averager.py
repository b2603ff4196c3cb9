"""What an averager with a delay says of itself before anything is delayed, and how it extrapolates."""

import inspect

import pytest
import torch

from lightning_hetero.comm.gradients.stale_averager import StaleAverager


def stale_averager(**given):
    """One with nothing behind what the rest of the package asks."""
    empty = {name: lambda self, *args: None for name in StaleAverager.__abstractmethods__}
    settings = {"limit": 1, "parameters": {"a": torch.zeros(2)}, "world_size": 3, "topology": None, **given}
    return type("Empty", (StaleAverager,), empty)(**settings)


def test_at_first_nothing_is_delayed_and_the_link_decides():
    averager = stale_averager(limit=0)
    assert (averager.limit, list(averager.parameters), averager.world_size) == (0, ["a"], 3)
    assert averager.topology is None
    assert averager.step_kind == frozenset()
    assert averager.choice is None
    assert not averager.keeps_own
    assert not averager.externally_controlled
    assert averager.flags.exact, "the base class was set up as well"


def test_a_controller_takes_the_decision_and_gives_it_back():
    averager = stale_averager()
    averager.control_externally(True)
    assert averager.externally_controlled
    assert not averager.keeps_own
    averager.control_externally(False)
    assert not averager.externally_controlled


def test_own_parts_are_kept_once_that_is_asked_for():
    averager = stale_averager()
    averager.keep_own()
    assert averager.keeps_own
    assert not averager.externally_controlled


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_extrapolation_is_by_the_share_and_no_more_than_by_the_number_of_parts(parts):
    for share in torch.linspace(0.01, 1.0, 50).tolist():
        factor = StaleAverager.extrapolation_factor(share, parts)
        assert factor == (parts if share * parts < 1.0 else pytest.approx(1.0 / share))
    assert StaleAverager.extrapolation_factor(0.0, parts) == parts
    assert isinstance(StaleAverager.extrapolation_factor(0.0, parts), float)


def test_equal_parts_add_up_to_what_is_extrapolated():
    parts = [torch.full((3,), 0.25)] * 4
    torch.testing.assert_close(parts[0] * StaleAverager.extrapolation_factor(0.25, 4), sum(parts))


@pytest.mark.parametrize("left_out", sorted(StaleAverager.__abstractmethods__))
def test_nothing_of_what_is_asked_may_be_left_out(left_out):
    rest = {name: lambda self, *args: None for name in StaleAverager.__abstractmethods__ - {left_out}}
    with pytest.raises(TypeError, match=left_out):
        type("Part", (StaleAverager,), rest)(1, {}, 2, None)
    assert inspect.isabstract(StaleAverager)
