"""What surrounds the steps of elastic averaging: resume, schedules, validation, logging, and what is refused."""

import copy
import os
import signal
import warnings
from datetime import timedelta
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback, HeteroElasticStrategy, PerfModelCallback
from lightning_hetero.core.merging.rules import MERGES
from tests.helpers import Points, Regressor, collected, covered, fit, run_ranks, trainer_of
from tests.strategies.elastic_helpers import Clocked, elastic

COSTS = (1.0, 2.5)
SLOW = {"mega_batch_size": 24}


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
        engine = self.trainer.strategy.engine
        if not self.trainer.sanity_checking:
            self.outcome.append((engine.position, tuple(self.flat())))


class ManualValidated(Validated):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize("merge", sorted(MERGES))
@pytest.mark.parametrize("inside", [False, True], ids=["at-an-epoch", "inside-an-epoch"])
def test_resume_is_as_if_there_had_been_no_break(tmp_path, merge, inside):
    """Sizes, momentum of the global model, replicas and each rank's optimizer all come back; the data go on."""
    arguments = {"merge": merge, **SLOW}
    common = {"costs": COSTS, "model": Validated, "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    whole = elastic(2, 4, arguments, **common)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=False)
    elastic(2, 4, arguments, **common, callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    assert len(paths) == 2  # in the middle, after the merge at sample 48 of 64, and at the end
    resumed = elastic(2, 4, arguments, **common, ckpt_path=str(paths[0 if inside else 1]))
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a["weights"], b["weights"])
        assert a["outcome"][-2:] == b["outcome"][-2:]
        assert a["sizes"] == b["sizes"]
    assert covered(resumed, 1) == list(range(64))
    assert len(covered(resumed, 0)) == (16 if inside else 0)


def test_resume_with_another_number_of_workers_and_to_and_from_plain_ddp(tmp_path):
    saving = {"enable_checkpointing": True, "max_epochs": 1}
    elastic(2, 4, SLOW, callbacks=[ModelCheckpoint(tmp_path, filename="two")], **saving)
    resumed = elastic(3, 4, {"merge": "adaptive", **SLOW}, ckpt_path=str(tmp_path / "two.ckpt"))
    assert covered(resumed, 1) == list(range(64))
    assert not covered(resumed, 0)
    assert len({tuple(r["weights"]) for r in resumed}) == 1
    for strategy in ("ddp", "hetero_ddp"):
        resumed = run_ranks(_resume, 2, strategy, str(tmp_path / "two.ckpt"))
        assert covered(resumed, 1) == list(range(64))
        assert not covered(resumed, 0)
    run_ranks(_ddp_until, 2, str(tmp_path / "plain"))
    resumed = elastic(2, 4, SLOW, ckpt_path=str(tmp_path / "plain" / "ddp.ckpt"))
    assert covered(resumed, 1) == list(range(64))
    assert not covered(resumed, 0)


def _resume(rank, strategy, path):
    return fit(rank, strategy, 2, 4, ckpt_path=path)


def _ddp_until(rank, folder):
    model = Regressor()
    saving = ModelCheckpoint(folder, filename="ddp")
    trainer = trainer_of("ddp", 2, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    trainer.fit(model, DataLoader(Points(), 4))


def test_a_checkpoint_holds_the_merged_model_and_each_ranks_optimizer(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="last")
    results = elastic(2, 4, SLOW, costs=COSTS, callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    np.testing.assert_array_equal(torch.cat([p.flatten() for p in state["state_dict"].values()]), results[0]["weights"])
    first, second = (own[0]["state"][0]["momentum_buffer"] for own in state["hetero_elastic"]["optimizer_states"])
    assert not torch.equal(first, second)


def _best(rank, folder, automatic):
    """Rank 1 trains on fewer batches, so that it counts fewer steps of its own."""
    model = Validated() if automatic else ManualValidated()
    saving = ModelCheckpoint(folder, monitor="val", save_top_k=2)
    steps = []
    callbacks = [saving, Clocked(COSTS), LambdaCallback(on_validation_end=lambda t, _: steps.append(t.global_step))]
    strategy = HeteroElasticStrategy(merge="mean", **SLOW)
    trainer = trainer_of(strategy, 2, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(model, DataLoader(Points(64), 4))
    own = sum(len(indices) > 0 for *_, indices in model.seen)
    (scores,) = trainer.test(model, DataLoader(Points(8), 4), ckpt_path="best", verbose=False)
    return saving.best_model_path, sorted(saving.best_k_models), steps, own, scores["test"]


@pytest.mark.parametrize("automatic", [True, False])
def test_the_best_checkpoint_has_one_name_on_all_ranks(tmp_path, automatic):
    (path, paths, steps, most, score), (*other, least, other_score) = run_ranks(_best, 2, str(tmp_path), automatic)
    assert most > least
    assert (path, paths, steps) == tuple(other)
    assert os.path.exists(path)
    assert score == other_score


def test_validation_sees_the_merged_model_on_all_ranks_at_merges_only():
    for merge in MERGES:
        results = elastic(
            2, 4, {"merge": merge, **SLOW}, costs=COSTS, model=Validated, val_check_interval=0.25, max_epochs=1
        )
        first, second = (r["outcome"] for r in results)
        assert first == second
        assert [position for position, _ in first] == [(0, 24), (0, 48), (0, 64)]
        assert {"val"} <= set(results[0]["metrics"])


class Scheduled(Regressor):
    """Two schedules: one by steps, as long as the run; one by epochs."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.by_step = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        self.by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": self.by_step, "interval": "step"}, self.by_epoch]

    def on_train_batch_start(self, batch, batch_idx):
        self.counts = getattr(self, "counts", [])
        self.counts.append(self.by_step.last_epoch)

    def on_train_end(self):
        self.outcome = (self.by_step.last_epoch, self.by_epoch.last_epoch, self.counts)


def test_schedules_go_by_samples_not_by_a_ranks_own_updates():
    results = elastic(2, 4, SLOW, costs=(1.0, 4.0), model=Scheduled, max_epochs=3)
    assert len(results[0]["seen"]) > len(results[1]["seen"]) + 5
    for result in results:
        assert result["outcome"][:2] == (3 * 64 // 8, 3)
        counts = result["outcome"][2]
        assert counts == sorted(counts)
        assert counts[0] == 0


class Rates(Regressor):
    """Sets the learning rate in each training step, inside the optimizer's closure; notes what the step takes."""

    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        if group["lr"] != self.lr:
            raise AssertionError
        group["lr"] = self.lr = 0.05 + 0.001 * batch_idx
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.outcome = getattr(self, "outcome", set())
        self.outcome.add((optimizer.param_groups[0]["lr"] / self.lr, self.trainer.strategy.engine.batch_sizes))

    def on_train_batch_end(self, *args):
        if self.optimizers().param_groups[0]["lr"] != self.lr:
            raise AssertionError


def test_each_rank_has_the_learning_rate_of_its_batch_size():
    results = elastic(
        2, 16, {"merge": "adaptive", "mega_batch_size": 192}, costs=(1, 3), model=Rates, dataset=Points(384)
    )
    assert len(results[1]["outcome"]) > 1
    for rank, result in enumerate(results):
        for factor, sizes in result["outcome"]:
            assert factor == pytest.approx(sizes[rank] / 16)


class Plateau(Validated):
    """Its rate is halved at each validation but the first, since nothing counts as better than that."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    def on_train_epoch_end(self):
        self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]

    def on_train_end(self):
        self.outcome = self.rates


def test_a_plateau_lowers_the_rate_on_all_ranks_alike():
    for result in elastic(2, 4, SLOW, costs=COSTS, model=Plateau, max_epochs=3, num_sanity_val_steps=0):
        assert result["outcome"] == [0.05, 0.05, 0.025]


class Normalised(Regressor):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def on_train_end(self):
        self.outcome = (self.net[1].running_mean.tolist(), int(self.net[1].num_batches_tracked))


def test_buffers_are_averaged_and_no_batch_has_one_sample():
    results = elastic(2, 4, SLOW, costs=COSTS, model=Normalised, dataset=Points(65))
    assert results[0]["outcome"] == results[1]["outcome"]
    assert min(len(indices) for r in results for *_, indices in r["seen"]) >= 2
    assert covered(results, 0) == list(range(65))


class Taught(Regressor):
    """With a teacher that follows the model after each step, and a layer that is frozen for good."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.start = self.frozen.weight.clone()

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for own, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(new, 0.1)

    def on_train_end(self):
        self.outcome = torch.equal(self.frozen.weight, self.start)


def test_a_teacher_that_follows_the_model_is_averaged_and_what_is_frozen_stays():
    one, other = elastic(2, 4, SLOW, costs=COSTS, model=Taught)
    np.testing.assert_array_equal(one["weights"], other["weights"])
    assert [one["outcome"], other["outcome"]] == [True, True]


def test_scaled_batches_have_two_samples_too_if_the_model_normalises():
    adaptive = {"merge": "adaptive", "mega_batch_size": 96, "beta": 4.0}
    results = elastic(2, 4, adaptive, costs=(1, 9), model=Normalised, dataset=Points(384))
    sizes = [len(indices) for *_, indices in results[1]["seen"]]
    assert 2 == min(sizes) < max(sizes) == 4


class TwoOptimizers(Regressor):
    """Manual optimization with two steps in a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.05) for i in (0, 2)]


def test_manual_optimization():
    results = elastic(2, 4, SLOW, costs=COSTS, model=TwoOptimizers)
    assert covered(results, 1) == list(range(64))
    assert len({tuple(r["weights"]) for r in results}) == 1


class Diverges(Regressor):
    """Rank 1 becomes nan in the first mega-batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        broken = self.trainer.global_rank == 1 and self.trainer.current_epoch == 0 and batch_idx == 0
        return loss * float("nan") if broken else loss


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_a_replica_that_is_not_finite_is_replaced_by_the_others(merge):
    results = elastic(2, 4, {"merge": merge, **SLOW}, model=Diverges)
    assert results[0]["merges"][0].weights == (1.0, 0.0)
    assert np.isfinite(results[1]["weights"]).all()
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_index", batch[2].double().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return loss


def test_means_over_an_epoch_count_each_sample_once():
    results = elastic(2, 4, SLOW, costs=COSTS, model=Logs, max_epochs=1)
    for result in results:
        assert result["metrics"]["mean_index"] == pytest.approx(31.5)


class LogsSteps(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


class Saves(Regressor):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.strategy.engine.inside:
            self.trainer.save_checkpoint("never.ckpt")


class SkipsEpoch(Regressor):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LogsSteps, "on_step=False, on_epoch=True"),
        (Saves, "a checkpoint needs all ranks"),
        (SkipsEpoch, "leaving an epoch"),
    ],
)
def test_what_needs_all_ranks_is_refused_inside_a_mega_batch(model, message):
    errors = elastic(2, 4, SLOW, model=model, expect_errors=True, timeout=30)
    assert any(message in text for *_, text in errors)
    assert len(errors) == 2


class ScheduleFreeSGD(torch.optim.SGD):
    """Exchanges weights and their averages, as the optimizers of schedulefree do."""

    def train(self):
        pass

    def eval(self):
        pass


class ScheduleFree(Regressor):
    def configure_optimizers(self):
        return ScheduleFreeSGD(self.parameters(), lr=0.1)


class PlateauOfSteps(Plateau):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        found["lr_scheduler"]["interval"] = "step"
        return found


class DrawsBatches(Regressor):
    def __init__(self):
        super().__init__()
        warnings.filterwarnings("ignore", "You are using the `dataloader_iter` step flavor")

    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"max_steps": 5}, "max_steps=5"),
        ({"val_check_interval": 4}, "val_check_interval=4"),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, "has to be a share"),
        ({"max_time": "00:01:00:00"}, "Timer"),
        ({"callbacks": [Timer(timedelta(minutes=1))]}, "Timer"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=3)], "enable_checkpointing": True}, "ModelCheckpoint"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "every batch is a local update"),
        ({"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging averages the weights of each worker's own replica"),
        ({"model": ScheduleFree}, "ScheduleFreeSGD keeps averages of the weights"),
        ({"callbacks": [PerfModelCallback()]}, "PerfModelCallback"),
        ({"callbacks": [GNSCallback()]}, "GNSCallback"),
        ({"loader_kwargs": {"num_workers": 1}}, "num_workers=1"),
        ({"dataset": Points(1)}, "cannot give each of 2 workers a batch"),
        ({"use_distributed_sampler": False}, "use_distributed_sampler"),
        ({"model": Normalised, "sync_batchnorm": True}, "sync_batchnorm=True needs all workers"),
        ({"model": PlateauOfSteps}, "ReduceLROnPlateau with interval='step'"),
        ({"model": DrawsBatches}, "training_step(dataloader_iter) draws batches by itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_need_all_ranks_are_refused_on_every_rank(kwargs, message):
    errors = elastic(2, 4, SLOW, **kwargs, expect_errors=True, timeout=30)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(message in text for *_, text in errors), errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"merge": "median"},
            "merge='median' is unknown. Did you mean 'mean'. Allowed are 'adaptive', 'elastic',",
        ),
        ({"mega_batch_size": 10, "mega_batch_batches": 2}, "Give one"),
        ({"mega_batch_size": 0}, "mega_batch_size=0"),
        ({"momentum": 1}, "momentum=1"),
        ({"find_unused_parameters": True}, "no gradient averaging that find_unused_parameters"),
        ({"policy": "pid"}, "policy"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HeteroElasticStrategy(**arguments)


def test_a_mega_batch_smaller_than_a_batch_each_is_refused():
    errors = elastic(2, 4, {"mega_batch_size": 7}, expect_errors=True, timeout=30)
    assert all("mega_batch_size=7 is less than a batch of 4 samples for each of 2 workers" in e[2] for e in errors)
    assert len(errors) == 2


@pytest.mark.parametrize(("limit", "samples"), [(3, 24), (0.5, 32)])
def test_limit_train_batches_counts_batches_of_all_ranks(limit, samples):
    results = elastic(2, 4, SLOW, limit_train_batches=limit, max_epochs=1)
    assert len(covered(results, 0)) == len(set(covered(results, 0))) == samples


def _summarized(rank):
    said, strategy = collected(), HeteroElasticStrategy(merge="mean", **SLOW)
    fit(rank, strategy, 2, 4, dataset=Points(64), callbacks=[Clocked(COSTS)])
    told = [line for line in said if line.startswith("hetero_elastic: ") and "merges" in line]
    return told, strategy.merges


def test_the_first_rank_logs_a_summary_of_the_merges_at_the_end():
    (told, merges), (others, _) = run_ranks(_summarized, 2)
    assert others == []
    (text,) = told
    assert f"{len(merges)} merges" in text
    for rank in range(2):
        assert f" {sum(merge.samples[rank] for merge in merges)} (" in text.splitlines()[2 + rank]


def test_fast_dev_run_and_fit_twice():
    assert len(covered(elastic(2, 4, SLOW, fast_dev_run=True), 0)) == 8
    results = run_ranks(_twice, 2)
    assert covered(results, 0) == covered(results, 1) == covered(results, 2) == list(range(64))


def _twice(rank):
    model, strategy = Regressor(), HeteroElasticStrategy(merge="crossbow", mega_batch_size=24)
    trainer = trainer_of(strategy, 2, max_epochs=1)
    loader = DataLoader(Points(), 4)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader)
    trainer.validate(Validated(), verbose=False)
    return {"seen": model.seen}


def test_one_worker_trains_as_on_a_single_device():
    reference, (ours,) = run_ranks(_single, 1)[0], elastic(1, 4, {"merge": "adaptive", **SLOW})
    np.testing.assert_allclose(ours["weights"], reference, rtol=1e-12)


def _single(rank):
    model = Regressor()
    trainer = trainer_of("ddp", 1)
    trainer.fit(model, DataLoader(Points(), 4, shuffle=True))
    return model.flat()


def test_metrics_are_logged_at_each_merge(tmp_path):
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    elastic(2, 4, {"merge": "adaptive", **SLOW}, logger=logger, max_epochs=1)
    header, *lines = (next(tmp_path.rglob("metrics.csv"))).read_text().splitlines()
    assert {"hetero/updates/rank1", "hetero/merge_weight/rank0", "hetero/local_batch_size/rank1"} <= set(
        header.split(",")
    )
    assert len(lines) == 3


def test_the_name_is_known():
    trainer = L.Trainer(strategy="hetero_elastic", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, HeteroElasticStrategy)
    assert trainer.strategy.config.merge == "adaptive"


class Grows(Regressor):
    """Another dataset in each epoch."""

    def train_dataloader(self):
        return DataLoader(Points(40 + 11 * self.trainer.current_epoch), 4, shuffle=True)


class Stops(Validated):
    """Validates four times an epoch; worse each time."""

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.global_step), sync_dist=True, batch_size=4)


def _fit_own_loader(rank, model, kwargs):
    model = model()
    strategy = HeteroElasticStrategy(mega_batch_size=16)
    trainer = trainer_of(strategy, 2, **kwargs)
    trainer.fit(model, *([] if isinstance(model, Grows | TwoLoaders) else [DataLoader(Points(), 4)]))
    return {"seen": model.seen, "merges": strategy.merges, "weights": model.flat()}


class TwoLoaders(Regressor):
    def train_dataloader(self):
        return [DataLoader(Points(), 4), DataLoader(Points(), 4)]


def test_several_train_loaders_are_refused_on_every_rank():
    errors = run_ranks(_fit_own_loader, 2, TwoLoaders, {"max_epochs": 1}, expect_errors=True, timeout=30)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("takes one train loader" in text for *_, text in errors)


def test_reloaded_data_may_change_their_length():
    results = run_ranks(_fit_own_loader, 2, Grows, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3})
    for epoch in range(3):
        assert covered(results, epoch) == list(range(40 + 11 * epoch))


def test_early_stopping_inside_an_epoch_stops_all_ranks_at_one_merge():
    stopping = EarlyStopping("val", patience=1)
    results = run_ranks(
        _fit_own_loader, 2, Stops, {"val_check_interval": 0.25, "callbacks": [stopping], "max_epochs": 5}
    )
    assert [m.position for m in results[0]["merges"]] == [16, 32]
    assert len(covered(results, 0)) == 32
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


class Signalled(Regressor):
    """Rank 1 is asked to end in its first batch."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class SignalledBefore(Regressor):
    """Rank 1 is asked to end when training begins."""

    def on_train_start(self):
        if self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class SavesAtTheEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("model", [Signalled, SignalledBefore])
def test_a_worker_that_is_asked_to_end_tells_all_at_the_merge(model, tmp_path):
    """All ranks end there, so that what saves at an exception can save."""
    path = str(tmp_path / "end.ckpt")
    errors = elastic(2, 4, SLOW, model=model, callbacks=[SavesAtTheEnd(path)], expect_errors=True, timeout=30)
    assert [kind for _, kind, _ in errors] == ["SIGTERMException"] * 2
    assert torch.load(path, weights_only=True)["hetero_elastic"]["position"] == [0, 24]


class Fails(Validated):
    """Rank 1 has a bug in its second batch, or in its first validation."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if self.where == "in training" and self.trainer.global_rank == 1 and batch_idx == 1:
            raise ZeroDivisionError("a bug of the user's")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "in validation" and self.trainer.global_rank == 1 and not self.trainer.sanity_checking:
            raise ZeroDivisionError("a bug of the user's")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["in training", "in validation"])
def test_a_worker_that_fails_alone_neither_waits_nor_hides_its_error_behind_a_checkpoint(where, tmp_path):
    """What saves at an exception saves nothing then; the others end, and name the worker if that is at a merge."""
    path = str(tmp_path / "end.ckpt")
    model, callbacks = partial(Fails, where), [SavesAtTheEnd(path)]
    errors = elastic(2, 4, SLOW, model=model, callbacks=callbacks, expect_errors=True, timeout=30)
    kinds = {rank: (kind, message) for rank, kind, message in errors}
    assert kinds[1] == ("ZeroDivisionError", "a bug of the user's")
    assert kinds[0][0] == ("ElasticWorkerError" if where == "in training" else "RuntimeError")
    assert "a checkpoint" not in kinds[0][1]
    assert not os.path.exists(path)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars(bar, capfd):
    results = elastic(2, 4, SLOW, costs=COSTS, model=Validated, callbacks=[bar()], enable_progress_bar=True)
    assert covered(results, 1) == list(range(64))


@pytest.mark.parametrize("alias", ["hetero_elastic_fork", "hetero_elastic_spawn"])
def test_launched_by_lightning_itself(alias):
    model = Regressor()
    trainer = trainer_of(alias, 2, max_epochs=1)
    before = model.flat()
    trainer.fit(model, DataLoader(Points(), 4))
    assert np.abs(model.flat() - before).max() > 0
