"""Batches are claimed at the pace of the device, on a device that works on its own: counted time, no sleeps."""

import pytest

from lightning_hetero.elastic.device_pace import DevicePace


class Device:
    """A host that queues work in no time, and a device that does it in order."""

    def __init__(self, seconds):
        self.seconds, self.host, self.device = seconds, 0.0, 0.0

    def train(self):
        self.host += 1e-4
        self.device = max(self.device, self.host) + self.seconds

    def mark(self):
        return max(self.device, self.host)

    def wait_for(self, mark):
        self.host = max(self.host, mark)


def claimed(costs, batches):
    """Batches that each worker gets of a counter, all claiming when their host is done."""
    devices = [Device(cost) for cost in costs]
    paces, counts = [DevicePace(device) for device in devices], [1] * len(costs)
    for device in devices:  # the first batch of each is reserved
        device.train()
    for _ in range(batches - len(costs)):
        for device, pace in zip(devices, paces, strict=True):
            device.paced = getattr(device, "paced", False) or (pace.end_batch() or True)
        next_one = min(range(len(costs)), key=lambda i: devices[i].host)
        devices[next_one].train()
        devices[next_one].paced = False
        counts[next_one] += 1
    return counts, max(device.device for device in devices)


@pytest.mark.parametrize("costs", [(0.025, 0.1), (0.025, 0.05, 0.1), (0.05, 0.05)])
def test_unequal_devices_claim_in_proportion_to_their_speed(costs):
    counts, seconds = claimed(costs, 400)
    rates = [1 / cost for cost in costs]
    ideal = 400 / sum(rates)
    for count, rate in zip(counts, rates, strict=True):
        assert count == pytest.approx(ideal * rate, abs=3)
    assert seconds == pytest.approx(ideal, abs=2 * max(costs) + 400 * 1e-4)


def test_one_batch_stays_in_the_queue_so_that_the_device_never_waits():
    device = Device(0.02)
    pace = DevicePace(device)
    for number in range(1, 20):
        device.train()
        pace.end_batch()
        assert 0.0 < device.device - device.host <= 0.02 + 1e-9  # one batch ahead, no more
        assert device.device == pytest.approx(1e-4 + number * 0.02)  # never idle
