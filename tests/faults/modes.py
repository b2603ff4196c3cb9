"""Modes of training, each a function that trains a small model on one rank and meets the injector in every batch.

A mode returns the samples of each batch, the weights and the plans, as the front ends of :mod:`tests.loops` do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from lightning_hetero import AdaptiveBatchCallback, BlockTopK, GNSCallback, HeteroElasticStrategy
from lightning_hetero.core.compression.settings import LowRank
from tests.helpers import Points
from tests.loops import FRONT_ENDS, SAMPLES
from tests.transformers.runs import Rows, arguments, of, trained

SIZES = (6, 4)
FIXED = {"local_batch_sizes": SIZES}
SPARSE = BlockTopK(density=0.3, block=8, warmup_steps=2)


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Args:
        train: ``train(rank, settings, injector, **kwargs)``, with ``save`` and ``resume`` among the keywords.
        settings: its settings.
        repeats: whether two runs give the same weights to the last bit; decisions by measured times do not.
        in_step: whether all ranks take equally many batches.
        in_pieces: whether a batch that does not fit is trained on in pieces.
        ranks: number of ranks.
        samples: samples of an epoch.
        epochs: epochs of the training.
    """

    train: Callable[..., dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: bool = True
    in_step: bool = True
    in_pieces: bool = False
    ranks: int = 2
    samples: int = SAMPLES
    epochs: int = 2


def _front_end(name, ranks=2, **more):
    def train(rank, settings, injector, **kwargs):
        def loss(output, x, y):
            return injector(nn.functional.mse_loss(output, y))

        given = {key: make() for key, make in more.items()}
        return FRONT_ENDS[name](rank, settings, 5, world_size=ranks, loss=loss, **given, **kwargs)

    return train


def _elastic(rank, settings, injector, **kwargs):
    settings = {key: value for key, value in settings.items() if key != "on_nonfinite"}  # which it always does
    strategy = HeteroElasticStrategy(merge="mean", mega_batch_size=20, **settings)
    return _front_end("lightning")(rank, strategy, injector, **kwargs)


class Suffers(nn.Module):
    """A model of Transformers' kind, whose forward pass returns the loss; notes what it is given."""

    def __init__(self, injector):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.injector, self.seen = [injector], []  # in a list: a module would otherwise be asked to register it

    def forward(self, x, labels, index):
        self.seen.append((0, len(self.seen), index.tolist()))
        loss = nn.functional.mse_loss(self.net(x)[:, 0], labels)
        return {"loss": self.injector[0](loss)}


def _transformers(rank, settings, injector, **kwargs):
    points = Points(MODES["transformers"].samples)
    rows = Rows([{"x": x, "labels": y[0], "index": i} for x, y, i in points])
    model = Suffers(injector)
    given = {f"hetero_{name}": value for name, value in settings.items()}
    args = arguments(sum(SIZES), SIZES, **given, output_dir=str(injector.folder / "out"))
    result = trained(of(transformers.Trainer)(model=model, args=args, train_dataset=rows), **kwargs)
    history = [(0, i, sizes) for i, sizes in enumerate(result["plans"])]
    return {"weights": result["weights"], "seen": model.seen, "history": history}


LIGHTNING = _front_end("lightning")
ADAPTIVE = _front_end("lightning", callbacks=lambda: [AdaptiveBatchCallback(20), GNSCallback(every_n_steps=1)])

MODES = {
    "plain": Mode(LIGHTNING, FIXED, in_pieces=True),
    "compressed": Mode(LIGHTNING, {**FIXED, "compression": SPARSE}, in_pieces=True),
    "powersgd": Mode(LIGHTNING, {**FIXED, "compression": LowRank(rank=1, start=2)}, in_pieces=True),
    "stale": Mode(LIGHTNING, {**FIXED, "staleness": 1}, repeats=False, in_pieces=True),
    "hierarchical": Mode(
        _front_end("lightning", ranks=3),
        {"local_batch_sizes": (4, 3, 3), "hierarchy": [[0], [1, 2]], "compression": SPARSE},
        in_pieces=True,
        ranks=3,
    ),
    "adaptive": Mode(ADAPTIVE, repeats=False, in_pieces=True),
    "elastic": Mode(_elastic, repeats=False, in_step=False),
    "accelerate": Mode(_front_end("accelerate"), FIXED),
    "fabric": Mode(_front_end("fabric"), FIXED),
    "transformers": Mode(_transformers, samples=70, epochs=1),
}
