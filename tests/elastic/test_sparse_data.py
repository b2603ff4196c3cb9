"""Sparse multi-label data: files, batches, loss and precision against dense references; synthetic sets of a shape."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples._sparse_mlp import SparseMLP
from lightning_hetero.data import (
    AMAZON_670K,
    DELICIOUS_200K,
    SparseMultiLabelDataset,
    load_libsvm,
    sparse_loader,
    synthetic_multilabel,
)
from lightning_hetero.datasets.multilabel_loss import PrecisionAtOne, multilabel_cross_entropy

ROWS = [({0: 1.0, 4: 0.5}, [1, 2]), ({}, [0]), ({3: 2.0}, []), ({1: 0.25, 2: 0.5, 4: 1.0}, [2])]
LINES = "1,2 0:1.0 4:0.5\n0\n 3:2.0\n2 1:0.25 2:0.5 4:1.0\n"
DATA = SparseMultiLabelDataset(
    [0, 2, 2, 3, 6], [0, 4, 3, 1, 2, 4], [1.0, 0.5, 2.0, 0.25, 0.5, 1.0], [0, 2, 3, 3, 4], [1, 2, 0, 2], 5, 3
)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_a_batch_gives_what_dense_rows_give(chosen):
    """Model, loss and precision of the sparse form, empty rows and rows with no label included."""
    x, y = torch.zeros(len(chosen), 5), torch.zeros(len(chosen), 3)
    for i, (found, labels) in enumerate(ROWS[row] for row in chosen):
        for feature, value in found.items():
            x[i, feature] = value
        y[i, labels] = 1
    batch, model, metric = DATA.__getitems__(chosen), SparseMLP(5, 3, hidden=4), PrecisionAtOne()
    assert batch.size == len(chosen)
    logits = model(batch)
    hidden = torch.relu(x @ model.embedding.weight + model.bias)
    torch.testing.assert_close(logits, hidden @ model.output.weight.T + model.output.bias)
    target = y / y.sum(dim=1, keepdim=True).clamp(min=1)
    loss = multilabel_cross_entropy(logits, batch.labels, batch.label_rows)
    torch.testing.assert_close(loss, -(target * torch.log_softmax(logits, dim=1)).sum(dim=1).mean())
    metric.update(logits, batch.labels, batch.label_rows)
    hits = y[torch.arange(len(chosen)), logits.argmax(dim=1)]
    assert metric.compute().item() == pytest.approx(hits.mean().item())


def test_the_loader_draws_whole_batches_and_the_first_layer_has_a_sparse_gradient():
    batches = list(sparse_loader(DATA, 3))
    assert [batch.size for batch in batches] == [3, 1]
    assert batches[1].indices.tolist() == DATA[3].indices.tolist() == [1, 2, 4]
    model = SparseMLP(5, 3, hidden=4)
    model.training_step(batches[0], 0).backward()
    assert sorted(model.embedding.weight.grad.coalesce().indices()[0].tolist()) == [0, 3, 4]


@pytest.mark.parametrize(
    ("header", "arguments", "sizes"),
    [
        ("4 5 3\n", {}, (5, 3)),
        ("4 90 80\n", {}, (90, 80)),
        ("4 90 80\n", {"num_features": 10, "num_classes": 20}, (10, 20)),
    ],
)
def test_a_file_is_read_as_it_is_written(tmp_path, header, arguments, sizes):
    path = tmp_path / "data.txt"
    path.write_text(header + LINES)
    found = load_libsvm(path, **arguments)
    assert (len(found), found.num_features, found.num_classes) == (4, *sizes)
    for name in ("indptr", "indices", "values", "label_indptr", "labels"):
        np.testing.assert_array_equal(getattr(found, name), getattr(DATA, name))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (([0, 2], [0, 1], [1.0], [0, 0], []), "values"),
        (([0, 3], [0, 1], [1.0, 2.0], [0, 0], []), "features"),
        (([0, 2], [0, 1], [1.0, 2.0], [0, 1], [3]), "labels"),
        (([0, 2], [0, 1], [1.0, 2.0], [0, 0, 0], []), "labels"),
        (([0, 2], [-1, 1], [1.0, 2.0], [0, 0], []), "features"),
    ],
)
def test_arrays_that_do_not_fit_and_other_files_are_refused(arrays, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        SparseMultiLabelDataset(*arrays, 5, 3)
    (tmp_path / "data.txt").write_text("no such format\n")
    with pytest.raises(ValueError, match="convert"):
        load_libsvm(tmp_path / "data.txt")


@pytest.mark.parametrize("shape", [AMAZON_670K, DELICIOUS_200K], ids=["amazon", "delicious"])
def test_means_and_spread_are_those_of_the_shape_and_the_seed_gives_the_data(shape):
    shape = replace(shape.scaled(0.01), train=600, test=150)
    (train, test), (again, _), (other, _) = (synthetic_multilabel(shape, seed=seed) for seed in (1, 1, 2))
    assert (len(train), len(test)) == (600, 150)
    assert (train.num_features, train.num_classes) == (shape.features, shape.classes)
    assert train.nonzeros.mean() == pytest.approx(shape.features_per_sample, rel=0.1)
    assert len(train.labels) / len(train) == pytest.approx(shape.classes_per_sample, rel=0.06)
    assert np.log(train.nonzeros).std() == pytest.approx(shape.spread, abs=0.08), "batches of one size are unequal work"
    for row in range(20):  # no feature twice in a sample, no label twice, values of length 1
        entries = slice(*train.indptr[row : row + 2])
        labels = train.labels[slice(*train.label_indptr[row : row + 2])]
        assert len(set(train.indices[entries])) == train.nonzeros[row]
        assert len(set(labels)) == len(labels)
        assert np.square(train.values[entries]).sum() == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(train.values, again.values)
    assert not np.array_equal(train.labels, other.labels)
