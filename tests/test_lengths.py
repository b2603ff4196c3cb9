"""Batches divided by cost through every front end: one process's mathematics, and a plan that changes the shares."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.summary import summary_of
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.log import show_log
from tests.helpers import collected, fit, run_ranks
from tests.loops import FRONT_ENDS, LOSS_SETTINGS, SAMPLES, every_sample_once, global_batches, one_process

EXACT = {"rtol": 1e-12, "atol": 1e-13}
COSTS = np.random.default_rng(3).lognormal(0.0, 0.8, SAMPLES)
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


def cost_of(index):
    return float(COSTS[index])


def _run(rank, front_end, settings, world_size, kwargs):
    settings = {"replan": 1000, "hysteresis": 1.0, **settings}
    return FRONT_ENDS[front_end](rank, settings, kwargs.pop("batch_size", 6), world_size=world_size, **kwargs)


def run(front_end, settings, world_size, **kwargs):
    return run_ranks(_run, world_size, front_end, settings, world_size, kwargs, env={"OMP_NUM_THREADS": "1"})


def shares(results, step):
    """Part of the cost of a step's global batch that each rank has."""
    costs = np.array([COSTS[r["seen"][step][2]].sum() for r in results])
    return costs / costs.sum()


@pytest.mark.parametrize("loss", ["mean", "masked"])
@every_front_end
def test_gradients_equal_one_process_and_a_plan_changes_the_shares_of_the_cost(front_end, loss):
    settings = {"cost_fn": cost_of, **LOSS_SETTINGS[loss]}
    results = run(front_end, settings, 2, loss=loss, plans={(0, 3): (9, 3)})
    plain = run(front_end, LOSS_SETTINGS[loss], 2, loss=loss, plans={(0, 3): (9, 3)})
    every_sample_once(results)
    assert [set(batch) for batch in global_batches(results)] == [set(batch) for batch in global_batches(plain)]
    expected = one_process(results, loss=loss)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT)
    begins = results[0]["history"][1][1]
    assert 3 < begins < 6
    full = SAMPLES // 12
    before, after = (np.mean([shares(results, step)[0] for step in steps]) for steps in (range(4), range(6, 6 + full)))
    assert before == pytest.approx(0.5, abs=0.06)
    assert after == pytest.approx(0.75, abs=0.06)
    numbers = [tuple(len(r["seen"][step][2]) for r in results) for step in range(4)]
    assert any(pair != (6, 6) for pair in numbers), "shares of equal cost are not of equal number"


def rows_that_ran(seen, rounds):
    """Samples of each rank in the full steps before each round, as far back as the round before or its epoch's begin.

    A row for each step that may be the first one, since rounds between two that are recorded may be left out.
    """
    counts = {(epoch, step): [len(one[i][2]) for one in seen] for i, (epoch, step, _) in enumerate(seen[0])}
    before = (0, -1)
    for one in rounds:
        steps = [at for at in counts if max(before, (one.epoch, -1)) < at <= (one.epoch, one.step)]
        full = [counts[at] for at in steps if sum(counts[at]) == one.total]
        yield np.array([np.mean(full[first:], axis=0) for first in range(len(full))])
        before = one.epoch, one.step


@every_front_end
@pytest.mark.parametrize(
    ("settings", "plans"),
    [
        ({"cost_fn": cost_of}, {}),
        ({"local_batch_sizes": (8, 4)}, {}),
        ({"hysteresis": 1.0}, {(0, 3): (9, 3), (1, 2): (3, 9)}),
    ],
    ids=["cost", "number", "plans that change"],
)
def test_the_sizes_that_are_shown_are_those_that_ran(front_end, settings, plans, tmp_path):
    results = run(front_end, {"replan": 2, "report": str(tmp_path), **settings}, 2, epochs=3, plans=plans)
    (path,) = tmp_path.rglob("hetero_run.jsonl")
    record = RunRecord.from_lines(path.read_text().splitlines())
    ran = np.array([one.ran for one in record.rounds])
    for rows, possible in zip(ran, rows_that_ran([result["seen"] for result in results], record.rounds), strict=True):
        assert not len(possible) or np.isclose(rows, possible, rtol=1e-5).all(axis=1).any(), (rows, possible)
    assert results[0]["rows"] == results[1]["rows"]
    together = zip(*(result["seen"] for result in results), strict=True)
    steps = [(*ranks[0][:2], [len(one[2]) for one in ranks]) for ranks in together]
    known = 0
    for (epoch, step, planned), rows in zip(results[0]["history"], results[0]["rows"], strict=True):
        full = np.array([sizes for *at, sizes in steps if sum(sizes) == 12 and tuple(at) >= (epoch, step)])
        windows = [full[i:j].mean(0) for j in range(1, len(full) + 1) for i in range(j)]  # of its own steps
        assert not rows or np.isclose(rows, windows or [planned], rtol=1e-5).all(axis=1).any()
        known += bool(rows)
    assert known, "a plan that has just begun has none"
    last = RunFigures(record).last
    means = np.average([one.ran for one in last], axis=0, weights=[one.count for one in last])
    shown = [float(row[2].split()[0]) for row in summary_of(record).rows]
    np.testing.assert_allclose(shown, means, atol=0.051)
    by_cost = "cost_fn" in settings
    assert record.header.by_cost is by_cost
    if not by_cost:
        assert ran.tolist() == [list(one.sizes) for one in record.rounds], "those of the running plan"
    assert (ran == (8, 4)).all() == ("local_batch_sizes" in settings)


@every_front_end
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_goes_on_in_the_same_global_batches(front_end, ranks, tmp_path):
    path, settings = str(tmp_path / "saved"), {"cost_fn": cost_of}
    size = {2: 6, 3: 4}[ranks]
    whole = run(front_end, settings, 2, save={3: path})
    rest = run(front_end, settings, ranks, batch_size=size, resume=path)
    expected = [set(batch) for batch in global_batches(whole)]
    assert [set(batch) for batch in global_batches(rest)] == expected[len(expected) - len(rest[0]["seen"]) :]
    assert len(rest[0]["seen"]) == len(expected) - 3
    for result in rest:
        np.testing.assert_allclose(result["weights"], whole[0]["weights"], **EXACT)


SENTENCES = [
    {"input_ids": np.random.default_rng(i).integers(1, 20, int(np.clip(COSTS[i] * 6, 2, 40))).tolist(), "index": i}
    for i in range(SAMPLES)
]


def padded(samples):
    length = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (length - len(sample["input_ids"])) for sample in samples]
    return torch.tensor(rows), [sample["index"] for sample in samples]


def tokens(batch):
    return (batch[0][:, 1:] > 0).sum()


def token_loss(model, ids):
    logits = model(ids[:, :-1])
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def language_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(20, 6), nn.Tanh(), nn.Linear(6, 20)).double()


def _language_model(rank, settings, seconds=0.0, **kwargs):
    from tests.helpers import Regressor

    class Model(Regressor):
        def __init__(self):
            super().__init__()
            self.net = language_model()

        def loss(self, batch):
            return token_loss(self.net, batch[0])

        def training_step(self, batch, batch_idx):
            own = self.trainer.strategy.engine.own_size
            self.seen.append((self.trainer.current_epoch, batch_idx, batch[1][:own]))
            time.sleep(seconds * batch[0].numel() * (1 + rank))
            return self.loss(batch)

    model, loader_kwargs = Model(), {"collate_fn": padded, "num_workers": 1}
    done = fit(rank, settings, 2, 6, model, SENTENCES, loader_kwargs=loader_kwargs, **kwargs)
    done["plans"] = [(e.epoch, e.step, e.plan.cost) for e in model.trainer.strategy.plan_history]
    return done


def test_padded_language_model_equals_one_process():
    settings = {"cost_fn": "tokens", "weight_fn": tokens, "local_batch_sizes": (8, 4)}
    results = run_ranks(_language_model, 2, settings, env={"OMP_NUM_THREADS": "1"})
    every_sample_once(results)
    model, grads = language_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in global_batches(results):
        token_loss(model, padded([SENTENCES[i] for i in batch])[0]).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        np.testing.assert_allclose(result["grads"], np.stack(grads), **EXACT)
    longest = [[max(len(SENTENCES[i]["input_ids"]) for i in r["seen"][step][2]) for step in range(6)] for r in results]
    assert (np.array(longest[0]) != np.array(longest[1])).all(), "shares are sorted by length, so one is padded less"


def _learns(rank):
    settings = {"weight_fn": tokens, "replan": 10}
    return _language_model(rank, settings, seconds=5e-5, max_epochs=6)


@pytest.mark.alone
def test_what_rank_0_learns_of_costs_reaches_the_plans_of_all_ranks():
    """A step takes as long as its padded tokens, and twice as long on rank 1."""
    results = run_ranks(_learns, 2, env={"OMP_NUM_THREADS": "1"})
    every_sample_once(results, epochs=6)
    assert results[0]["plans"] == results[1]["plans"]
    assert results[0]["plans"][0][2] == CostWeights.of("padded_cost")
    assert results[0]["plans"][-1][2] not in (None, CostWeights.of("padded_cost"))


def _engine(rank, settings, dataset):
    torch.distributed.init_process_group("gloo")
    show_log()
    lines = collected()
    from lightning_hetero.data import PermutationStream

    engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
    sampler = engine.shard(PermutationStream(4, shuffle=False, seed=0), batch_size=2, dataset=dataset)
    return sampler.division is not None, lines


def fails_on_the_last(index):
    if index == 3:
        raise KeyError("no length")
    return 1.0


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (fails_on_the_last, "cost_fn failed on rank 1 with KeyError: 'no length'"),
        (lambda index: float(index), "cost_fn gave the cost 0.0 for sample 0"),
    ],
    ids=["raises", "zero"],
)
def test_a_cost_that_is_none_is_an_error_on_all_ranks(cost, message):
    outcome = run_ranks(_engine, 2, {"cost_fn": cost}, list("abcd"), expect_errors=True)
    assert all(message in str(one) for one in outcome), outcome


VARIED = [{"input_ids": [1] * (1 + i)} for i in range(4)]


@pytest.mark.parametrize(
    ("settings", "dataset", "why"),
    [
        ({"cost_fn": "tokens"}, list("abcd"), "cannot be read without loading"),
        ({"cost_fn": "tokens"}, [{"input_ids": [1, 2]}] * 4, "all samples have the same length"),
        ({"weight_fn": tokens}, list("abcd"), "cannot be read without loading"),
        ({}, VARIED, "it is not known whether the loss is a mean over tokens"),
        ({"weight_fn": tokens, "local_batch_sizes": [3, 1]}, VARIED, "are numbers of samples"),
        ({"weight_fn": tokens, "local_batch_sizes": [3, 1], "policy": "pid"}, VARIED, "are numbers of samples"),
        ({"weight_fn": tokens, "policy": "even"}, VARIED, "policy='even' gives all workers equal numbers"),
        ({"weight_fn": tokens, "noise_scale": True}, VARIED, "shares that are drawn at random"),
    ],
)
def test_a_division_by_number_says_why(settings, dataset, why):
    (first, said), (second, nothing) = run_ranks(_engine, 2, settings, dataset)
    assert not first
    assert not second
    assert any(why in line for line in said)
    assert nothing == []


@pytest.mark.parametrize("settings", [{}, {"cost_fn": None, "weight_fn": tokens}])
def test_a_division_by_number_that_nobody_asks_about_says_nothing(settings):
    dataset = VARIED if "weight_fn" in settings else list("abcd")
    (first, said), (second, _) = run_ranks(_engine, 2, settings, dataset)
    assert not first
    assert not second
    assert not [line for line in said if "cost_fn" in line]


def test_tokens_are_the_cost_where_they_are_the_weight():
    (first, said), (second, _) = run_ranks(_engine, 2, {"weight_fn": tokens}, VARIED)
    assert first
    assert second
    assert not [line for line in said if "cost_fn" in line]


def _grows(rank, settings):
    """The same dataset object has more samples when it is split again."""
    from lightning_hetero.data import PermutationStream

    torch.distributed.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
    dataset, lengths = list(VARIED), []
    for more in (0, 3):
        dataset += [{"input_ids": [1] * 5}] * more
        sampler = engine.shard(PermutationStream(4 + more, shuffle=False, seed=0), batch_size=2, dataset=dataset)
        lengths.append(len(sampler.division.costs))
    return lengths


@pytest.mark.parametrize(
    "settings", [{"weight_fn": tokens}, {"cost_fn": lambda sample: len(sample["input_ids"])}], ids=["auto", "function"]
)
def test_a_dataset_may_grow(settings):
    assert run_ranks(_grows, 2, settings) == [[4, 7]] * 2


def _moving(rank, settings):
    from lightning_hetero.core import GoodputPlanner
    from lightning_hetero.data import PermutationStream

    torch.distributed.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
    planner = GoodputPlanner(max_total_batch_size=8)
    stream = PermutationStream(4, shuffle=False, seed=0)
    return engine.shard(stream, batch_size=2, dataset=list(VARIED), planner=planner).division is None


def test_a_total_that_moves_needs_shares_drawn_at_random():
    assert run_ranks(_moving, 2, {"weight_fn": tokens}) == [True, True]
    errors = run_ranks(_moving, 2, {"cost_fn": "tokens"}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("GoodputPlanner changes the total batch" in message for *_, message in errors)


def _calls(rank):
    from lightning_hetero.data import PermutationStream

    torch.distributed.init_process_group("gloo")
    called = []
    cost = lambda index: (called.append(index), 1.0 + index)[1]  # noqa: E731
    engine = HeteroEngine(HeteroConfig(cost_fn=cost), rank=rank, world_size=2, device=torch.device("cpu"))
    for dataset in (list("abcd"), list("abcd")):
        for _ in range(2):
            engine.shard(PermutationStream(4, shuffle=False, seed=0), batch_size=2, dataset=dataset)
    return called


def test_a_function_is_called_once_for_each_sample_of_a_dataset():
    assert run_ranks(_calls, 2) == [[0, 2] * 2, [1, 3] * 2]


def _each_its_own(rank, settings):
    return _engine(rank, settings, [{"input_ids": [1] * (1 + (i + rank) % 4)} for i in range(4)])


def test_lengths_that_differ_between_ranks():
    (first, said), (second, _) = run_ranks(_each_its_own, 2, {"weight_fn": tokens})
    assert not first
    assert not second
    assert any("not the same on all ranks" in line for line in said)
    outcome = run_ranks(_each_its_own, 2, {"cost_fn": "tokens"}, expect_errors=True)
    assert all("the costs of the samples (cost_fn)" in str(one) for one in outcome)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cost_fn": "words"}, TypeError, "'auto'"),
        ({"cost_fn": 3}, TypeError, "function of the sample"),
        ({"cost_fn": len, "noise_scale": True}, ValueError, "noise_scale=True"),
        ({"cost_fn": "tokens", "max_total_batch_size": 64}, ValueError, "max_total_batch_size=64"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        HeteroConfig(**settings)


def test_the_noise_scale_is_refused_by_name():
    engine = HeteroEngine(HeteroConfig(cost_fn=len), rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="GNSCallback"):
        engine.measure_noise(object())
    engine.measure_noise(None)


def test_weights_of_a_plan_reach_all_ranks_and_the_next_batches():
    outcome = run_ranks(_learned, 2)
    assert outcome[0] == outcome[1]
    history, before, after = outcome[0]
    assert history == [CostWeights.of("cost").theta, CostWeights.of("padded_cost").theta]
    assert before != after


def _learned(rank):
    from lightning_hetero.data import PermutationStream

    torch.distributed.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(cost_fn=len), rank=rank, world_size=2, device=torch.device("cpu"))
    sampler = engine.shard(
        PermutationStream(64, shuffle=False, seed=0), batch_size=8, dataset=["x" * (1 + 7 * i % 31) for i in range(64)]
    )
    loader = iter(DataLoader(range(64), batch_sampler=sampler))
    next(loader)
    before = sampler.division.divide(range(16, 32), (8, 8), engine.plan)
    engine.adopt(BatchPlan(16, (8, 8), cost=CostWeights.of("padded_cost")))
    next(loader)
    share = sampler.step_at(0, 1)
    history = [entry.plan.cost and entry.plan.cost.theta for entry in engine.plan_history]
    return (
        history,
        before.work[1],
        share.work if rank == 1 else sampler.division.divide(range(16, 32), (8, 8), engine.history.last.plan).work[1],
    )


def test_the_page_has_the_numbers_of_the_benchmark():
    root = Path(__file__).parents[1]
    measured = json.loads((root / "benchmarks" / "results" / "lengths.json").read_text())["rows"]
    methods = ("even", "count", "rebalance", "cost")
    lines = [
        f"| {row['workers']} | {row['cost_of_a_share']} | "
        + " | ".join(f"{row[name]:.3f} ({row[f'{name}_least']:.3f})" for name in methods)
        + " |"
        for row in measured
    ]
    page = (root / "docs" / "lengths.md").read_text()
    assert len(lines) == 7
    assert "\n".join(lines) in page
    for row in measured:
        assert row["cost_least"] >= 0.95
        assert row["cost"] >= max(row[name] for name in methods) - 0.001
