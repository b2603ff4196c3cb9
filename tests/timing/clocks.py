"""Clocks that are set by hand."""


class Hand:
    """A clock whose time is set, on a device that may lag behind.

    Attributes:
        now: the time, of which each mark takes ``tick`` seconds.
        reached: where the device is; later marks are not ready, and to read them is an error.
    """

    synchronous = False

    def __init__(self, tick=0.0):
        self.now, self.tick, self.reached, self.late = 0.0, tick, float("inf"), set()

    def mark(self):
        self.now += self.tick
        return self.now

    def ready(self, mark):
        return mark <= self.reached and mark not in self.late

    def seconds(self, start, end):
        assert self.ready(start), "to read it would be to wait for the device"
        assert self.ready(end), "to read it would be to wait for the device"
        return end - start

    def wait(self):
        self.reached = float("inf")
