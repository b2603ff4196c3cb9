"""A run records itself under every front end, names its stragglers, and ends with a summary."""

import json
import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path

import lightning as L
import pytest
import torch
import transformers
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.report import find_record, read_run
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as HeteroDDPFabric
from tests.helpers import Points, Regressor, collected, fit, trainer_of
from tests.ranks import at_end, run_ranks
from tests.transformers.runs import arguments, llama, of, padded, texts, trained

FAST = DeviceProfile(q=0.0002, s=0.002, k=0.0004, m=0.002, name="fast")
SUMMARY = "idle; limited by"


def recording():
    """Our log lines from here on. Recording has a share of the CPU time, and leaves out rounds on a slow machine."""
    patch = pytest.MonkeyPatch()
    patch.setattr(time, "thread_time", lambda: 0.0)
    at_end(patch.undo)
    return collected()


def lines(folder):
    """Lines of the record in a folder by their kind."""
    (path,) = Path(folder).rglob("hetero_run.jsonl")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {kind: [one for one in found if one["kind"] == kind] for kind in ("run", "round", "end")}


# under the Trainer


def _short(rank, folder, where):
    """Fits of ten steps each; log lines, metrics, and what a callback followed."""
    said = recording()
    logger = CSVLogger(folder) if where == "off" or (where == "logger on rank 0" and rank == 0) else False
    report = {"off": False, "a folder, twice": folder}.get(where, True)
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")
    monitor = ModelCheckpoint(f"{folder}/checkpoints", monitor="hetero/step_time", save_top_k=1)
    settings = {"max_epochs": 1, "logger": logger, "enable_checkpointing": True}
    callbacks = [monitor, EmulatedDeviceCallback(FAST)]
    trainer = trainer_of(HeteroDDPStrategy(replan=4, report=report), 2, callbacks=callbacks, **settings)
    model, loader = Regressor(), DataLoader(Points(80), 4, shuffle=True)
    trainer.fit(model, loader)
    if where == "a folder, twice":
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader)
    return said, {name: float(value) for name, value in trainer.callback_metrics.items()}, monitor.best_model_score


@pytest.mark.parametrize(
    ("where", "runs", "summaries"),
    [("off", 0, 0), ("a folder, twice", 2, 2), ("no logger", 0, 1), ("logger on rank 0", 1, 1)],
)
def test_where_a_trainer_records_its_run_and_says_what_was_gained(tmp_path, where, runs, summaries):
    (said, metrics, best), (other, others, _) = run_ranks(_short, 2, str(tmp_path), where)
    told = [line for line in said if SUMMARY in line]
    assert (len(told), [line for line in other if SUMMARY in line]) == (summaries, [])
    assert {"hetero/speed_up", "hetero/idle_fraction", "hetero/straggler", "hetero/lost_seconds"} <= set(metrics)
    assert set(metrics) == set(others)
    assert best is not None
    assert len(list(tmp_path.rglob("hetero_run.jsonl"))) == min(runs, 1)
    if runs:
        found, run = lines(tmp_path), read_run(tmp_path)
        assert (len(found["run"]), [one["steps"] for one in found["end"]]) == (runs, [10] * runs)
        assert (run.header.front_end, run.end.epoch, run.end.status) == ("Trainer", runs - 1, "finished")
        assert [worker.device for worker in run.header.workers] == ["fast (emulated)"] * 2
        assert 2 <= len(run.rounds) <= sum(one.count for one in run.rounds) <= 10
        assert f"lightning-hetero report {find_record(tmp_path).parent}" in told[-1]
    if where == "no logger":
        assert "report='folder'" in told[0]


class Killed(Regressor):
    """One rank is killed in the middle of an epoch."""

    def __init__(self, rank):
        super().__init__()
        self.killed = rank

    def training_step(self, batch, batch_idx):
        if batch_idx == 25 and self.global_rank == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _killed(rank, folder, who):
    recording()
    fit(rank, {"replan": 4}, 2, 4, model=Killed(who), dataset=Points(400), logger=CSVLogger(folder))


@pytest.mark.parametrize(("who", "status"), [(1, "rank 0 lost its connection"), (0, None)])
def test_what_was_recorded_before_a_rank_was_killed_can_be_read(tmp_path, who, status):
    run_ranks(_killed, 2, str(tmp_path), who, expect_errors=True)
    run = read_run(tmp_path)
    assert len(run.rounds) >= 3
    assert run.damaged == 0
    assert run.end.status.startswith(status) if status else run.end is None


# other front ends


def _parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    loader = DataLoader(Points(160, dtype=torch.float32), 4, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def _steps(model, optimizer, loader, backward):
    for x, y, _ in loader:
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()


def _fabric(rank, folder):
    said, logger = recording(), FabricLogger(folder) if rank == 0 else None
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPFabric(replan=4), loggers=logger)
    fabric.launch()
    model, optimizer, loader = _parts()
    model, optimizer = fabric.setup(model, optimizer)
    with suppress(ArithmeticError):
        try:
            _steps(model, optimizer, fabric.setup_dataloaders(loader), fabric.backward)
            fabric.log("loss", 1.0)
            raise ArithmeticError("boom")
        finally:
            fabric.strategy.teardown()
    return said


def _accelerate(rank, folder):
    from accelerate.utils import ProjectConfiguration

    said, config = recording(), ProjectConfiguration(project_dir=folder, logging_dir=folder)
    accelerator = HeteroAccelerator(cpu=True, project_config=config, hetero_plugin=HeteroPlugin(replan=4))
    _steps(*accelerator.prepare(*_parts()), accelerator.backward)
    accelerator.end_training()
    return said


class FailsAtTheEnd(transformers.TrainerCallback):
    """Raises when training ends, before Transformers cleans up."""

    def on_train_end(self, *args, **kwargs):
        raise ArithmeticError("boom")


def _transformers(rank, folder):
    said, args = recording(), arguments(16, None, hetero_replan=4, output_dir=folder)
    trainer = of(transformers.Trainer)(model=llama(), args=args, train_dataset=texts(320), data_collator=padded)
    trained(trainer)
    with suppress(ArithmeticError):
        trainer.add_callback(FailsAtTheEnd)
        trainer.train()
    return said


@pytest.mark.parametrize(
    ("run", "front_end", "statuses"),
    [
        (_fabric, "Fabric", ["ArithmeticError: boom"]),
        (_accelerate, "Accelerate", ["finished"]),
        (_transformers, "Transformers", ["finished", "ArithmeticError: boom"]),
    ],
)
def test_every_front_end_records_its_runs(tmp_path, run, front_end, statuses):
    said, other = run_ranks(run, 2, str(tmp_path))
    record, found = read_run(tmp_path), lines(tmp_path)
    assert (record.header.front_end, record.header.settings["replan"]) == (front_end, "4")
    assert [one.get("status", "finished") for one in found["end"]] == statuses
    assert [one["steps"] for one in found["end"]] == [20] * len(statuses)
    assert len(found["run"]) == len(statuses)
    assert len(record.rounds) >= 3
    assert [len([line for line in own if SUMMARY in line]) for own in (said, other)] == [len(statuses), 0]
