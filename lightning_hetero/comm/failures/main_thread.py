"""View of the main thread from other threads: whether it is debugged, or in a collective call."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.nn.parallel import distributed as ddp

__all__ = ["debugged", "frames_of_threads", "in_collective"]

CALLERS = (str(Path(dist.__file__).parent), str(ddp.__file__), str(Path(__file__).parents[1]))
"""Files and folders whose functions call what waits for other ranks."""


def frames_of_threads() -> dict[int, FrameType]:
    """Return the frame of each thread, without a deadlock.

    Python 3.11 holds a lock here that threads need to begin and to end. If it collects garbage meanwhile, another
    thread may run, and wait for that lock with the one of the interpreter in its hands (CPython's issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def debugged() -> bool:
    """Return whether a debugger watches this process, which it may stop at any time."""
    if "pydevd" in sys.modules or sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    frame = frames_of_threads().get(threading.main_thread().ident or 0)
    while frame is not None:  # a trace function belongs to its thread, but marks each frame
        if frame.f_trace is not None:
            return True
        frame = frame.f_back
    return False


def in_collective() -> bool:
    """Return whether the main thread is in a call in which other ranks take part, as far as its frames tell.

    What waits is written in C++ and has no frame, so the innermost one belongs to its caller.
    """
    frame = frames_of_threads().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(CALLERS)
