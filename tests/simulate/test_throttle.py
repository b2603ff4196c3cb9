"""The throttle slows a process, never leaves it stopped, and never outlives it."""

import contextlib
import math
import signal
import subprocess
import sys
import time

import pytest

from lightning_hetero.simulate import Throttle

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals"),
]

# Answers each line, a number of wall seconds, with the share of them in which it computed.
BUSY = """
import sys, time
for line in sys.stdin:
    wall, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - wall < float(line):
        pass
    print((time.process_time() - cpu) / (time.monotonic() - wall), flush=True)
"""


class Worker:
    """A child process that is busy for as long as it is told."""

    def __init__(self):
        command = [sys.executable, "-S", "-c", BUSY]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.busy(0.01)  # its start is over

    def busy(self, seconds=0.6):
        """Share of ``seconds`` in which the worker computed; returns only if the worker runs."""
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker():
    worker = Worker()
    with worker.process:
        yield worker
        worker.process.kill()


@pytest.mark.slow("measures shares of wall time")
def test_the_share_is_the_part_of_the_time_that_the_process_computes(worker):
    with Throttle(0.1, pid=worker.pid) as throttle:
        slow = worker.busy()
        throttle.set_share(1.0)
        fast = worker.busy()
    assert throttle.share == 1.0
    assert slow < 0.6 * fast


@pytest.mark.parametrize("end", ["stop", "error"])
def test_the_process_runs_on_after_it(worker, end):
    throttle = Throttle(0.02, pid=worker.pid)
    if end == "stop":
        throttle.start()
        throttle.stop()
        throttle.stop()
    else:
        with contextlib.suppress(KeyError), throttle:
            raise KeyError
    assert not throttle.running
    assert throttle.helper_pid is None
    worker.busy(0.01)


def test_it_ends_when_the_process_is_killed(worker):
    with Throttle(0.3, pid=worker.pid) as throttle:
        worker.kill()
        deadline = time.monotonic() + 30.0
        while throttle.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not throttle.running


@pytest.mark.parametrize("given", [{"share": 0.0}, {"share": 1.5}, {"share": True}, {"period": 2.0}, {"pid": 0}])
def test_arguments_outside_their_range_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Throttle(**{"share": 0.5, **given})
    throttle = Throttle(0.5)
    with pytest.raises(ValueError, match="share="):
        throttle.set_share(math.nan)
    assert throttle.share == 0.5
