"""What is stale follows the measured link, the same on all ranks, unless a controller decides."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.staleness.base import MeasuredStaleness
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.link.staleness import StaleChoice

BYTES = [4e6, 4e6, 4e6, 4e6]
READY = [0.1, 0.2, 0.3, 0.4]  # seconds until each bucket is ready; a step computes for the last
COLUMNS = 2 + len(BYTES)


def table(seconds, ready=READY, steps=3):
    """What a rank has seen of some steps, in which the link was busy for so long."""
    rows = np.full((SETTINGS.max_steps, COLUMNS), np.nan)
    for step in range(steps):
        rows[step] = [step, seconds, *ready]
    return rows


class Buckets(MeasuredStaleness):
    """Buckets of which the first so many are awaited."""

    def __init__(self, limit=1, sent=tuple(BYTES), **given):
        super().__init__(limit, {"w": torch.zeros(4)}, world_size=2, clock=HostClock(), **given)
        self.sent, self.awaited = list(sent), len(sent)

    def _sent_bytes(self):
        return self.sent

    def _awaited(self):
        return self.awaited

    def _await_first(self, number):
        self.awaited = number

    @property
    def stale_share(self):
        return 1.0 - self.awaited / len(self.sent)

    def average(self, bucket, squares=None):
        """Nothing is sent here: what a link is measured to take is given."""

    for_dense_sums = drain = wait_in_flight = predicted_sums = make_all_stale = state_dict = load_state_dict = average


def rank(number, answers=None):
    """A rank's control plane; rank 0 decides, and the others take its answers."""
    answers = [] if answers is None else answers

    def decide(decision):
        if number == 0:
            answers.append(decision())
        return answers[-1]

    return SimpleNamespace(rank=number, decide=decide)


def told(averager, seconds, **kwargs):
    """After a sync round in which both ranks have seen the link busy for so long."""
    averager.unpack(np.stack([table(seconds, **kwargs).ravel()] * 2), rank(0))
    return averager.awaited


def test_a_slow_link_makes_buckets_stale_and_a_fast_one_awaits_them_again():
    """All four buckets take 1.2 s on a link on which 0.4 s of computing hide a part; and next to nothing on a fast."""
    averager = Buckets()
    for _ in range(3):
        slow = told(averager, 1.2)
    assert slow < 4
    assert averager.choice.communication_bound
    for _ in range(40):
        fast = told(averager, 1e-3)
    assert fast == 4
    assert not averager.choice.communication_bound


def test_the_rate_is_that_of_what_was_sent_in_the_busy_seconds():
    averager = Buckets()
    told(averager, 0.5)
    assert averager.link.rate == pytest.approx(sum(BYTES) / 0.5)
    assert averager.metrics()["hetero/bandwidth"] == averager.link.rate
    expected = sum(averager.link.seconds(num_bytes) for num_bytes in BYTES)
    assert averager.metrics()["hetero/transfer_time"] == pytest.approx(expected)
    assert expected > 0.5, "a cautious estimate"
    assert averager.metrics()["hetero/delayed_share"] == averager.stale_share


def test_all_ranks_follow_rank_0_whatever_they_would_choose_themselves():
    """Another kind of host may round another way: only what rank 0 has decided counts."""
    answers, averagers = [], [Buckets(), Buckets()]
    everyone = np.stack([table(1.2).ravel()] * 2)
    averagers[0].unpack(everyone, rank(0, answers))
    averagers[1].unpack(np.zeros_like(everyone), rank(1, answers))
    assert averagers[1].awaited == averagers[0].awaited < 4
    assert averagers[1].link == averagers[0].link


@pytest.mark.parametrize("averager", [Buckets(limit=0), Buckets(sent=())], ids=["no limit", "nothing sent"])
def test_where_nothing_is_decided_nothing_is_told(averager):
    assert averager.pack().size == 0
    averager.unpack(np.zeros((2, 0)), SimpleNamespace(decide=None))
    assert averager.choice is None


def test_a_controller_takes_the_decision():
    averager = Buckets()
    assert averager.pack().shape == (SETTINGS.max_steps * COLUMNS,)
    averager.control_externally(True)
    assert averager.pack().size == 0


def test_steps_that_were_not_timed_change_nothing():
    averager = Buckets()
    told(averager, 1.2)
    before = averager.choice, averager.link, averager.awaited
    told(averager, 1.2, steps=0)
    assert (averager.choice, averager.link, averager.awaited) == before


def test_rank_0_logs_a_change_once_and_a_slow_link_as_a_warning(caplog):
    caplog.set_level(logging.INFO, logger="lightning_hetero")
    averager = Buckets()
    for _ in range(4):
        told(averager, 1.2)
    levels = [record.levelno for record in caplog.records]
    assert levels
    assert len(levels) <= 2
    assert set(levels) == {logging.WARNING}
    assert f"staleness: {4 - averager.awaited} of 4 gradient buckets" in caplog.records[-1].getMessage()


def test_a_second_set_of_parameters_takes_over_who_decides():
    before, after = Buckets(), Buckets()
    before.control_externally(True)
    before.keep_own()
    told(before, 1.2)
    after.follow(before)
    assert (after.externally_controlled, after.keeps_own, after.choice) == (True, True, before.choice)
    assert isinstance(after, StaleAverager)


def test_sums_of_a_checkpoint_have_to_fit(caplog):
    averager = Buckets()
    assert averager._fitting({"w": torch.ones(4)})["w"].tolist() == [1.0] * 4
    assert averager._fitting({"gone": torch.ones(4)}) == {}
    assert "gone is not trained any more" in caplog.text
    for number in (3, 5):
        with pytest.raises(ValueError, match=f"w has {number} elements, the parameter 4"):
            averager._fitting({"w": torch.ones(number)})


def test_rank_0_warns_when_the_link_becomes_the_bound_of_the_same_split(caplog):
    caplog.set_level(logging.INFO, logger="lightning_hetero")
    averager, levels = Buckets(), []
    for transfer in (0.2, 0.2, 2.0, 2.0, 0.2):
        averager._follow(StaleChoice(4, 0.4, 0.4, compute=0.4, transfer=transfer), 4, say=True)
        levels.append([record.levelno for record in caplog.records])
        caplog.clear()
    assert levels == [[], [], [logging.WARNING], [], [logging.INFO]]
