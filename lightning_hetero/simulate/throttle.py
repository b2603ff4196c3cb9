"""A straggler without a slow machine: a process that is stopped and continued at a duty cycle.

As with ``cpulimit``, the process really computes slower, in any library, and no privileges are needed. It is neither a
limit on processor time (the share is one of wall time, so it multiplies whatever else slows the process) nor a slow
network.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from numbers import Real
from pathlib import Path
from types import TracebackType

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["Throttle"]

_HELPER = Path(__file__).with_name("_duty_cycle.py")


@checked_keywords
class Throttle:
    """Duty cycle of a process, which runs for a ``share`` of the time: SIGSTOP and SIGCONT from a helper process.

    The helper measures every phase and corrects its own delays, so the average share is precise. It ends, and leaves
    the process running, at :meth:`stop`, at SIGTERM, and when the process or the one that called :meth:`start` ends.
    Only SIGKILL of the helper itself can leave the process stopped (``kill -CONT PID``).

    Note:
        Only the one process with all its threads is slowed: processes that it starts, such as the workers of a
        ``DataLoader``, run at full speed. A process started by an interactive shell should not throttle itself, since
        the shell takes a stopped foreground job from the terminal; throttle the processes that it starts.

    Args:
        share: part of the time that the process runs, ``0 < share <= 1``; 1.0 sends no signals at all.
        pid: the process to slow; None is the process that calls :meth:`start`.
        period: seconds of one cycle of running and stopping, ``0 < period <= 1``. It has to be much shorter than the
            timed steps, and ``share * period`` much longer than a context switch.

    Raises:
        ValueError: if an argument is outside its range.
        RuntimeError: if the system has no POSIX signals.

    Example:
        >>> with Throttle(0.5) as throttle:
        ...     throttle.set_share(0.8)
        ...     throttle.share
        0.8
    """

    helper_end_s = 5.0
    """Seconds for the helper to end; it takes milliseconds unless the machine is overloaded."""

    def __init__(self, share: float, *, pid: int | None = None, period: float = 0.02) -> None:
        if not (hasattr(signal, "SIGSTOP") and hasattr(signal, "SIGCONT")):
            raise RuntimeError(
                f"Throttle needs the POSIX signals SIGSTOP and SIGCONT, which {sys.platform!r} lacks. "
                "Run it on Linux or macOS."
            )
        self._share = _validated_fraction("share", share)
        self._period = _validated_fraction("period", period)
        self._pid = _validated_pid(pid)
        self._helper: subprocess.Popen[bytes] | None = None

    @property
    def share(self) -> float:
        """Part of the time that the process runs."""
        return self._share

    @property
    def helper_pid(self) -> int | None:
        """Process id of the running helper; None if there is none."""
        return self._helper.pid if self._helper is not None and self.running else None

    @property
    def running(self) -> bool:
        """True while the helper is alive; it ends by itself with the throttled process."""
        return self._helper is not None and self._helper.poll() is None

    def start(self) -> Throttle:
        """Start to throttle, and return ``self``.

        Raises:
            RuntimeError: if it is started already, or the process does not exist or may not be signaled.
        """
        if self.running:
            raise RuntimeError(
                "This Throttle is started already. Call set_share() to change it, or stop() before start()."
            )
        self.stop()  # releases the pipe of a helper that ended by itself
        pid = os.getpid() if self._pid is None else self._pid
        arguments = [str(pid), repr(self._share), repr(self._period), str(os.getpid())]
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HELPER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a signal to the group of the worker must not hit the helper
        )
        assert helper.stdout is not None
        with helper.stdout:
            answer = helper.stdout.readline().decode(errors="replace").strip()
        self._helper = helper
        if answer != "ready":
            self.stop()
            raise RuntimeError(
                f"Throttle cannot signal process {pid}: {answer or 'the helper process failed to start'}. "
                "Give the pid of a running process of the same user."
            )
        return self

    def set_share(self, share: float) -> None:
        """Change the share, at once if the throttle is running.

        Args:
            share: part of the time that the process runs, ``0 < share <= 1``.

        Raises:
            ValueError: if the share is outside its range.
            RuntimeError: if the helper has ended, as it does with the throttled process.
        """
        share = _validated_fraction("share", share)
        if self._helper is not None and not self._send(repr(share)):
            raise RuntimeError(
                f"The helper that throttles process {self._pid or os.getpid()} has ended (exit code "
                f"{self._helper.poll()}), so share={share} cannot take effect. Call start() again."
            )
        self._share = share

    def stop(self) -> None:
        """Stop throttling and leave the process running; harmless if nothing is throttled."""
        helper, self._helper = self._helper, None
        if helper is None:
            return
        assert helper.stdin is not None
        _write(helper, "quit")  # the end of input alone would be hidden by a forked process that holds the pipe open
        helper.stdin.close()
        try:
            helper.wait(self.helper_end_s)
        except subprocess.TimeoutExpired:
            helper.terminate()
            helper.wait()

    def _send(self, command: str) -> bool:
        return self._helper is not None and self._helper.poll() is None and _write(self._helper, command)

    def __enter__(self) -> Throttle:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _write(helper: subprocess.Popen[bytes], command: str) -> bool:
    """Send one command; return False if the helper has ended."""
    assert helper.stdin is not None
    try:
        helper.stdin.write(f"{command}\n".encode())
    except BrokenPipeError:
        return False
    return True


def _validated_fraction(name: str, value: float) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"{name}={value!r} must be a number with 0 < {name} <= 1. Pass, for example, {name}=0.5.")
    return float(value)


def _validated_pid(pid: int | None) -> int | None:
    if pid is not None and (isinstance(pid, bool) or not isinstance(pid, int) or pid <= 0):
        raise ValueError(
            f"pid={pid!r} must be a positive integer, or None for the process that calls start(). "
            "Pass the pid of the process to slow."
        )
    return pid
