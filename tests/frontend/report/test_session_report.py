"""The record of a custom loop ends when it is closed, or with the process."""

import atexit

from lightning_hetero.frontend.report import session_report
from lightning_hetero.frontend.report.session_report import SessionReport


def calls(monkeypatch):
    made = []
    monkeypatch.setattr(session_report, "begin_report", lambda engine, planner, **more: made.append(("begin", more)))
    monkeypatch.setattr(session_report, "finish_report", lambda engine: made.append(("end", engine)))
    monkeypatch.setattr(atexit, "register", lambda call: made.append(("at exit", call)))
    monkeypatch.setattr(atexit, "unregister", lambda call: made.append(("not at exit", call)))
    return made


def test_it_begins_once_and_ends_with_the_process_at_the_latest(monkeypatch, tmp_path):
    made, report = calls(monkeypatch), SessionReport("engine", "Fabric", tmp_path)
    report.begin(None)
    report.begin(None)
    more = {"front_end": "Fabric", "strategy": "hetero_ddp", "folder": tmp_path}
    assert made == [("begin", more), ("at exit", report.end)]
    report.end()
    assert made[2:] == [("not at exit", report.end), ("end", "engine")]
    report.begin(None)
    assert made[4:] == [("begin", more), ("at exit", report.end)], "a session that goes on begins another record"
