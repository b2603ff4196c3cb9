"""Checkpoints go on where they were: from and to plain DDP, on other numbers of ranks, with all that was learned."""

import copy
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, PerfModelCallback
from lightning_hetero.hardware import identity
from tests.helpers import Points, Regressor, collected, fit
from tests.learned import knowing
from tests.ranks import run_ranks

N, BATCH, STEPS = 70, 5, 7
SPLIT = {"local_batch_sizes": [7, 3]}
LOSSY = {"compression": BlockTopK(density=0.4, block=8, warmup_steps=2), "staleness": 1}


def train(rank, strategy, ranks, batch_size=BATCH, dataset=None, **kwargs):
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    return fit(rank, strategy, ranks, batch_size, dataset=dataset or Points(N), **kwargs)


def _train(rank, strategy, ranks, kwargs):
    return train(rank, strategy, ranks, **kwargs)


def run(strategy, ranks, **kwargs):
    return run_ranks(_train, ranks, strategy, ranks, kwargs)


def checkpoints(folder, **kwargs):
    saving = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}-{step}", **kwargs)
    return {"callbacks": [saving], "enable_checkpointing": True}


def at(folder, step):
    return str(next(folder.glob(f"*step={step}.ckpt")))


class WithValidation(Regressor):
    def val_dataloader(self):
        return DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


class AsksForSteps(Regressor):
    """Sets up the loaders early, before the loops are restored."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 3 * STEPS
        return super().configure_optimizers()


SAVED = {
    "behind an epoch": (WithValidation, {"save_on_train_epoch_end": True}, (7,)),
    "behind a validation": (WithValidation, {"save_on_train_epoch_end": False}, (7, 14)),
    "by who asks for steps": (AsksForSteps, {"every_n_train_steps": 1}, (7, 10)),
}
AGAIN = 12
"""Step at which what went on from the first checkpoint is saved itself."""


def _saved(rank, name, folder):
    model, when, steps = SAVED[name]
    whole = train(rank, SPLIT, 2, model=model(), max_epochs=3, **checkpoints(folder, **when))
    again = checkpoints(folder / "again", every_n_train_steps=3)
    rests = [
        train(rank, SPLIT, 2, model=model(), max_epochs=3, ckpt_path=at(folder, steps[0]), **again),
        *(train(rank, SPLIT, 2, model=model(), max_epochs=3, ckpt_path=at(folder, step)) for step in steps[1:]),
        train(rank, SPLIT, 2, model=model(), max_epochs=3, ckpt_path=at(folder / "again", AGAIN)),
    ]
    return whole, rests


@pytest.mark.parametrize("name", SAVED)
def test_a_run_goes_on_identically_behind_any_step(name, tmp_path):
    for whole, rests in run_ranks(_saved, 2, name, tmp_path):
        for step, rest in zip((*SAVED[name][2], AGAIN), rests, strict=True):
            np.testing.assert_array_equal(rest["weights"], whole["weights"])
            assert rest["seen"] == whole["seen"][step:]
            assert rest["steps"] == 3 * STEPS


# any number of ranks, and plain DDP

TOTAL, EPOCH, SAMPLES = 8, 6, 48
"""Samples of a step on any number of ranks, the steps of an epoch, and its samples, of which plain DDP repeats none."""
NAMES = ("hetero_ddp", "ddp")


def _at_total(rank, strategy, ranks, **kwargs):
    lines = collected()
    result = train(rank, strategy, ranks, TOTAL // ranks, Points(SAMPLES), max_epochs=3, **kwargs)
    return {**result, "told": sum("begins anew" in line for line in lines)}


def _whole_runs(rank, folder):
    return {name: _at_total(rank, name, 2, **checkpoints(folder / name, every_n_train_steps=3)) for name in NAMES}


def _rests(rank, strategy, ranks, paths):
    return {key: _at_total(rank, strategy, ranks, ckpt_path=path) for key, path in paths.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of a run under either name, and the paths of their checkpoints: in an epoch, at its end, in the next."""
    folder = tmp_path_factory.mktemp("whole")
    runs = run_ranks(_whole_runs, 2, folder)[0]
    paths = {(name, step): at(folder / name, step) for name in NAMES for step in (3, EPOCH, EPOCH + 3)}
    return {name: run["weights"] for name, run in runs.items()}, paths


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_under_either_name_goes_on_as_without_a_break(whole, strategy, ranks):
    """From a step inside an epoch, plain DDP does not say which samples were taken: all of them are, once more."""
    weights, paths = whole
    results = run_ranks(_rests, ranks, strategy, ranks, paths)
    for (name, step), rest in results[0].items():
        if step == EPOCH or name == strategy == "hetero_ddp":
            np.testing.assert_allclose(rest["weights"], weights["hetero_ddp"], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(rest["weights"], weights["ddp"], rtol=1e-9, atol=1e-12)
            continue
        taken = [i for result in results for e, _, own in result[name, step]["seen"] if e == step // EPOCH for i in own]
        assert rest["seen"][0][0] == results[0]["ddp", step]["seen"][0][0] == step // EPOCH
        assert strategy == "ddp" or sorted(taken) == list(range(SAMPLES))
        assert [result[name, step]["told"] for result in results] == [strategy != "ddp", *[0] * (ranks - 1)]


# what was learned, and what is forgotten


class Pretender(PerfModelCallback):
    """Two workers of this host with known models, the first three times as fast."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        names = [identity(torch.device("cpu"), slot) for slot in range(2)]
        models = {name: (0.025 * k, 0.0, 0.025 * k, 0.0) for name, k in zip(names, (1, 3), strict=True)}
        self.planner = knowing(models)


def test_learned_models_split_the_first_batch_of_a_resumed_run_whatever_its_size(tmp_path):
    ours = checkpoints(tmp_path)
    ours["callbacks"] = [Pretender(), *ours["callbacks"]]
    first = run({"hysteresis": 1.0}, 2, batch_size=8, max_epochs=1, **ours)
    assert first[0]["history"][0][2] == (12, 4)
    path = str(next(tmp_path.glob("*.ckpt")))
    for ranks, split in ((2, (15, 5)), (1, (10,))):
        again = run({"hysteresis": 1.0}, ranks, batch_size=10, max_epochs=2, ckpt_path=path)
        assert again[0]["history"][0] == (1, 0, split)


# what cannot be


def _resume_from(rank, paths):
    return train(rank, "hetero_ddp", 2, ckpt_path=paths[rank])


@pytest.mark.parametrize("other", [3, None])
def test_ranks_with_different_checkpoints_are_told(tmp_path, other):
    """Without a common file system one machine may have an older file, or none."""
    run("hetero_ddp", 2, max_epochs=1, **checkpoints(tmp_path, every_n_train_steps=1))
    paths = [at(tmp_path, 5), other and at(tmp_path, other)]
    errors = run_ranks(_resume_from, 2, paths, expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["PlanMismatchError"] * 2
    assert all("rank 0: 'step 5 of epoch 0" in text for *_, text in errors)


def _policy(state):
    return next(iter(state["callbacks"].values()))


def _residuals(state):
    return state["lightning_hetero_residuals"]


EDITS = {
    "no planner": lambda s: _policy(s).pop("planner"),
    "plans have no entries": lambda s: _policy(s)["engine"]["history"].pop("entries"),
    "no workers": lambda s: _policy(s)["engine"].pop("workers"),
    "sums are a list": lambda s: _policy(s)["engine"].update(staleness={"sums": [1]}),
    "residuals are words": lambda s: _residuals(s)["ranks"][0].update(residuals={"a": "b"}),
    "noise scale of another version": lambda s: s["callbacks"]["GNSCallback"].update(spread=1.0),
}


def _resume_edited(rank, path, folder):
    good, errors = torch.load(path, weights_only=True), {}
    for name, edit in EDITS.items():
        bad = copy.deepcopy(good)
        edit(bad)
        torch.save(bad, where := f"{folder}/{rank}.ckpt")
        try:
            train(rank, LOSSY, 2, max_epochs=1, ckpt_path=where, callbacks=[GNSCallback(every_n_steps=1)])
            errors[name] = None
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors[name] = type(error).__name__
    return errors


def test_malformed_state_of_ours_is_a_named_error_on_every_rank(tmp_path):
    ours = checkpoints(tmp_path, every_n_train_steps=1)
    ours["callbacks"].append(GNSCallback(every_n_steps=1))
    run(LOSSY, 2, max_epochs=1, **ours)
    for errors in run_ranks(_resume_edited, 2, at(tmp_path, 5), str(tmp_path)):
        assert errors == dict.fromkeys(EDITS, "CheckpointStateError")
