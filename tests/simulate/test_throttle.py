"""The throttle slows a process, never leaves it stopped, and never outlives it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lightning_hetero.simulate import Throttle

pytestmark = [
    pytest.mark.alone,
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

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.busy(0.01)  # its start is over

    def busy(self, seconds: float = 0.6) -> float:
        """Share of ``seconds`` in which the worker computed; returns only if the worker runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    with worker.process:
        yield worker
        worker.process.kill()


def wait_until_ended(throttle: Throttle) -> None:
    deadline = time.monotonic() + 30.0
    while throttle.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not throttle.running


def test_share_is_the_part_of_the_time_that_the_process_computes(worker: Worker) -> None:
    with Throttle(0.3, pid=worker.pid):
        assert 0.15 < worker.busy(1.5) < 0.5


def test_throttles_itself_by_default() -> None:
    wall, cpu = time.monotonic(), time.process_time()
    with Throttle(0.3):
        while time.monotonic() - wall < 1.0:
            pass
    assert (time.process_time() - cpu) / (time.monotonic() - wall) < 0.6


def test_set_share_takes_effect_while_running(worker: Worker) -> None:
    with Throttle(0.1, pid=worker.pid) as throttle:
        slow = worker.busy()
        throttle.set_share(1.0)
        fast = worker.busy()
        throttle.set_share(0.1)
        slow_again = worker.busy()
    assert throttle.share == 0.1
    assert slow < 0.6 * fast
    assert slow_again < 0.6 * fast


def test_stop_leaves_the_process_running_and_can_be_repeated(worker: Worker) -> None:
    throttle = Throttle(0.02, pid=worker.pid).start()
    throttle.stop()
    throttle.stop()
    assert not throttle.running
    assert throttle.helper_pid is None
    worker.busy(0.01)


def test_helper_ends_when_the_process_is_killed(worker: Worker) -> None:
    with Throttle(0.3, pid=worker.pid) as throttle:
        worker.process.kill()
        worker.process.wait()
        wait_until_ended(throttle)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan"), float("inf"), True, "0.5", None])
def test_share_outside_its_range_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match=r"share=.* must be a number with 0 < share <= 1\. Pass"):
        Throttle(share)  # type: ignore[arg-type]
    throttle = Throttle(0.5)
    with pytest.raises(ValueError, match="share="):
        throttle.set_share(share)  # type: ignore[arg-type]
    assert throttle.share == 0.5


@pytest.mark.parametrize("arguments", [{"period": 0.0}, {"period": 2.0}, {"pid": 0}, {"pid": -1}, {"pid": 1.5}])
def test_other_arguments_outside_their_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Throttle(0.5, **arguments)  # type: ignore[arg-type]


def test_a_process_that_does_not_exist_is_an_error_of_start(worker: Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    throttle = Throttle(0.5, pid=worker.pid)
    with pytest.raises(RuntimeError, match=f"cannot signal process {worker.pid}: No such process"):
        throttle.start()
    assert not throttle.running


def test_an_exception_inside_the_block_ends_the_throttle(worker: Worker) -> None:
    throttle = Throttle(0.02, pid=worker.pid)
    with contextlib.suppress(KeyError), throttle:
        raise KeyError
    assert not throttle.running
    worker.busy(0.01)
