"""Claims at the pace of the device, what a run's summary says, and settings that do nothing in a run."""

import numpy as np
import pytest

from lightning_hetero.elastic import ElasticConfig
from lightning_hetero.elastic.device_pace import DevicePace
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.run_summary import summary_of_merges
from lightning_hetero.elastic.without_effect import elastic_without_effect


class Device:
    """A host that queues work in no time, and a device that does it in order."""

    def __init__(self, seconds):
        self.seconds, self.host, self.device, self.batches = seconds, 0.0, 0.0, 0
        self.pace = DevicePace(self)

    def train(self):
        self.host += 1e-4
        self.device = max(self.device, self.host) + self.seconds
        self.batches += 1
        self.pace.end_batch()

    def mark(self):
        return max(self.device, self.host)

    def wait_for(self, mark):
        self.host = max(self.host, mark)


@pytest.mark.parametrize("costs", [(0.025, 0.1), (0.025, 0.05, 0.1), (0.05, 0.05)])
def test_unequal_devices_claim_in_proportion_to_their_speed_and_never_wait(costs):
    devices = [Device(cost) for cost in costs]
    for _ in range(400):
        min(devices, key=lambda device: device.host).train()
    ideal = 400 / sum(1 / cost for cost in costs)
    for device in devices:
        assert device.batches == pytest.approx(ideal / device.seconds, abs=3)
        assert 0.0 < device.device - device.host <= device.seconds + 1e-9, "one batch is ahead, no more"
        assert device.device == pytest.approx(1e-4 + device.batches * device.seconds), "never idle"


def test_the_figures_of_a_run_are_those_of_its_merges(seed):
    rng = np.random.default_rng(seed)
    ranks, merges = int(rng.integers(2, 6)), []
    for number in range(int(rng.integers(1, 8))):
        updates, sizes = rng.integers(1, 9, ranks), rng.integers(1, 17, ranks)
        merges.append(
            MergeRecord(
                *(0, number, tuple(map(int, sizes)), tuple(map(int, updates)), tuple(map(int, updates * sizes))),
                *((1 / ranks,) * ranks, False, tuple(rng.uniform(0.1, 3.0, ranks)), False, (1,) if number else ()),
            )
        )
    summary = summary_of_merges(merges, (8,) * ranks)
    took = sum(max(one.busy) for one in merges)
    samples, busy, updates = (np.array([getattr(m, n) for m in merges]).sum(0) for n in ("samples", "busy", "updates"))
    gain = max(samples.sum() / ranks / (samples / busy)) / took
    assert f"{gain:.2f}x" in summary.verdict
    assert f"{100 * np.mean(1 - busy / took):.0f} % idle" in summary.verdict
    assert f"{len(merges)} merge" in summary.verdict
    for rank, row in enumerate(summary.rows):
        share, waits = 100 * samples[rank] / samples.sum(), 100 * (1 - busy[rank] / took)
        due = (
            rank,
            8,
            updates[rank],
            f"{samples[rank]} ({share:.0f} %)",
            f"{samples[rank] / busy[rank]:.4g}",
            f"{waits:.0f} %",
        )
        assert row == tuple(map(str, due))
    assert [f"{len(merges) - 1} of {len(merges)}" in line for line in summary.lines] == [True] * (len(merges) > 1)


@pytest.mark.parametrize(
    ("merge", "settings", "world_size", "samples", "idle"),
    [
        ("adaptive", {"beta": 2.0, "momentum": 0.5}, 2, 640, []),
        (
            "mean",
            {"beta": 2.0, "renormalize": False, "momentum": 0.5},
            2,
            640,
            ["beta=2.0", "renormalize=False", "momentum=0.5"],
        ),
        ("elastic", {"damped": False, "momentum": 0.5}, 2, 640, ["damped=False"]),
        ("adaptive", {"beta": 2.0, "perturbation": 0.2}, 1, 640, ["beta=2.0", "perturbation=0.2"]),
        ("adaptive", {"perturbation": 0.0, "renormalize": False}, 2, 640, ["renormalize=False"]),
        ("adaptive", {"perturbation_threshold": 0, "perturbation": 0.2}, 2, 640, ["perturbation=0.2"]),
        ("adaptive", {}, 2, 32, ["mega_batch_size=64"]),
        ("adaptive", {"beta": None}, 1, 640, []),
    ],
)
def test_settings_that_do_nothing_in_a_run_are_named(merge, settings, world_size, samples, idle):
    config = ElasticConfig(merge, mega_batch_size=64, settings=settings)
    assert [name for one in elastic_without_effect(config, world_size, samples, 64) for name in one.settings] == idle
