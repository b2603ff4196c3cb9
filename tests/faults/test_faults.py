"""Faults outside a batch, and what plans, logs and checkpoints make of them; the table is in ``test_every_mode.py``.

All of them happen to real processes under a wall limit.
"""

import ast
import json
import os
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Dataset

from lightning_hetero import AdaptiveBatchCallback, BlockTopK, GNSCallback
from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from tests.faults.faults import BUG, Freeze, Kill, NaN, Raise
from tests.helpers import Points, Regressor, covered, fit, run_ranks

N, STEPS, REPLAN = 160, 20, 4
WALL = 45
"""Seconds after which a run counts as hanging."""


class Strikes(Regressor):
    """Suffers the fault in its training step."""

    def __init__(self, fault, rank):
        super().__init__()
        self.fault, self.mine = fault, fault is not None and fault.rank == rank

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.mine:
            return loss
        if isinstance(self.fault, NaN):
            return self.fault.strike(None, loss) if self.global_step >= self.fault.at else loss
        if self.global_step == self.fault.at:
            self.fault.strike(None, loss)
        return loss


class InExchange(Callback):
    """Suffers the fault when its rank enters the agreement on a plan; rank 0 when it is about to decide."""

    def __init__(self, fault, rank):
        self.fault, self.rank = fault, rank

    def on_train_start(self, trainer, pl_module):
        engine, fault = trainer.strategy.engine, self.fault
        if fault.rank != self.rank:
            return
        name = "broadcast_object" if self.rank == 0 else "gather"
        original, calls = getattr(engine.control, name), []

        def struck(value):
            calls.append(value)
            if len(calls) == 2:
                fault.strike(None, None)
            return original(value)

        setattr(engine.control, name, struck)


def _train(rank, fault, timeout, policy, dataset):
    strategy = {"replan": REPLAN, "policy": policy}
    if timeout is not None:
        strategy["timeout"] = timedelta(seconds=timeout)
    return fit(
        rank,
        strategy,
        2,
        4,
        dataset=dataset or Points(N),
        callbacks=[] if fault is None else [InExchange(fault, rank)],
        max_epochs=1,
    )


def run(fault, *, timeout=None, policy=None, dataset=None, **kwargs):
    return run_ranks(_train, 2, fault, timeout, policy, dataset, timeout=WALL, **kwargs)


# a rank is lost


@pytest.mark.parametrize("fault", [Kill(0, 6), Kill(1, 0)], ids=str)
def test_survivor_of_a_killed_rank_ends_with_an_error(fault):
    """``run_ranks`` raises if a rank is not done within the wall limit, far below torch's timeout of 30 minutes."""
    errors = {rank: (kind, message) for rank, kind, message in run(fault, expect_errors=True)}
    assert set(errors) == {0, 1}
    assert errors[fault.rank][0] == "Died"
    kind, message = errors[1 - fault.rank]
    assert kind != "Died"
    assert message


@pytest.mark.parametrize("rank", [0, 1])
def test_error_on_one_rank_ends_all_of_them(rank):
    errors = {rank: (kind, message) for rank, kind, message in run(Raise(rank, 6), expect_errors=True)}
    assert errors[rank] == ("ZeroDivisionError", BUG)
    assert set(errors) == {0, 1}


class AllRaise(Regressor):
    """Fails on every rank, each time in the middle of an epoch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            Raise().strike(None, None)
        return super().training_step(batch, batch_idx)


def _all_raise(rank):
    return fit(rank, {"replan": REPLAN}, 2, 4, model=AllRaise(), dataset=Points(N), max_epochs=1)


def test_an_error_on_all_ranks_is_that_error_on_each():
    errors = run_ranks(_all_raise, 2, timeout=WALL, expect_errors=True)
    assert errors == [(0, "ZeroDivisionError", BUG), (1, "ZeroDivisionError", BUG)]


@pytest.mark.alone
def test_rank_that_stays_away_from_an_agreement_is_given_up_after_the_timeout_of_the_strategy():
    """It is frozen for much longer than the four seconds that the user allows."""
    errors = {rank: message for rank, _, message in run(Freeze(1, 0, 9), timeout=4, expect_errors=True)}
    assert "imed out" in errors[0] or "imeout" in errors[0], errors[0]
    assert set(errors) == {0, 1}


# a rank is slow


def test_frozen_rank_loses_no_sample():
    results = run(Freeze(1, 6, 3))
    assert covered(results, 0) == list(range(N))
    assert [r["steps"] for r in results] == [STEPS, STEPS]
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    assert all(sum(sizes) == 8 for *_, sizes in results[0]["history"])


class SlowToLoad(Dataset):
    """Takes its time for every sample, on one rank only."""

    def __init__(self, n, rank):
        self.points, self.rank = Points(n), rank

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        if os.environ["RANK"] == str(self.rank):
            time.sleep(0.004)
        return self.points[i]


@pytest.mark.alone
@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_plan_moves_away_from_a_slow_loader(policy):
    """Loading is part of a worker's time per sample; the last plans leave little to the slow one."""
    results = run(None, policy=policy, dataset=SlowToLoad(480, rank=1))
    assert covered(results, 0) == list(range(480))
    sizes = [split[1] for *_, split in results[0]["history"]]
    assert sizes[0] == 4
    assert sizes[-1] < 4


# a rank computes nonsense


def _nan(rank, strategy):
    model = Strikes(NaN(1, 6), rank)
    seen = []

    class Watch(Callback):
        def on_train_end(self, trainer, pl_module):
            engine = getattr(trainer.strategy, "engine", None)
            if engine is not None:
                observations = engine.observations()
                seen.append([observations.compute.tolist(), observations.num_steps])
                seen.append(json.dumps(trainer.callbacks[0].planner.state_dict(), allow_nan=False))

    result = fit(rank, strategy, 2, 4, model=model, dataset=Points(N), callbacks=[Watch()], max_epochs=1)
    return {**result, "watched": seen}


def test_nan_on_one_rank_is_what_it_is_under_ddp():
    """Every rank has NaN from that step on, never only some of them; timings and plans do not notice."""
    ours, plain = (run_ranks(_nan, 2, s, timeout=WALL) for s in ({"replan": REPLAN}, "ddp"))
    for results in (ours, plain):
        for result in results:
            finite = np.isfinite(result["grads"]).all(axis=1)
            assert finite.tolist() == [True] * 6 + [False] * (STEPS - 6)
            assert np.isnan(result["weights"]).all()
    assert covered(ours, 0) == list(range(N))
    for result in ours:
        (compute, steps), state = result["watched"]
        assert steps > 0
        assert np.isfinite(compute).all()
    assert json.loads(ours[0]["watched"][1])["times"]
    assert all(sum(sizes) == 8 for *_, sizes in ours[0]["history"])


# the disk is full


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _full_disk(rank, strategy, folder, flush):
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=flush)
    if rank == 0:
        logger.experiment.metrics_file_path = "/dev/full"
    return fit(rank, strategy, 2, 4, model=Logs(), dataset=Points(N), logger=logger, log_every_n_steps=1, max_epochs=1)[
        "steps"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flush", [1, 1000], ids=["in training", "at the end"])
def test_full_disk_is_no_worse_than_under_ddp(tmp_path, flush):
    """Lightning's logger raises on rank 0 when it writes; with ours writing too, it raises no other error."""
    kinds = []
    for strategy in ("ddp", {"replan": REPLAN}):
        errors = run_ranks(_full_disk, 2, strategy, str(tmp_path), flush, timeout=WALL, expect_errors=True)
        kinds.append([(rank, kind) for rank, kind, _ in errors])
        assert kinds[-1][0] == (0, "OSError")
    assert kinds[0] == kinds[1]


# clocks


def wall_clocks(tree):
    """Uses of the time of day, which differs between hosts and is set back and forth."""
    banned = {"time", "time_ns", "ctime", "localtime", "gmtime", "now", "today", "utcnow"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in banned
            and ast.unparse(node.value)
            in (
                "time",
                "datetime",
                "datetime.datetime",
                "date",
            )
        ):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in banned)


def test_the_package_reads_no_time_of_day():
    root = Path(__file__).parents[2] / "lightning_hetero"
    dates = root / "frontend" / "report" / "begin.py"  # of a record, for people to read
    found = [
        f"{path.relative_to(root)}:{line} {what}"
        for path in sorted(set(root.rglob("*.py")) - {dates})
        for line, what in wall_clocks(ast.parse(path.read_text()))
    ]
    assert not found, "use time.perf_counter() or time.monotonic()"


@pytest.mark.parametrize("source", ["import time\ntime.time()", "from time import time", "datetime.datetime.now()"])
def test_a_time_of_day_is_found(source):
    assert list(wall_clocks(ast.parse(source)))


def _skewed(rank, hours):
    """The clocks of the hosts differ."""
    honest = time.time
    time.time = lambda: honest() + 3600 * hours * rank
    return fit(
        rank, {"replan": REPLAN}, 2, 4, dataset=Points(N), callbacks=[PolicyCallback(PerfModelPlanner())], max_epochs=1
    )


@pytest.mark.parametrize("hours", [5, -5])
def test_clocks_of_hosts_may_differ(hours):
    results = run_ranks(_skewed, 2, hours, timeout=WALL)
    assert covered(results, 0) == list(range(N))
    assert torch.isfinite(torch.as_tensor(results[0]["weights"])).all()


# a checkpoint of an exception


MODES = {
    "plain": {},
    "block top-k": {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)},
    "staleness": {"staleness": 1},
    "both": {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2), "staleness": 1},
    "adaptive": {},
}


def _saves_exception(rank, fault, mode, folder):
    warnings.filterwarnings("ignore", ".*was called without a model", UserWarning)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available", UserWarning)
    callbacks = [OnExceptionCheckpoint(folder)]
    if mode == "adaptive":
        callbacks += [AdaptiveBatchCallback(16), GNSCallback(every_n_steps=1)]
    return fit(
        rank,
        {**MODES[mode], "replan": REPLAN},
        2,
        4,
        model=Strikes(fault, rank),
        dataset=Points(N),
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=1,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_saved_without_waiting_for_the_others(rank, mode, tmp_path):
    """The rank that raises waits for nobody; what it leaves lets the others raise and save as well."""
    errors = run_ranks(_saves_exception, 2, Raise(rank, 6), mode, str(tmp_path), timeout=WALL, expect_errors=True)
    kinds = {rank: (kind, message) for rank, kind, message in errors}
    assert kinds[rank] == ("ZeroDivisionError", BUG)
    assert set(kinds) == {0, 1}
    path = tmp_path / "on_exception.ckpt"
    done = torch.load(path, weights_only=True)["global_step"]
    assert done in ((6, 7) if "staleness" in MODES[mode] and rank == 1 else (6,))  # rank 0 waits a step later
    again = run_ranks(_resumes, 2, mode, str(path), timeout=WALL)
    assert [result["steps"] for result in again] == [STEPS, STEPS]
    assert len(covered(again, 0)) == N - done * 8


def _resumes(rank, mode, path):
    callbacks = [AdaptiveBatchCallback(8)] if mode == "adaptive" else []
    return fit(rank, MODES[mode], 2, 4, dataset=Points(N), callbacks=callbacks, ckpt_path=path, max_epochs=1)


# ranks that hold different things


class Loses(Callback):
    """On one rank something is lost of what rank 0 has decided."""

    def __init__(self, rank, what):
        self.rank, self.what = rank, what

    def on_train_start(self, trainer, pl_module):
        control = trainer.strategy.engine.control
        original = control.decide

        def decide(decision):
            entry, predicted, following, choice = original(decision)
            if trainer.global_rank == self.rank and self.what == "plan":
                entry = None
            if trainer.global_rank == self.rank and self.what == "next look":
                following += 3
            return entry, predicted, following, choice

        control.decide = decide


def _loses(rank, what):
    slow = SlowToLoad(480, rank=1)
    return fit(
        rank, {"replan": REPLAN, "hysteresis": 0.0}, 2, 4, dataset=slow, callbacks=[Loses(1, what)], max_epochs=1
    )


@pytest.mark.alone
@pytest.mark.parametrize("what", ["plan", "next look"])
def test_a_decision_that_one_rank_has_lost_is_an_error_on_all(what):
    errors = run_ranks(_loses, 2, what, timeout=WALL, expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["PlanMismatchError"] * 2
    assert all("the plan and the step of the next sync round must be equal on all ranks" in text for *_, text in errors)


class Wider(Regressor):
    """Has a layer of another size."""

    def __init__(self):
        super().__init__()
        self.net[0], self.net[2] = torch.nn.Linear(5, 8), torch.nn.Linear(8, 1)
        self.net.double()


class TurnedRound(Regressor):
    """Registers its layers in the other order."""

    def __init__(self):
        super().__init__()
        first, second = self.net[0], self.net[2]
        del self.net
        self.second, self.first = second, first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def _other_model(rank, other):
    return fit(rank, {}, 2, 4, model=(Regressor, other)[rank](), dataset=Points(N), max_epochs=1)


@pytest.mark.parametrize("other", [Wider, TurnedRound])
def test_a_model_of_other_shapes_or_of_another_order_is_an_error_on_all_ranks(other):
    """Torch tells, when the model is wrapped; the parameter by its number."""
    errors = run_ranks(_other_model, 2, other, timeout=WALL, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert any(re.search(r"params\[\d+\] in this process", text) for *_, text in errors), errors
