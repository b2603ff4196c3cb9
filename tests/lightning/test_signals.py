"""Signals that end a training: all ranks obey at the same batch, whichever of them is told and when."""

import os
import random
import signal
import threading
import warnings
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero import BlockTopK
from lightning_hetero.comm.collectives.async_ops import SharedNotes
from tests.helpers import Points, Regressor, fit
from tests.ranks import put, run_ranks

SHORT = {"timeout": timedelta(seconds=20)}
TOPK = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}
MODES = {
    "plain": {},
    "both": {**TOPK, "staleness": 1},
    "even": {"policy": "even"},
    "powersgd": {"compression": "powersgd"},
}


class Told(L.Callback):
    """This process gets a signal some time after training has begun, wherever it is then, unless training has ended."""

    def __init__(self, seconds, number=signal.SIGTERM):
        self.seconds, self.number, self.timer = seconds, number, None

    def on_train_start(self, trainer, pl_module):
        self.timer = threading.Timer(self.seconds, os.kill, (os.getpid(), self.number))
        self.timer.start()

    def on_exception(self, trainer, pl_module, exception):
        """Lightning then restores the handlers of before, by which a late signal ends the process."""
        self.timer.cancel()


class Tells(L.Callback):
    """Ranks get a signal when training begins, in a batch by the number of all so far, or as they wait before it."""

    def __init__(self, ranks, point, number=signal.SIGTERM):
        self.ranks, self.point, self.number = ranks, point, number

    def tell(self, trainer, *point):
        if trainer.global_rank in self.ranks and point == self.point:
            os.kill(os.getpid(), self.number)

    def on_train_start(self, trainer, pl_module):
        take, before = SharedNotes.take, iter(range(10**9))

        def waits(notes):
            found = take(notes)
            self.tell(trainer, "waits", next(before))
            return found

        put(SharedNotes, "take", waits)
        self.tell(trainer, "begins")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.tell(trainer, "batch", trainer.global_step - 1)


class Validated(Regressor):
    """Has something to validate."""

    def val_dataloader(self):
        return torch.utils.data.DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


def filter_warnings():
    warnings.filterwarnings("ignore", ".*was called without a model", UserWarning)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available", UserWarning)


def _train_until_told(rank, mode, told, folder):
    filter_warnings()
    model = Validated()
    callbacks = [told[rank], OnExceptionCheckpoint(folder)]
    more = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 10**6}
    try:
        fit(rank, {**SHORT, **MODES[mode]}, 2, 5, model=model, dataset=Points(64), **more)
    except SIGTERMException:
        return len(model.seen)
    return None


def ends_with_a_checkpoint(mode, told, folder):
    steps = run_ranks(_train_until_told, 2, mode, told, str(folder), timeout=60.0)
    assert steps[0] == steps[1] > 0
    state = torch.load(folder / "on_exception.ckpt", weights_only=True)
    assert state["global_step"] == steps[0]
    if isinstance(MODES[mode].get("compression"), BlockTopK):
        everyone = state["lightning_hetero_residuals"]["ranks"]
        assert [bool(own["residuals"]) for own in everyone] == [True, True], "what each has not sent yet is saved"


@pytest.mark.parametrize(
    ("mode", "ranks", "point"),
    [("both", [0, 1], ("batch", 8)), ("plain", [0, 1], ("waits", 8)), ("plain", [0], ("batch", 8))],
)
def test_all_ranks_end_with_a_checkpoint(mode, ranks, point, tmp_path):
    ends_with_a_checkpoint(mode, [Tells(ranks, point)] * 2, tmp_path)


@pytest.mark.slow("in real time")
@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_end_with_a_checkpoint_when_told_at_almost_the_same_time(mode, tmp_path, seed):
    """A scheduler tells every process, milliseconds apart."""
    rng = random.Random(f"{mode} {seed}")
    begin = rng.uniform(0.2, 0.6)
    ends_with_a_checkpoint(mode, [Told(begin + rng.uniform(0.0, 0.004)) for _ in range(2)], tmp_path)


TOLD = {
    "rank 0 before the first batch": (0, ("begins",), 1),
    "rank 0 in a batch": (0, ("batch", 2), 4),
    "rank 1 in a batch": (1, ("batch", 2), 4),
    "in the last batch": (1, ("batch", 6), 7),
}


def _told(rank, world_size):
    """Steps that each training had, and whether Lightning is then as it was."""
    found, before = {}, signal.getsignal(signal.SIGTERM)
    for name, (told, point, _) in TOLD.items():
        model, tells = Regressor(), Tells([told % world_size], point)
        try:
            given = {"model": model, "dataset": Points(64), "callbacks": [tells], "max_epochs": 1}
            fit(rank, SHORT, world_size, 10 // world_size, **given)
            found[name] = "trained to the end"
        except SIGTERMException:
            found[name] = len(model.seen)
    found["handler"] = signal.getsignal(signal.SIGTERM) is before
    return found


def test_a_note_is_sent_before_the_next_batch_and_obeyed_before_the_one_after_it():
    for found in run_ranks(_told, 2, 2):
        assert found == {**{name: steps for name, (*_, steps) in TOLD.items()}, "handler": True}
    assert run_ranks(_told, 1, 1)[0]["rank 1 in a batch"] == 3, "a process alone obeys at once"


class Slurm(SLURMEnvironment):
    """SLURM as far as the handlers ask for it; the ranks are those of the test."""

    creates_processes_externally = True
    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))
    world_size = staticmethod(lambda: int(os.environ["WORLD_SIZE"]))
    global_rank = staticmethod(lambda: int(os.environ["RANK"]))
    local_rank = staticmethod(lambda: int(os.environ["LOCAL_RANK"]))
    node_rank = staticmethod(lambda: 0)

    def validate_settings(self, num_devices, num_nodes):
        pass


class Stops(L.Callback):
    """Ends training once the checkpoint of the requeue is there, and counts the requests."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        found = trainer.strategy.broadcast(any(name.startswith("hpc_ckpt") for name in os.listdir(self.folder)))
        trainer.should_stop = found


def _requeued(rank, told, folder):
    os.environ["SLURM_JOB_ID"] = "12"
    os.environ["PATH"] = folder  # no scontrol
    model = Validated()
    environment = Slurm(auto_requeue=True, requeue_signal=signal.SIGUSR2)
    given = {"plugins": [environment], "default_root_dir": folder, "callbacks": [told, Stops(folder)]}
    fit(rank, {**SHORT, **TOPK}, 2, 5, model=model, dataset=Points(64), max_epochs=40, **given)
    return len(model.seen)


class TellsInTurn(Tells):
    """Each rank is told one batch later than the one before it."""

    def tell(self, trainer, *point):
        super().tell(trainer, point[0], *(number - trainer.global_rank for number in point[1:]))


@pytest.mark.parametrize(
    ("told", "ranks", "point"),
    [(Tells, [0, 1], ("waits", 8)), (Tells, [1], ("batch", 8)), (TellsInTurn, [0, 1], ("batch", 8))],
)
def test_slurms_signal_to_requeue_saves_once_on_all_ranks_at_the_same_batch(told, ranks, point, tmp_path):
    """Ranks that wait for each other before a batch are told while they do."""
    steps = run_ranks(_requeued, 2, told(ranks, point, signal.SIGUSR2), str(tmp_path), timeout=60.0)
    assert steps[0] == steps[1]
    assert len(list(tmp_path.glob("hpc_ckpt_*"))) == 1
    assert 8 < torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] <= 10
