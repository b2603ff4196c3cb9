"""Elastic averaging end to end: batches claimed through the job's store, merges, resume, and what is refused.

Batches are claimed in the order of a virtual clock where counts matter (tests/modes/clocked.py).
"""

import copy
import inspect
import os
import signal
import warnings
from datetime import timedelta
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    Timer,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback, HeteroElasticStrategy, PerfModelCallback
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticEngine
from lightning_hetero.elastic.batch_queue import job_store
from tests.helpers import Points, Regressor, collected, covered, fit, trainer_of
from tests.modes.clocked import Clocked
from tests.ranks import run_ranks

COSTS, SLOW = (1.0, 2.5), {"mega_batch_size": 24}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def train(rank, arguments=SLOW, *, ranks=2, batch_size=4, costs=COSTS, model=Regressor, callbacks=(), **kwargs):
    """``costs`` are virtual seconds of a sample on each rank; models and callbacks are given as what makes them."""
    torch.manual_seed(0)
    model, strategy = model(), HeteroElasticStrategy(**{"merge": "mean", **arguments})
    callbacks = [make() for make in callbacks] + ([Clocked(costs)] if costs else [])
    kwargs = {"dataset": Points(64), "model": model, "callbacks": callbacks, **kwargs}
    done = fit(rank, strategy, ranks, batch_size, **kwargs)
    outcome = getattr(model, "outcome", None)
    return {**done, "merges": strategy.merges, "outcome": outcome, "sizes": strategy.engine.batch_sizes}


def _each(rank, cases):
    found = {}
    for name, case in cases.items():
        try:
            found[name] = train(rank, **case)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def elastic(cases, ranks=2, **kwargs):
    """Results of all ranks by the name of the case."""
    found = run_ranks(_each, ranks, cases, **{"timeout": 240, "start": "fork", **kwargs})
    return {name: [results[name] for results in found] for name in cases}


def alike(results, epochs=2, samples=64):
    """One model on all ranks, and each sample once."""
    for result in results[1:]:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
    assert np.isfinite(results[0]["weights"]).all()
    for epoch in range(epochs):
        assert covered(results, epoch) == list(range(samples))
    return results[0]


# merges


def _ddp(rank, ranks, samples):
    plain = fit(rank, "ddp", ranks, 4, dataset=Points(samples))
    how = {"ranks": ranks, "costs": None, "dataset": Points(samples)}
    return {"ddp": plain, "elastic": train(rank, {"mega_batch_batches": ranks}, **how)}


@pytest.mark.parametrize(("ranks", "samples"), [(1, 64), (2, 64), (3, 66)])
def test_one_batch_each_and_the_plain_mean_are_synchronous_sgd(ranks, samples):
    """Averaging replicas after one update each is averaging their gradients, local momentum included."""
    found = run_ranks(_ddp, ranks, ranks, samples, timeout=240)
    for result in found:
        np.testing.assert_allclose(result["elastic"]["weights"], result["ddp"]["weights"], **EXACT)
        assert result["elastic"]["steps"] == result["ddp"]["steps"]
    alike([result["elastic"] for result in found], samples=samples)


RAGGED = {"arguments": {"mega_batch_size": 31}, "ranks": 3, "costs": (1.0, 2.5, 0.7), "dataset": Points(107)}


def of_every_rule(**case):
    return {merge: {**case, "arguments": {**case.get("arguments", SLOW), "merge": merge}} for merge in sorted(MERGES)}


def test_every_sample_once_and_one_model_whatever_the_speeds_and_the_rule():
    """Ragged mega-batches, three ranks of three speeds."""
    dropped = {**RAGGED, "loader_kwargs": {"drop_last": True}, "max_epochs": 1}
    cases = {**of_every_rule(**RAGGED), "dropped": dropped}
    for name, results in elastic(cases, 3).items():
        if name == "dropped":
            seen = covered(results, 0)
            assert len(seen) == len(set(seen)) == 107 // 12 * 12
        else:
            alike(results, samples=107)
        updates = np.sum([merge.updates for merge in results[0]["merges"]], axis=0)
        assert updates.tolist() == [len(result["seen"]) for result in results]
        assert len(set(updates)) > 1


def test_a_slow_worker_takes_fewer_batches_then_smaller_ones():
    """Three times slower: a third of the batches first; once sizes are scaled, as many updates, within 1."""
    how = {"batch_size": 32, "costs": (1.0, 3.0), "dataset": Points(32 * 24), "max_epochs": 10}
    results = elastic({"": {"arguments": {"merge": "adaptive", "mega_batch_batches": 24}, **how}})[""]
    merges = alike(results, 10, 32 * 24)["merges"]
    assert (merges[0].updates, merges[0].batch_sizes) == ((18, 6), (32, 32))
    for merge in merges[-3:]:
        assert abs(merge.updates[0] - merge.updates[1]) <= 1
    assert abs(results[0]["sizes"][1] / results[0]["sizes"][0] - 1 / 3) < 0.1


def _merged(rank, cases):
    """Of each case the merge of six updates of rank 0 and two of rank 1, the sizes that follow, and three weights."""
    dist.init_process_group("gloo")
    store, found = job_store(), []
    for number, keywords in enumerate(cases):
        strategy = HeteroElasticStrategy(mega_batch_size=64, **keywords)
        engine, model = ElasticEngine(strategy.config, rank=rank, world_size=2), nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 0.01)
        engine.attach(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        weights, sampler = [model.weight.item()], engine.shard(PermutationStream(128, shuffle=False, seed=0), 8)
        for done, _ in enumerate(sampler, 1):
            engine.begin_batch()
            if not engine.merges:
                with torch.no_grad():
                    model.weight.add_(0.01)
                if rank == 1 and done == 1:
                    store.wait([f"{number}: one batch is left"])
                if rank == 0 and done == 6:
                    store.set(f"{number}: one batch is left", "")
                    store.wait([f"{number}: none is"])
            if engine.end_batch() is not None:
                weights.append(model.weight.item())
            elif rank == 1 and done == 1:
                store.set(f"{number}: none is", "")
        first, second = engine.merges
        found.append((first.updates, second.batch_sizes, first.weights, first.perturbed, weights))
    dist.barrier()
    return found


CASES = (
    *({}, {"beta": 1.0}, {"beta": 3.0}, {"beta": 3.0, "damped": False}, {"beta": 3.0, "min_batch_size": 5}),
    *({"perturbation": 0.5}, {"perturbation_threshold": 1e-6}, {"renormalize": False}, {"momentum": 0.5}),
    *({"merge": "elastic"}, {"merge": "mean"}),
)


def test_every_setting_changes_the_merge_or_the_next_batches():
    keywords = set(inspect.signature(HeteroElasticStrategy).parameters)
    assert {name for case in CASES for name in case} == keywords - {"mega_batch_size", "mega_batch_batches", "kwargs"}
    different = set()
    for case, found, other in zip(CASES, *run_ranks(_merged, 2, CASES, timeout=240), strict=True):
        assert found == other
        updates, sizes, weights, perturbed, (before, first, second) = found
        rule = MERGES[case.get("merge", "adaptive")]
        settings = AdaptiveSettings(8, **{name: value for name, value in case.items() if name != "merge"})
        merged = rule.weights((8, 8), (6, 2), (0.07, 0.03), settings)
        assert updates == (6, 2)
        assert sizes == (scale_batch_sizes((8, 8), (6, 2), settings) if rule.scales else (8, 8))
        assert (weights, perturbed) == (merged.weights, merged.perturbed)
        assert first == pytest.approx(weights[0] * 0.07 + weights[1] * 0.03)
        moved = first + (settings.momentum * (first - before) if rule.momentum else 0.0)
        if settings.renormalize:  # replicas stood still until the second merge
            assert second == pytest.approx(moved)
        different.add((sizes, weights, round(second, 9)))
    assert len(different) == len(CASES)


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


class Manual(Validated):
    """Two optimizers."""

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
    """Sets the learning rate in each training step, inside the optimizer's closure; notes what the step takes."""

    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        assert group["lr"] == self.lr
        group["lr"] = self.lr = 0.05 + 0.001 * batch_idx
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.outcome = getattr(self, "outcome", set())
        self.outcome.add((optimizer.param_groups[0]["lr"] / self.lr, self.trainer.strategy.engine.batch_sizes))

    def on_train_batch_end(self, *args):
        assert self.optimizers().param_groups[0]["lr"] == self.lr


class Plateau(Validated):
    """Its rate is halved at each validation but the first, since nothing counts as better than that."""

    interval = "epoch"

    def configure_optimizers(self):
        optimizer, better = super().configure_optimizers(), {"threshold": 1e9, "threshold_mode": "abs"}
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **better)
        how = {"scheduler": schedule, "monitor": "val", "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": how}

    def on_train_epoch_end(self):
        self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]

    def on_train_end(self):
        self.outcome = self.rates


class Normalised(Regressor):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def on_train_end(self):
        self.outcome = self.net[1].running_mean.tolist()


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


class Diverges(Regressor):
    """Rank 1 becomes nan in the first mega-batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        broken = self.trainer.global_rank == 1 and self.trainer.current_epoch == 0 and batch_idx == 0
        return loss * float("nan") if broken else loss


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        self.log("mean_index", batch[2].double().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


ADAPTIVE = {"merge": "adaptive"}
SEEN = {
    "manual": {"model": Manual},
    "schedules": {"model": Scheduled, "costs": (1.0, 4.0)},
    "rates": {
        "arguments": {**ADAPTIVE, "mega_batch_size": 192}, "batch_size": 16, "costs": (1, 3), "model": Rates,
        "dataset": Points(384),
    },
    "plateau": {"model": Plateau, "max_epochs": 3, "num_sanity_val_steps": 0},
    "normalised": {"model": Normalised, "dataset": Points(65)},
    "scaled and normalised": {
        "arguments": {**ADAPTIVE, "mega_batch_size": 96, "beta": 4.0}, "costs": (1, 9), "model": Normalised,
        "dataset": Points(384),
    },
    "taught": {"model": Taught},
    "logs": {"model": Logs, "max_epochs": 1},
    "a number of batches": {"limit_train_batches": 3, "max_epochs": 1},
    "a share of batches": {"limit_train_batches": 0.5, "max_epochs": 1},
    "a fast dev run": {"fast_dev_run": True},
    **{f"diverges, {merge}": {**case, "model": Diverges} for merge, case in of_every_rule().items()},
    **{
        f"validated, {merge}": {**case, "model": Validated, "val_check_interval": 0.25, "max_epochs": 1}
        for merge, case in of_every_rule().items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    return elastic(SEEN, timeout=240)


def test_replicas_are_one_model_in_the_end_and_each_sample_is_used_once(seen):
    for name, case in SEEN.items():
        samples = {"a number of batches": 24, "a share of batches": 32, "a fast dev run": 8}.get(name)
        if samples is None:
            alike(seen[name], case.get("max_epochs", 2), len(case.get("dataset", Points(64))))
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
    assert [result["outcome"] for result in seen["plateau"]] == [[0.05, 0.05, 0.025]] * 2


def test_buffers_teachers_and_means_are_those_of_all_ranks(seen):
    one, other = seen["normalised"]
    assert one["outcome"] == other["outcome"]
    assert min(len(own) for result in (one, other) for *_, own in result["seen"]) >= 2
    sizes = [len(own) for *_, own in seen["scaled and normalised"][1]["seen"]]
    assert 2 == min(sizes) < max(sizes) == 4
    assert [result["outcome"] for result in seen["taught"]] == [True, True]
    assert [result["metrics"]["mean_index"] for result in seen["logs"]] == pytest.approx([31.5] * 2)


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_validation_sees_the_merged_model_and_a_replica_that_is_not_finite_is_replaced(merge, seen):
    first, second = (result["outcome"] for result in seen[f"validated, {merge}"])
    assert first == second
    assert [position for position, _ in first] == [(0, 24), (0, 48), (0, 64)]
    assert seen[f"diverges, {merge}"][0]["merges"][0].weights == (1.0, 0.0)


# checkpoints


def _resumed(rank, merge, folder):
    """A whole run, one that is saved in the middle of an epoch and at its end, and those that go on."""
    arguments = {"merge": merge, **SLOW}
    common = {"model": Validated, "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    saving = partial(ModelCheckpoint, folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    found = [train(rank, arguments, **common)]
    train(rank, arguments, **common, callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    dist.barrier()
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    return found + [train(rank, arguments, **common, ckpt_path=str(path)) for path in paths]


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_resume_is_as_if_there_had_been_no_break(tmp_path, merge):
    """Sizes, momentum of the global model, replicas and each rank's optimizer all come back; the data go on."""
    whole, inside, end = zip(*run_ranks(_resumed, 2, merge, tmp_path, timeout=240), strict=True)
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
    for name, arguments in (("elastic", SLOW), ("ddp", None)):
        saving = {
            "callbacks": [ModelCheckpoint(f"{folder}/{name}", filename="last")],
            "enable_checkpointing": True,
            "max_epochs": 1,
        }
        strategy = "ddp" if arguments is None else HeteroElasticStrategy(merge="mean", **arguments)
        fit(rank, strategy, 2, 4, dataset=Points(64), **saving)
    dist.barrier()
    found = {name: fit(rank, name, 2, 4, ckpt_path=f"{folder}/elastic/last.ckpt") for name in ("ddp", "hetero_ddp")}
    return {**found, "elastic": train(rank, ckpt_path=f"{folder}/ddp/last.ckpt", costs=None)}


def test_resume_with_another_number_of_workers_and_to_and_from_plain_ddp(tmp_path):
    for ranks in (2, 3):
        found = run_ranks(_elsewhere, ranks, str(tmp_path), ranks, timeout=240)
        for name in found[0]:
            results = [result[name] for result in found]
            assert covered(results, 1) == list(range(64))
            assert not covered(results, 0)
    own = torch.load(tmp_path / "elastic" / "last.ckpt", weights_only=True)["hetero_elastic"]["optimizer_states"]
    assert len(own) == 2, "each rank's optimizer"


def _best(rank, folder):
    """Rank 1 trains on fewer batches, so that it counts fewer steps of its own."""
    found = []
    for model in (Validated(), Manual()):
        saving, steps = ModelCheckpoint(f"{folder}/{type(model).__name__}", monitor="val", save_top_k=2), []
        noting = LambdaCallback(on_validation_end=lambda trainer, _, steps=steps: steps.append(trainer.global_step))
        strategy = HeteroElasticStrategy(merge="mean", **SLOW)
        how = {"enable_checkpointing": True, "callbacks": [saving, Clocked(COSTS), noting]}
        trainer = trainer_of(strategy, 2, **how)
        trainer.fit(model, DataLoader(Points(64), 4))
        (scores,) = trainer.test(model, DataLoader(Points(8), 4), ckpt_path="best", verbose=False)
        own = sum(len(indices) > 0 for *_, indices in model.seen)
        found.append(((saving.best_model_path, sorted(saving.best_k_models), steps, scores["test"]), own))
    return found


def test_the_best_checkpoint_has_one_name_on_all_ranks(tmp_path):
    for (one, most), (other, least) in zip(*run_ranks(_best, 2, str(tmp_path), timeout=240), strict=True):
        assert most > least
        assert one == other
        assert os.path.exists(one[0])


# around the training


class Grows(Regressor):
    """Another dataset in each epoch."""

    def train_dataloader(self):
        return DataLoader(Points(40 + 11 * self.trainer.current_epoch), 4, shuffle=True)


class Stops(Validated):
    """Worse at each validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.global_step), sync_dist=True, batch_size=4)


def _around(rank, folder):
    found, lines = {}, collected()
    logger = L.pytorch.loggers.CSVLogger(folder)
    found["logged"] = train(rank, {**ADAPTIVE, **SLOW}, logger=logger, max_epochs=1)
    found["said"] = [line for line in lines if line.startswith("hetero_elastic: ") and "merges" in line]
    model, strategy = Regressor(), HeteroElasticStrategy(merge="crossbow", mega_batch_size=24)
    trainer = trainer_of(strategy, 2, max_epochs=1)
    trainer.fit(model, DataLoader(Points(), 4))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, DataLoader(Points(), 4))
    trainer.validate(Validated(), verbose=False)
    found["twice"] = {"seen": model.seen}
    model = Grows()
    trainer_of(HeteroElasticStrategy(**SLOW), 2, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    found["grows"] = {"seen": model.seen}
    stopping = partial(EarlyStopping, "val", patience=1)
    how = {"val_check_interval": 0.25, "callbacks": [stopping], "max_epochs": 5}
    found["stops"] = train(rank, {"mega_batch_size": 16}, model=Stops, costs=None, **how)
    return found


def test_metrics_summary_second_fits_data_that_grow_and_early_stops(tmp_path):
    ranks = run_ranks(_around, 2, str(tmp_path), timeout=240)
    header, *lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    named = {"hetero/updates/rank1", "hetero/merge_weight/rank0", "hetero/local_batch_size/rank1"}
    assert named <= set(header.split(","))
    assert len(lines) == len(ranks[0]["logged"]["merges"]) == 3
    assert [len(found["said"]) for found in ranks] == [1, 0]
    assert "3 merges" in ranks[0]["said"][0]
    results = {name: [found[name] for found in ranks] for name in ("twice", "grows", "stops")}
    for epoch in range(3):
        assert covered(results["twice"], epoch) == list(range(64))
        assert covered(results["grows"], epoch) == list(range(40 + 11 * epoch))
    assert [merge.position for merge in results["stops"][0]["merges"]] == [16, 32]
    assert len(covered(results["stops"], 0)) == 32


@pytest.mark.slow("starts interpreters")
@pytest.mark.parametrize("alias", ["hetero_elastic_fork", "hetero_elastic_spawn"])
def test_launched_by_lightning_itself(alias):
    model = Regressor()
    before = model.flat()
    trainer_of(alias, 2, max_epochs=1).fit(model, DataLoader(Points(), 4))
    assert np.abs(model.flat() - before).max() > 0


# what is refused


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
    interval = "step"


class DrawsBatches(Regressor):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class TwoLoaders(Regressor):
    def train_dataloader(self):
        return [DataLoader(Points(), 4), DataLoader(Points(), 4)]


REFUSED = {
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "max_steps=5": {"max_steps": 5},
    "val_check_interval=4": {"val_check_interval": 4},
    "val_check_interval": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "Timer": {"max_time": "00:01:00:00"},
    "Timer.*": {"callbacks": [partial(Timer, timedelta(minutes=1))]},
    "ModelCheckpoint": {"callbacks": [partial(ModelCheckpoint, every_n_train_steps=3)], "enable_checkpointing": True},
    "every batch is a local update": {"callbacks": [partial(GradientAccumulationScheduler, {0: 2})]},
    "EMAWeightAveraging": {"callbacks": [EMAWeightAveraging]},
    "ScheduleFreeSGD": {"model": ScheduleFree},
    "PerfModelCallback": {"callbacks": [PerfModelCallback]},
    "GNSCallback": {"callbacks": [GNSCallback]},
    "num_workers=1": {"loader_kwargs": {"num_workers": 1}},
    "2 workers": {"dataset": Points(1)},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "sync_batchnorm=True": {"model": Normalised, "sync_batchnorm": True},
    "ReduceLROnPlateau": {"model": PlateauOfSteps},
    "training_step": {"model": DrawsBatches},
    "mega_batch_size=7": {"arguments": {"mega_batch_size": 7}},
}


def _refused(rank):
    warnings.filterwarnings("ignore", "You are using the `dataloader_iter` step flavor")
    for match, case in REFUSED.items():
        with pytest.raises(Exception, match=match):
            train(rank, **{"costs": None, **case})
    with pytest.raises(Exception, match="one train loader"):
        trainer_of(HeteroElasticStrategy(), 2).fit(TwoLoaders())
    return True


def test_settings_that_need_all_ranks_are_refused_on_every_rank():
    assert run_ranks(_refused, 2, timeout=240) == [True, True]


@pytest.mark.parametrize(
    ("model", "match"), [(LogsSteps, "on_step=False"), (Saves, "a checkpoint"), (SkipsEpoch, "leaving an epoch")]
)
def test_what_needs_all_ranks_is_refused_inside_a_mega_batch(model, match):
    errors = run_ranks(_each, 2, {"": {"model": model, "costs": None}}, expect_errors=True, timeout=30)
    assert len(errors) == 2
    assert any(match in text for *_, text in errors)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"merge": "median"}, "merge='median'"),
        ({"mega_batch_size": 10, "mega_batch_batches": 2}, "mega_batch_size"),
        ({"mega_batch_size": 0}, "mega_batch_size=0"),
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


class Ends(Validated):
    """Rank 1 ends in its second batch, in a validation or before training, in one of these ways."""

    def __init__(self, how, rank=1):
        super().__init__()
        self.how, self.rank = how, rank

    def mine(self, *hows):
        return self.how in hows and self.trainer.global_rank == self.rank

    def on_train_start(self):
        if self.mine("asked before"):
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx):
        if self.mine("asked") and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.mine("killed", "raises") and batch_idx == 1:
            if self.how == "killed":
                os._exit(9)
            raise ArithmeticError("broken worker")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.mine("raises in validation") and not self.trainer.sanity_checking:
            raise ArithmeticError("broken worker")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("how", ["asked", "asked before"])
def test_a_worker_that_is_asked_to_end_tells_all_at_the_merge(how, tmp_path):
    """All ranks end there, so that what saves at an exception can save."""
    path = str(tmp_path / "end.ckpt")
    case = {"model": partial(Ends, how), "callbacks": [partial(SavesAtTheEnd, path)], "costs": None}
    errors = run_ranks(_each, 2, {"": case}, expect_errors=True, timeout=30)
    assert [kind for _, kind, _ in errors] == ["SIGTERMException"] * 2
    assert torch.load(path, weights_only=True)["hetero_elastic"]["position"] == [0, 24]


@pytest.mark.parametrize(
    ("how", "rank"), [("killed", 1), ("raises", 1), ("raises in validation", 1), ("killed", 0)], ids=str
)
def test_a_worker_that_ends_alone_is_named_and_nobody_waits_for_ever(how, rank, tmp_path):
    """What saves at an exception saves nothing then; the store, which hands out the batches, is rank 0's."""
    path = str(tmp_path / "end.ckpt")
    case = {"model": partial(Ends, how, rank), "callbacks": [partial(SavesAtTheEnd, path)], "costs": None}
    errors = run_ranks(_each, 2, {"": case}, expect_errors=True, timeout=60)
    found = {number: (kind, message) for number, kind, message in errors}
    if how != "killed":
        assert found[1][0] == "ArithmeticError"
    kind, message = found[1 - rank]
    assert kind == ("RuntimeError" if how == "raises in validation" else "ElasticWorkerError")
    assert "validation" in how or f"nothing is heard: {rank}" in message or "store" in message
    assert not os.path.exists(path)


class Stuck(Regressor):
    """Rank 1 stops in its second batch until rank 0 has taken all others; or for good."""

    def __init__(self, for_good):
        super().__init__()
        self.for_good = for_good

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1 and self.trainer.current_epoch == 0:
            job_store().wait(["never" if self.for_good else "all are taken"], timedelta(seconds=60))
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 0 and len(self.seen) == 14:
            job_store().set("all are taken", "")
        return loss


def test_the_share_of_a_worker_that_stops_claiming_is_done_by_the_rest():
    case = {"arguments": {"mega_batch_size": 64}, "model": partial(Stuck, False), "costs": None}
    results = elastic({"": case})[""]
    assert results[0]["merges"][0].updates == (14, 2)
    alike(results)


@pytest.mark.slow("waits for a timeout")
def test_a_worker_that_is_stuck_is_named_after_the_timeout():
    arguments = {"mega_batch_size": 64, "timeout": timedelta(seconds=3)}
    case = {"arguments": arguments, "model": partial(Stuck, True), "costs": None}
    errors = run_ranks(_each, 2, {"": case}, expect_errors=True, timeout=90)
    assert errors[0][:2] == (0, "ElasticWorkerError")
    assert "nothing is heard: 1" in errors[0][2]
