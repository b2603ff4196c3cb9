"""Calls to a store that may never return: the caller gives up in time, and gets what they return or raise."""

import logging
import threading

import pytest

from lightning_hetero.comm.failures.store_calls import StoreCalls


def test_a_call_returns_and_raises_as_without():
    calls = StoreCalls(30.0, 30.0)
    assert calls(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        calls(lambda: 1 / 0)
    assert calls(lambda: 4) == 4
    calls.close()


def test_a_call_that_does_not_return_is_given_up(caplog):
    calls, ever = StoreCalls(0.2, 0.1), threading.Event()
    with (
        caplog.at_level(logging.WARNING, "lightning_hetero"),
        pytest.raises(TimeoutError, match="no answer within 0 s"),
    ):
        calls(ever.wait)
    assert "has not answered for 0 s" in caplog.text
    ever.set()
    calls.close()


def test_the_thread_ends_and_the_next_call_starts_it_again():
    calls = StoreCalls(30.0, 30.0)
    first = calls(threading.current_thread)
    calls.close()
    first.join(30.0)
    assert not first.is_alive()
    second = calls(threading.current_thread)
    assert second is not first
    calls.close()
