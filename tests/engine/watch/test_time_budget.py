"""The time that watching over a run may take is a share of the run's own, and counts the CPU of its thread alone."""

import threading
import time

import pytest

from lightning_hetero.engine.watch.time_budget import TimeBudget


class Times:
    """A clock and the CPU seconds of a thread, both moved by hand."""

    def __init__(self):
        self.now, self.worked = 100.0, 7.0
        self.budget = TimeBudget(lambda: self.now, lambda: self.worked)

    def work(self, seconds, then=int):
        with self.budget.working():
            self.worked += seconds
            then()


def test_the_first_ten_seconds_have_thirty_milliseconds_and_what_follows_its_share():
    times = Times()
    times.work(0.01)
    times.work(0.0199)
    assert times.budget.may
    times.work(0.0002)
    assert times.budget.spent == pytest.approx(0.0301)
    assert not times.budget.may
    times.now += 9.0
    assert not times.budget.may
    times.now += 2.0
    assert times.budget.may


def test_each_run_has_a_budget_of_its_own():
    times = Times()
    times.now += 1000.0
    times.work(2.0)
    times.budget.begin()
    assert (times.budget.elapsed, times.budget.spent) == (0.0, 0.0)
    assert times.budget.may
    times.work(0.04)
    assert not times.budget.may


def test_work_that_fails_counts():
    times = Times()
    with pytest.raises(StopIteration):
        times.work(1.0, iter(()).__next__)
    assert times.budget.spent == pytest.approx(1.0)


def test_waiting_for_another_thread_takes_time_and_is_no_work():
    def work():
        while time.thread_time() < 0.05:
            pass

    budget, other = TimeBudget(), threading.Thread(target=work)
    with budget.working():
        other.start()
        other.join()
    assert budget.elapsed >= 0.05
    assert budget.spent < 0.05
