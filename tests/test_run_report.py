"""A run records itself under every front end, names its stragglers, and ends with a summary."""

import csv
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import lightning as L
import pytest
import torch
import transformers
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as HeteroDDPFabric
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, collected, fit, run_ranks, trainer_of
from tests.transformers.runs import arguments, llama, of, padded, texts, trained

FAST = DeviceProfile(q=0.0002, s=0.002, k=0.0004, m=0.002, name="fast")
SLOW = DeviceProfile(q=0.0006, s=0.006, k=0.0012, m=0.006, name="slow")


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    """Recording has a share of the CPU time, and leaves out rounds of runs as short as these on a slow machine."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)


def read(folder):
    (path,) = Path(folder).rglob("hetero_run.jsonl")
    with open(path, encoding="utf-8") as file:
        return RunRecord.from_lines(file)


def lines(folder):
    """Kind and fields of each line of the record in a folder."""
    (path,) = Path(folder).rglob("hetero_run.jsonl")
    return [(line["kind"], line) for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


# under the Trainer


def _emulated(rank, folder):
    said = collected()
    logger, model = CSVLogger(folder), Regressor()
    monitor = ModelCheckpoint(monitor="hetero/step_time", save_top_k=1, filename="best", every_n_epochs=1)
    stop = EarlyStopping(monitor="hetero/idle_fraction", patience=9, check_on_train_epoch_end=True)
    trainer = trainer_of(
        HeteroDDPStrategy(replan=12),
        2,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=4,
        enable_checkpointing=True,
        callbacks=[EmulatedDeviceCallback([FAST, SLOW]), monitor, stop],
    )
    trainer.fit(model, DataLoader(Points(32 * 40), 16, shuffle=True))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return said, metrics, monitor.best_model_score, logger.log_dir, len(trainer.strategy.plan_history)


@pytest.mark.alone
def test_a_trainer_records_the_run_and_says_what_was_gained(tmp_path):
    (said, metrics, best, folder, plans), (other, others, *_) = run_ranks(_emulated, 2, str(tmp_path))
    run, (summary,) = read(tmp_path), [line for line in said if "over even sizes" in line]
    figures = RunFigures(run)
    # the record
    assert run.header.front_end == "Trainer"
    assert run.header.policy == "perf_model"
    assert [worker.device for worker in run.header.workers] == ["fast (emulated)", "slow (emulated)"]
    assert run.end.status == "finished"
    assert sum(one.count for one in run.rounds) == run.end.steps == 80, (
        "also the steps after the last round that is due"
    )
    assert (run.rounds[-1].count, run.rounds[-1].kept, len(run.changes)) == (8, "", plans - 1)
    assert figures.last[-1].sizes[0] > figures.last[-1].sizes[1]
    assert figures.speed_up > 1.2
    assert run.changes[0].reason == "equal sizes" or run.changes[0].sizes != (16, 16)
    assert run.gains[0].after < run.gains[0].before
    # the log
    assert f"{figures.speed_up:.2f}x over even sizes" in summary
    assert f"lightning-hetero report {folder}" in summary
    assert any("measured (predicted" in line for line in said)
    assert not [line for line in other if "over even sizes" in line or "measured" in line]
    # the metrics
    assert {"hetero/step_time", "hetero/straggler", "hetero/lost_seconds", "hetero/speed_up"} <= set(metrics)
    assert set(metrics) == set(others)
    assert best is not None
    with open(Path(folder) / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("hetero/step_time")]
    assert {row["epoch"] for row in rows} <= {"0", "1", "0.0", "1.0"}
    assert all(row["epoch"] for row in rows)


def _without(rank, folder, report, everywhere=True):
    report = f"{report}-{rank}" if isinstance(report, str) else report
    said, logger = collected(), CSVLogger(folder) if everywhere or rank == 0 else False
    ran = fit(rank, {"replan": 4, "report": report}, 2, 4, dataset=Points(80), logger=logger, log_every_n_steps=1)
    return said, ran["metrics"]


def _fits_twice(rank, folder):
    said = collected()
    trainer = trainer_of(HeteroDDPStrategy(replan=4, report=folder), 2, max_epochs=1)
    model, loader = Regressor(), DataLoader(Points(80), 4, shuffle=True)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    return said, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("where", ["off", "mine", "no logger", "logger on rank 0"])
def test_where_the_record_is_written(tmp_path, where):
    if where == "off":
        (said, metrics), _ = run_ranks(_without, 2, str(tmp_path), False)
        assert not list(tmp_path.rglob("hetero_run.jsonl"))
        assert not [line for line in said if "idle; limited by" in line]
        assert {"hetero/speed_up", "hetero/idle_fraction", "hetero/straggler"} <= set(metrics)
    elif where == "mine":
        (said, metrics), _ = run_ranks(_fits_twice, 2, str(tmp_path / "mine"))
        assert len([line for line in said if "idle; limited by" in line]) == 2
        assert "hetero/speed_up" in metrics
        kinds = [kind for kind, _ in lines(tmp_path / "mine")]
        assert (kinds.count("run"), kinds.count("end")) == (2, 2)
        assert [one["steps"] for kind, one in lines(tmp_path / "mine") if kind == "end"] == [10, 10]
        run = read(tmp_path / "mine")
        assert run.end.epoch == 1
        assert len(run.rounds) >= 2
        assert sum(one.count for one in run.rounds) <= 10
    elif where == "logger on rank 0":
        run_ranks(_without, 2, str(tmp_path), True, False)
        (record,) = tmp_path.rglob("hetero_run.jsonl")
        assert read(record.parent).end is not None
    else:
        said = run_ranks(_quiet, 2)[0]
        (summary,) = [line for line in said if "idle; limited by" in line]
        assert "record:" not in summary
        assert "no record was written, because the run has no folder: give report='folder', or the Trainer" in summary


def _quiet(rank):
    said = collected()
    fit(rank, {"replan": 4}, 2, 4, dataset=Points(80))
    return said


class Fails(Regressor):
    """Raises, is told to end, or is killed in the middle of an epoch."""

    def __init__(self, how, step=25):
        super().__init__()
        self.how, self.at = how, step

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at and self.how == "raise":
            raise ArithmeticError("boom\nsecond line")
        if batch_idx == self.at and self.how == "kill" and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == self.at and self.how == "kill 0" and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _fails(rank, folder, how):
    fit(rank, {"replan": 4}, 2, 4, model=Fails(how), dataset=Points(400), logger=CSVLogger(folder))


@pytest.mark.parametrize("how", ["raise", "kill", "kill 0"])
def test_what_was_recorded_before_a_failure_can_be_read(tmp_path, how):
    run_ranks(_fails, 2, str(tmp_path), how, expect_errors=True, start="fork")
    run = read(tmp_path)
    assert len(run.rounds) >= 3
    assert run.damaged == 0
    if how == "raise":
        assert run.end.status == "ArithmeticError: boom"
    elif how == "kill":
        assert run.end.status.startswith("rank 0 lost its connection to another rank, whose log may say why (")
    else:
        assert run.end is None


# faults in each phase

STEPS, PAUSE = 40, 0.03  # steps of each fault and between two of them, seconds that it takes


class Late(Points):
    """A dataset that does something for each sample."""

    def __init__(self, n, late):
        super().__init__(n)
        self.late = late

    def __getitem__(self, i):
        self.late()
        return super().__getitem__(i)


class Faulty(Regressor):
    """Pauses in one phase of one rank at a time, by counted time: from data to the optimizer, and the link at last."""

    FAULTS = (("data", 1), ("forward", 0), ("backward", 1), ("optimizer", 0), ("link", -1))

    def __init__(self, counted):
        super().__init__()
        self.count, self.counted = 0, counted

    def on_train_start(self):
        self.net[0].weight.register_hook(self._pause("backward"))
        start, pause = sums.async_all_reduce, self._pause("link", everywhere=True)
        sums.async_all_reduce = lambda buffer, group=None: (pause(None), start(buffer, group))[1]

    def fault(self):
        """Phase and rank of the running step's fault."""
        number, odd = divmod(self.count // STEPS, 2)
        return self.FAULTS[number] if odd and number < len(self.FAULTS) else ("none", -2)

    def _pause(self, phase, everywhere=False):
        def pause(gradient):
            if self.fault() == (phase, -1 if everywhere else self.global_rank):
                self.counted.sleep(PAUSE)
            return gradient

        return pause

    def forward(self, x):
        self._pause("forward")(None)
        self.counted.spend(FAST.q * len(x) + FAST.s)
        y = super().forward(x)
        y.register_hook(lambda _: self.counted.spend(FAST.k * len(x) + FAST.m))
        return y

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += 1


class LateOptimizer(torch.optim.SGD):
    """Pauses after its closure."""

    pause = None

    def step(self, closure=None):
        loss = closure()
        self.pause(None)
        super().step()
        return loss


def _faulty(rank, folder):
    counted = CountedTime(rank, 1e9)
    model = Faulty(counted)

    def late():
        if model.fault() == ("data", rank):
            counted.sleep(PAUSE / 4)

    def optimizers():
        optimizer = LateOptimizer(model.parameters(), lr=0.01)
        optimizer.pause = model._pause("optimizer")
        return optimizer

    model.configure_optimizers = optimizers
    said, steps = collected(), (2 * len(model.FAULTS) + 1) * STEPS
    settings = {"replan": 10, "policy": "static"}
    fit(rank, settings, 2, 4, model=model, dataset=Late(8 * steps, late), logger=CSVLogger(folder), max_epochs=1)
    return said


def test_injected_faults_are_named_with_their_phase_and_end(tmp_path):
    """And nothing else is."""
    said, other = run_ranks(_faulty, 2, str(tmp_path))
    records = read(tmp_path).stragglers
    begins = [one for one in records if one.event == "begin"]
    assert [(one.phase, one.rank) for one in begins] == list(Faulty.FAULTS)
    for number, (begin, (phase, rank)) in enumerate(zip(begins, Faulty.FAULTS, strict=True)):
        first = (2 * number + 1) * STEPS
        assert first <= begin.step <= first + 15
        assert begin.cost == pytest.approx(PAUSE, rel=0.1)
        ends = [one for one in records if one.event == "end" and (one.phase, one.rank) == (phase, rank)]
        assert [one.relieved for one in ends] == ["recovered"]
        assert first + STEPS <= ends[0].step <= first + STEPS + 20
        assert ends[0].lost == pytest.approx(PAUSE * STEPS, rel=0.3)
    lines = [line for line in said if "has made all others wait" in line or "the link has been slower" in line]
    assert len(lines) == len([one for one in records if one.event == "begin"])
    assert not [line for line in other if "wait" in line]


# other front ends


def _fabric(rank, folder):
    said = collected()
    logger = FabricLogger(folder) if rank == 0 else None
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPFabric(replan=4), loggers=logger)
    fabric.launch()
    model, optimizer = _module(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Points(160, dtype=torch.float32), 4, shuffle=True))
    with suppress(ArithmeticError):
        try:
            for x, y, _ in loader:
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
            fabric.log("loss", 1.0)
            raise ArithmeticError("boom")
        finally:
            fabric.strategy.teardown()
    if rank == 0:
        assert (Path(logger.log_dir) / "hetero_run.jsonl").exists()
    return said


def _module():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1)


def _accelerate(rank, folder):
    from accelerate.utils import ProjectConfiguration

    said = collected()
    config = ProjectConfiguration(project_dir=folder, logging_dir=folder)
    accelerator = HeteroAccelerator(cpu=True, project_config=config, hetero_plugin=HeteroPlugin(replan=4))
    model = _module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Points(160, dtype=torch.float32), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    accelerator.end_training()
    return said


def _transformers(rank, folder):
    said, args = collected(), arguments(16, None, hetero_replan=4, output_dir=folder)
    trainer = of(transformers.Trainer)(model=llama(), args=args, train_dataset=texts(320), data_collator=padded)
    trained(trainer)
    with suppress(ArithmeticError):
        trainer.add_callback(FailsAtTheEnd)
        trainer.train()
    return said


class FailsAtTheEnd(transformers.TrainerCallback):
    """Raises when training ends, before Transformers cleans up."""

    def on_train_end(self, *args, **kwargs):
        raise ArithmeticError("boom")


@pytest.mark.parametrize(
    ("run", "front_end", "statuses"),
    [
        (_fabric, "Fabric", ["ArithmeticError: boom"]),
        (_accelerate, "Accelerate", ["finished"]),
        (_transformers, "Transformers", ["finished", "ArithmeticError: boom"]),
    ],
)
def test_every_front_end_records_its_runs(tmp_path, run, front_end, statuses):
    runs = len(statuses)
    said, other = run_ranks(run, 2, str(tmp_path))
    record = read(tmp_path)
    assert record.header.front_end == front_end
    ends = [one.get("status", "finished") for kind, one in lines(tmp_path) if kind == "end"]
    assert ends == statuses
    assert len(record.rounds) >= 3
    assert record.header.settings["replan"] == "4"
    assert [kind for kind, _ in lines(tmp_path)].count("run") == runs
    assert {one["steps"] for kind, one in lines(tmp_path) if kind == "end"} == {20}
    assert len([line for line in said if "idle; limited by" in line]) == runs
    assert not [line for line in other if "idle; limited by" in line]
