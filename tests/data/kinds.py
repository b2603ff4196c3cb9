"""Kinds of training data as users have them, and a training over one of them that tells which samples it took."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import BatchPlan, HeteroDDPStrategy
from tests.helpers import Points, Regressor, trainer_of
from tests.loops import flat, network
from tests.streams import SAMPLES, Batches, Loader, Numbered, Sharded, Sized, thirds

SPLITS = {1: (8,), 2: (5, 3), 3: (4, 2, 2)}
"""Sizes of ranks, by their number; eight samples together."""
CHANGED = (2, 6)
"""Plan that two ranks adopt behind their second step."""


class Buckets:
    """Batches of neighbours in another order each epoch, some longer than others: duck-typed, without a length."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng(self.epoch)
        borders = rng.choice(np.arange(2, SAMPLES), 16 + self.epoch, replace=False)
        borders = [0, *sorted(borders.tolist()), SAMPLES]
        yield from (list(range(borders[i], borders[i + 1])) for i in rng.permutation(len(borders) - 1))


class Shuffled(BatchSampler):
    """A batch sampler of which Lightning cannot make a new instance."""

    def __init__(self, data, size, *, name):
        super().__init__(RandomSampler(data), size, drop_last=False)
        self.name = name


class Batched(Dataset):
    """Yields whole batches of 3 to 7 rows of the points."""

    def __init__(self, samples=SAMPLES):
        self.points = Points(samples)
        borders = np.minimum(np.cumsum([0, *(3 + 2 * (i % 3) for i in range(samples))]), samples)
        self.ranges = [(a, b) for a, b in zip(borders, borders[1:], strict=False) if b > a]

    def __len__(self):
        return len(self.ranges)

    def __getitem__(self, i):
        first, end = self.ranges[i]
        return self.points.x[first:end], self.points.y[first:end], torch.arange(first, end)


class Halves(DistributedSampler):
    """The first rank holds two thirds of the data, in another order each epoch."""

    def __iter__(self):
        border = 2 * len(self.dataset) // 3
        own = [range(border), range(border, len(self.dataset))][self.rank]
        return iter(np.random.default_rng(self.epoch).permutation(np.asarray(own)).tolist())

    def __len__(self):
        return sum(1 for _ in iter(self))


def cost_of(index):
    return 1.0 + 9.0 * (index % 5 == 0)


def points(rank, **kwargs):
    return DataLoader(Points(SAMPLES), 4, shuffle=True, **kwargs)


def own_batches(rank, **kwargs):
    return DataLoader(Points(SAMPLES), batch_sampler=Buckets(), **kwargs)


def own_samples(rank):
    return DataLoader(Points(SAMPLES), 4, sampler=Halves(Points(SAMPLES), 2, rank))


def claimed(rank, **kwargs):
    return DataLoader(Sharded([9, 0, 4, 17, 8, 1, 20, 14]), 4, **kwargs)


class Kind(NamedTuple):
    """Training data of a script.

    Args:
        loader: makes the loader of a rank.
        settings: of the strategy, beside the sizes.
        trainer: arguments of the Trainer.
        sizes: whether the sizes of ranks are given.
        others: numbers of ranks that a run of two ranks may go on with inside an epoch.
        same: whether global batches are the same for any number of ranks and the same total.
        replayed: whether ranks that go on see what they would have seen without a break: nothing is learned or claimed.
        weight: what of a sample is divided by the plan.
    """

    loader: Callable[[int], Any]
    settings: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    sizes: bool = True
    others: tuple[int, ...] = (1, 3)
    same: bool = False
    replayed: bool = True
    weight: Callable[[int], float] = lambda index: 1.0


MINE, WHOLE, CLAIM = ({"shard": shard} for shard in ("mine", "whole", "claim"))
ALONE = {"use_distributed_sampler": False}
KINDS = {
    "map": Kind(points, same=True),
    "map, workers": Kind(lambda rank: points(rank, num_workers=2), same=True),
    "map in order": Kind(lambda rank: DataLoader(Points(SAMPLES), 4), same=True),
    "map that nobody distributes": Kind(points, WHOLE, ALONE, same=True),
    "torch's batch sampler": Kind(
        lambda rank: DataLoader(Points(SAMPLES), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, False)),
        same=True,
    ),
    "map by cost": Kind(points, {"cost_fn": cost_of}, same=True, replayed=False, weight=cost_of),
    "own batches": Kind(own_batches),
    "own batches, workers": Kind(lambda rank: own_batches(rank, num_workers=2)),
    "own batches, shuffled": Kind(
        lambda rank: DataLoader(Points(SAMPLES), batch_sampler=Shuffled(Points(SAMPLES), 5, name="x"))
    ),
    "own batches by cost": Kind(own_batches, {"cost_fn": cost_of}, replayed=False, weight=cost_of),
    "own batches, each of all ranks": Kind(own_batches, {"batch_sampler": "global"}, same=True),
    "datasets of batches": Kind(lambda rank: DataLoader(Batched(), batch_size=None, shuffle=True)),
    "own samples of each rank": Kind(own_samples, MINE, ALONE, sizes=False, others=()),
    "stream of each rank": Kind(lambda rank: DataLoader(Numbered(thirds(rank)), 4), others=()),
    "stream of each rank, workers": Kind(lambda rank: DataLoader(Numbered(thirds(rank)), 4, num_workers=2), others=()),
    "stream of batches": Kind(lambda rank: DataLoader(Batches(thirds(rank)), None), others=()),
    "loader of no class of torch's": Kind(lambda rank: Loader(thirds(rank)), others=()),
    "whole stream": Kind(lambda rank: DataLoader(Sized(range(SAMPLES)), 4), WHOLE, same=True),
    "claimed shards": Kind(claimed, CLAIM, replayed=False),
    "claimed shards, workers": Kind(lambda rank: claimed(rank, num_workers=2), CLAIM, replayed=False),
}


class Trained(Regressor):
    """Adopts plans behind given steps, and saves behind every step."""

    def __init__(self, plans=None, folder=None):
        super().__init__()
        self.net = network()
        self.plans, self.folder = plans or {}, folder

    def training_step(self, batch, batch_idx):
        return super().training_step(tuple(batch.values()) if isinstance(batch, dict) else batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        sizes = self.plans.get((self.trainer.current_epoch, batch_idx))
        if sizes is not None:
            self.trainer.strategy.adopt(BatchPlan(sum(sizes), sizes))
        if self.folder is not None:
            self.trainer.save_checkpoint(f"{self.folder}/{self.trainer.global_step}.ckpt")


def trained(rank, ranks, loader, settings, *, resume=None, plans=None, folder=None, model=None, **trainer):
    """Train two epochs, unless told otherwise: samples, weights and gradients, steps and plans of this rank."""
    model = Trained(plans, folder) if model is None else model
    trainer = trainer_of(HeteroDDPStrategy(**settings), ranks, **trainer)
    trainer.fit(model, loader, ckpt_path=resume)
    return {
        "seen": model.seen,
        "weights": flat(model.net),
        "grads": np.stack([grad.numpy() for grad in model.grads]),
        "steps": trainer.global_step,
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in trainer.strategy.plan_history],
    }


def trained_on(rank, ranks, name, **given):
    kind = KINDS[name]
    sizes = {"local_batch_sizes": SPLITS[ranks]} if kind.sizes else {}
    return trained(rank, ranks, kind.loader(rank), {**sizes, **kind.settings}, **kind.trainer, **given)


class Normed(Trained):
    """Batch normalization, which a single row would fail."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x):
        return self.net(self.norm(x))
