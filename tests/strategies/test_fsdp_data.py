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
    """Adopts a plan behind its third step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.trainer.current_epoch, batch_idx) == (0, 2):
            self.trainer.strategy.adopt(BatchPlan(8, (2, 6)))


class JointSharded(Sharded, Joint):
    pass


def _fit(rank, job):
    model = job.get("model", Planned)()
    loader = job["loader"](rank) if job.get("ranked") else job["loader"]()
    strategy = HeteroFSDPStrategy(**{"local_batch_sizes": [6, 2], **job.get("settings", {})})
    trainer = trainer_of(strategy, 2, **job.get("trainer", {}))
    trainer.fit(model, loader)
    plans = [e.plan.local_batch_sizes for e in trainer.strategy.plan_history]
    return {"weights": model.flat(), "seen": model.seen, "plans": plans}


def run(**job):
    return run_ranks(_fit, 2, job, env=ENV)


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
