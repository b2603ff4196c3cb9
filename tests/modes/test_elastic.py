"""Elastic averaging end to end: batches claimed through the job's store, merges, resume, and what is refused.

Batches are claimed in the order of a virtual clock where counts matter (tests/modes/clocked.py).
"""

import inspect
import os
import signal
from datetime import timedelta
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroElasticStrategy, PerfModelCallback
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.elastic.batch_queue import job_store
from tests.helpers import Points, Regressor, covered, fit, trainer_of
from tests.modes.clocked import Clocked
from tests.modes.runs import alike, by_name, each
from tests.one_process.test_modules import Adversaries
from tests.ranks import run_ranks

COSTS, SLOW, ADAPTIVE = (1.0, 2.5), {"mega_batch_size": 24}, {"merge": "adaptive"}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def train(rank, arguments=SLOW, *, ranks=2, batch_size=4, costs=COSTS, model=Regressor, callbacks=(), **kwargs):
    """``costs`` are virtual seconds of a sample on each rank; models are given as what makes them."""
    torch.manual_seed(0)
    model, strategy = model(), HeteroElasticStrategy(**{"merge": "mean", **arguments})
    callbacks = [*callbacks, *([Clocked(costs)] if costs else [])]
    kwargs = {"dataset": Points(64), "model": model, "callbacks": callbacks, **kwargs}
    done = fit(rank, strategy, ranks, batch_size, **kwargs)
    found = {"merges": strategy.merges, "outcome": getattr(model, "outcome", None)}
    return {**done, **found, "sizes": strategy.engine.batch_sizes}


def elastic(cases, ranks=2):
    return by_name(run_ranks(each, ranks, train, cases))


def one_model(results, epochs=2, samples=64):
    """One model on all ranks, and each sample once."""
    for epoch in range(epochs):
        assert covered(results, epoch) == list(range(samples))
    return alike(results)


# merges


def _ddp(rank, ranks, samples):
    plain = fit(rank, "ddp", ranks, 4, dataset=Points(samples))
    how = {"ranks": ranks, "costs": None, "dataset": Points(samples)}
    return {"ddp": plain, "elastic": train(rank, {"mega_batch_batches": ranks}, **how)}


@pytest.mark.parametrize(("ranks", "samples"), [(1, 64), (2, 64), (3, 66)])
def test_one_batch_each_and_the_plain_mean_are_synchronous_sgd(ranks, samples):
    """Averaging replicas after one update each is averaging their gradients, local momentum included."""
    found = run_ranks(_ddp, ranks, ranks, samples)
    for result in found:
        np.testing.assert_allclose(result["elastic"]["weights"], result["ddp"]["weights"], **EXACT)
        assert result["elastic"]["steps"] == result["ddp"]["steps"]
    one_model([result["elastic"] for result in found], samples=samples)


RAGGED = {"arguments": {"mega_batch_size": 31}, "ranks": 3, "costs": (1.0, 2.5, 0.7), "dataset": Points(107)}


def of_every_rule(**case):
    return {merge: {**case, "arguments": {**case.get("arguments", SLOW), "merge": merge}} for merge in sorted(MERGES)}


def test_every_sample_once_and_one_model_whatever_the_speeds_and_the_rule():
    """Ragged mega-batches, three ranks of three speeds."""
    for results in elastic(of_every_rule(**RAGGED), 3).values():
        one_model(results, samples=107)
        updates = np.sum([merge.updates for merge in results[0]["merges"]], axis=0)
        assert updates.tolist() == [len(result["seen"]) for result in results]
        assert len(set(updates)) > 1


def test_a_slow_worker_takes_fewer_batches_then_smaller_ones():
    """Three times slower: a third of the batches first; once sizes are scaled, as many updates, within 1."""
    how = {"batch_size": 32, "costs": (1.0, 3.0), "dataset": Points(32 * 24), "max_epochs": 10}
    results = elastic({"": {"arguments": {**ADAPTIVE, "mega_batch_batches": 24}, **how}})[""]
    merges = one_model(results, 10, 32 * 24)["merges"]
    assert (merges[0].updates, merges[0].batch_sizes) == ((18, 6), (32, 32))
    for merge in merges[-3:]:
        assert abs(merge.updates[0] - merge.updates[1]) <= 1
    assert abs(results[0]["sizes"][1] / results[0]["sizes"][0] - 1 / 3) < 0.1


SETTINGS = {
    "min_batch_size": 5, "beta": 3.0, "perturbation": 0.5, "perturbation_threshold": 0.2, "momentum": 0.5,
    "renormalize": False, "damped": False,
}  # fmt: skip


def test_every_setting_reaches_the_merges():
    """What each does there: tests/elastic, tests/equations/test_merging.py."""
    keywords = set(inspect.signature(HeteroElasticStrategy).parameters)
    assert set(SETTINGS) == keywords - {"merge", "mega_batch_size", "mega_batch_batches", "kwargs"}
    assert HeteroElasticStrategy(**SETTINGS).config.adaptive(8) == AdaptiveSettings(8, **SETTINGS)


# what a module sees


class Validated(Regressor):
    """Validates, and notes the model and the position at which that happened."""

    def __init__(self):
        super().__init__()
        self.outcome = []

    def val_dataloader(self):
        return DataLoader(Points(8), 4)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.outcome.append((self.trainer.strategy.engine.position, tuple(self.flat())))


class Scheduled(Regressor):
    """Two schedules: one by steps, as long as the run; one by epochs."""

    def configure_optimizers(self):
        optimizer, steps = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        self.by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        self.by_epoch, self.counts = torch.optim.lr_scheduler.StepLR(optimizer, 1), []
        return [optimizer], [{"scheduler": self.by_step, "interval": "step"}, self.by_epoch]

    def on_train_batch_start(self, batch, batch_idx):
        self.counts.append(self.by_step.last_epoch)

    def on_train_end(self):
        self.outcome = (self.by_step.last_epoch, self.by_epoch.last_epoch, self.counts)


class Rates(Regressor):
    """Notes the learning rate that a step takes, and finds its own again behind it."""

    def __init__(self):
        super().__init__()
        self.outcome = set()

    def on_before_optimizer_step(self, optimizer):
        self.outcome.add((optimizer.param_groups[0]["lr"] / self.lr, self.trainer.strategy.engine.batch_sizes))

    def on_train_batch_end(self, *args):
        assert self.optimizers().param_groups[0]["lr"] == self.lr


class Normalised(Regressor):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def on_train_end(self):
        self.outcome = self.net[1].running_mean.tolist()


class Diverges(Regressor):
    """Rank 1 becomes nan in the first mega-batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        broken = self.trainer.global_rank == 1 and self.trainer.current_epoch == 0 and batch_idx == 0
        return loss * float("nan") if broken else loss


class Logs(Regressor):
    on_step = False

    def training_step(self, batch, batch_idx):
        self.log("mean", batch[2].double().mean(), on_step=self.on_step, on_epoch=not self.on_step, sync_dist=True)
        return super().training_step(batch, batch_idx)


SEEN = {
    "manual": {"model": Adversaries},
    "schedules": {"model": Scheduled, "costs": (1.0, 4.0)},
    "rates": {
        "arguments": {**ADAPTIVE, "mega_batch_size": 192}, "batch_size": 16, "costs": (1, 3), "model": Rates,
        "dataset": Points(384),
    },
    "normalised": {"model": Normalised, "dataset": Points(65)},
    "logs": {"model": Logs, "max_epochs": 1},
    "a share of batches": {"limit_train_batches": 0.5, "max_epochs": 1},
    "a fast dev run": {"fast_dev_run": True},
    "validated": {"model": Validated, "val_check_interval": 0.25, "max_epochs": 1},
    **{f"diverges, {merge}": {**case, "model": Diverges} for merge, case in of_every_rule().items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    return elastic(SEEN)


def test_replicas_are_one_model_in_the_end_and_each_sample_is_used_once(seen):
    for name, case in SEEN.items():
        samples = {"a share of batches": 32, "a fast dev run": 8}.get(name)
        if samples is None:
            one_model(seen[name], case.get("max_epochs", 2), len(case.get("dataset", Points(64))))
        else:
            assert len(covered(seen[name], 0)) == len(set(covered(seen[name], 0))) == samples


def test_schedules_and_rates_go_by_samples_not_by_a_ranks_own_updates(seen):
    ranks = seen["schedules"]
    assert len(ranks[0]["seen"]) > len(ranks[1]["seen"]) + 5
    for result in ranks:
        by_step, by_epoch, counts = result["outcome"]
        assert (by_step, by_epoch) == (2 * 64 // 8, 2)
        assert counts[0] == 0
        assert counts == sorted(counts)
    assert len(seen["rates"][1]["outcome"]) > 1
    for rank, result in enumerate(seen["rates"]):
        for factor, sizes in result["outcome"]:
            assert factor == pytest.approx(sizes[rank] / 16)


def test_buffers_means_and_validations_are_those_of_all_ranks(seen):
    one, other = seen["normalised"]
    assert one["outcome"] == other["outcome"]
    assert min(len(own) for result in (one, other) for *_, own in result["seen"]) >= 2
    assert [result["metrics"]["mean"] for result in seen["logs"]] == pytest.approx([31.5] * 2)
    first, second = (result["outcome"] for result in seen["validated"])
    assert first == second
    assert [position for position, _ in first] == [(0, 24), (0, 48), (0, 64)]


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_a_replica_that_is_not_finite_is_left_out(merge, seen):
    assert seen[f"diverges, {merge}"][0]["merges"][0].weights == (1.0, 0.0)


# checkpoints


def _resumed(rank, merge, folder):
    """A whole run, one that is saved in the middle of an epoch and at its end, and those that go on."""
    arguments = {"merge": merge, **SLOW}
    common = {"model": Validated, "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    saving = partial(ModelCheckpoint, folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    found = [train(rank, arguments, **common)]
    train(rank, arguments, **common, callbacks=[saving()], enable_checkpointing=True, max_epochs=1)
    dist.barrier()
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    return found + [train(rank, arguments, **common, ckpt_path=str(path)) for path in paths]


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_resume_is_as_if_there_had_been_no_break(tmp_path, merge):
    """Sizes, momentum of the global model, replicas and each rank's optimizer all come back; the data go on."""
    whole, inside, end = zip(*run_ranks(_resumed, 2, merge, tmp_path), strict=True)
    for resumed, left in ((inside, 16), (end, 0)):
        for a, b in zip(whole, resumed, strict=True):
            np.testing.assert_array_equal(a["weights"], b["weights"])
            assert (a["outcome"][-2:], a["sizes"]) == (b["outcome"][-2:], b["sizes"])
        assert covered(resumed, 1) == list(range(64))
        assert len(covered(resumed, 0)) == left


def _elsewhere(rank, folder, ranks):
    """An epoch under each strategy, and the next one under the other ones."""
    if ranks == 3:
        return {"more": train(rank, {**ADAPTIVE, **SLOW}, ranks=3, costs=None, ckpt_path=f"{folder}/elastic/last.ckpt")}
    for name, strategy in (("elastic", HeteroElasticStrategy(merge="mean", **SLOW)), ("ddp", "ddp")):
        saving = [ModelCheckpoint(f"{folder}/{name}", filename="last")]
        fit(rank, strategy, 2, 4, max_epochs=1, callbacks=saving, enable_checkpointing=True)
    dist.barrier()
    found = {name: fit(rank, name, 2, 4, ckpt_path=f"{folder}/elastic/last.ckpt") for name in ("ddp", "hetero_ddp")}
    return {**found, "elastic": train(rank, ckpt_path=f"{folder}/ddp/last.ckpt", costs=None)}


def test_resume_with_another_number_of_workers_and_to_and_from_plain_ddp(tmp_path):
    for ranks in (2, 3):
        found = run_ranks(_elsewhere, ranks, str(tmp_path), ranks)
        for name in found[0]:
            results = [result[name] for result in found]
            assert covered(results, 1) == list(range(64))
            assert not covered(results, 0)
    own = torch.load(tmp_path / "elastic" / "last.ckpt", weights_only=True)["hetero_elastic"]["optimizer_states"]
    assert len(own) == 2, "each rank's optimizer"


def _best(rank, folder):
    """Rank 1 trains on fewer batches, so that it counts fewer steps of its own."""
    model, steps = Validated(), []
    saving = ModelCheckpoint(folder, monitor="val", save_top_k=2)
    noting = LambdaCallback(on_validation_end=lambda trainer, _: steps.append(trainer.global_step))
    how = {"enable_checkpointing": True, "callbacks": [saving, Clocked(COSTS), noting]}
    trainer = trainer_of(HeteroElasticStrategy(merge="mean", **SLOW), 2, **how)
    trainer.fit(model, DataLoader(Points(64), 4))
    (scores,) = trainer.test(model, DataLoader(Points(8), 4), ckpt_path="best", verbose=False)
    return (saving.best_model_path, sorted(saving.best_k_models), steps, scores["test"]), len(model.seen)


def test_the_best_checkpoint_has_one_name_on_all_ranks(tmp_path):
    (one, most), (other, least) = run_ranks(_best, 2, str(tmp_path))
    assert most > least
    assert one == other
    assert os.path.exists(one[0])


# around the training


class Grows(Regressor):
    """Another dataset in each epoch."""

    def train_dataloader(self):
        return DataLoader(Points(40 + 11 * self.trainer.current_epoch), 4, shuffle=True)


def _around(rank):
    model, trainer = Regressor(), trainer_of(HeteroElasticStrategy(merge="crossbow", **SLOW), 2, max_epochs=1)
    trainer.fit(model, DataLoader(Points(), 4))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, DataLoader(Points(), 4))
    trainer.validate(Validated(), verbose=False)
    grows = Grows()
    trainer_of(HeteroElasticStrategy(**SLOW), 2, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(grows)
    return {"seen": model.seen}, {"seen": grows.seen}


def test_a_second_fit_and_data_that_grow_use_each_sample_once():
    twice, grows = zip(*run_ranks(_around, 2), strict=True)
    for epoch in range(3):
        assert covered(twice, epoch) == list(range(64))
        assert covered(grows, epoch) == list(range(40 + 11 * epoch))


# what is refused


class LogsSteps(Logs):
    on_step = True


class Saves(Regressor):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.strategy.engine.inside:
            self.trainer.save_checkpoint("never.ckpt")


class PlateauOfSteps(Regressor):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        how = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": how}


class TwoLoaders(Regressor):
    def train_dataloader(self):
        return [DataLoader(Points(), 4), DataLoader(Points(), 4)]


REFUSED = {
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "max_steps=5": {"max_steps": 5},
    "val_check_interval=4": {"val_check_interval": 4},
    "Timer": {"max_time": "00:01:00:00"},
    "ModelCheckpoint": {"callbacks": [partial(ModelCheckpoint, every_n_train_steps=3)], "enable_checkpointing": True},
    "every batch is a local update": {"callbacks": [partial(GradientAccumulationScheduler, {0: 2})]},
    "EMAWeightAveraging": {"callbacks": [EMAWeightAveraging]},
    "PerfModelCallback": {"callbacks": [PerfModelCallback]},
    "num_workers=1": {"loader_kwargs": {"num_workers": 1}},
    "2 workers": {"dataset": Points(1)},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "ReduceLROnPlateau": {"model": PlateauOfSteps},
}


def _refused(rank):
    for match, case in REFUSED.items():
        with pytest.raises((ValueError, MisconfigurationException), match=match):
            each(rank, train, {match: {"costs": None, **case}})
    with pytest.raises((ValueError, MisconfigurationException), match="one train loader"):
        trainer_of(HeteroElasticStrategy(), 2).fit(TwoLoaders())
    return True


def test_settings_that_need_all_ranks_are_refused_on_every_rank():
    assert run_ranks(_refused, 2) == [True, True]


@pytest.mark.parametrize(("model", "match"), [(LogsSteps, "on_step=False"), (Saves, "a checkpoint")])
def test_what_needs_all_ranks_is_refused_inside_a_mega_batch(model, match):
    errors = run_ranks(each, 2, train, {"": {"model": model, "costs": None}}, expect_errors=True, timeout=30)
    assert len(errors) == 2
    assert any(match in text for *_, text in errors)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"momentum": 1}, "momentum=1"),
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"policy": "pid"}, "policy"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        HeteroElasticStrategy(**arguments)


# workers that end


class SavesAtTheEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


class Ends(Regressor):
    """Rank 1 is asked to end in its first batch, or raises in its second one."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.how == "asked" and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.trainer.global_rank == 1 and self.how == "raises" and batch_idx == 1:
            raise ArithmeticError("broken worker")
        return super().training_step(batch, batch_idx)


ENDS = {
    "asked": ("SIGTERMException", "SIGTERMException"),
    "raises": ("ElasticWorkerError", "ArithmeticError"),
}


@pytest.mark.parametrize("how", ENDS)
def test_asked_to_end_all_save_at_the_merge_and_where_one_fails_nobody_does(how, tmp_path):
    """Nobody waits for ever; what saves at an exception can save only where all end together."""
    path = tmp_path / "end.ckpt"
    case = {"model": partial(Ends, how), "callbacks": [partial(SavesAtTheEnd, str(path))], "costs": None}
    errors = run_ranks(each, 2, train, {"": case}, expect_errors=True, timeout=60)
    assert tuple(kind for _, kind, _ in errors) == ENDS[how]
    assert path.exists() == (how == "asked")
    if path.exists():
        assert torch.load(path, weights_only=True)["hetero_elastic"]["position"] == [0, 24]


class Stuck(Regressor):
    """Rank 1 stops in its second batch until rank 0 has taken all others."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1 and self.trainer.current_epoch == 0:
            job_store().wait(["all are taken"], timedelta(seconds=60))
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 0 and len(self.seen) == 14:
            job_store().set("all are taken", "")
        return loss


def test_the_share_of_a_worker_that_stops_claiming_is_done_by_the_rest():
    case = {"arguments": {"mega_batch_size": 64}, "model": Stuck, "costs": None}
    results = elastic({"": case})[""]
    assert results[0]["merges"][0].updates == (14, 2)
    one_model(results)
