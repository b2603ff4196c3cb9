"""Clock of a host for tests: its time passes only by sleeping, and by what a test says that the host takes."""

from lightning_hetero.simulate.devices.emulated_device import HostClock

__all__ = ["Clock"]


class Clock:
    """Time that passes only by sleeping, and by what a test says that the host takes."""

    def __init__(self):
        self.seconds, self.asleep = 0.0, 0.0

    def sleep(self, seconds):
        assert seconds > 0.0
        self.seconds += seconds
        self.asleep += seconds

    def work(self, seconds):
        self.seconds += seconds

    def host(self):
        return HostClock(lambda: self.seconds, self.sleep)
