"""Data that is not plain under ``hetero_fsdp``: gradients of one process, each sample once, plans that count."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan, HeteroFSDPStrategy
from tests.helpers import Points, run_ranks, trainer_of
from tests.loops import one_process
from tests.strategies.test_fsdp import Sharded
from tests.strategies.test_loaders import (
    ENV,
    EXACT,
    LOADERS,
    Joint,
    cost_of,
    divided_by_cost,
    every_sample_once,
    loaders,
    replayed,
    replayed_jointly,
)
from tests.streams import SAMPLES, Numbered, thirds

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command|ignore::FutureWarning", "ignore::UserWarning")


class Planned(Sharded):
    """Adopts a plan behind its third step, and may save there."""

    def __init__(self, save=None):
        super().__init__()
        self.save = save

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.trainer.current_epoch, batch_idx) == (0, 2):
            if self.save is None:
                self.trainer.strategy.adopt(BatchPlan(8, (2, 6)))
            else:
                self.trainer.save_checkpoint(self.save)


class JointSharded(Sharded, Joint):
    pass


def _fit(rank, job):
    model = job.get("model", Planned)()
    loader = job["loader"](rank) if job.get("ranked") else job["loader"]()
    strategy = HeteroFSDPStrategy(**{"local_batch_sizes": [6, 2], **job.get("settings", {})})
    trainer = trainer_of(strategy, job.get("ranks", 2), **job.get("trainer", {}))
    trainer.fit(model, loader, ckpt_path=job.get("resume"))
    plans = [e.plan.local_batch_sizes for e in trainer.strategy.plan_history]
    return {"weights": model.flat(), "seen": model.seen, "plans": plans}


def run(**job):
    return run_ranks(_fit, job.get("ranks", 2), job, env=ENV)


def agree(results, expected):
    for result in results:
        np.testing.assert_allclose(result["weights"], expected, **EXACT)


@pytest.mark.parametrize("kind", LOADERS)
def test_units_are_shared_by_the_plan(kind):
    results = run(loader=LOADERS[kind])
    every_sample_once(results, 2)
    agree(results, replayed(results))
    first, second = ([len(own) for e, _, own in r["seen"] if e == 0] for r in results)
    assert sum(first[:3]) > sum(second[:3])
    assert sum(first[3:]) < sum(second[3:])


@pytest.mark.parametrize("kind", ["batch sampler", "plain"])
def test_batches_are_divided_by_cost(kind):
    loader = LOADERS.get(kind, lambda: DataLoader(Points(46), 4, shuffle=True))
    results = run(loader=loader, settings={"cost_fn": cost_of})
    every_sample_once(results, 2)
    agree(results, replayed(results))
    assert divided_by_cost(results, slice(3), 0.75)
    assert divided_by_cost(results, slice(4, None), 0.25)


RESUMED = {
    **LOADERS,
    "several loaders": loaders("min_size", sizes={"a": (37, 4), "b": (31, 6)}),
    "whole stream": lambda: DataLoader(Numbered(range(SAMPLES)), 4),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", RESUMED)
def test_training_goes_on_inside_an_epoch(kind, ranks, tmp_path):
    """With another number of ranks, steps are made of other units; what is left of the epoch is trained on once."""
    path = str(tmp_path / "saved")
    joint = kind == "several loaders"
    job = {"loader": RESUMED[kind], "trainer": {"max_epochs": 1}}
    settings = {"shard": "whole"} if kind == "whole stream" else {}
    model = lambda save=None: Saving(save) if joint else Planned(save)  # noqa: E731
    whole = run(model=lambda: model(path), settings={"local_batch_sizes": [6, 2], **settings}, **job)
    sizes = {2: [6, 2], 3: [4, 2, 2]}[ranks]
    rest = run(model=model, settings={"local_batch_sizes": sizes, **settings}, ranks=ranks, resume=path, **job)
    assert len({len(r["seen"]) for r in rest}) == 1

    def samples(results, first):
        taken = [own for r in results for e, step, own in r["seen"] if step >= first]
        return sorted(
            (name, i) for own in taken for name in (own if joint else [""]) for i in (own[name] if joint else own)
        )

    if not joint or ranks == 2:
        assert samples(rest, 0) == samples(whole, 3)
    if ranks == 2 or kind == "whole stream":
        agree(rest, whole[0]["weights"])


class Saving(JointSharded):
    """Saves behind its third step."""

    def __init__(self, save):
        super().__init__()
        self.save = {} if save is None else {(0, 2): save}


def test_several_loaders_have_one_weight():
    results = run(model=JointSharded, loader=loaders("max_size"), settings={"local_batch_sizes": [15, 5]})
    agree(results, replayed_jointly(results))


def test_streams_of_unequal_length():
    results = run(
        loader=lambda rank: DataLoader(Numbered(thirds(rank)), 4),
        ranked=True,
        settings={"shard": "mine"},
        trainer={"max_epochs": 1},
    )
    taken = sorted(i for r in results for _, _, own in r["seen"] for i in own)
    assert taken == list(range(SAMPLES))
    agree(results, one_process(results)["weights"])
    assert len({len(r["seen"]) for r in results}) == 1
