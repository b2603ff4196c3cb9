"""Other threads see what the main thread does, without a deadlock."""

import gc
import sys
import threading

import pytest

from lightning_hetero.comm.failures import main_thread


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
