"""Signals that end a training: all ranks obey at the same batch, whichever of them is told and when."""

import os
import random
import signal
import threading
import time
import warnings
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero import AdaptiveBatchCallback, BlockTopK, GNSCallback
from lightning_hetero.strategies._lightning.ending import EndingMixin
from lightning_hetero.strategies._lightning.signals import SharedSignals, restore_sigterm, sigterm_at_next_merge
from tests.helpers import Points, Regressor, fit, run_ranks

N = 64
CHECK = "_broadcast_sigterm_tensor"
TOPK = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}
MODES = {
    "plain": ({}, []),
    "even": ({"policy": "even"}, []),
    "block top-k": (TOPK, []),
    "staleness": ({"staleness": 1}, []),
    "both": ({**TOPK, "staleness": 1}, []),
    "powersgd": ({"compression": "powersgd"}, []),
    "noise scale": ({}, [lambda: GNSCallback(every_n_steps=1)]),
    "adaptive": ({}, [lambda: AdaptiveBatchCallback(20)]),
}
SHORT = {"timeout": timedelta(seconds=20)}


class Told(L.Callback):
    """This process gets a signal some time after training has begun, wherever it is then, unless training has ended."""

    def __init__(self, seconds, number=signal.SIGTERM):
        self.seconds, self.number, self.timer = seconds, number, None

    def on_train_start(self, trainer, pl_module):
        if self.seconds is not None:
            self.timer = threading.Timer(self.seconds, os.kill, (os.getpid(), self.number))
            self.timer.start()

    def on_exception(self, trainer, pl_module, exception):
        """Lightning then restores the handlers of before, by which a late signal ends the process."""
        if self.timer is not None:
            self.timer.cancel()


class Slow(Regressor):
    """Takes a millisecond for a step, and has something to validate."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.001)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


def _train_until_told(rank, mode, delays, folder):
    warnings.filterwarnings("ignore", ".*was called without a model", UserWarning)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available", UserWarning)
    settings, callbacks = MODES[mode]
    model = Slow()
    callbacks = [*(make() for make in callbacks), Told(delays[rank]), OnExceptionCheckpoint(folder)]
    more = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 10**6}
    try:
        fit(rank, {**SHORT, **settings}, 2, 5, model=model, dataset=Points(N), **more)
    except SIGTERMException:
        return len(model.seen)
    return None


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_end_with_a_checkpoint_when_told_at_almost_the_same_time(mode, tmp_path):
    """A scheduler tells every process, milliseconds apart."""
    for seed in range(3):
        rng = random.Random(f"{mode} {seed}")
        begin = rng.uniform(0.2, 0.6)
        delays = [begin + rng.uniform(0.0, 0.004) for _ in range(2)]
        folder = tmp_path / str(seed)
        steps = run_ranks(_train_until_told, 2, mode, delays, str(folder), timeout=60.0)
        assert steps[0] == steps[1] > 0
        state = torch.load(folder / "on_exception.ckpt", weights_only=True)
        assert state["global_step"] == steps[0]
        if isinstance(MODES[mode][0].get("compression"), BlockTopK):
            everyone = state["lightning_hetero_residuals"]["ranks"]
            assert [bool(own["residuals"]) for own in everyone] == [True, True], "what each has not sent yet is saved"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_is_told_ends_all(rank, tmp_path):
    delays = [0.4 if rank == told else None for told in range(2)]
    steps = run_ranks(_train_until_told, 2, "plain", delays, str(tmp_path), timeout=60.0)
    assert steps[0] == steps[1] > 0
    assert (tmp_path / "on_exception.ckpt").exists()


class Fake:
    """What handlers ask of a trainer; two ranks in one process, whose messages meet in :meth:`maximum_later`."""

    def __init__(self, world_size):
        self.killed, self.requeued, self.others = [], [], [0, 0, 0, 0]
        launcher = SimpleNamespace(kill=self.killed.append)
        self.connector = SimpleNamespace(
            received_sigterm=False,
            _sigterm_notifier_fn=None,
            _slurm_sigusr_handler_fn=lambda number, frame: self.requeued.append(number),
        )
        trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), _signal_connector=self.connector)
        control = SimpleNamespace(rank=0, world_size=world_size, maximum_later=lambda: self.maximum_later)
        self.heard = []
        self.signals = SharedSignals(trainer, control, hasten=lambda: self.heard.append(1)).install()

    def maximum_later(self, notes):
        others = torch.tensor(self.others)
        return SimpleNamespace(wait=lambda: torch.maximum(notes, others, out=notes))

    def gets(self, name):
        number = signal.SIGUSR2 if "usr" in name else signal.SIGTERM
        getattr(self.connector, name)(number, None)


def test_a_process_alone_obeys_at_once():
    one = Fake(1)
    one.gets("_slurm_sigusr_handler_fn")
    assert one.requeued == [signal.SIGUSR2]
    assert not one.connector.received_sigterm
    one.gets("_sigterm_notifier_fn")
    assert one.connector.received_sigterm


def test_processes_that_were_started_by_this_one_are_told_once():
    """Else the two would tell each other for ever."""
    one = Fake(2)
    for _ in range(3):
        one.gets("_sigterm_notifier_fn")
    assert one.killed == [signal.SIGTERM]
    assert not one.connector.received_sigterm


def test_a_requeue_is_asked_for_once():
    one = Fake(2)
    one.gets("_slurm_sigusr_handler_fn")
    for _ in range(4):
        one.signals.check()
    assert one.requeued == [signal.SIGUSR2]


def test_all_ranks_hear_at_the_same_batch_that_one_has_run_out_of_memory():
    """Once, a batch later, whichever rank it was."""
    one, other = Fake(2), Fake(2)
    one.signals.note_memory()
    heard = []
    for fake in (one, other):
        for batch in range(4):
            other.others = [0, 0, 0, int(batch == 0)]
            before = len(fake.heard)
            fake.signals.check()
            heard += [batch] * (len(fake.heard) - before)
    assert heard == [1, 1]


@pytest.mark.parametrize("when", ["before the last check", "after it"])
def test_a_signal_to_another_rank_at_the_very_end_is_obeyed(when):
    one = Fake(2)
    one.others = [signal.SIGTERM if when == "before the last check" else 0, 0, 0, 0]
    one.signals.check()
    one.others = [0 if when == "before the last check" else signal.SIGTERM, 0, 0, 0]
    with pytest.raises(SIGTERMException):
        one.signals.finish()
    assert one.signals.agreed
    assert one.connector.received_sigterm


def test_under_elastic_averaging_only_lightnings_own_handler_is_replaced():
    """By one that talks to no other rank, and still tells processes that Lightning has started."""
    killed, noted = [], []

    class Connector:
        def _sigterm_notifier_fn(self, number, frame):
            raise AssertionError("it would broadcast from within the signal")

    trainer = SimpleNamespace(
        strategy=SimpleNamespace(launcher=SimpleNamespace(kill=killed.append)), _signal_connector=Connector()
    )
    sigterm_at_next_merge(trainer, lambda: noted.append("noted"))
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert (killed, noted) == ([signal.SIGTERM], ["noted"])
    restore_sigterm(trainer)
    with pytest.raises(AssertionError, match="it would broadcast"):
        trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)


class Asks:
    """In place of DDP: what it is called with goes to other ranks."""

    def __init__(self):
        self.asked = []

    def barrier(self, name=None):
        self.asked.append("barrier")

    def broadcast(self, obj, src):
        self.asked.append("broadcast")
        return "of rank 0"

    def reduce(self, tensor, group, reduce_op):
        self.asked.append("reduce")
        return -tensor

    def all_gather(self, tensor, group, sync_grads):
        self.asked.append("all_gather")
        return torch.stack([tensor, tensor])


class Ending(EndingMixin, Asks):
    def __init__(self, interrupted, agreed=None):
        super().__init__()
        self.lightning_module = SimpleNamespace(_trainer=SimpleNamespace(interrupted=interrupted))
        self._signals = None if agreed is None else SimpleNamespace(agreed=agreed)


@pytest.mark.parametrize(
    ("strategy", "alone"),
    [
        (Ending(True), True),
        (Ending(True, agreed=False), True),
        (Ending(True, agreed=True), False),
        (Ending(False), False),
    ],
    ids=["an error", "an error beside signals", "an agreed end", "none"],
)
def test_a_rank_that_handles_an_error_of_its_own_asks_nobody(strategy, alone):
    strategy.barrier("saving")
    found = strategy.broadcast("own"), strategy.reduce(torch.ones(2)).tolist(), strategy.all_gather(torch.ones(2)).shape
    assert found == (("own", [1.0, 1.0], (1, 2)) if alone else ("of rank 0", [-1.0, -1.0], (2, 2)))
    assert strategy.asked == ([] if alone else ["barrier", "broadcast", "reduce", "all_gather"])


class InBatch(L.Callback):
    """One rank is told in a batch, by the number of all batches so far."""

    def __init__(self, rank, batch):
        self.rank, self.batch = rank, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and trainer.global_step == self.batch + 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _told_in_batch(rank, told, batch):
    model, callbacks = Regressor(), [InBatch(told, batch)]
    try:
        fit(rank, SHORT, 2, 5, model=model, dataset=Points(N), callbacks=callbacks, max_epochs=1)
    except SIGTERMException:
        return len(model.seen)
    return None


@pytest.mark.parametrize("told", [0, 1])
def test_a_note_is_sent_before_the_next_batch_and_obeyed_before_the_one_after_it(told):
    assert run_ranks(_told_in_batch, 2, told, 2) == [4, 4]


def test_a_note_of_the_last_batch_ends_training_as_well():
    assert run_ranks(_told_in_batch, 2, 1, 6) == [7, 7]


class BeforeTraining(L.Callback):
    """One rank is told when training begins."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def _told_before_training(rank, told):
    model = Regressor()
    try:
        fit(rank, SHORT, 2, 5, model=model, dataset=Points(N), callbacks=[BeforeTraining(told)], max_epochs=1)
    except SIGTERMException:
        return len(model.seen)
    return None


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_before_the_first_batch_is_obeyed_before_the_second(told):
    assert run_ranks(_told_before_training, 2, told) == [1, 1]


def _left_behind(rank):
    before = signal.getsignal(signal.SIGTERM)
    trainers = []

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainers.append((trainer, CHECK in vars(trainer.fit_loop.epoch_loop)))

    fit(rank, SHORT, 2, 5, dataset=Points(N), callbacks=[Looks()], max_epochs=1)
    trainer = trainers[0][0]
    left = {**vars(trainer.fit_loop.epoch_loop), **vars(trainer._signal_connector)}
    return (
        all(there for _, there in trainers),
        CHECK in left,
        "_sigterm_notifier_fn" in left,
        before is signal.getsignal(signal.SIGTERM),
    )


def test_lightning_is_left_as_it_was():
    assert run_ranks(_left_behind, 2) == [(True, False, False, True)] * 2


class Slurm(SLURMEnvironment):
    """SLURM as far as the handlers ask for it; the ranks are those of the test."""

    creates_processes_externally = True
    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))

    def world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self):
        return int(os.environ["RANK"])

    def local_rank(self):
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self):
        return 0

    def validate_settings(self, num_devices, num_nodes):
        pass


class Stops(L.Callback):
    """Ends training once the checkpoint of the requeue is there."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        found = trainer.strategy.broadcast(any(name.startswith("hpc_ckpt") for name in os.listdir(self.folder)))
        trainer.should_stop = found


def _requeued(rank, delays, folder):
    os.environ["SLURM_JOB_ID"] = "12"
    os.environ["PATH"] = folder  # no scontrol
    model = Slow()
    environment = Slurm(auto_requeue=True, requeue_signal=signal.SIGUSR2)
    callbacks = [Told(delays[rank], signal.SIGUSR2), Stops(folder)]
    fit(
        rank,
        {**SHORT, **TOPK},
        2,
        5,
        model=model,
        dataset=Points(N),
        callbacks=callbacks,
        plugins=[environment],
        max_epochs=10**6,
        default_root_dir=folder,
    )
    return len(model.seen)


def test_slurms_signal_to_requeue_saves_on_all_ranks_at_the_same_batch(tmp_path):
    steps = run_ranks(_requeued, 2, [0.4, 0.403], str(tmp_path), timeout=60.0)
    assert steps[0] == steps[1]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] > 0
