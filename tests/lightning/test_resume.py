"""Checkpoints go on where they were: from and to plain DDP, on other numbers of ranks, with all that was learned."""

import copy
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan, BlockTopK, GNSCallback, HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.hardware import identity
from tests.helpers import Points, Regressor, collected, fit, trainer_of
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


def run(strategy, ranks, start="pool", **kwargs):
    return run_ranks(_train, ranks, strategy, ranks, kwargs, start=start)


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
    "every step": (Regressor, {"every_n_train_steps": 1}, (3, 7, 10, 14)),
    "behind an epoch": (WithValidation, {"save_on_train_epoch_end": True}, (7,)),
    "behind a validation": (WithValidation, {"save_on_train_epoch_end": False}, (7, 14)),
    "by who asks for steps": (AsksForSteps, {"every_n_train_steps": 1}, (10,)),
}


def _saved(rank, name, folder):
    model, when, steps = SAVED[name]
    whole = train(rank, SPLIT, 2, model=model(), max_epochs=3, **checkpoints(folder, **when))
    rests = [train(rank, SPLIT, 2, model=model(), max_epochs=3, ckpt_path=at(folder, step)) for step in steps]
    return whole, rests


@pytest.mark.parametrize("name", SAVED)
def test_a_run_goes_on_identically_behind_any_step(name, tmp_path):
    for whole, rests in run_ranks(_saved, 2, name, tmp_path):
        for step, rest in zip(SAVED[name][2], rests, strict=True):
            np.testing.assert_array_equal(rest["weights"], whole["weights"])
            assert rest["seen"] == whole["seen"][step:]
            assert rest["steps"] == 3 * STEPS


# any number of ranks, and plain DDP

WORLDS = (1, 2, 3, 4)
SAMPLES = {"hetero_ddp": 50, "ddp": 48}
"""Plain DDP repeats samples of a ragged end, which is not what is counted here."""


def places(ranks, strategy):
    """Steps at which to save: inside of the first epoch, in its last batch, and inside of the second."""
    steps = -(-SAMPLES[strategy] // (2 * ranks))
    return {"inside": steps // 2, "last": steps, "later": steps + steps // 2}


def _seen(rank, strategy, ranks, name, **kwargs):
    return train(rank, strategy, ranks, 2, Points(SAMPLES[name]), max_epochs=3, **kwargs)["seen"]


def _save(rank, ranks, folder):
    given = {name: checkpoints(folder / f"{name}-{ranks}", every_n_train_steps=1) for name in SAMPLES}
    return {name: _seen(rank, name, ranks, name, **given[name]) for name in SAMPLES}


def _resume(rank, strategy, ranks, paths):
    lines, results = collected(), {}
    for key, path in paths.items():
        lines.clear()
        seen = _seen(rank, strategy, ranks, key[0], ckpt_path=path)
        results[key] = seen, sum("begins anew" in line for line in lines)
    return results


def saved_on(worlds, folder):
    """What runs of every size trained on, and their checkpoints."""
    runs = {ranks: run_ranks(_save, ranks, ranks, folder, start="fork") for ranks in worlds}
    names = [(name, ranks) for name in SAMPLES for ranks in worlds]
    paths = {
        (*one, place): at(folder / f"{one[0]}-{one[1]}", step)
        for one in names
        for place, step in places(one[1], one[0]).items()
    }
    return runs, paths


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_on([2], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def saved_by_many(tmp_path_factory):
    return saved_on(WORLDS, tmp_path_factory.mktemp("many"))


def taken(seen_of_ranks, epoch, before=99):
    return [i for seen in seen_of_ranks for e, step, own in seen if e == epoch and step < before for i in own]


def check_once(saved, ranks):
    """Each sample once; from inside an epoch of plain DDP, which does not say how far it was, once more."""
    runs, paths = saved
    results = run_ranks(_resume, ranks, "hetero_ddp", ranks, paths, timeout=240.0, start="fork")
    for name, world, place in paths:
        case, everything = f"{name} on {world}, {place}, on {ranks}", list(range(SAMPLES[name]))
        resumed, said = zip(*(result[name, world, place] for result in results), strict=True)
        epoch, step = {"inside": 0, "last": 1, "later": 1}[place], places(world, name)[place]
        inside = step - epoch * places(world, name)["last"]
        begun = taken([seen[name] for seen in runs[world]], epoch, inside) if inside else []
        unknown = name == "ddp" and inside > 0
        assert sorted(taken(resumed, epoch) + ([] if unknown else begun)) == everything, case
        assert all(sorted(taken(resumed, e)) == everything for e in range(epoch + 1, 3)), case
        assert not taken(resumed, epoch - 1), case
        assert list(said) == [int(unknown and rank == 0) for rank in range(ranks)], case


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_sample_is_skipped_or_taken_twice_by_another_number_of_ranks(saved, ranks):
    check_once(saved, ranks)


@pytest.mark.slow("runs of one to four ranks, each resumed by one to four")
@pytest.mark.parametrize("ranks", WORLDS)
def test_no_sample_is_skipped_or_taken_twice_between_any_two_numbers_of_ranks(saved_by_many, ranks):
    check_once(saved_by_many, ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow("as with two ranks"))])
def test_plain_ddp_trains_on_from_our_checkpoints(saved, ranks):
    """Within the epoch it sees what it sees after a checkpoint of its own; behind it every sample once."""
    results = run_ranks(_resume, ranks, "ddp", ranks, saved[1], start="fork")
    for place in ("inside", "last", "later"):
        resumed = [result["hetero_ddp", 2, place][0] for result in results]
        assert sorted(set(taken(resumed, 2))) == list(range(50)), place
        assert [seen[0][0] for seen in resumed] == [result["ddp", 2, place][0][0][0] for result in results]


TOTAL, EPOCH = 8, 6
"""Samples of a step on any number of ranks, and the steps of an epoch of 48 samples."""


def _at_total(rank, strategy, ranks, **kwargs):
    return train(rank, strategy, ranks, TOTAL // ranks, Points(48), max_epochs=3, **kwargs)["weights"]


def _whole_runs(rank, folder):
    return {name: _at_total(rank, name, 2, **checkpoints(folder / name, every_n_train_steps=3)) for name in SAMPLES}


def _rests(rank, strategy, ranks, paths):
    return [_at_total(rank, strategy, ranks, ckpt_path=path) for path in paths]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of a run under hetero_ddp and of one under plain DDP, and the paths of their checkpoints by step."""
    folder = tmp_path_factory.mktemp("whole")
    weights = run_ranks(_whole_runs, 2, folder)[0]
    return weights, {(name, step): at(folder / name, step) for name in SAMPLES for step in (3, EPOCH, EPOCH + 3)}


@pytest.mark.parametrize(("strategy", "ranks"), [("hetero_ddp", 1), ("hetero_ddp", 4), ("ddp", 1), ("ddp", 4)])
def test_weights_are_those_of_the_run_without_a_break(whole, strategy, ranks):
    """Ours from any step; from and to plain DDP, whose checkpoints say nothing of samples, from the end of an epoch."""
    weights, paths = whole
    given = [paths[name, step] for name, step in paths if step == EPOCH or name == strategy == "hetero_ddp"]
    assert len(given) == (4 if strategy == "hetero_ddp" else 2)
    for resumed in run_ranks(_rests, ranks, strategy, ranks, given, start="fork"):
        for rest in resumed:
            np.testing.assert_allclose(rest, weights["hetero_ddp"], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(rest, weights["ddp"], rtol=1e-9, atol=1e-12)


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


class Interrupted(L.Callback):
    """Leaves a plan, residuals and a delayed sum behind: training fails at a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.strategy.adopt(BatchPlan(10, (8, 2)))
            trainer.strategy.engine.hook_state.staleness.make_all_stale()
        if trainer.global_step == 5:
            raise ValueError("interrupted")


class Looks(L.Callback):
    """Keeps what a fit starts with."""

    def on_train_start(self, trainer, pl_module):
        self.planner = trainer.callbacks[0].planner
        engine = trainer.strategy.engine
        residuals = engine.compression.state_dict_of_rank().get("residuals", {})
        self.residual = sum(float(value.abs().sum()) for value in residuals.values())
        self.owed = engine.hook_state.stale_state()
        self.sizes = engine.plan.local_batch_sizes
        self.samples = next(c for c in trainer.callbacks if isinstance(c, GNSCallback)).estimate.samples


def _from_plain(rank, path):
    """Fits from a checkpoint of plain DDP, with a strategy that was used before and with a new one."""
    found, lines = [], collected()
    for used in (True, False):
        lines.clear()
        looks, left = Looks(), Looks()
        strategy = HeteroDDPStrategy(replan=2, hysteresis=0.999, **LOSSY)
        trainer = trainer_of(strategy, 2, max_epochs=3, callbacks=[GNSCallback(), looks])
        loader = DataLoader(Points(N), BATCH, shuffle=True)
        if used:
            trainer.callbacks.append(interrupted := Interrupted())
            with pytest.raises(ValueError, match="interrupted"):
                trainer.fit(Regressor(lr=0.2), loader)
            trainer.callbacks.remove(interrupted)
            left.on_train_start(trainer, None)
            assert left.planner != PerfModelPlanner() or rank
            assert min(left.residual, left.samples) > 0
            assert left.owed["sums"]
            assert left.sizes == (8, 2)
        model = Regressor()
        trainer.fit(model, loader, ckpt_path=path)
        assert (looks.residual, looks.owed, looks.sizes, looks.samples) == (0.0, {}, (5, 5), 0.0)
        assert looks.planner == PerfModelPlanner()
        found.append((model.flat(), model.seen, sum("no state of hetero_ddp" in line for line in lines)))
    return found


def test_a_checkpoint_without_our_state_leaves_nothing_of_an_earlier_fit(tmp_path):
    run("ddp", 2, max_epochs=1, **checkpoints(tmp_path))
    for rank, (used, new) in enumerate(run_ranks(_from_plain, 2, str(next(tmp_path.glob("*.ckpt"))))):
        np.testing.assert_array_equal(used[0], new[0])
        assert used[1] == new[1]
        assert (used[2], new[2]) == (int(rank == 0), 0)


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


def _plans(state):
    return _policy(state)["engine"]["history"]


def _residuals(state):
    return state["lightning_hetero_residuals"]


EDITS = {
    "no planner": lambda s: _policy(s).pop("planner"),
    "planner is a list": lambda s: _policy(s).update(planner=[1]),
    "engine is a list": lambda s: _policy(s).update(engine=[1]),
    "plans have no entries": lambda s: _plans(s).pop("entries"),
    "plan is short": lambda s: _plans(s)["entries"][0].pop("plan"),
    "sizes are words": lambda s: _plans(s)["entries"][0]["plan"].update(local_batch_sizes=["a", "b"]),
    "no workers": lambda s: _policy(s)["engine"].pop("workers"),
    "sums are a list": lambda s: _policy(s)["engine"].update(staleness={"sums": [1]}),
    "residuals of nobody": lambda s: _residuals(s).pop("ranks"),
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
