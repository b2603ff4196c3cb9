"""Checkpoints: continue identically, with another number of workers, from and to plain DDP; each sample once."""

import copy
import logging
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan, BlockTopK, GNSCallback, HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of
from tests.learned import knowing

N, BATCH = 70, 5
SPLIT = {"local_batch_sizes": [7, 3]}


def _fit(rank, strategy, world_size, kwargs):
    kwargs = {"dataset": Points(N), "batch_size": BATCH, **kwargs}
    batch_size = kwargs.pop("batch_size")
    return fit(rank, strategy, world_size, batch_size, **kwargs)


def run(strategy, world_size, **kwargs):
    return run_ranks(_fit, world_size, strategy, world_size, kwargs)


def checkpoints(folder, **kwargs):
    return {
        "callbacks": [ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}-{step}", **kwargs)],
        "enable_checkpointing": True,
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [3, 7, 10, 14])
def test_mid_epoch_and_epoch_end_continue_identically(tmp_path, step, workers):
    """7 steps an epoch: saved inside the first and second epoch and after their last batches."""
    loader = {"num_workers": workers}
    whole = run(SPLIT, 2, max_epochs=3, loader_kwargs=loader, **checkpoints(tmp_path, every_n_train_steps=1))
    path = next(tmp_path.glob(f"*step={step}.ckpt"))
    rest = run(SPLIT, 2, max_epochs=3, loader_kwargs=loader, ckpt_path=str(path))
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["seen"] == full["seen"][step:]
        assert part["steps"] == 21


@pytest.mark.parametrize("when", [{"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}])
def test_epoch_checkpoints_continue_identically(tmp_path, when):
    validate = {"model": WithValidation()}
    whole = run(SPLIT, 2, max_epochs=3, **validate, **checkpoints(tmp_path, **when))
    path = next(tmp_path.glob("epoch=0*.ckpt"))
    rest = run(SPLIT, 2, max_epochs=3, **validate, ckpt_path=str(path))
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["seen"] == full["seen"][7:]


class WithValidation(Regressor):
    def val_dataloader(self):
        return torch.utils.data.DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


class AsksForSteps(Regressor):
    """Sets up the loaders early, before the loops are restored."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


def test_estimated_stepping_batches_does_not_lose_the_position(tmp_path):
    whole = run(SPLIT, 2, max_epochs=3, model=AsksForSteps(), **checkpoints(tmp_path, every_n_train_steps=1))
    path = next(tmp_path.glob("*step=10.ckpt"))
    rest = run(SPLIT, 2, max_epochs=3, model=AsksForSteps(), ckpt_path=str(path))
    assert [r["seen"] for r in rest] == [r["seen"][10:] for r in whole]


@pytest.mark.parametrize("new_size", [1, 3])
def test_another_number_of_workers_takes_each_sample_once(tmp_path, new_size):
    whole = run("hetero_ddp", 2, max_epochs=2, **checkpoints(tmp_path, every_n_train_steps=1))
    path = next(tmp_path.glob("*step=3.ckpt"))
    rest = run("hetero_ddp", new_size, max_epochs=2, ckpt_path=str(path))
    before = [i for r in whole for e, step, indices in r["seen"] if (e, step) < (0, 3) for i in indices]
    after = [i for r in rest for e, _, indices in r["seen"] if e == 0 for i in indices]
    assert sorted(before + after) == list(range(N))
    assert sorted(i for r in rest for e, _, indices in r["seen"] if e == 1 for i in indices) == list(range(N))


def _load_everywhere(rank, path):
    return fit(rank, "ddp", 1, 10, dataset=Points(N), max_epochs=1, ckpt_path=path)


def test_plain_ddp_reads_our_checkpoint_and_we_read_its(tmp_path):
    ours = tmp_path / "ours"
    run(SPLIT, 2, max_epochs=1, **checkpoints(ours))
    state = torch.load(next(ours.glob("*.ckpt")), weights_only=True)
    plain = tmp_path / "plain"
    run("ddp", 2, max_epochs=1, **checkpoints(plain))
    theirs = torch.load(next(plain.glob("*.ckpt")), weights_only=True)
    assert set(state) == set(theirs)
    assert set(state["state_dict"]) == set(theirs["state_dict"])
    again = run(SPLIT, 2, max_epochs=2, ckpt_path=str(next(plain.glob("*.ckpt"))))
    assert [r["steps"] for r in again] == [14, 14]
    run_ranks(_load_everywhere, 1, str(next(ours.glob("*.ckpt"))))


class Pretender(PerfModelCallback):
    """Two workers of this host with known models, the first three times as fast."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        from lightning_hetero.hardware import identity

        names = [identity(torch.device("cpu"), slot) for slot in range(2)]
        models = {name: (0.025 * k, 0.0, 0.025 * k, 0.0) for name, k in zip(names, (1, 3), strict=True)}
        self.planner = knowing(models)


def test_learned_models_ride_in_the_checkpoint_by_hardware(tmp_path):
    """What was learned of each piece of hardware splits the first batch of a resumed run, whatever its size."""
    ours = checkpoints(tmp_path)
    ours["callbacks"] = [Pretender(), *ours["callbacks"]]
    first = run({"hysteresis": 1.0}, 2, batch_size=8, max_epochs=1, **ours)
    assert first[0]["history"][0][2] == (12, 4)
    path = str(next(tmp_path.glob("*.ckpt")))
    again = run({"hysteresis": 1.0}, 2, batch_size=10, max_epochs=2, ckpt_path=path)
    assert again[0]["history"][0] == (1, 0, (15, 5))
    alone = run({"hysteresis": 1.0}, 1, batch_size=10, max_epochs=2, ckpt_path=path)
    assert alone[0]["history"][0] == (1, 0, (10,))


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


def _from_plain(rank, path, used):
    """A fit from a checkpoint of plain DDP, with a strategy that was used before or is new."""
    records = []
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: records.append(record.getMessage())
    compression = BlockTopK(density=0.4, block=8, warmup_steps=2)
    strategy = HeteroDDPStrategy(replan=2, hysteresis=0.999, compression=compression, staleness=1)
    looks, left = Looks(), Looks()
    trainer = trainer_of(strategy, 2, max_epochs=3, callbacks=[GNSCallback(), looks])
    loader = DataLoader(Points(N), BATCH, shuffle=True)
    if used:
        trainer.callbacks.append(interrupted := Interrupted())
        try:
            trainer.fit(Regressor(lr=0.2), loader)
        except ValueError:
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
    return model.flat(), model.seen, [text for text in records if "no state of hetero_ddp" in text]


def test_a_checkpoint_without_our_state_leaves_nothing_of_an_earlier_fit(tmp_path):
    run("ddp", 2, max_epochs=1, **checkpoints(tmp_path))
    path = str(next(tmp_path.glob("*.ckpt")))
    results = run_ranks(_from_plain, 2, path, True)
    for one, other in zip(results, run_ranks(_from_plain, 2, path, False), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1] == other[1]
        assert other[2] == []
    assert [len(said) for _, _, said in results] == [1, 0]


WORLDS = (1, 2, 3, 4)
SAMPLES = {"hetero_ddp": 50, "ddp": 48}
"""Plain DDP repeats samples of a ragged end, which is not what is counted here."""


def _places(world_size, strategy):
    """Steps at which to save: inside of the first epoch, in its last batch, and inside of the second."""
    steps = -(-SAMPLES[strategy] // (2 * world_size))
    return {"inside": steps // 2, "last": steps, "later": steps + steps // 2}


def _counts(rank, strategy, world_size, name, **kwargs):
    return fit(rank, strategy, world_size, 2, dataset=Points(SAMPLES[name]), max_epochs=3, **kwargs)["seen"]


def _save(rank, world_size, folder):
    seen = {}
    for name in SAMPLES:
        where = str(folder / f"{name}-{world_size}")
        seen[name] = _counts(rank, name, world_size, name, **checkpoints(where, every_n_train_steps=1))
    return seen


def _resume(rank, world_size, paths):
    said = []
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    results = {}
    for key, path in paths.items():
        said.clear()
        seen = _counts(rank, "hetero_ddp", world_size, key[0], ckpt_path=str(path))
        results[key] = seen, sum("begins anew" in line for line in said)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What runs of every size trained on, and their checkpoints."""
    folder = tmp_path_factory.mktemp("worlds")
    runs = {world: run_ranks(_save, world, world, folder) for world in WORLDS}
    paths = {
        (name, world, place): next((folder / f"{name}-{world}").glob(f"*-step={step}.ckpt"))
        for name in SAMPLES
        for world in WORLDS
        for place, step in _places(world, name).items()
    }
    return runs, paths


def _taken(seen_of_ranks, epoch, before=None):
    return [
        i
        for seen in seen_of_ranks
        for e, step, indices in seen
        if e == epoch and step < (before or 99)
        for i in indices
    ]


@pytest.mark.parametrize("new_size", WORLDS)
def test_no_sample_is_skipped_between_any_two_numbers_of_workers(saved, new_size):
    """Each is trained on once; from inside an epoch of plain DDP, which does not say how far it was, once more."""
    runs, paths = saved
    results = run_ranks(_resume, new_size, new_size, paths, timeout=240.0)
    for (name, world, place), step in [(key, _places(key[1], key[0])[key[2]]) for key in paths]:
        everything = list(range(SAMPLES[name]))
        resumed = [result[name, world, place][0] for result in results]
        said = [result[name, world, place][1] for result in results]
        epoch = {"inside": 0, "last": 1, "later": 1}[place]
        inside = step - epoch * _places(world, name)["last"]
        before = _taken([seen[name] for seen in runs[world]], epoch, inside) if inside else []
        unknown = name == "ddp" and inside > 0
        case = f"{name} on {world}, {place}, on {new_size}"
        assert sorted(_taken(resumed, epoch) + ([] if unknown else before)) == everything, case
        assert all(sorted(_taken(resumed, e)) == everything for e in range(epoch + 1, 3)), case
        assert not _taken(resumed, epoch - 1), case
        assert said == [int(unknown and rank == 0) for rank in range(new_size)], case


def _go_on_with_ddp(rank, world_size, paths):
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    return {key: _counts(rank, "ddp", world_size, "ddp", ckpt_path=str(path)) for key, path in paths.items()}


@pytest.mark.parametrize("new_size", [1, 2, 3])
def test_plain_ddp_trains_on_from_our_checkpoints(saved, new_size):
    """Within the epoch it sees what it sees after a checkpoint of its own; behind it every sample once."""
    paths = {(name, place): path for (name, world, place), path in saved[1].items() if world == 2}
    results = run_ranks(_go_on_with_ddp, new_size, new_size, paths)
    for place in ("inside", "last", "later"):
        resumed = [result["hetero_ddp", place] for result in results]
        assert sorted(_taken(resumed, 2)) == list(range(48)), place
        assert [seen[0][0] for seen in resumed] == [result["ddp", place][0][0] for result in results]


TOTAL, EPOCH = 8, 6
"""Samples of a step on any number of ranks, and the steps of an epoch of 48 samples."""


def _whole_runs(rank, folder):
    return {name: _at_total(rank, name, 2, **checkpoints(folder / name, every_n_train_steps=3)) for name in SAMPLES}


def _at_total(rank, strategy, world_size, **kwargs):
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    return fit(rank, strategy, world_size, TOTAL // world_size, dataset=Points(48), max_epochs=3, **kwargs)["weights"]


def _rests(rank, strategy, world_size, paths):
    return [_at_total(rank, strategy, world_size, ckpt_path=path) for path in paths]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of a run under hetero_ddp and of one under plain DDP, and the paths of their checkpoints by step."""
    folder = tmp_path_factory.mktemp("whole")
    weights = run_ranks(_whole_runs, 2, folder)[0]
    steps = (3, EPOCH, EPOCH + 3)
    return weights, {(n, s): str(next((folder / n).glob(f"*-step={s}.ckpt"))) for n in SAMPLES for s in steps}


@pytest.mark.parametrize(
    ("strategy", "new_size"), [("hetero_ddp", 1), ("hetero_ddp", 2), ("hetero_ddp", 4), ("ddp", 1), ("ddp", 4)]
)
def test_weights_are_those_of_the_run_without_a_break(whole, strategy, new_size):
    """Ours from any step; from and to plain DDP, whose checkpoints say nothing of samples, from the end of an epoch."""
    weights, paths = whole
    saved = [(name, step) for name, step in paths if step == EPOCH or name == strategy == "hetero_ddp"]
    assert len(saved) == (4 if strategy == "hetero_ddp" else 2)
    for resumed in run_ranks(_rests, new_size, strategy, new_size, [paths[one] for one in saved]):
        for rest in resumed:
            np.testing.assert_allclose(rest, weights["hetero_ddp"], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(rest, weights["ddp"], rtol=1e-9, atol=1e-12)


def _resume_from(rank, paths):
    return fit(rank, "hetero_ddp", 2, 5, dataset=Points(N), ckpt_path=paths[rank])


@pytest.mark.parametrize("other", ["older", "none"])
def test_ranks_with_different_checkpoints_are_told(tmp_path, other):
    """Without a common file system one machine may have an older file, or none."""
    run("hetero_ddp", 2, max_epochs=1, **checkpoints(tmp_path, every_n_train_steps=1))
    older, newer = (str(next(tmp_path.glob(f"*step={step}.ckpt"))) for step in (3, 5))
    errors = run_ranks(_resume_from, 2, [newer, older if other == "older" else None], expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["PlanMismatchError"] * 2
    says = "the checkpoint that training goes on from must be equal on all ranks; got rank 0: 'step 5 of epoch 0"
    assert all(says in text for *_, text in errors)


def _edits(state):
    """Ways in which what is ours in a checkpoint can be wrong."""
    callback = next(iter(state["callbacks"]))
    return {
        "no planner": lambda s: s["callbacks"][callback].pop("planner"),
        "planner is a list": lambda s: s["callbacks"][callback].update(planner=[1]),
        "engine is a list": lambda s: s["callbacks"][callback].update(engine=[1]),
        "plans have no entries": lambda s: s["callbacks"][callback]["engine"]["history"].pop("entries"),
        "plan is short": lambda s: s["callbacks"][callback]["engine"]["history"]["entries"][0].pop("plan"),
        "sizes are words": lambda s: s["callbacks"][callback]["engine"]["history"]["entries"][0]["plan"].update(
            local_batch_sizes=["a", "b"]
        ),
        "no workers": lambda s: s["callbacks"][callback]["engine"].pop("workers"),
        "sums are a list": lambda s: s["callbacks"][callback]["engine"].update(staleness={"sums": [1]}),
        "residuals of nobody": lambda s: s["lightning_hetero_residuals"].pop("ranks"),
        "residuals are words": lambda s: s["lightning_hetero_residuals"]["ranks"][0].update(residuals={"a": "b"}),
        "noise scale of another version": lambda s: s["callbacks"]["GNSCallback"].update(spread=1.0),
    }


def _resume_edited(rank, path, folder):
    strategy = {"compression": BlockTopK(density=0.4, block=8, warmup_steps=2), "staleness": 1}
    good, errors = torch.load(path, weights_only=True), {}
    for name, edit in _edits(good).items():
        bad = copy.deepcopy(good)
        edit(bad)
        torch.save(bad, where := f"{folder}/{rank}.ckpt")
        callbacks = [GNSCallback(every_n_steps=1)]
        try:
            fit(rank, strategy, 2, 5, dataset=Points(N), max_epochs=1, ckpt_path=where, callbacks=callbacks)
            errors[name] = None
        except Exception as error:
            errors[name] = type(error).__name__, str(error)
    return errors


def test_malformed_state_of_ours_is_a_named_error(tmp_path):
    strategy = {"compression": BlockTopK(density=0.4, block=8, warmup_steps=2), "staleness": 1}
    ours = checkpoints(tmp_path, every_n_train_steps=1)
    ours["callbacks"].append(GNSCallback(every_n_steps=1))
    run(strategy, 2, max_epochs=1, **ours)
    path = str(next(tmp_path.glob("*step=5.ckpt")))
    for errors in run_ranks(_resume_edited, 2, path, str(tmp_path)):
        for name, error in errors.items():
            assert error is not None, name
            assert error[0] == "CheckpointStateError", (name, error)
            assert "the checkpoint's state cannot be read, of: " in error[1]
