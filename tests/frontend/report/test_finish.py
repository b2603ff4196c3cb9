"""The summary is logged once, when the run ends, with rich's table on a terminal that shows one."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_hetero.engine.watch.recorder import Recorder
from lightning_hetero.frontend.report import finish
from lightning_hetero.frontend.report.finish import finish_report, status_of
from tests.recorded import a_run


class Watch:
    """A watch whose run has ended."""

    def __init__(self, run, path, folder):
        self.run, self.path, self.status, self.reached = run, path, None, None
        self.recorder = SimpleNamespace(folder=folder)

    def finish(self, status, at, steps):
        run, self.run, self.status = self.run, None, status
        self.reached = self.reached or (at, steps)
        return run


def ended(run, caplog, error=None, path=None, folder=Path()):
    observer = SimpleNamespace(synced_steps=100)
    engine = SimpleNamespace(
        rounds=SimpleNamespace(watch=Watch(run, path, folder)), position=(3, 24), observer=observer
    )
    with caplog.at_level("INFO", logger="lightning_hetero"):
        finish_report(engine, error)
        finish_report(engine, error)
    return engine.rounds.watch, caplog.messages


def test_the_summary_is_logged_once(caplog, tmp_path):
    watch, messages = ended(a_run(), caplog, path=tmp_path / "hetero_run.jsonl")
    assert watch.reached == ((3, 24), 100)
    (message,) = messages
    assert "x over even sizes" in message
    assert f"record: {tmp_path / 'hetero_run.jsonl'} (lightning-hetero report {tmp_path})" in message


def test_an_error_is_named_by_its_first_line(caplog):
    watch, _ = ended(None, caplog, RuntimeError("boom\nand much more"))
    assert watch.status == "RuntimeError: boom"


def test_a_summary_that_fails_does_not_fail_the_training(caplog, monkeypatch):
    """It is made on rank 0 alone: an error there would leave all other ranks waiting."""
    monkeypatch.setattr(finish, "summary_of", lambda run: 1 // 0)
    _, messages = ended(a_run(), caplog)
    assert "the summary of the run could not be made" in messages[0]
    assert "ZeroDivisionError" in caplog.text


LOST = "rank 0 lost its connection to another rank, whose log may say why (RuntimeError: {})"
PEER = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:23871"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (RuntimeError(f"{PEER}\nRanks were waiting for others."), LOST.format(PEER)),
        (
            ConnectionResetError(104, "Connection reset by peer"),
            "ConnectionResetError: [Errno 104] Connection reset by peer",
        ),
    ],
)
def test_the_status_says_no_more_than_is_known(error, status):
    assert status_of(error) == status


def test_a_run_without_rounds_says_nothing(caplog):
    run = a_run()
    empty = type(run)(run.header)
    _, messages = ended(empty, caplog)
    assert messages == []


def test_a_run_without_a_folder_says_how_to_get_one(caplog):
    for folder in (None, Path("full disk")):
        _, (*_, message) = ended(a_run(), caplog, folder=folder)
        told = "no record was written, because the run has no folder: give report='folder', or the Trainer a logger"
        assert (told in message) == (folder is None)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_table_that_fits(caplog, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(finish.shutil, "get_terminal_size", lambda **_: os.terminal_size((90, 24)))
    _, (message,) = ended(a_run(), caplog)
    assert ("━" in message) == terminal
    assert "device 2" in message
    assert "samples/s" in message
    if terminal:
        assert max(map(len, message.partition("step:")[0].splitlines())) <= 90


def test_without_rich_the_text_is_plain(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _, (message,) = ended(a_run(), caplog)
    assert "━" not in message
    assert "device 2" in message


def test_a_recorder_can_be_ended_without_any_record():
    assert Recorder(2).run is None
