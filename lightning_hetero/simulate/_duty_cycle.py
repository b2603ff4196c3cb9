"""Helper process of :class:`~lightning_hetero.simulate.Throttle`: stops and continues one process at a duty cycle.

Run it by path with ``python -I -S``, as ``_duty_cycle.py PID SHARE PERIOD PARENT_PID``. It imports only light parts of
the standard library and starts in milliseconds. Lines on its standard input are commands: a share, or ``quit``. It
ends at ``quit``, at the end of its input, at SIGTERM, SIGINT or SIGHUP, when its parent or the throttled process has
ended, and on any error of its own; it always leaves the process running.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

__all__ = ["DutyCycle", "main"]

_STDIN = 0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndedError(Exception):
    """End of the helper: the parent or the throttled process has ended, or the parent asked for it."""


class Target:
    """The throttled process, by file descriptor where the system supports it, so a reused PID is never hit."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.paused = False
        self.fd: int | None = None
        os.kill(pid, 0)  # raises at once for a process that is absent or not ours
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            try:
                self.fd = os.pidfd_open(pid)
            except OSError:  # an old kernel, or a sandbox that denies the call
                self.fd = None

    def pause(self) -> None:
        """Stop the process."""
        self.paused = True  # before the signal, so that no interruption can leave a stopped process behind
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process if it was stopped here."""
        if self.paused:
            self.send(signal.SIGCONT)
            self.paused = False

    def send(self, number: int) -> None:
        """Send a signal; ProcessLookupError if the process is gone."""
        if self.fd is None:
            os.kill(self.pid, number)
        else:
            signal.pidfd_send_signal(self.fd, number)


class DutyCycle:
    """Alternation of run and stop phases, in which the process runs for ``share`` of the time on average.

    It relies on measured phases, not on the requested ones: after a run phase of measured length ``r``, a stop of
    ``r * (1 - share) / share`` is due, and the error of a stop's length is carried over to the next cycle.
    """

    check_s = 0.5
    """Seconds between checks of the parent while nothing is throttled."""

    def __init__(self, target: Target, share: float, period: float, parent: int) -> None:
        self.target = target
        self.share = share
        self.period = period
        self.parent = parent
        self.stop_due = 0.0  # seconds of stop still to come; negative after a stop that was too long
        self.partial_line = b""

    def run(self) -> None:
        """Cycle until there is nothing left to do."""
        running_since = time.monotonic()
        while True:
            if self.share == 1.0:
                self.stop_due = 0.0
                self.wait(self.check_s)
                running_since = time.monotonic()
            else:
                running_since = self.cycle(running_since)

    def cycle(self, running_since: float) -> float:
        """Run one run phase and the stop that it entails; return the time at which the process last began to run."""
        excess = max(0.0, -self.stop_due)
        run_for = self.share * self.period + excess * self.share / (1.0 - self.share)
        self.wait(running_since + run_for - time.monotonic())
        now = time.monotonic()
        self.stop_due += (now - running_since) * (1.0 - self.share) / self.share
        if self.stop_due <= 0.0:
            return now
        self.target.pause()
        stopped_since = time.monotonic()
        share_changed = self.wait(self.stop_due)
        self.target.resume()
        now = time.monotonic()
        self.stop_due = 0.0 if share_changed else self.stop_due - (now - stopped_since)
        return now

    def wait(self, seconds: float) -> bool:
        """Wait and obey commands; return True, before the time is up, if one of them set the share."""
        deadline = time.monotonic() + seconds
        watched = [_STDIN] if self.target.fd is None else [_STDIN, self.target.fd]
        while True:
            ready, _, _ = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))
            # The end of input is not reliable: a process that the parent forked also holds the pipe open.
            if os.getppid() != self.parent or (self.target.fd is not None and self.target.fd in ready):
                raise EndedError
            if self.target.fd is None:
                self.target.send(0)
            if _STDIN in ready and self.obey():
                return True
            if time.monotonic() >= deadline:
                return False

    def obey(self) -> bool:
        """Read the commands that have arrived; return True if one of them set the share."""
        received = os.read(_STDIN, 4096)
        if not received:
            raise EndedError
        *lines, self.partial_line = (self.partial_line + received).split(b"\n")
        for line in lines:
            if line == b"quit":
                raise EndedError
            self.share = float(line)
        return bool(lines)


def _end_on_signals(target: Target) -> None:
    def end(number: int, frame: object) -> None:
        for ending in _ENDING_SIGNALS:  # a second signal must not cut the clean-up short
            signal.signal(ending, signal.SIG_IGN)
        try:
            target.resume()  # here, because the handler may have interrupted the clean-up itself
        finally:
            raise SystemExit(0)

    for number in _ENDING_SIGNALS:
        signal.signal(number, end)


def main(arguments: list[str]) -> int:
    """Throttle until the end; the first line printed is ``ready``, or why the process cannot be throttled."""
    pid, share, period, parent = int(arguments[0]), float(arguments[1]), float(arguments[2]), int(arguments[3])
    try:
        target = Target(pid)
    except OSError as error:
        sys.stdout.write(f"{error.strerror or error}\n")
        sys.stdout.flush()
        return 1
    _end_on_signals(target)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        try:
            DutyCycle(target, share, period, parent).run()
        finally:
            target.resume()
    except (EndedError, ProcessLookupError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
