"""Other threads see what the main thread does, without a deadlock."""

import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.failures import main_thread
from tests.helpers import run_ranks


def test_a_debugger_of_the_main_thread_is_found_from_others():
    """As ``breakpoint()`` sets it: a trace function of this thread, which marks its frames."""
    assert not main_thread.debugged()
    found, frame, before = [], sys._getframe(), sys.gettrace()
    trace = lambda *given: None  # noqa: E731
    sys.settrace(trace)
    try:
        frame.f_trace = trace
        thread = threading.Thread(target=lambda: found.append(main_thread.debugged()))
        thread.start()
        thread.join()
        found.append(main_thread.debugged())
    finally:
        frame.f_trace = None
        sys.settrace(before)
    assert found == [True, True]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_interpreter_lists_its_threads(collects):
    """What is freed would wait for threads that can neither begin nor end meanwhile."""
    collections = []

    def note(phase, info):
        caller = sys._getframe(1)
        if threading.current_thread() is threading.main_thread() and caller.f_code.co_name == "frames_of_threads":
            collections.append(caller.f_lineno)

    thresholds, before = gc.get_threshold(), gc.isenabled()
    (gc.enable if collects else gc.disable)()
    gc.set_threshold(1)
    gc.callbacks.append(note)
    try:
        found = main_thread.frames_of_threads()
        after = gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        (gc.enable if before else gc.disable)()
    assert collections == []
    assert after == collects
    assert found[threading.main_thread().ident] is not None


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="since Python 3.12")
def test_a_debugger_that_monitors_is_found():
    sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "a debugger")
    try:
        assert main_thread.debugged()
    finally:
        sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)
    assert not main_thread.debugged()


def _calls(rank):
    """Whether rank 0 is in a collective call: while it computes, and in calls that rank 1 comes to later."""
    dist.init_process_group("gloo")
    control, net = ControlPlane(rank, 2), torch.nn.Linear(2, 2)
    calls = {
        "barrier": dist.barrier,
        "agreement": lambda: control.gather_objects(rank),
        "asynchronous agreement": lambda: control.gather_later(np.zeros(3))(),
        "wrapping": lambda: DistributedDataParallel(net),
    }
    with ThreadPoolExecutor(1) as pool:
        seen = {"computing": pool.submit(main_thread.in_collective).result()}
    store = dist.distributed_c10d._get_default_store()
    for name, call in calls.items():
        if rank == 1:
            store.wait([name])
            call()
            continue
        thread = threading.Thread(target=lambda name=name: seen.update({name: _found(store, name)}))
        thread.start()
        call()
        thread.join()
    store.set("over", "")
    return seen


def _found(store, name):
    """Whether the main thread is found in a collective call within 20 s, after which rank 1 comes."""
    until = time.monotonic() + 20
    while not (found := main_thread.in_collective()) and time.monotonic() < until:
        time.sleep(0.01)
    store.set(name, "")
    return found


def test_a_main_thread_that_waits_in_a_collective_call_is_found():
    first, _ = run_ranks(_calls, 2)
    assert first == {"computing": False} | dict.fromkeys(
        ("barrier", "agreement", "asynchronous agreement", "wrapping"), True
    )
