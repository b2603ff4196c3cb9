"""Own batch samplers and datasets of batches in loops of one's own, Fabric's and Accelerate's."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import BatchPlan
from lightning_hetero.frontend.units.loaders import is_made_of_units, units_reason
from tests.helpers import Points, run_ranks
from tests.loops import flat, network
from tests.strategies.test_loaders import ENV, EXACT, LOADERS, Batched, N, cost_of, divided_by_cost, every_sample_once
from tests.streams import Numbered

SPLIT = {"local_batch_sizes": [6, 2]}


def _steps(engine, session, loader, model, optimizer, backward, job, first=0):
    """Two epochs; adopts a plan behind its second step, and saves there."""
    seen = []
    for epoch in range(first, 2):
        for x, y, index in loader if epoch > first or "skipped" not in job else job["skipped"](loader):
            step = session.position[1] - 1
            seen.append((epoch, step, index[: engine.own_size].tolist() if engine.own_size else []))
            backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step) == (0, 1) and job.get("plan"):
                session.adopt(BatchPlan(8, job["plan"]))
            if (epoch, step) == (0, 1) and "save" in job:
                job["save"](epoch)
    return {"seen": seen, "weights": flat(model), "plans": [e.plan.local_batch_sizes for e in engine.plan_history]}


def _fabric(rank, world_size, kind, job):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=HeteroDDPStrategy(**job["settings"]))
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(job.get("made", LOADERS.get(kind))())
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if "path" in job:
        job = {**job, "save": lambda epoch: fabric.save(job["path"], state)}
    if "resume" in job:
        fabric.load(job["resume"], state)
    session = fabric.strategy.session
    return _steps(session.engine, session, loader, model, optimizer, fabric.backward, job)


def _accelerate(rank, world_size, kind, job):
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    set_seed(3 if "resume" not in job else 4)
    layout = DataLoaderConfiguration(split_batches=job.get("given", {}).get("split", False))
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**job["settings"]), dataloader_config=layout)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, job.get("made", LOADERS.get(kind))())
    if "path" in job:
        job = {**job, "save": lambda epoch: accelerator.save_state(job["path"])}
    if "resume" in job:
        accelerator.load_state(job["resume"])
        job = {**job, "skipped": accelerator.skip_first_batches}
    session = accelerator.hetero_session
    return _steps(session.engine, session, loader, model, optimizer, accelerator.backward, job)


LOOPS = {"fabric": _fabric, "accelerate": _accelerate}


def run(loop, kind, world_size=2, **job):
    return run_ranks(LOOPS[loop], world_size, world_size, kind, {"settings": SPLIT, **job}, env=ENV)


def replayed(results):
    """Weights of one process on the union of what all ranks saw in each step."""
    from tests.helpers import Points

    model, data = network(), Points(N)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parts in zip(*(r["seen"] for r in results), strict=True):
        indices = [i for _, _, own in parts for i in own]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[indices]), data.y[indices]).backward()
        optimizer.step()
    return flat(model)


every_loop = pytest.mark.parametrize("loop", LOOPS)
every_kind = pytest.mark.parametrize("kind", LOADERS)


@every_loop
@every_kind
def test_units_are_shared_by_the_plan_and_an_adopted_one_changes_the_next(loop, kind):
    results = run(loop, kind, plan=(1, 7))
    every_sample_once(results, 2)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)
    assert results[0]["plans"] == [(6, 2), (1, 7)]
    first, second = ([len(e[2]) for e in r["seen"] if e[0] == 0] for r in results)
    assert sum(first[:2]) > sum(second[:2])
    assert sum(first[2:]) < sum(second[2:])


@every_loop
def test_units_are_divided_by_cost(loop):
    results = run(loop, "batch sampler", settings={**SPLIT, "cost_fn": cost_of}, plan=(2, 6))
    every_sample_once(results, 2)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)
    assert divided_by_cost(results, slice(2), 0.75)
    assert divided_by_cost(results, slice(3, None), 0.25)


class Neighbours(BatchSampler):
    """Batches of neighbours in random order: a subclass over a sampler in order."""

    def __init__(self, data):
        super().__init__(SequentialSampler(data), 4, False)

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


def _over(make):
    data = Points(N)
    return DataLoader(data, batch_sampler=make(data))


OTHERS = {
    "in order, batch_size=None": lambda: DataLoader(Batched(), batch_size=None),
    "subclass": lambda: _over(Neighbours),
    "torch's": lambda: _over(lambda data: BatchSampler(RandomSampler(data), 4, False)),
    "torch's in order": lambda: _over(lambda data: BatchSampler(SequentialSampler(data), 4, False)),
    "distributed": lambda: _over(lambda data: BatchSampler(_distributed_over(data), 4, False)),
    "distributed sampler": lambda: DataLoader(data := Points(N), 4, sampler=_distributed_over(data)),
}


def _distributed_over(data):
    return DistributedSampler(data, num_replicas=2, rank=torch.distributed.get_rank(), seed=3)


@every_loop
@pytest.mark.parametrize("kind", OTHERS)
def test_loaders_of_other_kinds_are_split(loop, kind):
    results = run_ranks(LOOPS[loop], 2, 2, kind, {"settings": SPLIT, "made": OTHERS[kind]}, env=ENV)
    every_sample_once(results, 2)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)
    assert results[0]["plans"] == [(6, 2)]
    first, second = (sum(len(own) for _, _, own in r["seen"]) for r in results)
    assert first > 2 * second


def _dispatches(rank):
    from accelerate.utils import DataLoaderConfiguration

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    seen = {}
    layout = DataLoaderConfiguration(dispatch_batches=True, split_batches=False)
    for name, config, batches in (("dispatched", layout, None), ("distributed", None, _Halves)):
        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(), dataloader_config=config)
        data = Points(48)
        own = Neighbours(data) if batches is None else batches(data)
        loader = DataLoader(data, batch_sampler=own, shuffle=False)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen[name] = [i for _, _, index in loader for i in index.tolist()]
        accelerator.free_memory()
    return seen


class _Halves(BatchSampler):
    """A subclass over a sampler that splits its data over ranks."""

    def __init__(self, data):
        super().__init__(_distributed_over(data), 4, False)

    def __iter__(self):
        return super().__iter__()


def test_loaders_that_are_left_to_accelerate_yield_their_own_batches():
    results = run_ranks(_dispatches, 2, env=ENV)
    assert sorted(results[0]["dispatched"] + results[1]["dispatched"]) == list(range(48))
    assert len(results[0]["distributed"]) > 10


@every_loop
@every_kind
@pytest.mark.parametrize("ranks", [2, 3])
def test_units_resume_inside_a_pass(tmp_path, loop, kind, ranks):
    path = str(tmp_path / "state")
    whole = run(loop, kind, path=path)
    rest = run(loop, kind, ranks, resume=path, settings={"local_batch_sizes": [6, 2, 1][:ranks]})
    done = sorted(i for r in whole for e, s, own in r["seen"] if (e, s) < (0, 2) for i in own)
    later = sorted(i for r in rest for e, _, own in r["seen"] if e == 0 for i in own)
    assert sorted(done + later) == list(range(N))
    assert sorted(i for r in rest for e, _, own in r["seen"] if e == 1 for i in own) == list(range(N))
    if ranks == 2:
        assert [r["seen"][0] for r in rest] == [r["seen"][2] for r in whole]


@every_loop
def test_own_data_is_refused_where_it_would_be_split(loop):
    job = {"settings": {"shard": "mine"}}
    errors = run_ranks(LOOPS[loop], 2, 2, "batch sampler", job, env=ENV, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("shard='mine'" in message and "policy='even'" in message for *_, message in errors)


def test_split_batches_makes_a_batch_that_of_all_ranks():
    results = run("accelerate", "batch sampler", given={"split": True})
    every_sample_once(results, 2)
    np.testing.assert_allclose(results[0]["weights"], replayed(results), **EXACT)
    assert len(results[0]["seen"]) == 9 + 10


class Split:
    """A batch sampler that splits its batches over ranks by itself, of no class of torch's."""

    def __init__(self, ranks):
        self.num_replicas = ranks

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize(("ranks", "refused"), [(2, True), (1, False), ("all", False)])
def test_batch_samplers_that_split_by_themselves_are_told_by_what_they_say(ranks, refused):
    reason = units_reason(DataLoader(Points(4), batch_sampler=Split(ranks)))
    assert (reason is not None and "Split splits its data over ranks" in reason) is refused


def test_a_stream_is_not_made_of_units():
    assert not is_made_of_units(DataLoader(Numbered(range(4)), batch_size=None))
    assert is_made_of_units(DataLoader(Points(4), batch_size=None))
