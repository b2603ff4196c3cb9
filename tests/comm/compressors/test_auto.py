"""``compression="auto"`` sends dense sums until enough steps were timed on all ranks, and then chooses once."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors import auto
from lightning_hetero.comm.compressors.auto import AUTO, AutoAverager, AutoCompression
from lightning_hetero.comm.link.link_benchmark import BENCHMARK
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.compression.auto import Computing, LinkMeasurement, choose_density
from lightning_hetero.core.compression.settings import Automatic
from lightning_hetero.core.observations import StepObservations
from tests.comm.contexts import context_of

FIELDS = StepObservations.FIELDS
SLOW, FAST = (LinkMeasurement(1e-3, rate, 1e-3, 2, 1_000_000, 4) for rate in (1e6, 1e12))
SECONDS = {"forward": 0.01, "backward": 0.02, "first_bucket": 0.005, "overlapped_sync": 0.0, "last_sync": 0.001}


def row(step, slower=1.0):
    """A row of the timer: its number, the fields of an observation, and the end of a bucket."""
    values = {"local_batch_sizes": 8.0, "step_time": 0.05, **SECONDS}
    return np.array([float(step), *(slower * values.get(name, 0.0) for name in FIELDS), 0.03])


class Timer:
    """Steps that this rank has timed."""

    def __init__(self):
        self.rows, self.synced_steps, self.interrupts = deque(), 0, 0

    def step(self, timed=True):
        self.synced_steps += 1
        if timed:
            self.rows.append(row(self.synced_steps))

    def interrupt(self):
        self.interrupts += 1


def chooser(monkeypatch, link, rank=0, other=lambda table: table):
    """A choice of this rank, and what ranks gathered for it; the other rank's table is ``other`` of this one's."""
    monkeypatch.setattr(auto, "measure", lambda *_: link)
    gathered = []
    control = SimpleNamespace(
        rank=rank, world_size=2, gather=lambda table: gathered.append(table) or np.stack([table, other(table)])
    )
    topology = Topology.flat_over(rank, 2)
    return AutoCompression(Automatic(), {"w": torch.zeros(3)}, control, topology), gathered


def decided(choice, timer, timed=lambda step: True, last=100, **more):
    """Step after which there is a choice, and the choice."""
    for step in range(1, last):
        timer.step(timed(step))
        found = choice.try_decide(timer, **more)
        if found is not None:
            return step, found
    return None, None


def test_nobody_is_asked_before_the_first_try_and_three_timed_steps_are_enough(monkeypatch):
    choice, gathered = chooser(monkeypatch, SLOW)
    timer = Timer()
    assert decided(choice, timer, lambda step: step > 5)[0] == AUTO.first_try_step == 8
    assert len(gathered) == timer.interrupts == 1
    assert gathered[0].shape == (SETTINGS.max_steps, len(FIELDS) + 1)
    assert np.isfinite(gathered[0][:, 0]).sum() == 3


def test_ranks_wait_for_steps_that_all_of_them_have_timed(monkeypatch):
    """The other rank reports only those from the tenth on; so the twelfth is the third that both have."""

    def late(table):
        rows = table.copy()
        rows[~(rows[:, 0] >= 10)] = np.nan
        return rows

    choice, gathered = chooser(monkeypatch, SLOW, other=late)
    assert decided(choice, Timer())[0] == 12
    assert len(gathered) == 5


def test_where_no_step_can_be_timed_the_link_alone_decides_in_the_end(monkeypatch):
    choice, _ = chooser(monkeypatch, SLOW)
    step, found = decided(choice, Timer(), lambda step: False)
    assert step == AUTO.max_step == 32
    assert found.density == choose_density(SLOW, Automatic().densities, "bfloat16", Computing()).density is not None


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow", "fast"])
def test_the_choice_is_that_of_the_measured_link_and_steps(link, monkeypatch, caplog):
    """On a slow link block top-k, on a fast one dense sums; rank 0 says so."""
    caplog.set_level("INFO", logger="lightning_hetero")
    for rank in (0, 1):
        choice, _ = chooser(monkeypatch, link, rank=rank)
        _, found = decided(choice, Timer())
        assert (found.density is None) == (link is FAST)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text == f"compression='auto': {found.describe()}"


def test_stale_gradients_count_for_the_choice(monkeypatch):
    """A dense sum that a step of computing hides needs no compression."""
    sends_in_20_ms = LinkMeasurement(1e-5, 4e6 / 0.02, 1e-3, 2, 1_000_000, 4)
    found = [decided(chooser(monkeypatch, sends_in_20_ms)[0], Timer(), may_be_stale=may)[1] for may in (False, True)]
    assert found[1].density is None
    assert found[0] != found[1]


def test_it_may_become_any_of_the_candidates(monkeypatch):
    settings = Automatic()
    choice, _ = chooser(monkeypatch, SLOW)
    assert choice.placeholder.density in settings.densities
    assert choice.placeholder.value_dtype == settings.value_dtype


def test_block_top_k_sends_no_step_densely_once_it_is_chosen(monkeypatch):
    choice, timer = chooser(monkeypatch, SLOW)[0], Timer()
    averager = AutoAverager(choice, context_of({"w": torch.nn.Parameter(torch.zeros(4096))}, 2))
    averager._observer = timer
    assert (averager.undecided, averager.sends_blocks) == (True, False)
    while averager.undecided:
        timer.step()
        assert averager.end_step(may_be_stale=False)
    assert averager.sends_blocks
    assert averager.density == choose_density(SLOW, Automatic().densities, "bfloat16", Computing()).density


def test_the_link_is_measured_by_the_slowest_rank(monkeypatch):
    monkeypatch.setattr(auto, "exchange_seconds", lambda size, topology, device: 1e-6 * size)
    monkeypatch.setattr(auto, "encode_seconds", lambda *_: 0.25)
    control = SimpleNamespace(gather=lambda mine: np.stack([mine, [3.0, 2.0, 4.0] * mine]))
    found = auto.measure({"w": torch.zeros(3)}, control, Topology.flat_over(0, 2), Automatic())
    small, large = BENCHMARK.latency_bytes, BENCHMARK.probe_bytes
    assert found.latency == pytest.approx(3e-6 * small)
    assert found.rate == pytest.approx(large / (2e-6 * (large - small)))
    assert found.encode == 1.0
