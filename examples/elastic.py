"""Sparse data with many labels on unequal workers: replicas train on their own and are averaged now and then.

How long a batch takes depends on its non-zeros, so no split of a batch can be right; each worker takes the next batch
when it is done with one. Give the path of a libSVM file of the Extreme Classification Repository to train on real data.
"""

import sys

import lightning as L
from _model import SlowSecondWorker
from _sparse_mlp import SparseMLP

from lightning_hetero import HeteroElasticStrategy
from lightning_hetero.data import SparseShape, load_libsvm, sparse_loader, synthetic_multilabel


def data():
    """Training and test set: the files given, or synthetic ones."""
    if len(sys.argv) == 3:
        return load_libsvm(sys.argv[1]), load_libsvm(sys.argv[2])
    return synthetic_multilabel(
        SparseShape(2000, 100, train=6400, test=500, features_per_sample=40, classes_per_sample=3)
    )


if __name__ == "__main__":
    train, test = data()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroElasticStrategy(mega_batch_batches=25),
        max_epochs=3,
        callbacks=[SlowSecondWorker(1 / 3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = SparseMLP(train.num_features, train.num_classes, hidden=256, lr=3.0)
    trainer.fit(model, sparse_loader(train, 64, shuffle=True), sparse_loader(test, 100))
    if trainer.is_global_zero:
        for merge in trainer.strategy.merges:
            print(f"epoch {merge.epoch} sample {merge.position}: {merge.describe()}")
        print(f"batches {'/'.join(map(str, trainer.strategy.engine.batch_sizes))}")
        print(f"precision at 1: {float(trainer.callback_metrics['precision_at_1']):.2f}")
