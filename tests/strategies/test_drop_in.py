"""A drop-in for ``ddp``: one job under both names, with what of Lightning's own tests of its strategy matters here.

Samplers, hooks of callbacks, validation, test and prediction, checkpoints and their resume, early stopping.
"""

import warnings

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers import Points, Regressor, run_ranks, trainer_of

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
        loss = self.loss(batch) + self.worse * self.current_epoch
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch[2]


def _job(rank, name, folder, ckpt_path, epochs, worse):
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    attends = Attends()
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}")
    stops = EarlyStopping("val_loss", patience=1)
    model, valid = Evaluated(worse), DataLoader(Points(VALID, seed=1), 3)
    trainer = trainer_of(
        name, 2, max_epochs=epochs, callbacks=[attends, best, stops], enable_checkpointing=True, num_sanity_val_steps=0
    )
    loader = DataLoader(Points(N), 4, shuffle=True)
    trainer.fit(model, loader, valid, ckpt_path=ckpt_path)
    result = {
        "seen": model.seen,
        "validated": model.validated,
        "weights": model.flat(),
        "heard": attends.heard,
        "steps": trainer.global_step,
        "batches": (trainer.num_training_batches, *trainer.num_val_batches),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "sampled_by": type(trainer.train_dataloader.sampler).__name__,
    }
    result["predicted"] = [i for batch in trainer.predict(model, valid) for i in batch.tolist()]
    result["tested"] = trainer.test(model, valid, verbose=False)[0]["test_loss"]
    return result


def job(name, folder, ckpt_path=None, epochs=EPOCHS, worse=False):
    return run_ranks(_job, 2, name, str(folder), ckpt_path, epochs, worse)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The job, and one more epoch from its last checkpoint, under either name."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        first = job(name, folder)
        kept = sorted(path.name for path in folder.iterdir())
        last = torch.load(folder / "last.ckpt", weights_only=True)
        rest = job(name, folder, str(folder / "last.ckpt"), EPOCHS + 1)
        made[name] = {"first": first, "rest": rest, "kept": kept, "last": last}
    return made


@pytest.fixture(params=NAMES)
def one(request, both):
    return both[request.param]


def batches(results):
    """Samples of every global batch, in no order."""
    return [sorted(sum(seen, [])) for seen in zip(*([row[2] for row in r["seen"]] for r in results), strict=True)]


def test_every_sample_once_an_epoch_in_another_order_each(one):
    for result in one["first"]:
        assert [(epoch, number) for epoch, number, _ in result["seen"]] == [(e, b) for e in range(3) for b in range(4)]
        assert result["batches"] == (4, 2)
    every = np.array(batches(one["first"])).reshape(EPOCHS, N)
    assert (np.sort(every, axis=1) == np.arange(N)).all()
    assert len({tuple(epoch) for epoch in every}) == EPOCHS


def test_every_rank_evaluates_its_share(one):
    for results, epochs in ((one["first"], EPOCHS), (one["rest"], 1)):
        assert sorted(results[0]["validated"] + results[1]["validated"]) == sorted(list(range(VALID)) * epochs)
        assert sorted(results[0]["predicted"] + results[1]["predicted"]) == list(range(VALID))
        assert results[0]["val_loss"] == results[1]["val_loss"]
        assert results[0]["tested"] == results[1]["tested"] == pytest.approx(results[0]["val_loss"])


def test_replicas_stay_alike(one):
    for results in (one["first"], one["rest"]):
        np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


def test_a_checkpoint_goes_on_where_it_was(one):
    for result in one["rest"]:
        assert {epoch for epoch, *_ in result["seen"]} == {EPOCHS}
        assert result["steps"] == 4 * (EPOCHS + 1)
        assert ("on_load_checkpoint", 0, 0) in result["heard"]


@pytest.mark.parametrize("what", ["first", "rest"])
def test_both_are_one_training(both, what):
    """The same global batches, hooks in the same order, and the same weights but for the rounding of a sum.

    A rank has a slice of a batch, and under ``ddp`` every second sample of it.
    """
    plain, ours = both["ddp"][what], both["hetero_ddp"][what]
    assert batches(plain) == batches(ours)
    for theirs, own in zip(plain, ours, strict=True):
        assert theirs["heard"] == own["heard"]
        assert theirs["steps"] == own["steps"]
        assert theirs["val_loss"] == pytest.approx(own["val_loss"], rel=1e-6)
        np.testing.assert_allclose(theirs["weights"], own["weights"], rtol=1e-12)


def test_checkpoints_have_the_same_names_and_contents(both):
    plain, ours = both["ddp"], both["hetero_ddp"]
    assert plain["kept"] == ours["kept"]
    assert set(plain["last"]) == set(ours["last"])
    assert set(plain["last"]["callbacks"]) < set(ours["last"]["callbacks"])  # and what was learned of the workers
    assert (plain["last"]["global_step"], plain["last"]["epoch"]) == (ours["last"]["global_step"], EPOCHS - 1)
    for key, value in plain["last"]["state_dict"].items():
        torch.testing.assert_close(ours["last"]["state_dict"][key], value)


@pytest.mark.parametrize("name", NAMES)
def test_early_stopping_ends_every_rank_at_one_step(name, tmp_path):
    results = job(name, tmp_path, epochs=6, worse=True)
    assert [r["steps"] for r in results] == [8, 8]  # best after the first epoch, and one more to be patient with
    assert (tmp_path / "epoch=0-step=4.ckpt").exists()
