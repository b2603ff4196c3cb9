"""Synthetic extreme classification: the means of the paper's Table I, irregular, learnable, the same on all ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from examples._sparse_mlp import SparseMLP
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.data import AMAZON_670K, DELICIOUS_200K, SparseShape, sparse_loader, synthetic_multilabel
from lightning_hetero.datasets.multilabel_loss import PrecisionAtOne
from tests.helpers import run_ranks, trainer_of
from tests.strategies.elastic_helpers import Clocked


@pytest.mark.parametrize("shape", [AMAZON_670K, DELICIOUS_200K], ids=["amazon", "delicious"])
def test_means_and_spread_are_those_of_the_shape(shape):
    shape = shape.scaled(0.01)
    train, test = synthetic_multilabel(replace(shape, train=1000, test=300))
    assert (len(train), len(test)) == (1000, 300)
    assert (train.num_features, train.num_classes) == (shape.features, shape.classes)
    assert train.nonzeros.mean() == pytest.approx(shape.features_per_sample, rel=0.08)
    assert len(train.labels) / len(train) == pytest.approx(shape.classes_per_sample, rel=0.05)
    assert np.log(train.nonzeros).std() == pytest.approx(shape.spread, abs=0.06)
    for row in range(20):  # no feature twice in a sample, no label twice, values of length 1
        entries = slice(*train.indptr[row : row + 2])
        labels = train.labels[slice(*train.label_indptr[row : row + 2])]
        assert len(set(train.indices[entries])) == train.nonzeros[row]
        assert len(set(labels)) == len(labels)
        assert np.square(train.values[entries]).sum() == pytest.approx(1, rel=1e-5)


def test_batches_of_one_size_have_unequal_work():
    train, _ = synthetic_multilabel(replace(AMAZON_670K.scaled(0.01), train=640))
    work = [len(batch.indices) for batch in sparse_loader(train, 32)]
    assert max(work) > 1.25 * min(work)


def test_the_seed_gives_the_data():
    shape = SparseShape(200, 20, 50, 10, 8, 2)
    a, b, c = (synthetic_multilabel(shape, seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.indices, b.indices)
    np.testing.assert_array_equal(a.values, b.values)
    assert not np.array_equal(a.labels, c.labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 0}, "features=0"),
        ({"features_per_sample": 150}, "features_per_sample=150"),
        ({"spread": -1}, "spread=-1"),
    ],
)
def test_bad_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        replace(SparseShape(200, 20, 50, 10, 8, 2), **arguments)


def _train(rank, merge):
    from lightning_hetero import HeteroElasticStrategy

    train, test = synthetic_multilabel(SparseShape(300, 20, 960, 200, 12, 2))
    model = SparseMLP(train.num_features, train.num_classes, hidden=16, lr=2.0)
    strategy = HeteroElasticStrategy(merge=merge, mega_batch_batches=10, momentum=0.5)
    work = Clocked((1.0, 2.0))  # virtual seconds of a non-zero: unequal workers and irregular batches
    trainer = trainer_of(strategy, 2, max_epochs=8, callbacks=[work])
    torch.manual_seed(0)
    trainer.fit(model, sparse_loader(train, 16, shuffle=True), sparse_loader(test, 100))
    metric = PrecisionAtOne()
    with torch.no_grad():
        for batch in sparse_loader(test, 100):
            metric.update(model(batch), batch.labels, batch.label_rows)
    logged = trainer.callback_metrics["precision_at_1"].item()
    return metric.compute().item(), logged, sum(m.samples[rank] for m in strategy.merges)


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_the_sparse_perceptron_learns_with_every_merge_rule(merge):
    """From the sparse gradients of each replica to the precision of the merged model, over two real ranks."""
    results = run_ranks(_train, 2, merge)
    for precision, logged, _ in results:
        assert precision > 0.5  # by chance 0.1 to 0.2
        assert logged == pytest.approx(precision)  # the metric is summed over both ranks' shares of the test data
    assert sum(samples for *_, samples in results) == 8 * 960
