"""One rank of `benchmarks/elastic.py`: trains the sparse perceptron and writes how its precision grew with time.

Started on every node by that benchmark; not meant to be run by hand. The clock stands still during evaluation, as in
the paper.
"""

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.utilities.warnings import PossibleUserWarning

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _sparse_mlp import SparseMLP

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.data import AMAZON_670K, DELICIOUS_200K, sparse_loader, synthetic_multilabel

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)

SHAPES = {"amazon": AMAZON_670K, "delicious": DELICIOUS_200K}


class Curve(L.Callback):
    """Seconds of training, share of epochs done and precision at each evaluation."""

    def __init__(self):
        self.points, self.seconds, self.last = [], 0.0, 0.0

    def on_train_start(self, trainer, pl_module):
        self.last = time.perf_counter()

    def on_validation_start(self, trainer, pl_module):
        self.seconds += time.perf_counter() - self.last

    def on_validation_end(self, trainer, pl_module):
        self.points.append((self.seconds, float(trainer.callback_metrics["precision_at_1"])))
        self.last = time.perf_counter()


def strategy_of(kind, args):
    merge, _, printed = kind.partition("+")
    if merge in MERGES:
        return HeteroElasticStrategy(
            merge=merge,
            mega_batch_size=args.mega_batch,
            momentum=args.momentum,
            renormalize=not printed,
            damped=not printed,
        )
    return HeteroDDPStrategy() if kind == "hetero_ddp" else "ddp"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="amazon")
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mega-batch", type=int, required=True)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    L.seed_everything(0, verbose=False)
    shape = replace(SHAPES[args.shape].scaled(args.scale), classes=args.classes, train=args.samples, test=600)
    train, test = synthetic_multilabel(shape)
    # Averaged gradients go dense, which is faster here (sparse ones run too); local steps are faster with sparse ones.
    model = SparseMLP(train.num_features, train.num_classes, lr=args.lr, sparse=args.kind.partition("+")[0] in MERGES)
    curve, local = Curve(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        strategy=strategy_of(args.kind, args),
        accelerator="cpu",
        devices=local,
        num_nodes=world // local,
        max_epochs=args.epochs,
        val_check_interval=min(1.0, args.mega_batch / args.samples),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    trainer.fit(model, sparse_loader(train, args.batch, shuffle=True), sparse_loader(test, 200))
    merges = [(m.batch_sizes, m.updates, m.perturbed, m.busy) for m in getattr(trainer.strategy, "merges", ())]
    if rank == 0:
        nonzeros = [float(train.nonzeros.mean()), float(train.nonzeros.std())]
        Path(args.out).write_text(json.dumps({"points": curve.points, "merges": merges, "nonzeros": nonzeros}))


if __name__ == "__main__":
    main()
