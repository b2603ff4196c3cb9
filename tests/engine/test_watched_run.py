"""What a run leaves: its record's file, its metrics and its log, of ranks whose time is told."""

import json
import logging
import subprocess
import sys

import pytest
import torch

from lightning_hetero import HeteroElasticStrategy
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.frontend.report.finish import status_of
from lightning_hetero.frontend.report.process_end import ProcessEnd
from tests.counted import CountedTime
from tests.decisions.told import told_time
from tests.helpers import Points, Regressor, collected, fit
from tests.ranks import run_ranks

RATE = 1e9


class Paced(Regressor):
    """Computes for what it is told by the sample, a third of it forward; ranks wait for each other in their sums."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def loss(self, batch):
        spent = len(batch[0]) * self.seconds(self.trainer.global_rank, self.trainer.global_step)
        self.clock.now += spent / 3
        output = self(batch[0])
        output.register_hook(lambda grad: setattr(self.clock, "now", self.clock.now + 2 * spent / 3))
        return torch.nn.functional.mse_loss(output, batch[1])

    def on_before_optimizer_step(self, optimizer):
        """Gradients are not kept."""


def trained(rank, ranks, settings, seconds, kwargs):
    """A training on the counted clock; lines that were said, and the metrics of the last round."""
    from lightning.pytorch.loggers.logger import DummyLogger

    class Rows(DummyLogger):
        rows = []

        def log_metrics(self, metrics, step=None):
            self.rows.append(metrics)

    Rows.rows = []
    lines, kwargs = [], {"max_epochs": 1, "dataset": Points(1200), **kwargs}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("lightning_hetero").addHandler(handler)
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    with told_time():
        clock, error = CountedTime(rank, RATE), ""
        try:
            fit(rank, settings, ranks, 8, model=Paced(clock, seconds), logger=Rows(), log_every_n_steps=1, **kwargs)
        except (ArithmeticError, KeyboardInterrupt) as caught:
            error = type(caught).__name__
    return lines, [row for row in Rows.rows if "hetero/lost_seconds" in row], error


def straggles(rank, step):
    """Rank 1 takes three times as long for a while."""
    return 0.03 if rank == 1 and 24 <= step < 48 else 0.01


def unequal(rank, step):
    return (0.01, 0.03)[rank]


def record_of(folder):
    (path,) = folder.rglob("hetero_run.jsonl")
    lines = path.read_text().splitlines()
    return RunRecord.from_lines(lines), [json.loads(line)["kind"] for line in lines]


def test_a_straggler_is_recorded_and_said_with_its_step_and_its_cost(tmp_path):
    settings = {"report": str(tmp_path), "replan": 8, "policy": "even"}
    (lines, rows, _), (silent, others, _) = run_ranks(trained, 2, 2, settings, straggles, {})
    record, _ = record_of(tmp_path)
    begin, end = record.stragglers
    assert (begin.event, begin.rank, begin.epoch) == ("begin", 1, 0)
    assert 22 <= begin.step <= 26
    assert begin.cost == pytest.approx(0.16, rel=0.1)
    assert (end.event, end.relieved) == ("end", "recovered")
    assert 48 <= end.step <= 66
    assert end.lost == pytest.approx(24 * 0.16, rel=0.15)
    said = [(level, text) for level, text in lines if text.startswith("rank 1")]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert f"step {begin.step}" in said[0][1]
    assert not [text for _, text in silent if text.startswith("rank 1")]
    assert rows[-1]["hetero/lost_seconds"] == pytest.approx(end.lost)
    assert others == [] or others == rows, "the same metrics on all ranks"
    assert 1.0 in [row["hetero/straggler"] for row in rows]
    assert rows[-1]["hetero/straggler"] < 0


def test_a_round_has_the_medians_and_a_change_its_measured_gain(tmp_path):
    (lines, rows, _), _ = run_ranks(trained, 2, 2, {"report": str(tmp_path), "replan": 8}, unequal, {})
    record, kinds = record_of(tmp_path)
    assert (kinds[0], kinds[-1]) == ("run", "end")
    assert (record.header.front_end, record.header.policy, record.header.total_batch_size) == (
        "Trainer",
        "perf_model",
        16,
    )
    assert len(record.header.workers) == 2
    first = record.rounds[0]
    assert (first.sizes, first.step, first.count) == ((8, 8), 7, 8)
    assert first.forward == pytest.approx((0.08 / 3, 0.24 / 3), rel=0.1)
    assert first.backward == pytest.approx((0.16 / 3, 0.48 / 3), rel=0.1)
    assert first.step_time == pytest.approx(0.24, rel=0.1)
    assert 75 - 4 < sum(one.count for one in record.rounds) <= record.end.steps == 75
    last = record.rounds[-1]
    assert last.sizes in ((12, 4), (11, 5))
    assert last.step_time == pytest.approx(0.12, rel=0.15)
    assert last.predicted == pytest.approx(last.step_time, rel=0.1)
    assert last.even == pytest.approx(0.24, rel=0.1)
    assert last.nodes
    assert [change.sizes for change in record.changes][-1] == last.sizes
    assert all(change.reason for change in record.changes)
    gain = record.gains[0]
    assert gain.before == pytest.approx(0.24, rel=0.1)
    assert gain.after < 0.8 * gain.before
    assert any(text.startswith("the change of the split") for _, text in lines)
    assert rows[-1]["hetero/speed_up"] == pytest.approx(0.24 / 0.12, rel=0.15)
    assert (record.end.status, len(record.end.memory)) == ("finished", 2)
    assert min(record.end.memory) > 1e7
    assert [text for _, text in lines if str(tmp_path) in text], "the summary says where the record is"


def fails_at_40(rank, step):
    if step == 40:
        raise ArithmeticError("boom\nand much more")
    return 0.01


def test_a_run_ends_with_its_error_and_the_next_one_follows_in_the_same_file(tmp_path):
    for seconds in (fails_at_40, unequal):
        found = run_ranks(trained, 2, 2, {"report": str(tmp_path), "replan": 8}, seconds, {})
        assert [error for *_, error in found] == ["ArithmeticError" if seconds is fails_at_40 else ""] * 2
    record, kinds = record_of(tmp_path)
    assert kinds.count("run") == kinds.count("end") == 2
    assert record.end.status == "finished"
    (path,) = tmp_path.rglob("hetero_run.jsonl")
    lines = path.read_text().splitlines()
    failed = RunRecord.from_lines(lines[: kinds.index("end") + 1])
    assert failed.end.status == "ArithmeticError: boom"
    assert failed.end.steps == 40


@pytest.mark.parametrize("settings", [{"report": False}, {}], ids=["switched off", "no folder"])
def test_a_run_without_a_record_has_the_same_metrics_and_says_why_there_is_none(settings):
    lines, rows, _ = run_ranks(trained, 2, 2, {"replan": 8, **settings}, unequal, {})[0]
    assert rows[-1]["hetero/speed_up"] > 1.5
    assert any("report='folder'" in text for _, text in lines) == (not settings)


LOST = "rank 0 lost its connection"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (RuntimeError("[../gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:23871\nmore"), LOST),
        (ConnectionResetError(104, "Connection reset by peer"), "ConnectionResetError"),
    ],
)
def test_the_status_says_no_more_than_is_known(error, says):
    assert status_of(error).startswith(says)
    assert "\n" not in status_of(error)


# what ends a process


@pytest.fixture
def end():
    before = sys.exit
    made = ProcessEnd()
    yield made
    made.close()
    assert sys.exit is before


def test_an_error_that_is_being_handled_ends_the_run_and_one_of_before_does_not(end, monkeypatch):
    try:
        raise ArithmeticError("boom")
    except ArithmeticError:
        assert str(end.error) == "boom"
    for ordinary in (StopIteration(), SystemExit(0), SystemExit(None)):
        try:
            raise ordinary
        except BaseException:  # noqa: BLE001 - SystemExit is none of Exception
            assert end.error is None
    with pytest.raises(SystemExit):
        sys.exit("wrong option")
    assert str(end.error) == "wrong option"
    end.go_on()
    assert end.error is None
    monkeypatch.setattr(sys, "last_value", ArithmeticError("earlier"), raising=False)
    try:
        raise MemoryError
    except MemoryError:
        later = ProcessEnd()
        assert later.error is None  # trains again in the handler of an error
    monkeypatch.setattr(sys, "last_value", ArithmeticError("later"), raising=False)
    assert str(later.error) == "later"
    later.close()


SCRIPT = """
import atexit, sys
from lightning_hetero.frontend.report.process_end import ProcessEnd
sys.excepthook = lambda *error: None  # other packages replace it as well
end = ProcessEnd()
atexit.register(lambda: sys.stdout.write(repr(end.error)))
{}
"""
ENDS = {
    "raise ArithmeticError('boom')": "ArithmeticError('boom')",
    "raise KeyboardInterrupt": "KeyboardInterrupt()",
    "sys.exit(3)": "SystemExit(3)",
    "try: 1 / 0\nexcept ArithmeticError: sys.exit(1)": "ZeroDivisionError('division by zero')",  # as launchers do
    "try: 1 / 0\nexcept ArithmeticError: pass\nsys.exit(0)": "None",
}


@pytest.mark.slow("starts interpreters")
@pytest.mark.parametrize("how", ENDS)
def test_an_error_that_nobody_catches_is_known_when_the_process_ends(how):
    made = subprocess.run([sys.executable, "-c", SCRIPT.format(how)], capture_output=True, text=True)
    assert made.stdout == ENDS[how], made.stderr


class Ends(Regressor):
    """Fails in a late step, if it is to."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.current_epoch == 1:
            raise ArithmeticError("boom\nmore")
        return super().training_step(batch, batch_idx)


def _elastic(rank, fails):
    lines = collected()
    try:
        fit(rank, HeteroElasticStrategy(mega_batch_size=32), 2, 4, model=Ends(fails), dataset=Points(64))
    except ArithmeticError:
        lines.append("failed")
    return [line for line in lines if line.startswith("hetero_elastic: ") or line == "failed"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_elastic_run_ends_with_one_summary_of_its_merges_by_whatever_it_ends(fails):
    (summary, *failed), silent = run_ranks(_elastic, 2, fails)
    assert failed == silent == ["failed"] * fails
    assert "over equal shares" in summary
    assert ("ArithmeticError: boom" in summary.splitlines()[-1]) == fails
