"""Claims at the pace of the device, and what a run's summary says."""

import pytest

from lightning_hetero.elastic.device_pace import DevicePace
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.run_summary import summary_of_merges


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


def merge(number, sizes, updates, busy, lost=()):
    samples = tuple(size * count for size, count in zip(sizes, updates, strict=True))
    return MergeRecord(0, number, sizes, updates, samples, (0.5, 0.5), False, busy, False, lost)


def test_the_figures_of_a_run_are_those_of_its_merges():
    """Rank 0 trains on 120 samples in 6 s, rank 1 on 40 in 5 s; equal shares at these speeds take 10 s, not 7."""
    merges = [merge(0, (8, 8), (5, 3), (2.0, 3.0)), merge(1, (8, 4), (10, 4), (4.0, 2.0), lost=(1,))]
    summary = summary_of_merges(merges, (8, 8))
    assert summary.rows == (("0", "8", "15", "120 (75 %)", "20", "14 %"), ("1", "8", "7", "40 (25 %)", "8", "29 %"))
    for figure in ("2 merges", "1.43x", "21 % idle"):
        assert figure in summary.verdict
    assert ["1 of 2" in line for line in summary.lines] == [True]
