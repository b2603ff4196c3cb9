"""Batches that loaders make themselves, and batches divided by cost, through every front end's own loop."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import BatchPlan
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.report.run_record import RunRecord
from tests.helpers import Points, collected, fit
from tests.loops import (
    FRONT_ENDS,
    LOSS_SETTINGS,
    SAMPLES,
    every_sample_once,
    flat,
    global_batches,
    network,
    one_process,
)
from tests.ranks import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}
N = 46

# batches that a loader makes itself


class Neighbours(BatchSampler):
    """Batches of neighbours in random order: a subclass over a sampler in order."""

    def __init__(self, data):
        super().__init__(SequentialSampler(data), 4, False)

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


class Batched(Dataset):
    """Each item is a batch of its own size."""

    def __init__(self):
        points = Points(N)
        self.parts = [[part[own] for part in (points.x, points.y, torch.arange(N))] for own in torch.arange(N).split(4)]

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, i):
        return self.parts[i]


def over(make):
    data = Points(N)
    return DataLoader(data, batch_sampler=make(data))


def distributed(data):
    return DistributedSampler(data, num_replicas=2, rank=torch.distributed.get_rank(), seed=3)


UNITS = {
    "own batch sampler": lambda: over(Neighbours),
    "batch_size=None": lambda: DataLoader(Batched(), batch_size=None, shuffle=True),
    "batch_size=None in order": lambda: DataLoader(Batched(), batch_size=None),
    "torch's": lambda: over(lambda data: BatchSampler(RandomSampler(data), 4, False)),
    "torch's in order": lambda: over(lambda data: BatchSampler(SequentialSampler(data), 4, False)),
    "distributed batches": lambda: over(lambda data: BatchSampler(distributed(data), 4, False)),
    "distributed": lambda: DataLoader(data := Points(N), 4, sampler=distributed(data)),
}


def _steps(session, loader, model, optimizer, backward, job, skipped):
    """Two epochs; adopts a plan behind the second step, and saves there."""
    seen, engine, first = [], session.engine, session.position[0]
    for epoch in range(first, 2):
        for x, y, index in loader if epoch > first or skipped is None else skipped:
            step = session.position[1] - 1
            seen.append((epoch, step, index[: engine.own_size].tolist() if engine.own_size else []))
            backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step) == (0, 1):
                if "plan" in job:
                    session.adopt(BatchPlan(8, job["plan"]))
                if "save" in job:
                    job["save"](job["path"])
    return {"seen": seen, "weights": flat(model), "plans": [e.plan.local_batch_sizes for e in engine.plan_history]}


def _fabric(rank, world_size, kind, job):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=HeteroDDPStrategy(**job["settings"]))
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(UNITS[kind]())
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if "resume" in job:
        fabric.load(job["resume"], state)
    if "path" in job:
        job["save"] = lambda path: fabric.save(path, state)
    result = _steps(fabric.strategy.session, loader, model, optimizer, fabric.backward, job, None)
    if not job.get("another"):
        fabric.strategy.teardown()
    return result


def _accelerate(rank, world_size, kind, job):
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    set_seed(3 if "resume" not in job else 4)
    layout = DataLoaderConfiguration(**job.get("layout", {}))
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**job["settings"]), dataloader_config=layout)
    model, skipped = network(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, UNITS[kind]())
    if "resume" in job:
        accelerator.load_state(job["resume"])
        skipped = accelerator.skip_first_batches(loader)
    if "path" in job:
        job["save"] = accelerator.save_state
    session = accelerator.hetero_session
    result = _steps(session, loader, model, optimizer, accelerator.backward, job, skipped)
    if not job.get("another"):
        accelerator.end_training()
    return result


LOOPS = {"fabric": _fabric, "accelerate": _accelerate}
SPLIT = {"local_batch_sizes": [6, 2]}
every_loop = pytest.mark.parametrize("loop", LOOPS)
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


def cost_of(index):
    return 1.0 + 9.0 * (index % 5 == 0)


def _cases(rank, loop, cases):
    """One training after another in one group."""
    more = [{"settings": SPLIT, **job, "another": i + 1 < len(cases)} for i, (_, job) in enumerate(cases)]
    return [LOOPS[loop](rank, 2, kind, job) for (kind, _), job in zip(cases, more, strict=True)]


CASES = [
    *((kind, {"plan": (1, 7)}) for kind in UNITS),
    ("own batch sampler", {"settings": {**SPLIT, "cost_fn": cost_of}, "plan": (2, 6)}),
]


@every_loop
def test_units_are_shared_by_the_plan_and_an_adopted_one_changes_the_next(loop):
    for (kind, job), results in zip(CASES, zip(*run_ranks(_cases, 2, loop, CASES), strict=True), strict=True):
        seen = [[own for _, _, own in result["seen"]] for result in results]
        for epoch in range(2):
            taken = [i for r in results for e, _, own in r["seen"] if e == epoch for i in own]
            assert sorted(taken) == list(range(N)), kind
        expected = replayed(results)
        for result in results:
            np.testing.assert_allclose(result["weights"], expected, **EXACT, err_msg=kind)
        assert results[0]["plans"] == [(6, 2), job["plan"]], kind
        size = (lambda own: sum(map(cost_of, own))) if "settings" in job else len
        before, after = (
            np.array([[size(own) for own in part[steps]] for part in seen]).sum(1) for steps in (slice(2), slice(3, 9))
        )
        assert before[0] > 2 * before[1], kind
        assert after[1] > 2 * after[0], kind


def replayed(results):
    """Weights of one process on the union of what all ranks saw in each step."""
    model, data = network(), Points(N)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for indices in global_batches(results):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[indices]), data.y[indices]).backward()
        optimizer.step()
    return flat(model)


@every_loop
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow("the same with another number"))])
def test_units_resume_inside_a_pass(tmp_path, loop, ranks):
    for kind in list(UNITS)[:2]:
        path = str(tmp_path / kind)
        whole = run_ranks(LOOPS[loop], 2, 2, kind, {"settings": SPLIT, "path": path})
        job = {"settings": {"local_batch_sizes": [6, 2, 1][:ranks]}, "resume": path}
        rest = run_ranks(LOOPS[loop], ranks, ranks, kind, job, start="pool" if ranks == 2 else "fork")
        done = [i for r in whole for e, s, own in r["seen"] if (e, s) < (0, 2) for i in own]
        later = [i for r in rest for e, _, own in r["seen"] if e == 0 for i in own]
        assert sorted(done + later) == list(range(N))
        assert sorted(i for r in rest for e, _, own in r["seen"] if e == 1 for i in own) == list(range(N))
        if ranks == 2:
            assert [r["seen"][0] for r in rest] == [r["seen"][2] for r in whole]


@every_loop
def test_own_data_is_refused_where_it_would_be_split(loop):
    job = {"settings": {"shard": "mine"}}
    errors = run_ranks(LOOPS[loop], 2, 2, "own batch sampler", job, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("shard='mine'" in message and "policy='even'" in message for *_, message in errors)


def test_accelerates_layouts_of_batches_are_followed():
    """With split_batches a batch is that of all ranks; dispatched batches are left to Accelerate."""
    split = run_ranks(_accelerate, 2, 2, "own batch sampler", {"settings": SPLIT, "layout": {"split_batches": True}})
    np.testing.assert_allclose(split[0]["weights"], replayed(split), **EXACT)
    assert len(split[0]["seen"]) > 18
    left = run_ranks(_dispatched, 2)
    assert sorted(left[0] + left[1]) == list(range(48))


def _dispatched(rank):
    from accelerate.utils import DataLoaderConfiguration

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    layout = DataLoaderConfiguration(dispatch_batches=True, split_batches=False)
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(), dataloader_config=layout)
    data, model = Points(48), network()
    loader = DataLoader(data, batch_sampler=Neighbours(data))
    loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)[2]
    seen = [i for _, _, index in loader for i in index.tolist()]
    accelerator.end_training()
    return seen


# batches divided by cost

COSTS = np.random.default_rng(3).lognormal(0.0, 0.8, SAMPLES)


def drawn_cost(index):
    return float(COSTS[index])


def _run(rank, front_end, settings, world_size, kwargs):
    settings = {"replan": 1000, "hysteresis": 1.0, **settings}
    return FRONT_ENDS[front_end](rank, settings, kwargs.pop("batch_size", 6), world_size=world_size, **kwargs)


def run(front_end, settings, world_size=2, **kwargs):
    start = "pool" if world_size == 2 else "fork"
    return run_ranks(_run, world_size, front_end, settings, world_size, kwargs, start=start)


@pytest.mark.parametrize("loss", ["mean", "masked"])
@every_front_end
def test_gradients_equal_one_process_and_a_plan_changes_the_shares_of_the_cost(front_end, loss):
    settings = {"cost_fn": drawn_cost, **LOSS_SETTINGS[loss]}
    results = run(front_end, settings, loss=loss, plans={(0, 3): (9, 3)})
    plain = run(front_end, LOSS_SETTINGS[loss], loss=loss, plans={(0, 3): (9, 3)})
    every_sample_once(results)
    assert [set(batch) for batch in global_batches(results)] == [set(batch) for batch in global_batches(plain)]
    expected = one_process(results, loss=loss)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT)
    assert 3 < results[0]["history"][1][1] < 6
    costs = np.array([[COSTS[own].sum() for *_, own in r["seen"]] for r in results])
    shares = costs[0] / costs.sum(0)
    assert shares[:4].mean() == pytest.approx(0.5, abs=0.06)
    assert shares[6 : 6 + SAMPLES // 12].mean() == pytest.approx(0.75, abs=0.06)
    numbers = [tuple(len(r["seen"][step][2]) for r in results) for step in range(4)]
    assert any(pair != (6, 6) for pair in numbers), "shares of equal cost are not of equal number"


@every_front_end
@pytest.mark.parametrize(
    ("settings", "plans"),
    [
        ({"cost_fn": drawn_cost}, {}),
        ({"local_batch_sizes": (8, 4)}, {}),
        ({"hysteresis": 1.0}, {(0, 3): (9, 3), (1, 2): (3, 9)}),
    ],
    ids=["cost", "number", "plans that change"],
)
def test_the_sizes_that_are_recorded_are_those_that_ran(front_end, settings, plans, tmp_path):
    """Means over the full steps since the round before, or since a later step if rounds in between were left out."""
    results = run(front_end, {"replan": 2, "report": str(tmp_path), **settings}, epochs=3, plans=plans)
    (path,) = tmp_path.rglob("hetero_run.jsonl")
    record = RunRecord.from_lines(path.read_text().splitlines())
    counts = {(e, s): [len(r["seen"][i][2]) for r in results] for i, (e, s, _) in enumerate(results[0]["seen"])}

    def windows(first, last):
        full = [sizes for at, sizes in counts.items() if first < at <= last and sum(sizes) == 12]
        return [np.mean(full[i:], axis=0) for i in range(len(full))]

    before = (0, -1)
    for one in record.rounds:
        at = one.epoch, one.step
        possible = windows(max(before, (one.epoch, -1)), at)
        assert not possible or np.isclose(one.ran, possible, rtol=1e-5).all(1).any(), (one.ran, possible)
        before = at
    assert results[0]["rows"] == results[1]["rows"]
    assert any(results[0]["rows"])
    by_cost = "cost_fn" in settings
    assert record.header.by_cost is by_cost
    if not by_cost:
        assert [one.ran for one in record.rounds] == [one.sizes for one in record.rounds], "those of the running plan"


@every_front_end
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow("the same with another number"))])
def test_a_run_divided_by_cost_goes_on_in_the_same_global_batches(front_end, ranks, tmp_path):
    path, settings = str(tmp_path / "saved"), {"cost_fn": drawn_cost}
    whole = run(front_end, settings, save={3: path})
    rest = run(front_end, settings, ranks, batch_size=12 // ranks, resume=path)
    expected = [set(batch) for batch in global_batches(whole)]
    assert [set(batch) for batch in global_batches(rest)] == expected[3:]
    for result in rest:
        np.testing.assert_allclose(result["weights"], whole[0]["weights"], **EXACT)


# costs by tokens, and what is said where there are none

VARIED = [{"input_ids": [1] * (1 + i)} for i in range(16)]


def tokens(batch):
    return (batch[0] > 0).sum()


def fails_on_the_last(index):
    if index == 15:
        raise KeyError("no length")
    return 1.0


def collate(rows):
    x = torch.zeros(len(rows), 5, dtype=torch.float64)
    return x + 1.0, x[:, :1], torch.zeros(len(rows))


def _sizes(rank, cases):
    """What is said of one training after the other."""
    found = []
    for settings, rows in cases:
        lines = collected()
        rows = rows[rank] if isinstance(rows, tuple) else rows
        fit(rank, settings, 2, 4, dataset=rows, loader_kwargs={"collate_fn": collate}, max_epochs=1)
        found.append([line for line in lines if not line.startswith("plan ")])
    return found


SAME = [{"input_ids": [1, 2]}] * 16
UNLIKE = tuple([{"input_ids": [1] * (1 + (i + rank) % 4)} for i in range(16)] for rank in range(2))
SAID = [
    ({"weight_fn": tokens}, VARIED, ""),
    ({"cost_fn": "tokens"}, list(range(16)), "cannot be read without loading"),
    ({"cost_fn": "tokens"}, SAME, "same length"),
    ({"weight_fn": tokens}, list(range(16)), "cannot be read without loading"),
    ({"weight_fn": tokens}, UNLIKE, "not the same on all ranks"),
    ({}, VARIED, "not known whether the loss is a mean over tokens"),
    ({"weight_fn": tokens, "local_batch_sizes": [6, 2]}, VARIED, "numbers of samples"),
    ({"weight_fn": tokens, "policy": "even"}, VARIED, "policy='even'"),
    ({"cost_fn": None, "weight_fn": tokens}, VARIED, ""),
]


def test_a_division_by_number_says_why():
    first, second = run_ranks(_sizes, 2, [case[:2] for case in SAID])
    for (settings, _, says), lines, silent in zip(SAID, first, second, strict=True):
        told = [line for line in lines if "cost_fn" in line or "divided" in line or (says and says in line)]
        assert any(says in line for line in told) if says else not told, (settings, lines)
        assert not [line for line in silent if says and says in line]


@pytest.mark.parametrize(
    ("cost", "rows", "says"),
    [
        (fails_on_the_last, list(range(16)), "KeyError: 'no length'"),
        (float, list(range(16)), "cost 0.0 for sample 0"),
        ("tokens", UNLIKE, "cost_fn"),
    ],
    ids=["raises", "zero", "unlike"],
)
def test_a_cost_that_is_none_is_an_error_on_all_ranks(cost, rows, says):
    errors = run_ranks(_sizes, 2, [({"cost_fn": cost}, rows)], expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in message for *_, message in errors)


def _learned(rank):
    """Weights of costs that are given with a plan reach all ranks and the next batches."""

    def adopt(trainer):
        trainer.strategy.adopt(BatchPlan(8, (4, 4), cost=CostWeights.of("padded_cost")))

    from lightning.pytorch.callbacks import LambdaCallback

    callback = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: adopt(trainer) if trainer.current_epoch else None
    )
    done = fit(
        rank, {"cost_fn": drawn_cost, "replan": 1000}, 2, 4, dataset=Points(64), callbacks=[callback], max_epochs=2
    )
    return [[len(own) for e, _, own in done["seen"] if e == epoch] for epoch in (0, 1)]


def test_weights_of_a_plan_reach_all_ranks_and_the_next_batches():
    first, second = run_ranks(_learned, 2)
    for one, other in zip(first, second, strict=True):
        assert [a + b for a, b in zip(one, other, strict=True)] == [8] * 8
    spread = [
        np.std([a - b for a, b in zip(one, other, strict=True)]) for one, other in zip(first, second, strict=True)
    ]
    assert spread[0] != pytest.approx(spread[1], rel=0.05)
