"""Whatever happens to one rank: an error is one on every rank, with the same cause, and nobody is left waiting.

One table of faults and modes of training (``faults.py``), with one invariant for each fault; further places of an error
in Lightning; and ranks that hold different things. All of them happen to real processes under a wall limit.
"""

import os
import re
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK
from tests.decisions.told import told_time
from tests.helpers import Points, Regressor, covered, fit
from tests.promises.faults import (
    BUG,
    PAIRS,
    WALL,
    CorruptMessage,
    DamagedCheckpoint,
    Freeze,
    Kill,
    LinkCut,
    LinkDelay,
    NaN,
    Pause,
    Raise,
    Sigterm,
    check,
    train,
)
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _no_process_is_left_behind():
    yield
    names = {"sh", "sleep"}  # ranks are joined, or killed, by who has started them; see tests/ranks.py
    left = [child for child in psutil.Process().children(recursive=True) if child.name() in names]
    assert not psutil.wait_procs(left, timeout=10)[1]


@cache
def undisturbed(mode):
    """A run without any fault, which all faults in this mode share."""
    with TemporaryDirectory() as folder:
        return train(None, mode, Path(folder))


LEFT_TO_SLOW = (Kill(0), Pause(0), LinkDelay(seconds=0.2, every=10))
OWN = {"stale": Freeze, "adaptive": NaN, "elastic": LinkCut, "compressed": CorruptMessage, "hierarchical": Sigterm}


def quick(fault, mode):
    """Every kind of fault but a pause is in one mode; an error and a loss of rank 1 are in every mode."""
    if mode == "plain":
        return fault not in LEFT_TO_SLOW
    return fault in (Raise(1), Kill(1)) or type(fault) is OWN.get(mode)


ALL_MODES = pytest.mark.slow("every fault in every mode: more of the same for each change but one of that mode")


@pytest.mark.parametrize(
    ("fault", "mode"),
    [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=[] if quick(*pair) else [ALL_MODES]) for pair in PAIRS],
)
def test_the_invariant_of_a_fault_holds_in_every_mode(fault, mode, tmp_path):
    resumed = {}
    if isinstance(fault, DamagedCheckpoint):
        path = tmp_path / "saved.ckpt"
        assert not train(None, mode, tmp_path / "first", save={4: str(path)}).errors
        fault.damage(path, tmp_path / "second")
        resumed = {"resume": str(path)}
    outcome = train(None if resumed else fault, mode, tmp_path / "second", **resumed)
    check(fault, mode, outcome, undisturbed(mode))


# where an error may come from, under Lightning

N, STEPS, AT = 80, 10, 6


class Raises(Regressor):
    """Raises at some place, on some ranks."""

    def __init__(self, place, ranks, rank):
        super().__init__()
        self.place, self.mine = place, rank in ranks

    def at(self, place, when=True):
        if self.mine and when and place == self.place:
            raise ZeroDivisionError(BUG)

    def on_fit_start(self):
        self.at("fit start")

    def training_step(self, batch, batch_idx):
        self.at("forward", batch_idx == AT)
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:
            loss.register_hook(lambda _: self.at("backward", batch_idx == AT))
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.at("optimizer", self.trainer.fit_loop.batch_idx == AT)

    def val_dataloader(self):
        return DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.at("validation", not self.trainer.sanity_checking)

    def on_train_epoch_end(self):
        self.at("epoch end")


class Fails(Points):
    """Cannot be read on rank 1 from the middle on."""

    def __getitem__(self, i):
        if os.environ["RANK"] == "1" and i >= N // 2:
            raise ZeroDivisionError(BUG)
        return super().__getitem__(i)


PLACES = ("fit start", "loader", "backward", "optimizer", "validation", "epoch end")


def _raises(rank, place, ranks):
    data = (Fails if place == "loader" else Points)(N)
    return fit(rank, {"replan": 2}, 2, 4, model=Raises(place, ranks, rank), dataset=data, max_epochs=2)


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_one_rank_is_the_cause_of_those_of_all_others_wherever_it_comes_from(place):
    errors = run_ranks(_raises, 2, place, (1,), timeout=WALL, expect_errors=True, grace=0.0)
    assert [rank for rank, *_ in errors] == [0, 1]
    (_, kind, text), (_, own, mine) = errors
    assert (own, mine.splitlines()[0]) == ("ZeroDivisionError", BUG)
    assert "rank 1 " in text
    assert f"ZeroDivisionError: {BUG}" in text


def test_an_error_on_all_ranks_is_that_error_on_each():
    errors = run_ranks(_raises, 2, "forward", (0, 1), timeout=WALL, expect_errors=True)
    assert errors == [(0, "ZeroDivisionError", BUG), (1, "ZeroDivisionError", BUG)]


# a checkpoint of an exception

SAVED = {
    "plain": {},
    "both": {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2), "staleness": 1},
}


def _saves(rank, failing, mode, folder):
    warnings.filterwarnings("ignore", ".*was called without a model", UserWarning)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available", UserWarning)
    kwargs = {"callbacks": [OnExceptionCheckpoint(folder)], "enable_checkpointing": True, "max_epochs": 1}
    return fit(rank, {**SAVED[mode], "replan": 4}, 2, 4, Raises("forward", (failing,), rank), Points(N), **kwargs)


def _resumes(rank, mode, path):
    return fit(rank, SAVED[mode], 2, 4, dataset=Points(N), ckpt_path=path, max_epochs=1)


@pytest.mark.parametrize(("mode", "failing"), [("plain", 0), ("plain", 1), ("both", 0), ("both", 1)])
def test_an_error_on_one_rank_is_saved_without_waiting_for_the_others(mode, failing, tmp_path):
    """The rank that raises waits for nobody; what it leaves lets the others raise and save as well."""
    errors = run_ranks(_saves, 2, failing, mode, str(tmp_path), timeout=WALL, expect_errors=True, grace=0.0)
    kinds = {rank: (kind, message) for rank, kind, message in errors}
    assert kinds[failing] == ("ZeroDivisionError", BUG)
    assert set(kinds) == {0, 1}
    path = tmp_path / "on_exception.ckpt"
    done = torch.load(path, weights_only=True)["global_step"]
    assert done in ((6, 7) if "staleness" in SAVED[mode] and failing == 1 else (6,))  # rank 0 waits a step later
    again = run_ranks(_resumes, 2, mode, str(path), timeout=WALL)
    assert [result["steps"] for result in again] == [STEPS, STEPS]
    assert len(covered(again, 0)) == N - done * 8


# nonsense, and a full disk, are what they are under plain ddp


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _full_disk(rank, strategy, folder, flush):
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=flush)
    if rank == 0:
        logger.experiment.metrics_file_path = "/dev/full"
    kwargs = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 1}
    return fit(rank, strategy, 2, 4, model=Logs(), dataset=Points(N), **kwargs)["steps"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flush", [1, 1000], ids=["in training", "at the end"])
def test_full_disk_is_no_worse_than_under_ddp(tmp_path, flush):
    """Lightning's logger raises on rank 0 when it writes; with ours writing too, it raises no other error."""
    kinds = []
    for strategy in ("ddp", {"replan": 4}):
        errors = run_ranks(_full_disk, 2, strategy, str(tmp_path), flush, timeout=WALL, expect_errors=True, grace=0.0)
        kinds.append([(rank, kind) for rank, kind, _ in errors])
    assert kinds[0][0] == (0, "OSError")
    assert kinds[0] == kinds[1]


# ranks that hold different things


class SlowToLoad(Points):
    """Takes its time for every sample, on rank 1 only, so that another split is decided on."""

    clock = None

    def __getitem__(self, i):
        if os.environ["RANK"] == "1":
            self.clock.spend(0.002)
        return super().__getitem__(i)


class Computes(Regressor):
    clock = None

    def training_step(self, batch, batch_idx):
        self.clock.spend(0.001 * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _follows(rank, policy):
    settings = {"replan": 4, "policy": policy, "hysteresis": 0.0}
    with told_time() as clock:
        data, model = SlowToLoad(480), Computes()
        data.clock = model.clock = clock
        return fit(rank, settings, 2, 4, model=model, dataset=data, max_epochs=1)


@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_plan_moves_away_from_a_slow_loader(policy):
    """Loading is part of a worker's time per sample; the last plans leave little to the slow one."""
    results = run_ranks(_follows, 2, policy, timeout=WALL)
    assert covered(results, 0) == list(range(480))
    sizes = [split[1] for *_, split in results[0]["history"]]
    assert sizes[0] == 4
    assert sizes[-1] < 4


class Wider(Regressor):
    """Has a layer of another size."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


class TurnedRound(Regressor):
    """Registers its last layer first."""

    def __init__(self):
        super().__init__()
        net = self.net
        del self.net
        self.last, self.net = net[2], net


def _other_model(rank, other):
    return fit(rank, {}, 2, 4, model=(Regressor, other)[rank](), dataset=Points(N), max_epochs=1)


@pytest.mark.parametrize("other", [Wider, TurnedRound])
def test_a_model_of_other_shapes_or_of_another_order_is_an_error_on_all_ranks(other):
    """Torch tells, when the model is wrapped; the parameter by its number."""
    errors = run_ranks(_other_model, 2, other, timeout=WALL, expect_errors=True, grace=0.0)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert any(re.search(r"params\[\d+\] in this process", text) for *_, text in errors), errors
