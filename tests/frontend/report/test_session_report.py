"""The record of a custom loop ends when it is closed, or with the process, and knows by which error."""

import atexit
import sys
import weakref
from types import SimpleNamespace

import pytest

from lightning_hetero.frontend.report import session_report
from lightning_hetero.frontend.report.session_report import SessionReport


def calls(monkeypatch):
    """What is called, for no other records than those of a test."""
    made = []
    monkeypatch.setattr(session_report, "_begun", set())
    monkeypatch.setattr(session_report, "begin_report", lambda engine, planner, **more: made.append(("begin", more)))
    monkeypatch.setattr(session_report, "finish_report", lambda engine, error: made.append(("end", error)))
    monkeypatch.setattr(atexit, "register", lambda call: made.append(("at exit", call)))
    monkeypatch.setattr(atexit, "unregister", lambda call: made.append(("not at exit", call)))
    return made


class Session:
    running = True


SESSION = Session()


def engine(run="a run"):
    return SimpleNamespace(rounds=SimpleNamespace(watch=SimpleNamespace(run=run)))


def test_it_begins_once_and_ends_with_the_process_at_the_latest(monkeypatch, tmp_path):
    made, report = calls(monkeypatch), SessionReport(engine(), "Fabric", tmp_path, SESSION)
    report.begin(None)
    report.begin(None)
    more = {"front_end": "Fabric", "strategy": "hetero_ddp", "folder": tmp_path}
    assert made == [("begin", more), ("at exit", report.end)]
    report.end()
    assert made[2:] == [("not at exit", report.end), ("end", None)]
    report.begin(None)
    assert made[4:] == [("begin", more), ("at exit", report.end)], "a session that goes on begins another record"
    report.end()


def test_it_names_the_error_that_it_is_given_or_that_ends_the_process(monkeypatch):
    made, report, before = calls(monkeypatch), SessionReport(engine(), "Fabric", None, SESSION), sys.exit
    given = ArithmeticError("given")
    report.begin(None)
    report.end(given)
    assert made[-1] == ("end", given)
    report.begin(None)
    with pytest.raises(SystemExit):
        sys.exit(3)
    report.begin(None)  # somebody caught it
    report.end()
    assert made[-1] == ("end", None)
    report.begin(None)
    uncaught = ArithmeticError("uncaught")
    monkeypatch.setattr(sys, "last_value", uncaught, raising=False)
    report.end()
    assert made[-1] == ("end", uncaught)
    assert sys.exit is before


def test_a_rank_that_records_nothing_leaves_the_process_alone(monkeypatch):
    calls(monkeypatch)
    before, report = sys.exit, SessionReport(engine(None), "Fabric", None, SESSION)
    report.begin(None)
    assert sys.exit is before
    report.end()


@pytest.mark.parametrize(
    ("how", "ends"), [("in a pass", False), ("between two", True), ("gone", True), ("cycle", True)]
)
def test_another_training_ends_the_record_of_a_session_that_does_not_run(monkeypatch, how, ends):
    """Its engine would else be kept until the process ends."""
    made, session = calls(monkeypatch), Session()
    report = SessionReport(engine(), "Fabric", None, session)
    report.begin(None)
    gone = weakref.ref(session)
    session.running, session.itself = how != "between two", session if how == "cycle" else None
    if how in ("gone", "cycle"):
        del session
    session_report.end_idle_reports()
    assert (("end", None) in made) == ends
    assert (gone() is None) == (how in ("gone", "cycle"))
    before = len(made)
    session_report.end_idle_reports()
    assert len(made) == before, "it has ended, or goes on"
    report.end()


def test_a_forked_process_ends_no_record(monkeypatch):
    made, report = calls(monkeypatch), SessionReport(engine(), "Fabric", None, Session())
    report.begin(None)
    monkeypatch.setattr(session_report.os, "getpid", lambda: -1)
    monkeypatch.setattr(session_report.gc, "collect", lambda: made.append("collected"))
    session_report.end_idle_reports()
    assert made[2:] == []
    report.end()
