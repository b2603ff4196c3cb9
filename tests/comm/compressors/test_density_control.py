"""A controller's choices reach messages and their staleness, and rank 0 logs what changes."""

import logging
from types import SimpleNamespace

import pytest

from lightning_hetero.comm.compressors.density_control import DensityControl
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.link.bandwidth import LinkEstimate

LINKS = (LinkEstimate(4e6), LinkEstimate(2e6), LinkEstimate(None))
CLUSTERS = ((0, 1), (2,), (3,))


class Blocks:
    """Messages with a density."""

    def __init__(self, density):
        self.density, self.topology = density, SimpleNamespace(clusters=CLUSTERS)

    def set_density(self, density):
        self.density = density


class Staleness:
    """Messages that are stale or not."""

    def __init__(self, limit, share):
        self.limit, self.stale_share, self.controlled = limit, share, False

    def control_externally(self, controlled):
        self.controlled = controlled

    def make_all_stale(self):
        self.stale_share = 1.0

    def make_all_synchronous(self):
        self.stale_share = 0.0


def choice(density, least=0.1, compute=1.0):
    """With ``least`` above ``compute``, even the least density takes longer than computing."""
    return DensityChoice(density, 10, 1.0, compute, 0.5, least)


def lines(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="lightning_hetero")


def test_a_density_is_set_and_logged_with_the_slowest_leader(caplog):
    """The rate that counts is the least that is known; the third link was not measured yet."""
    control, blocks = DensityControl(True), Blocks(0.1)
    control.apply(choice(0.02), None, blocks, None, LINKS)
    assert blocks.density == 0.02
    assert control.choice.density == 0.02
    ((level, text),) = lines(caplog)
    assert level == logging.INFO
    assert text.startswith("density 0.1 -> 0.02: rank 2 sends 2 MB/s at the least; ")


def test_what_stays_is_not_logged_and_no_other_rank_speaks(caplog):
    DensityControl(True).apply(choice(0.1), None, Blocks(0.1), None, LINKS)
    other = Blocks(0.1)
    DensityControl(False).apply(choice(0.02), None, other, None, LINKS)
    assert other.density == 0.02
    assert lines(caplog) == []


def test_a_link_that_becomes_the_bound_is_a_warning_once(caplog):
    control, blocks = DensityControl(True), Blocks(0.1)
    for least in (2.0, 2.0, 0.1):
        control.apply(choice(0.1, least=least), None, blocks, None, LINKS)
    assert [level for level, _ in lines(caplog)] == [logging.WARNING, logging.INFO]


@pytest.mark.parametrize(("limit", "stale", "share", "after"), [
    (1, True, 0.0, 1.0),
    (1, False, 1.0, 0.0),
    (1, True, 1.0, 1.0),
    (1, None, 1.0, 1.0),
    (0, True, 0.0, 0.0),
])  # fmt: skip
def test_messages_become_stale_only_if_somebody_decided_so_and_they_may(limit, stale, share, after, caplog):
    control, staleness = DensityControl(True), Staleness(limit, share)
    control.apply(choice(0.1), stale, Blocks(0.1), staleness, LINKS)
    assert staleness.stale_share == after
    assert staleness.controlled == (limit == 1 and stale is not None), "a rule of its own decides no more"
    assert len(lines(caplog)) == (share != after)
