"""Threads of one process by a clock that is counted: they run one at a time, and time passes when all of them wait.

Inside of :class:`VirtualTime`, ``time``, ``threading`` and ``queue`` are those of this clock for whoever looks them up
in their modules. A rank, a keeper or a host that stands still is a thread that is not run for a while.
"""

import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from unittest import mock

REAL_THREAD = threading.Thread


def _waiting_by(clock):
    """Events and queues for which one waits by a clock."""

    class Event:
        def __init__(self):
            self._flag = False

        is_set = __bool__ = lambda self: self._flag

        def set(self):
            self._flag = True

        def clear(self):
            self._flag = False

        def wait(self, timeout=None):
            clock.wait(self.is_set, timeout)
            return self._flag

    class Queue:
        def __init__(self):
            self._items = deque()

        def put(self, item):
            self._items.append(item)

        def get(self, block=True, timeout=None):
            clock.wait(lambda: self._items, timeout)
            if not self._items:
                raise queue.Empty
            return self._items.popleft()

    return Event, Queue


def _thread_of(clock):
    """Threads that run when the clock says so."""

    class Thread(REAL_THREAD):
        def start(self):
            self.owner, self.over = getattr(threading.current_thread(), "owner", clock.owner), False
            clock._turn[self] = threading.Semaphore(0)
            clock._waiting[self] = (lambda: True, clock.now)
            super().start()

        def run(self):
            clock._turn[self].acquire()
            try:
                clock._closed or super().run()
            except SystemExit:
                pass
            finally:
                self.over = True
                clock._back.release()

        def join(self, timeout=None):
            clock.wait(lambda: self.over, timeout)

        def is_alive(self):
            return not self.over if hasattr(self, "over") else super().is_alive()

    return Thread


class VirtualTime:
    """The clock; who uses it as a context drives it by :meth:`pass_`, by waiting, or by joining a thread.

    Attributes:
        now: seconds.
        frozen: names of owners whose threads do not run; a thread belongs to who was the ``owner`` when it started.
        ended: exit codes of processes that have ended themselves, by owner; only their thread ends.
    """

    def __init__(self):
        self.now, self.owner, self.frozen, self.ended = 1000.0, None, set(), {}
        self.computes = 0.0  # share of a core that the main thread takes, as the system tells
        self._waiting, self._turn, self._back = {}, {}, threading.Semaphore(0)
        self._patches, self._closed = [], False

    def __enter__(self):
        event, items = _waiting_by(self)

        def exits(code):
            owner = getattr(threading.current_thread(), "owner", None)
            self.ended.setdefault(owner, code)
            self.frozen.add(owner)
            raise SystemExit(code)

        changes = {
            **{(time, name): getattr(self, name) for name in ("monotonic", "sleep", "clock_gettime")},
            **{(threading, "Event"): event, (threading, "Thread"): _thread_of(self), (queue, "SimpleQueue"): items},
            **{(os, "_exit"): exits, (logging, "shutdown"): lambda: None},
        }
        self._patches = [mock.patch.object(*place, value) for place, value in changes.items()]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        self._closed = True
        for thread, turn in self._turn.items():  # those that are left end in the wait in which they are
            if not thread.over:
                turn.release()
                REAL_THREAD.join(thread)
        for patch in self._patches:
            patch.stop()

    def monotonic(self):
        return self.now

    def clock_gettime(self, _):
        return self.now * self.computes

    def sleep(self, seconds):
        self.wait(lambda: False, seconds)

    def wait(self, ready, timeout=None):
        """Wait until something is so, or for so many seconds."""
        until = math.inf if timeout is None else self.now + timeout
        me = threading.current_thread()
        if me in self._turn:
            self._waiting[me] = ready, until
            self._back.release()
            self._turn[me].acquire()
            if self._closed:
                raise SystemExit
            return
        while not ready() and self._step(until):
            pass

    pass_ = sleep

    def until(self, ready, seconds=3600.0):
        """Let time pass until something is so; an error if it never is."""
        self.wait(ready, seconds)
        assert ready(), f"not so after {seconds} s"

    def _step(self, until):
        """Run the thread that is next, and return true; or let the time ``until`` come where none is."""
        best, at = None, math.inf
        for thread, (ready, moment) in self._waiting.items():
            if thread.owner not in self.frozen and (due := self.now if ready() else max(moment, self.now)) < at:
                best, at = thread, due
        if best is None or at > until:
            assert until < math.inf, "everybody waits for ever"
            self.now = max(self.now, until)
            return False
        self.now = at
        del self._waiting[best]
        self._turn[best].release()
        self._back.acquire()
        return True

    def run(self, owner, call, *args):
        """Start a function of an owner in a thread; its result, or its error, is in the dictionary that is returned."""
        found, before, self.owner = {}, self.owner, owner

        def go():
            try:
                found["result"] = call(*args)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found["error"] = error

        threading.Thread(target=go, name=f"of {owner}").start()
        self.owner = before
        return found


class Lives:
    """Processes in the place of those that ``subprocess`` starts: each lasts so many seconds, and ends with a code.

    Args:
        clock: the time.
        lives: a function of each process that is started, in order: called with it and its environment when it begins;
            returns seconds and exit code.
    """

    def __init__(self, clock, *lives):
        self.clock, self.lives, self.started, self.environments, self.commands = clock, list(lives), [], [], []

    def __call__(self, command, env=None, **_):
        process = Process(self.clock)
        self.started.append(process)
        self.environments.append(env)
        self.commands.append(command)
        process.lasts(*self.lives[min(len(self.started), len(self.lives)) - 1](process, env))
        return process


class Process:
    """A process of :class:`Lives`, as ``subprocess.Popen`` shows one."""

    def __init__(self, clock):
        self.clock, self.pid, self.code, self.signals, self.until, self.then = clock, 2**22 + 1, None, [], math.inf, 0

    def lasts(self, seconds, code):
        self.until, self.then = self.clock.now + seconds, code

    def poll(self):
        if self.code is None and self.clock.now >= self.until:
            self.code = self.then
        return self.code

    def wait(self, timeout=math.inf):
        self.clock.wait(lambda: self.poll() is not None, min(timeout, max(0.0, self.until - self.clock.now)))
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a worker", timeout)
        return self.code

    def send_signal(self, number):
        self.signals.append(number)
        if number != signal.SIGUSR1:
            self.code = -number if self.poll() is None else self.code

    def kill(self):
        self.send_signal(signal.SIGKILL)
