"""Train loaders of a Trainer: several in one step, samplers that are obeyed, and those that are refused by name."""

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate

from lightning_hetero import AdaptiveBatchCallback
from tests.data.kinds import (
    ALONE,
    CLAIM,
    MINE,
    SPLITS,
    WHOLE,
    Batched,
    Buckets,
    Normed,
    Trained,
    cost_of,
    own_batches,
    points,
    trained,
)
from tests.helpers import Points, collected, raised
from tests.loops import flat, network, one_process
from tests.ranks import run_ranks
from tests.streams import SAMPLES, Numbered, thirds

EXACT = {"rtol": 1e-12, "atol": 1e-13}


# several loaders in one step


class Joint(Trained):
    """A loss of the batches of both loaders; the tasks are learned by one net."""

    def training_step(self, batch, batch_idx):
        own = self.trainer.strategy.engine.own_size
        seen = {name: [] if own == 0 or part is None else part[2].tolist() for name, part in batch.items()}
        self.seen.append((self.trainer.current_epoch, batch_idx, seen))
        given = {name: part for name, part in batch.items() if part is not None}
        return sum((1 + (name == "b")) * self.loss(part) for name, part in given.items())


SIZES = {"a": (37, 4), "b": (22, 6)}
MODES = {None: max, "max_size_cycle": max, "min_size": min, "max_size": max}
FIRST, THEN = (15, 5), (5, 15)


def several(mode, drop_last=False):
    made = {name: DataLoader(Points(n), size, shuffle=True, drop_last=drop_last) for name, (n, size) in SIZES.items()}
    return made if mode is None else CombinedLoader(made, mode)


def replayed_jointly(results):
    """Weights of one process on the unions, each part of the loss a mean over one loader's samples."""
    model = network()
    data = {name: Points(size) for name, (size, _) in SIZES.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parts in zip(*(r["seen"] for r in results), strict=True):
        optimizer.zero_grad()
        for name in parts[0][2]:
            indices = [i for _, _, own in parts for i in own.get(name, [])]
            if indices:
                x, y = data[name].x[indices], data[name].y[indices]
                ((1 + (name == "b")) * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
    return flat(model)


def _several(rank, mode, folder):
    def run(drop_last=False, model=None, **more):
        data = several(mode, drop_last)
        return trained(rank, 2, data, {"local_batch_sizes": FIRST}, model=model or Joint(), **more)

    found = {"dropped": run(True), "whole": run(model=Joint(None, folder)), "planned": run(model=Joint({(0, 0): THEN}))}
    return {**found, "rest": run(resume=f"{folder}/2.ckpt")}


@pytest.mark.parametrize("mode", MODES)
def test_several_loaders_are_one_step_with_one_weight(mode, tmp_path):
    results = run_ranks(_several, 2, mode, str(tmp_path))
    for run in ("dropped", "whole", "planned"):
        for result in results:
            np.testing.assert_allclose(result[run]["weights"], replayed_jointly([r[run] for r in results]), **EXACT)
    for run, counts in (("dropped", (4, 1)), ("whole", (5, 2))):
        for epoch in (0, 1):
            seen = [[e for e in r[run]["seen"] if e[0] == epoch] for r in results]
            assert {len(part) for part in seen} == {MODES[mode](counts)}
            for name, complete in (("a", mode != "min_size"), ("b", mode in ("min_size", "max_size"))):
                taken = sorted(i for part in seen for e in part for i in e[2].get(name, []))
                assert run == "dropped" or not complete or taken == list(range(SIZES[name][0]))
    for step, (first, second) in enumerate(zip(*(r["planned"]["seen"] for r in results), strict=True)):
        parts = {n: (len(first[2][n]), len(second[2][n])) for n in "ab" if first[2].get(n) or second[2].get(n)}
        shares = {part[0] / sum(part) for part in parts.values()}
        assert len(shares) == 1, "the parts of a step have equal shares"
        if all(sum(part) == 2 * SIZES[name][1] for name, part in parts.items()) and len(parts) == 2:
            assert shares == ({0.75} if step == 0 else {0.25})
    for result in results:
        assert result["rest"]["seen"] == result["whole"]["seen"][2:]
        np.testing.assert_array_equal(result["rest"]["weights"], result["whole"]["weights"])


# samplers and batches of the user


class Halved(RandomSampler):
    """A subclass that does what its parent does not."""

    def __iter__(self):
        return iter(list(super().__iter__())[: len(self)])

    def __len__(self):
        return len(self.data_source) // 2


class Growing(Buckets):
    """Own data of each rank: more batches on one rank, and more in later epochs."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.sampler = rank, self

    def __iter__(self):
        own = np.array_split(np.arange(SAMPLES)[self.rank :: 2], 3 + self.rank + 2 * self.epoch)
        yield from (part.tolist() for part in own)

    def __len__(self):
        return 3 + self.rank + 2 * self.epoch


class Transposed(Trained):
    """Gets batches whose first dimension is not that of the samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step([part.movedim(-1, 0) for part in batch], batch_idx)


def transposed(rank):
    own = Subset(Points(SAMPLES), range(48) if rank == 0 else range(48, SAMPLES))
    collate = lambda samples: [part.movedim(0, -1) for part in default_collate(samples)]  # noqa: E731
    return DataLoader(own, 9 if rank == 0 else 3, collate_fn=collate, shuffle=True)


def sampled(sampler):
    return lambda rank: DataLoader(Points(SAMPLES), 4, sampler=sampler(Points(SAMPLES)))


SIZED = {"local_batch_sizes": SPLITS[2]}
OBEYED = {
    "replacement": (sampled(lambda data: RandomSampler(data, replacement=True, num_samples=33)), SIZED, Trained, 33),
    "number": (sampled(lambda data: RandomSampler(data, num_samples=20)), SIZED, Trained, 20),
    "subclass": (sampled(Halved), SIZED, Trained, SAMPLES // 2),
    "growing": (lambda rank: DataLoader(Points(SAMPLES), batch_sampler=Growing(rank)), MINE, Trained, SAMPLES),
    "transposed": (transposed, MINE, Transposed, SAMPLES),
    "normed": (lambda rank: DataLoader(Batched(45), None, shuffle=True), {"local_batch_sizes": (9, 2)}, Normed, 45),
}


def _obeyed(rank):
    found = {}
    for name, (loader, settings, model, _) in OBEYED.items():
        given = ALONE if name == "growing" else {}
        found[name] = trained(rank, 2, loader(rank), settings, model=model(), **given)
    return found


def test_samplers_that_lightning_would_replace_are_obeyed():
    results = run_ranks(_obeyed, 2)
    for name, (*_, number) in OBEYED.items():
        runs = [result[name] for result in results]
        taken = [i for r in runs for epoch, _, own in r["seen"] if epoch == 0 for i in own]
        assert len(taken) == number, name
        assert (len(set(taken)) < number) == name.startswith("replacement"), name
        if name != "normed":
            for run in runs:
                np.testing.assert_allclose(run["weights"], one_process(runs)["weights"], **EXACT)
    steps = [e[:2] for e in results[0]["growing"]["seen"]]
    assert steps == [(0, b) for b in range(4)] + [(1, b) for b in range(6)]
    assert all(len(own) != 1 for r in results for _, _, own in r["normed"]["seen"]), (
        "batch normalization needs two rows"
    )


def _epochs_and_limits(rank):
    """Streams as users have them: accumulation, limits, validation inside of an epoch, an even policy."""

    def run(data, settings=SIZED, val=False, **trainer):
        model, checked = Trained(), []
        if val:
            model.val_dataloader = lambda: DataLoader(Points(4), 2)
            model.validation_step = lambda batch, batch_idx: checked.append(model.trainer.global_step)
        found = trained(rank, 2, DataLoader(data, 4), settings, model=model, **{"max_epochs": 1, **trainer})
        return {**found, "checked": checked[1:]}

    own = Numbered(thirds(rank))
    return {
        "accumulated": run(own, accumulate_grad_batches=2),
        "max_steps": run(own, max_epochs=-1, max_steps=13),
        "limited": run(own, limit_train_batches=3, max_epochs=2),
        "checked": run(own, val=True, val_check_interval=4),
        "checked at the end": run(own, val=True),
        "even": run(own, {"policy": "even"}, limit_train_batches=5),
    }


def test_streams_are_counted_as_lightning_counts_them():
    found = run_ranks(_epochs_and_limits, 2)[0]
    assert {name: one["steps"] for name, one in found.items()} == {
        "accumulated": 5,
        "max_steps": 13,
        "limited": 6,
        "checked": 10,
        "checked at the end": 10,
        "even": 5,
    }
    assert [found[name]["checked"] for name in ("checked", "checked at the end")] == [[4, 8], [10]]
    assert [len(own) for _, _, own in found["even"]["seen"]] == [4] * 5
    assert found["even"]["history"] == []


# what is refused, on every rank and by name


class Drifting(Buckets):
    """Another order, and another number of batches, on one rank from the second epoch on."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def set_epoch(self, epoch):
        super().set_epoch(epoch + self.rank * (epoch > 0))


class Endless:
    def __iter__(self):
        return itertools.repeat([0, 1])


def stream(rank):
    return DataLoader(Numbered(thirds(rank)), 4)


def batched_by(make):
    return lambda rank: DataLoader(Points(SAMPLES), batch_sampler=make(rank))


def moves():
    return {"callbacks": [AdaptiveBatchCallback(max_total_batch_size=64)]}


def one_without_size(rank):
    return CombinedLoader([points(rank), DataLoader(Batched(), None)], "min_size")


HOSTILE = {
    "a total that moves": (own_batches, {}, moves, "GoodputPlanner"),
    "multiples of whole batches": (own_batches, {"local_batch_multiple": 2}, dict, "local_batch_multiple=2"),
    "orders that drift apart": (batched_by(Drifting), {}, dict, "epoch 1 of Drifting"),
    "no end": (batched_by(lambda rank: Endless()), {}, dict, "Endless"),
    "several of each rank": (lambda rank: several("min_size"), MINE, dict, "shard='mine'"),
    "several, one of batches": (one_without_size, {}, dict, "batch_size=None"),
    "several, one a stream": (lambda rank: CombinedLoader([points(rank), stream(rank)]), {}, dict, "map-style|stream"),
    "no shards": (stream, CLAIM, dict, "shard='claim'"),
    "map-style shards": (points, CLAIM, dict, "shard"),
    "streams that differ": (stream, WHOLE, dict, "shard='whole'"),
    "a stream's total that moves": (stream, {}, moves, "max_total_batch_size"),
    "a stream that fails": (
        lambda rank: DataLoader(Numbered(thirds(rank), fails_at=14 if rank else None), 4),
        {},
        dict,
        "the archive ends here",
    ),
}


def _hostile(rank):
    found = {}
    for name, (loader, settings, trainer, _) in HOSTILE.items():
        found[name] = raised(partial(trained, rank, 2, loader(rank), settings, **trainer()))
    return found


def test_loaders_that_cannot_be_shared_are_refused_by_name_on_every_rank():
    for rank, errors in enumerate(run_ranks(_hostile, 2)):
        for name, (*_, says) in HOSTILE.items():
            assert re.search(says, errors[name], re.DOTALL), (rank, name, errors[name])


SAID = {
    "own batches": (own_batches, {"local_batch_sizes": (30, 10)}, []),
    "functions": (own_batches, {"slice_fn": len, "concat_fn": len}, ["slice_fn, concat_fn"]),
    "sampler": (lambda rank: DataLoader(Batched(), None), {"batch_sampler": "global"}, ["batch_sampler='global'"]),
    "left": (
        lambda rank: DataLoader(Points(SAMPLES), 4),
        {**MINE, "local_batch_sizes": (9, 1), "policy": "pid", "cost_fn": cost_of},
        ["local_batch_sizes=[9, 1], cost_fn, policy='pid'", "ranks 0, 1"],
    ),
    "same streams": (lambda rank: DataLoader(Numbered(range(9)), 4), {}, ["ranks 0, 1"]),
}


def _said(rank):
    found = {}
    for name, (loader, settings, _) in SAID.items():
        lines = collected()
        trained(rank, 2, loader(rank), settings, max_epochs=1)
        found[name] = list(lines)
    return found


def test_what_has_no_effect_or_may_be_wrong_is_said_once_by_one_rank():
    first, second = run_ranks(_said, 2)
    for name, (*_, expected) in SAID.items():
        for text in expected:
            assert sum(text in line for line in first[name]) == 1, first[name]
        assert expected or not any("_fn" in line for line in first[name])
        assert not any(text in line for text in expected for line in second[name])
