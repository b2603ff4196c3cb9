"""Workers are lost and come during a fit: the others go on at once, with the same total and the same mathematics.

A matrix of faults is slow; one of each kind runs always.
"""

import csv
import json
import os
import warnings
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.config import HeteroConfig
from lightning_hetero.strategies._lightning.membership import launcher
from lightning_hetero.strategies._lightning.membership.strategy import config_of_members
from tests.kept import run_kept
from tests.lightning.members import (
    CUT,
    ENDLESS,
    EPOCHS,
    EXIT,
    FAIL,
    JOINING,
    KILL,
    LOCAL,
    SLOTS,
    STEPS,
    STOP,
    TERM,
    Numbers,
    Outcome,
    Suffers,
    lives_of,
    loss_of,
    lost,
    outcome,
    train,
    wait_for,
)

slow = pytest.mark.slow("kills workers, which takes seconds each")
LOSSY = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}
ALL, HALF = range(SLOTS), STEPS // EPOCHS
VALIDATION = ["validation start", "validation", "validation end"]
PLACES = ["epoch start", "between batches", "batch start", "forward", "optimizer", "batch end", "epoch end"]
BETWEEN = [(where, True) for where in PLACES + VALIDATION] + [(where, False) for where in PLACES]


def fail(step, where):
    """All links fail in the same place."""
    return [(slot, 0, step, where, FAIL) for slot in ALL]


def between_epochs(where, validates, first, accumulation):
    """In the last step of the first epoch, or after it, and once more in the second."""
    step = HALF // accumulation - (not first)
    given = {"validates": validates, "accumulation": accumulation, "interval": 1 / accumulation}
    return fail(step, where) + fail(step + 2, "forward"), given


def joins(*deaths):
    """Newcomers are lost while they join, each with its life, step and place."""
    return [(1, 0, 6, "forward", KILL), *((*death, KILL) for death in deaths)], {}


QUICK = {
    "rank 0": ([(0, 0, 6, "forward", KILL)], {}),
    "links": between_epochs("forward", True, True, 1),
}
SLOW = {
    "the last rank": ([(2, 0, 6, "forward", KILL)], {}),
    "rank 0 in the optimizer": ([(0, 0, 6, "optimizer", KILL)], {}),
    "the script exits": ([(1, 0, 6, "forward", EXIT)], {}),
    "a newcomer is there before the next step": ([(1, 0, 6, "forward", KILL)], {"late": False}),
    "stopped": ([(1, 0, 6, "forward", STOP)], {"silence": 1.0}),
    "two, and one again": ([(0, 0, 6, "forward", KILL), (2, 0, 6, "forward", KILL), (2, 1, 14, "forward", KILL)], {}),
    "in a validation": ([(1, 0, HALF, "validation", KILL)], {}),
    "in a window": ([(2, 0, 2, "second batch", KILL)], {"accumulation": 3}),
    **{f"between epochs {at}": ([(0, 0, HALF, at[0], KILL)], {"validates": at[1]}) for at in BETWEEN},
    **{
        f"links between epochs {(*at, first, count)}": between_epochs(*at, first, count)
        for at in BETWEEN
        for first in (True, False)
        for count in (1, 3)
    },
    # what Lightning counts is right also behind a batch that has failed
    **{f"links again, {at}": ([*fail(6, "forward"), *fail(9, at)[:2], (2, 0, 9, at, KILL)], {}) for at in PLACES},
    "a link is cut": ([(1, 0, 6, "forward", CUT)], {}),
    "a link is cut in the optimizer": ([(1, 0, 6, "optimizer", CUT)], {}),
    "a link is cut again and again": ([(1, 0, 6, "forward", CUT)] * (launcher.MEETINGS + 1), {}),
    "a sum does not end": ([(1, 0, 6, "forward", ENDLESS), (2, 0, 6, "forward", KILL)], {}),
    "setting up": joins((1, 1, 0, "setup")),
    "before the group": joins((1, 1, 0, "group")),
    "one after another": joins(
        (1, 1, 0, "steps"), (1, 2, 0, "state"), (1, 3, 0, "control plane"), (1, 4, 0, "forward")
    ),
    "two at once": joins((1, 1, 0, "state"), (0, 0, 2, "state")),
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=slow) for name in SLOW)])
def test_the_others_go_on_and_a_newcomer_joins(tmp_path, name):
    """From their own state; nobody but who was lost is started again, and who was lost while it joined is again."""
    faults, given = {**QUICK, **SLOW}[name]
    found = outcome(tmp_path, faults, **given)
    joined_in_vain = {slot for slot, _, _, where, _ in faults if where in JOINING}
    others = [{life for life in lives if life[0] not in joined_in_vain} for lives in (found.lives, lives_of(faults))]
    assert others[0] == others[1], "nobody else was started again"
    assert SLOTS in found.worlds()
    assert len(found.worlds()) > 1 or not lost(faults) or "late" in given or "silence" in given
    assert lost(faults) or found.worlds() == {SLOTS}
    assert found.difference() < 1e-12


@slow
@pytest.mark.parametrize(
    ("step", "where", "accumulation", "validations"),
    [*((1, where, 3, (6, 7)) for where in VALIDATION), (5, "between batches", 1, (6,))],
)
def test_links_fail_around_a_validation_inside_an_epoch(tmp_path, step, where, accumulation, validations):
    found = outcome(tmp_path, fail(step, where), accumulation=accumulation, interval=1 / 3)
    assert found.difference() < 1e-12
    for slot in ALL:
        assert len((tmp_path / f"validated-{slot}-0").read_text()) in validations, "three an epoch, one maybe again"


@slow
def test_lost_too_often_the_others_end_without_it(tmp_path):
    faults = [(1, life, 6, "forward", KILL) for life in range(3)]
    found = outcome(tmp_path, faults, rejoin=False, late=False, restarts=2)
    assert len(found.ends) == SLOTS - 1
    assert found.difference() < 1e-12


def train_without_the_disk_of_the_others(folder, faults, **given):
    """In the second life, a worker does not see the file that the first one has saved."""
    exists = os.path.exists
    if os.environ["LIGHTNING_HETERO_SLOT"] == "1":
        os.path.exists = lambda path: exists(path) and "saved" not in str(path)
    train(folder, faults, **given)


ALL_LOST = {
    "from a checkpoint": (train, True, 6),
    "begin anew": (train, False, 0),
    "not all see it": (train_without_the_disk_of_the_others, True, 0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "from a checkpoint" else slow) for name in ALL_LOST]
)
def test_all_are_lost_at_once_and_go_on_from_the_newest_checkpoint(tmp_path, name):
    function, saves, step = ALL_LOST[name]
    faults = [(slot, 0, 7, "forward", KILL) for slot in ALL]
    assert run_kept(partial(function, tmp_path, faults, late=False, saves=saves), SLOTS) == [0] * SLOTS
    begun = [path.read_text().partition("\n")[0] for path in tmp_path.rglob("steps-*-1.jsonl")]
    assert [json.loads(one)["step"] for one in begun if one] == [step] * SLOTS
    if name == "begin anew":
        for path in tmp_path.glob("steps-*-0.jsonl"):
            path.unlink()
        found = Outcome(tmp_path)
        found.check(STEPS)
        assert found.difference() < 1e-12


MODES = {
    "block top-k": LOSSY,
    "powersgd": {"compression": "powersgd"},
    "stale": {"staleness": 1},
    "stale blocks": {**LOSSY, "staleness": 1},
    "hierarchy": {"hierarchy": [[0, 1], [2]]},
    "fixed": {"local_batch_sizes": [6, 4, 2]},
    "bounds": {"max_local_batch_sizes": [8, 8, 8]},
    "pid": {"policy": "pid"},
}


@slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on(tmp_path, mode):
    faults = [(0, 0, 6, "forward", KILL)]
    found = outcome(tmp_path, faults, arguments=MODES[mode])
    assert found.lives == lives_of(faults)
    assert found.worlds() == {SLOTS - 1, SLOTS}
    assert mode not in ("hierarchy", "fixed", "bounds", "pid") or found.difference() < 1e-12


# callbacks and loggers


class Logs(Suffers):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("trained", loss)
        return loss


class Config:
    """Stands for the parser of a LightningCLI, which has read this."""

    def save(self, config, path, **kwargs):
        with open(path, "a") as file:
            file.write("written once\n")


def trainer_of(strategy, **kwargs):
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`")
    given = {"logger": False, "plugins": [TorchElasticEnvironment()], "max_epochs": 1, "num_sanity_val_steps": 0}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=SLOTS, strategy=strategy, **{**given, **quiet, **kwargs})


def loader():
    return DataLoader(Numbers(), batch_size=LOCAL, shuffle=True)


def _logs(folder, faults):
    model = Logs(folder, faults)
    if model.life:
        wait_for(folder / "alone")
    logger = CSVLogger(folder, "log", flush_logs_every_n_steps=1)
    callbacks = [SaveConfigCallback(Config(), SimpleNamespace())]
    given = {"max_epochs": EPOCHS, "log_every_n_steps": 1, "logger": logger, "callbacks": callbacks}
    trainer = trainer_of(HeteroDDPStrategy(replan=4), **given)
    trainer.fit(model, loader(), DataLoader(Numbers(), batch_size=30))


def rows_of(path):
    with open(path, newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["trained"]]


@slow
@pytest.mark.parametrize("slot", [0, 1])
def test_rows_and_files_are_those_of_an_undisturbed_training(tmp_path, slot):
    (tmp_path / "expects-0").touch()
    assert run_kept(_logs, SLOTS, tmp_path, [(slot, 0, 6, "forward", KILL)]) == [0] * SLOTS
    files = sorted((tmp_path / "log").glob("*/metrics.csv"))
    first = rows_of(files[0])
    assert sorted(step for path in files for step in rows_of(path)) == list(range(STEPS))
    assert first == list(range(len(first))), "what the first rank 0 has written stays, and the next goes on there"
    assert len(files) == 1 or slot == 0
    configs = list((tmp_path / "log").glob("*/config.yaml"))
    assert [path.read_text() for path in configs] == ["written once\n"]


# what compression has not sent yet


class Inputs(Dataset):
    """The sum of gradients of an epoch is the sum of these, whatever the weights are."""

    def __len__(self):
        return 120

    def __getitem__(self, i):
        return torch.randn(64, generator=torch.Generator().manual_seed(i))


class Scores(L.LightningModule):
    """A loss that is linear in the weights; in one step the messages of all workers do not arrive."""

    def __init__(self, fails):
        super().__init__()
        self.weights, self.fails, self.done = nn.Parameter(torch.zeros(64)), fails, 0

    def training_step(self, x, batch_idx):
        if self.trainer.global_step == 5 and self.fails:
            self.fails = False
            self.trainer.strategy.engine.compression.averager.path.receive = _connection_lost
        self.done += 1
        return (x @ self.weights).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _connection_lost(averager, sent):
    raise RuntimeError("gloo: Connection closed by peer")


def _scores(folder, fails):
    compression = BlockTopK(density=0.25, block=8, warmup_steps=0)
    strategy = HeteroDDPStrategy(compression=compression, local_batch_sizes=(LOCAL,) * SLOTS)
    trainer, model = trainer_of(strategy), Scores(fails)
    trainer.fit(model, DataLoader(Inputs(), batch_size=LOCAL, shuffle=True))
    residual = strategy.engine.compression.state_dict_of_rank()["residuals"]["weights"]
    found = {"weights": model.weights.detach(), "residual": residual, "done": model.done}
    torch.save(found, folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("fails", [pytest.param(False, marks=slow), True])
def test_what_was_not_sent_is_neither_lost_nor_counted_twice(tmp_path, fails):
    assert run_kept(_scores, SLOTS, tmp_path, fails) == [0] * SLOTS
    ranks = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))]
    assert [rank["done"] for rank in ranks] == [10 + fails] * SLOTS, "the step that failed is done again"
    unsent = torch.stack([rank["residual"] for rank in ranks]).sum(0)
    assert unsent.abs().max() > 0.1, "else this test would see nothing"
    everything = torch.stack([Inputs()[i] for i in range(120)]).sum(0) / (SLOTS * LOCAL)
    for rank in ranks:
        torch.testing.assert_close(-rank["weights"] / 0.1 + unsent, everything, rtol=1e-5, atol=1e-5)


# ends, and what is refused


def told(folder, function, *arguments, restarts=0):
    """Exit codes, and what workers have written when they ended with an error."""
    codes = run_kept(_tells, SLOTS, folder, function, arguments, restarts=restarts)
    return codes, [path.read_text() for path in sorted(folder.glob("error-*"))]


def _tells(folder, function, arguments):
    try:
        function(folder, *arguments)
    except BaseException as error:
        name = f"error-{os.environ['LIGHTNING_HETERO_SLOT']}-{os.environ['LIGHTNING_HETERO_LIFE']}"
        (folder / name).write_text(f"{type(error).__name__}: {error}")
        raise


def _with_strategy(folder, name, kwargs):
    trainer = trainer_of(name, **kwargs)
    trainer.fit(Suffers(folder, []), loader())


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Numbers()[i] for i in range(len(Numbers())))


def _stream(folder):
    model = Suffers(folder, [])
    model.note, model.optimizer_step = None, partial(L.LightningModule.optimizer_step, model)
    model.training_step = lambda batch, batch_idx: _dies_in_batch(model, batch, batch_idx)
    trainer_of(HeteroDDPStrategy()).fit(model, DataLoader(Stream(), batch_size=LOCAL))


def _dies_in_batch(model, batch, batch_idx):
    if (model.slot, model.life, batch_idx) == (1, 0, 3):
        os.kill(os.getpid(), KILL)
    return loss_of(model.net, batch[0])


REFUSED = {
    "elastic": (_with_strategy, ("hetero_elastic", {}), "hetero_ddp"),
    "sharded": (_with_strategy, ("hetero_fsdp", {}), "hetero_ddp"),
    "ranks": (_with_strategy, ("hetero_ddp", {"plugins": [LightningEnvironment()]}), "LightningEnvironment"),
    "backend": (_with_strategy, (partial(HeteroDDPStrategy, process_group_backend="nccl"), {}), "'nccl'"),
    "averages": (
        _with_strategy,
        (HeteroDDPStrategy, {"callbacks": [StochasticWeightAveraging(0.1)]}),
        "StochasticWeightAveraging",
    ),
    "stream": (_stream, (), "MembershipError"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "ranks" else slow) for name in REFUSED])
def test_what_cannot_go_on_without_a_worker_is_refused(tmp_path, name):
    function, arguments, says = REFUSED[name]
    codes, errors = told(tmp_path, function, *(one() if callable(one) else one for one in arguments))
    assert all(codes)
    assert len(errors) == SLOTS - (name == "stream")
    assert all(says in error for error in errors)


@slow
@pytest.mark.parametrize("also", [[], [(1, 0, 4, "forward", KILL)]], ids=["alone", "beside a loss"])
def test_sigterm_ends_all_and_nothing_starts_again(tmp_path, also):
    codes, _ = told(
        tmp_path, partial(train, late=False), [*also, (2, 0, 4, "forward", TERM)], restarts=3 - 2 * len(also)
    )
    assert not list(tmp_path.glob("end-*")), "training was told to end"
    if not also:
        steps = [path.read_text().count("done") for path in tmp_path.glob("steps-*-0.jsonl")]
        assert len(steps) == SLOTS == len(list(tmp_path.glob("steps-*")))
        assert len(set(steps)) == 1, "all stop before the same batch"
        assert codes == [0, 0, 0]


# settings alone


def test_settings_with_an_entry_for_each_worker_are_those_of_the_members():
    given = HeteroConfig(max_local_batch_sizes=[8, 4, 2, 1], hierarchy=[[0], [1, 2], [3]])
    found = config_of_members(given, [1, 2, 3])
    assert found.max_local_batch_sizes == (4, 2, 1)
    assert found.hierarchy == ((0, 1), (2,))
    given = HeteroConfig(local_batch_sizes=[4, 2, 2], local_batch_multiple=2)
    assert config_of_members(given, [0, 2]).local_batch_sizes == (6, 2)


def test_evaluation_data_are_split_among_the_members(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(SLOTS - 1))
    devices, environment = [torch.device("cpu")] * SLOTS, TorchElasticEnvironment()
    strategy = HeteroDDPStrategy(parallel_devices=devices, cluster_environment=environment)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": SLOTS - 1, "rank": 1}
