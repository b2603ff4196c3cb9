"""How many stragglers are found on emulated devices: real planner, schedule and timers, in closed loop."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.stragglers.detector import LINK, StragglerDetector
from lightning_hetero.core.stragglers.settings import StragglerSettings
from lightning_hetero.simulate import DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.rounds import VirtualRounds
from lightning_hetero.simulate.cluster.control.virtual_timer import VirtualTimer
from lightning_hetero.simulate.cluster.result import Recorder
from lightning_hetero.simulate.cluster.truth.factors import ProfileFactors
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.cluster.truth.step_events import StepTimes, bucket_times

SETTINGS_OF_DETECTION = StragglerSettings()
FAULTS = ("data", "forward", "backward", "optimizer", "link")
LOADING, UPDATING = 0.05, 0.1
"""Shares of the time outside of the backward pass that a device without a fault loads and updates."""


@dataclass(frozen=True)
class PhasedTimes(StepTimes):
    """Steps whose time outside of the backward pass has three phases."""

    data: np.ndarray = None
    optimizer: np.ndarray = None

    def observed(self, since=0):
        data, optimizer = self.data[since:], self.optimizer[since:]
        seen = super().observed(since)
        return replace(seen, forward=seen.forward - data - optimizer, data_wait=data, optimizer=optimizer)


class Timer(VirtualTimer):
    """Timers whose newest rows the detector takes as well."""

    def take(self):
        self.newest = super().take()
        return self.newest


class Training:
    """Training on emulated devices under the default policy, with one fault.

    The fault makes a phase of one device longer, in proportion to its samples or by constant seconds, or the all-reduce
    of all. Steps go on from there by their events, so that the others wait, and the planner sees it.
    """

    def __init__(self, seed, fault=None):
        draw = self.draw = np.random.default_rng(seed)
        n = self.workers = int(draw.integers(2, 17))
        self.jitter = draw.uniform(0.01, 0.08)
        base = draw.uniform(1e-4, 3e-3)
        speeds = draw.uniform(1.0, draw.choice([1.05, 2.0, 5.0]), n)
        devices = tuple(self.device(base * speed) for speed in speeds)
        total = int(n * draw.integers(16, 96))
        self.fault, self.rank = fault, LINK if fault == "link" else int(draw.integers(n))
        seconds = float(base * draw.uniform(0.5, 3.0))  # of all buckets of a step
        link = LinkProfile(rate=1e9, latency=seconds / 5 * (16 if draw.random() < 0.5 else 2))
        self.cluster = ClusterState(devices, tuple(f"device {i}" for i in range(n)), link)
        factors = ProfileFactors(devices, [1000 * seed + i for i in range(n)], self.jitter, seed)
        self.factors, record = factors, Recorder()
        self.timer = Timer(n, SETTINGS.of(n))
        self.rounds = VirtualRounds(POLICIES["perf_model"].factory(), record, replan="auto", timer=self.timer)
        self.rounds.begin(self.cluster, total)
        self.detector = StragglerDetector(n)
        self.step, self.last, self.count, self.events = 0, 0, 0, []
        self.too_slow = []  # names of devices that are too slow even for their least share, as they are
        self.begins = self.ends = 10**9
        self.splits = set()

    def device(self, seconds):
        fixed = seconds * self.draw.uniform(0.0, 16.0, 2)
        share = self.draw.uniform(0.3, 0.5)
        return DeviceProfile(seconds * share, fixed[0], seconds * (1 - share), fixed[1], jitter=self.jitter)

    # steps

    def times(self, count):
        """Times of the next steps at the running split, the fault included."""
        sizes = np.array(self.rounds.plan_at(self.step).local_batch_sizes, dtype=float)
        self.splits.add(tuple(sizes))
        q, s, k, m = self.cluster.coefficients
        drawn = self.factors.take(count)
        a, p = (q * sizes + s) * drawn.devices[:, :, 0], (k * sizes + m) * drawn.devices[:, :, 1]
        phases = {
            "data": LOADING * a,
            "forward": (1 - LOADING - UPDATING) * a,
            "backward": p,
            "optimizer": UPDATING * a,
        }
        link = self.cluster.link.seconds(self.workers) * drawn.link[:, None]
        if self.begins <= self.step < self.ends:
            if self.rank == LINK:
                link = link * self.factor
            else:
                grows = sizes[self.rank] / self.size if self.in_proportion else 1.0
                phases[self.fault][:, self.rank] += self.delay * grows
        a = phases["data"] + phases["forward"] + phases["optimizer"]
        shares = self.cluster.link.ready_shares
        done = bucket_times(a, phases["backward"], shares, link)
        return PhasedTimes(
            sizes, a, phases["backward"], shares, done, data=phases["data"], optimizer=phases["optimizer"]
        )

    def advance(self, end):
        while self.step < end:
            if self.step == self.begins:
                self.begin_fault()
            until = min(end, self.rounds.stretch_ends(self.step))
            until = min([until, *(at for at in (self.begins, self.ends) if at > self.step)])
            self.rounds.see(self.times(until - self.step))
            self.step = until
            if self.rounds.due(self.step):
                self.sync_round()

    def sync_round(self):
        sizes = self.rounds.plan_at(self.step - 1).local_batch_sizes
        self.rounds.run(self.step, self.cluster)
        found = self.detector.observe(self.timer.newest, self.step - self.last)
        for one in found:
            too_slow = one.lasting and sizes[one.rank] == 1 and self.lead(one.rank, sizes) > 0.08
            (self.too_slow if too_slow else self.events).append((self.step, replace(one)))
        self.last, self.count = self.step, self.count + 1

    def lead(self, rank, sizes):
        """Share of the step that a device without a fault makes the others wait: it is named with reason then."""
        alone = [self.seconds(sizes, [i]) for i in range(self.workers)]
        return 1.0 - max(np.delete(alone, rank)) / alone[rank]

    def seconds(self, sizes, devices=slice(None)):
        """Seconds of a step of some devices without faults or jitter."""
        sizes = np.array(sizes, dtype=float)
        q, s, k, m = self.cluster.coefficients
        a, p = (q * sizes + s)[None, devices], (k * sizes + m)[None, devices]
        link, shares = self.cluster.link.seconds(self.workers), self.cluster.link.ready_shares
        return bucket_times(a, p, shares, link[None])[0, -1]

    @property
    def interval(self):
        return self.rounds.schedule.next - self.rounds.schedule.last

    def begin_fault(self):
        """Draw how long the phase becomes, so that it costs more than the page of reports says of a straggler."""
        sizes = np.array(self.rounds.plan_at(self.step).local_batch_sizes, dtype=float)
        q, s, k, m = self.cluster.coefficients
        busy = (q + k) * sizes + s + m
        step = busy.max() + self.cluster.link.seconds(self.workers).sum()
        noise = np.hypot(1.2533 * self.jitter / 4**0.5, SETTINGS_OF_DETECTION.first_deviation)
        least = max(SETTINGS_OF_DETECTION.min_cost * step, SETTINGS_OF_DETECTION.deviations * noise * busy.max())
        self.cost = least * self.draw.uniform(1.2, 6.0)
        if self.rank == LINK:
            link, shares = self.cluster.link.seconds(self.workers), self.cluster.link.ready_shares
            low, high = 1.0, 1.0 + 100 * step / link.sum()
            for _ in range(60):
                self.factor = (low + high) / 2
                usual, slow = (
                    bucket_times((q * sizes + s)[None], (k * sizes + m)[None], shares, one[None])[0, -1]
                    for one in (link, link * self.factor)
                )
                low, high = (self.factor, high) if slow - usual < self.cost else (low, self.factor)
        else:
            self.delay = busy.max() - busy[self.rank] + self.cost
        self.size = sizes[self.rank]
        constant = self.fault == "optimizer" or (self.fault == "data" and self.draw.random() < 0.5)
        self.in_proportion = not constant
        lasts = int(self.draw.integers(3, 9)) * self.interval
        self.ends = self.begins + lasts if self.draw.random() < 0.7 else 10**9

    def run(self, rounds=40):
        """Train for some rounds, or from before the fault until some rounds after it, ten after its begin at most."""
        if self.fault is None:
            while self.count < rounds:
                self.advance(self.rounds.schedule.next)
            return self
        self.begins = int(self.draw.integers(40, 160))
        self.advance(self.begins + 1)
        self.advance(min(self.ends, self.begins + 10 * self.interval))
        for _ in range(5):
            self.advance(self.rounds.schedule.next)
        return self


def test_in_quiet_trainings_nobody_is_named():
    runs = [Training(seed).run() for seed in range(30)]
    assert [(seed, run.events) for seed, run in enumerate(runs) if run.events] == []
    assert sum(len(run.splits) > 1 for run in runs) >= 22, "splits changed"
    assert min(run.workers for run in runs) <= 4 < 16 <= max(run.workers for run in runs)


def test_faults_are_found_with_their_rank_and_phase_and_their_end():
    runs = [Training(1000 + number, FAULTS[number % 5]).run() for number in range(150)]
    begins = [[(one.rank, one.phase) for _, one in run.events if not one.relieved] for run in runs]
    meant = [(run.rank, run.fault) for run in runs]
    missed = [(1000 + number, want) for number, want in enumerate(meant) if begins[number][:1] != [want]]
    assert len(missed) <= 0.01 * len(runs), missed
    others = [1000 + number for number, want in enumerate(meant) if set(begins[number]) - {want}]
    assert len(others) <= 0.01 * len(runs), others
    over = [run for run in runs if run.ends < 10**9]
    assert len(over) > 75
    lasting = [run.fault for run in over if len([one for _, one in run.events if one.relieved]) < 1]
    assert len(lasting) <= 0.01 * len(over), lasting
    assert all(step > run.begins for run in runs for step, _ in run.events), "nothing before the fault"
    assert any(run.too_slow for run in runs), "the test says what is too slow from the start"


@pytest.mark.parametrize("seed", [109, 189])
def test_a_link_that_becomes_slow_as_the_split_changes_is_found(seed):
    """Both fall into one round, whose steps all have the new split."""
    run = Training(seed, "link").run()
    assert [(one.rank, one.phase) for _, one in run.events][:1] == [(LINK, "link")]


def test_the_split_of_a_slow_link_goes_once_the_link_has_recovered():
    """Few steps then tell the time of the link, but every step bounds it."""
    run = Training(1179, "link").run()
    at_end, now = (run.seconds(run.rounds.plan_at(step).local_batch_sizes) for step in (run.ends - 1, run.step))
    assert run.ends < run.step
    assert now < 0.9 * at_end
