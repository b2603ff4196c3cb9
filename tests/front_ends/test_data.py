"""Batches that loaders make themselves, and batches divided by cost, through every front end's own loop."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.core.report.run_record import RunRecord
from tests.data.kinds import Shuffled
from tests.helpers import collected, fit
from tests.loops import (
    FRONT_ENDS,
    LOSS_SETTINGS,
    SAMPLES,
    every_sample_once,
    one_process,
    shuffled,
)
from tests.ranks import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


def over(sampler):
    """Loaders with batch samplers of torch's over a sampler."""
    return lambda rank, size, data, **kwargs: DataLoader(
        data, batch_sampler=BatchSampler(sampler(rank, data), size, False)
    )


def made_batches(**order):
    """Loaders of a dataset whose items are batches."""

    def loader(rank, size, data, **kwargs):
        parts = [(data.x[own], data.y[own], own) for own in torch.arange(SAMPLES).split(size)]
        return DataLoader(parts, batch_size=None, **order)

    return loader


def distributed(rank, data):
    return DistributedSampler(data, num_replicas=2, rank=rank, seed=3)


def own_batches(rank, size, data, **kwargs):
    return DataLoader(data, batch_sampler=Shuffled(data, size, name="x"))


COSTS = np.random.default_rng(3).lognormal(0.0, 0.8, SAMPLES)


def drawn_cost(index):
    return float(COSTS[index])


class Kind(NamedTuple):
    """Training data; the run of a kind that is divided by cost learns how, and so does not go on identically."""

    loader: Any = shuffled
    settings: dict[str, Any] = {}
    loss: str = "mean"


KINDS = {
    "own batch sampler": Kind(own_batches),
    "batch_size=None": Kind(made_batches(shuffle=True)),
    "batch_size=None in order": Kind(made_batches()),
    "torch's": Kind(over(lambda rank, data: RandomSampler(data))),
    "torch's in order": Kind(over(lambda rank, data: SequentialSampler(data))),
    "distributed batches": Kind(over(distributed)),
    "distributed": Kind(lambda rank, size, data, **kwargs: DataLoader(data, size, sampler=distributed(rank, data))),
    "cost": Kind(settings={"cost_fn": drawn_cost}),
    "cost and counts": Kind(settings={"cost_fn": drawn_cost, **LOSS_SETTINGS["masked"]}, loss="masked"),
    "cost of batches": Kind(own_batches, {"cost_fn": drawn_cost}),
}
STILL = {"replan": 1000, "hysteresis": 1.0}
ADOPTED = (1, 7)


def _runs(rank, front_end, folder):
    """Of each kind, a run that adopts a plan behind the second step and saves behind the fifth, and the rest of it."""
    found = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        settings = {**STILL, **kind.settings}
        path, given = f"{folder}/{number}", {"world_size": 2, "loader": kind.loader, "loss": kind.loss}
        more = {"plans": {(0, 1): ADOPTED}, "save": {5: path}, "another": True}
        whole = FRONT_ENDS[front_end](rank, settings, 4, **given, **more)
        last = number + 1 == len(KINDS)
        found[name] = whole, FRONT_ENDS[front_end](rank, settings, 4, **given, resume=path, another=not last)
    return found


@every_front_end
def test_data_are_shared_by_the_plan_an_adopted_one_changes_the_next_and_a_run_goes_on(front_end, tmp_path):
    ranks = run_ranks(_runs, 2, front_end, str(tmp_path), timeout=240)
    for name, kind in KINDS.items():
        whole, rest = zip(*(found[name] for found in ranks), strict=True)
        every_sample_once(whole)
        expected = one_process(whole, loss=kind.loss, schedule=0)
        for result in whole:
            np.testing.assert_allclose(result["grads"], expected["grads"], **EXACT, err_msg=name)
            np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT, err_msg=name)
        assert whole[0]["history"][-1][2] == ADOPTED, name
        by_cost = "cost_fn" in kind.settings
        taken = np.array([[COSTS[own].sum() if by_cost else len(own) for *_, own in r["seen"][:9]] for r in whole])
        shares = [taken[0, steps].sum() / taken[:, steps].sum() for steps in (slice(2), slice(3, 9))]
        assert shares == pytest.approx([0.5, 0.125], abs=0.13), name
        before = [{"seen": result["seen"][:5]} for result in whole]
        every_sample_once([*before, *rest])
        # Accelerate restores no random state of a loader in the next epoch, whose order may then be another.
        epochs = 1 if front_end == "accelerate" else 2
        left = [[[step for step in part["seen"] if step[0] < epochs] for part in run] for run in (whole, rest)]
        assert by_cost or left[1] == [seen[5:] for seen in left[0]], name
        for part in rest if epochs == 2 else ():
            np.testing.assert_allclose(part["weights"], whole[0]["weights"], **EXACT, err_msg=name)


def _run(rank, front_end, settings, kwargs):
    lines = collected()
    return {**FRONT_ENDS[front_end](rank, settings, 6, world_size=2, **kwargs), "said": lines}


@pytest.mark.parametrize("front_end", ["fabric", "accelerate"])
def test_own_data_is_refused_where_it_would_be_split(front_end):
    errors = run_ranks(_run, 2, front_end, {"shard": "mine"}, {"loader": own_batches}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("shard='mine'" in message and "policy='even'" in message for *_, message in errors)


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
    given = {**STILL, "replan": 2, "report": str(tmp_path), **settings}
    results = run_ranks(_run, 2, front_end, given, {"epochs": 3, "plans": plans})
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
    first = next(line for line in results[0]["said"] if line.startswith("plan from"))
    assert ("equal work" in first) is by_cost
    if not by_cost:
        assert [one.ran for one in record.rounds] == [one.sizes for one in record.rounds], "those of the running plan"


# costs by tokens, and what is said where there are none

SAME = [{"input_ids": [1, 2]}] * 16
VARIED = [{"input_ids": [1] * (1 + i)} for i in range(16)]
UNLIKE = tuple([{"input_ids": [1] * (1 + (i + rank) % 4)} for i in range(16)] for rank in range(2))


def tokens(batch):
    return (batch[0] > 0).sum()


def fails_on_the_last(index):
    if index == 15:
        raise KeyError("no length")
    return 1.0


def collate(rows):
    x = torch.zeros(len(rows), 5, dtype=torch.float64)
    return x + 1.0, x[:, :1], torch.zeros(len(rows))


def _said(rank, cases):
    """What is said of one training after the other."""
    found = []
    for settings, rows in cases:
        lines = collected()
        rows = rows[rank] if isinstance(rows, tuple) else rows
        fit(rank, settings, 2, 4, dataset=rows, loader_kwargs={"collate_fn": collate}, max_epochs=1)
        found.append([line for line in lines if not line.startswith("plan ")])
    return found


SAID = [
    ({"weight_fn": tokens}, VARIED, ""),
    ({"cost_fn": None, "weight_fn": tokens}, VARIED, ""),
    ({"weight_fn": tokens}, list(range(16)), "cannot be read without loading"),
    ({"cost_fn": "tokens"}, SAME, "same length"),
    ({"weight_fn": tokens}, UNLIKE, "not the same on all ranks"),
    ({}, VARIED, "not known whether the loss is a mean over tokens"),
    ({"weight_fn": tokens, "local_batch_sizes": [6, 2]}, VARIED, "numbers of samples"),
    ({"weight_fn": tokens, "policy": "even"}, VARIED, "policy='even'"),
]


def test_a_division_by_number_says_why():
    first, second = run_ranks(_said, 2, [case[:2] for case in SAID])
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
    errors = run_ranks(_said, 2, [({"cost_fn": cost}, rows)], expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in message for *_, message in errors)
