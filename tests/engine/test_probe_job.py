"""Orders for probe trainings: who obeys them, and whose are left over."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_hetero.probe_job import VARIABLE, ProbeOrder, ProbeReport


@pytest.fixture
def order(tmp_path):
    """As a script gets it."""
    return ProbeOrder.from_environment({VARIABLE: ProbeOrder(str(tmp_path / "answer.json"), samples=8).announce()})


@pytest.fixture
def gone():
    """Number of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write(order):
    with open(f"{order.report}.order", "w", encoding="utf-8") as file:
        file.write(order.to_json())
    return order


def test_an_order_of_a_process_that_is_alive_is_obeyed(order, monkeypatch):
    assert (order.host, order.pid) == (socket.gethostname(), os.getpid())
    assert order.why_left_over(answers=True) is order.why_left_over(answers=False) is None

    def kill(pid, number):
        raise PermissionError("another user's")

    monkeypatch.setattr(os, "kill", kill)
    assert order.why_left_over(answers=True) is None


def test_of_another_host_only_what_can_be_seen_is_judged(order, gone):
    """Its processes cannot be, and its folder may not be."""
    assert write(replace(order, host="elsewhere", pid=gone)).why_left_over(answers=True) is None
    assert replace(order, host="elsewhere").why_left_over(answers=False)
    nowhere = replace(order, report="/no/such/folder/answer.json")
    assert nowhere.report in nowhere.why_left_over(answers=False)
    assert replace(nowhere, host="elsewhere").why_left_over(answers=False) is None
    assert replace(nowhere, host="elsewhere").why_left_over(answers=True)


def test_an_answer_is_there_as_a_whole_and_nothing_beside_it(tmp_path):
    report = ProbeReport(0.25, samples=8, staleness=0, world_size=2, total=4, dataset=50, min_local=1)
    report.write(tmp_path / "answer.json")
    assert os.listdir(tmp_path) == ["answer.json"]
    assert ProbeReport.read(tmp_path / "answer.json") == report
