"""A drop-in for ``ddp``: one job under both names, with what of Lightning's own tests of its strategy matters here.

Samplers, hooks of callbacks, validation, test and prediction, checkpoints and their resume, early stopping; and means
that are logged under uneven sizes.
"""

import warnings

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers import Points, Regressor, fit, trainer_of
from tests.ranks import run_ranks

NAMES = ("ddp", "hetero_ddp")
N, VALID, EPOCHS = 32, 12, 3
ATTENDED = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end"),
    *("on_save_checkpoint", "on_load_checkpoint", "on_train_end", "on_fit_end", "on_exception"),
)


class Attends(Callback):
    """Writes down every hook that is called, with the epoch and the step."""

    def __init__(self):
        self.heard = []
        for name in ATTENDED:
            setattr(self, name, self._listener(name))

    def _listener(self, name):
        return lambda trainer, *_, **__: self.heard.append((name, trainer.current_epoch, trainer.global_step))


class Evaluated(Regressor):
    """Also validates, tests and predicts; ``worse``: the validation loss rises from the second epoch on."""

    def __init__(self, worse=False):
        super().__init__(momentum=0.0)
        self.worse, self.validated = worse, []

    def validation_step(self, batch, batch_idx):
        self.validated += batch[2].tolist()
        self.log("val_loss", self.loss(batch) + self.worse * self.current_epoch, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch[2]


def job(rank, name, folder, ckpt_path=None, epochs=EPOCHS, worse=False):
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", "The dirpath has changed")
    attends = Attends()
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}")
    callbacks = [attends, best, EarlyStopping("val_loss", patience=1)]
    model, valid = Evaluated(worse), DataLoader(Points(VALID, seed=1), 3)
    given = {"max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = trainer_of(name, 2, **given)
    trainer.fit(model, DataLoader(Points(N), 4, shuffle=True), valid, ckpt_path=ckpt_path)
    return {
        "seen": model.seen,
        "validated": model.validated,
        "weights": model.flat(),
        "heard": attends.heard,
        "steps": trainer.global_step,
        "batches": (trainer.num_training_batches, *trainer.num_val_batches),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "predicted": [i for batch in trainer.predict(model, valid) for i in batch.tolist()],
        "tested": trainer.test(model, valid, verbose=False)[0]["test_loss"],
    }


def _jobs(rank, folder):
    """The job, and one more epoch from its last checkpoint, under either name; and one that is stopped early."""
    made = {}
    for name in NAMES:
        where = f"{folder}/{name}"
        made[name, "first"] = job(rank, name, where)
        made[name, "rest"] = job(rank, name, f"{where}/rest", f"{where}/last.ckpt", EPOCHS + 1)
        made[name, "stopped"] = job(rank, name, f"{where}/stopped", epochs=6, worse=True)["steps"]
    return made


def batches(results):
    """Samples of every global batch, in no order."""
    return [sorted(sum(seen, [])) for seen in zip(*([row[2] for row in r["seen"]] for r in results), strict=True)]


def test_both_names_are_one_training(tmp_path):
    """The same global batches, hooks in the same order, checkpoints, and weights but for the rounding of a sum."""
    results = run_ranks(_jobs, 2, str(tmp_path))
    both = {key: [result[key] for result in results] for key in results[0]}
    for what in ("first", "rest"):
        plain, ours = both["ddp", what], both["hetero_ddp", what]
        assert batches(plain) == batches(ours)
        for theirs, own in zip(plain, ours, strict=True):
            same = ("heard", "steps", "batches", "validated", "predicted")
            assert [theirs[name] for name in same] == [own[name] for name in same]
            assert ("on_load_checkpoint", 0, 0) in own["heard"] or what == "first"
            for name in ("val_loss", "tested"):
                assert theirs[name] == pytest.approx(own[name], rel=1e-6)
            np.testing.assert_allclose(theirs["weights"], own["weights"], rtol=1e-12)
    assert both["ddp", "stopped"] == both["hetero_ddp", "stopped"] == [8, 8], "best after an epoch, and one more"
    kept = [sorted(path.name for path in (tmp_path / name).glob("*.ckpt")) for name in NAMES]
    assert kept[0] == kept[1]
    plain, ours = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in NAMES)
    assert set(plain) == set(ours)
    assert set(plain["callbacks"]) < set(ours["callbacks"]), "and what was learned of the workers"
    assert (plain["global_step"], plain["epoch"]) == (ours["global_step"], EPOCHS - 1)
    for key, value in plain["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][key], value)


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("constant", torch.tensor(1.0), on_epoch=True, on_step=False, sync_dist=True)
        self.log("mean_x", batch[0][:, 0].mean(), on_epoch=True, on_step=False, sync_dist=True)
        self.log("step_constant", torch.tensor(3.0), on_step=True, on_epoch=False, sync_dist=True)
        return loss


LOGGED = [((3, 4), 25), ((6, 1), 7), ((5, 0), 21)]


def _logs(rank):
    found = {}
    for sizes, n in LOGGED:
        given = {"model": Logs(), "dataset": Points(n), "max_epochs": 1}
        found[sizes, n] = fit(rank, {"local_batch_sizes": sizes}, 2, 1, **given)["metrics"]
    return found


def test_logged_means_are_means_over_samples():
    for found in run_ranks(_logs, 2):
        for (sizes, n), metrics in found.items():
            expected = float(Points(n).x[:, 0].mean())
            assert metrics["constant"] == pytest.approx(1.0, abs=1e-6), (sizes, n)
            assert metrics["step_constant"] == pytest.approx(3.0, abs=1e-6), (sizes, n)
            assert metrics["mean_x"] == pytest.approx(expected, rel=1e-4, abs=1e-6), (sizes, n)
