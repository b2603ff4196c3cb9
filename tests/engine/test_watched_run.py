"""What a run leaves: its record's file and its metrics, of ranks whose time is counted; and how it ended."""

import sys

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hetero import HeteroElasticStrategy
from lightning_hetero.frontend.report.process_end import ProcessEnd
from lightning_hetero.report import read_run
from tests.counted import CountedTime
from tests.decisions.told import told_time
from tests.helpers import Points, Regressor, collected, fit
from tests.ranks import run_ranks


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


class Rows(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows += [metrics] if "hetero/lost_seconds" in metrics else []


def watched(rank, folder, seconds, settings):
    """A training of 75 steps on the counted clock: what its rounds logged."""
    logger = Rows()
    with told_time():
        model = Paced(CountedTime(rank, 1e9), seconds)
        more = {"model": model, "dataset": Points(1200), "max_epochs": 1, "logger": logger, "log_every_n_steps": 1}
        fit(rank, {"report": str(folder), "replan": 8, **settings}, 2, 8, **more)
    return logger.rows


def straggles(rank, step):
    """Rank 1 takes three times as long for a while."""
    return 0.03 if rank == 1 and 24 <= step < 48 else 0.01


def unequal(rank, step):
    return (0.01, 0.03)[rank]


def test_a_straggler_is_in_the_record_and_in_the_metrics_of_all_ranks(tmp_path):
    rows, others = run_ranks(watched, 2, tmp_path, straggles, {"policy": "even"})
    begin, end = read_run(tmp_path).stragglers
    assert (begin.event, begin.rank, end.event, end.relieved) == ("begin", 1, "end", "recovered")
    assert 22 <= begin.step <= 26
    assert 48 <= end.step <= 66
    assert begin.cost == pytest.approx(0.16, rel=0.1)
    assert end.lost == pytest.approx(24 * 0.16, rel=0.15)
    assert rows[-1]["hetero/lost_seconds"] == pytest.approx(end.lost)
    assert 1.0 in [row["hetero/straggler"] for row in rows]
    assert rows[-1]["hetero/straggler"] < 0
    assert others in ([], rows)


def test_a_round_has_the_medians_and_a_change_its_measured_gain(tmp_path):
    rows, _ = run_ranks(watched, 2, tmp_path, unequal, {})
    run = read_run(tmp_path)
    first, last, gain = run.rounds[0], run.rounds[-1], run.gains[0]
    assert (first.sizes, first.step, first.count) == ((8, 8), 7, 8)
    assert first.forward == pytest.approx((0.08 / 3, 0.24 / 3), rel=0.1)
    assert first.backward == pytest.approx((0.16 / 3, 0.48 / 3), rel=0.1)
    assert first.step_time == pytest.approx(0.24, rel=0.1)
    assert last.sizes == run.changes[-1].sizes in ((12, 4), (11, 5))
    assert last.step_time == pytest.approx(0.12, rel=0.15)
    assert last.predicted == pytest.approx(last.step_time, rel=0.1)
    assert (last.even, gain.before) == pytest.approx((0.24, 0.24), rel=0.1)
    assert gain.after < 0.8 * gain.before
    assert rows[-1]["hetero/speed_up"] == pytest.approx(0.24 / 0.12, rel=0.15)
    assert (run.end.status, run.end.steps, len(run.end.memory)) == ("finished", 75, 2)


# what ends a process


@pytest.fixture
def end():
    before = sys.exit
    made = ProcessEnd()
    yield made
    made.close()
    assert sys.exit is before


def test_an_error_that_is_being_handled_ends_the_run_and_one_of_before_does_not(end):
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


class Fails(Regressor):
    """In a late step."""

    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1:
            raise ArithmeticError("boom\nmore")
        return super().training_step(batch, batch_idx)


def _elastic(rank):
    lines = collected()
    with pytest.raises(ArithmeticError):
        fit(rank, HeteroElasticStrategy(mega_batch_size=32), 2, 4, model=Fails(), dataset=Points(64))
    return [line for line in lines if line.startswith("hetero_elastic: ")]


def test_an_elastic_run_that_fails_ends_with_one_summary_that_says_why():
    (summary,), silent = run_ranks(_elastic, 2)
    assert silent == []
    assert "ArithmeticError: boom" in summary.splitlines()[-1]
