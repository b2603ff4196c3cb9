"""Sparse multi-label data: files, batches, loss and precision against dense references."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples._sparse_mlp import SparseMLP
from lightning_hetero.data import SparseMultiLabelDataset, load_libsvm, sparse_loader
from lightning_hetero.datasets.multilabel_loss import PrecisionAtOne, multilabel_cross_entropy

ROWS = [({0: 1.0, 4: 0.5}, [1, 2]), ({}, [0]), ({3: 2.0}, []), ({1: 0.25, 2: 0.5, 4: 1.0}, [2])]


def dataset(rows, features=5, classes=3):
    indptr = np.cumsum([0, *(len(x) for x, _ in rows)])
    label_indptr = np.cumsum([0, *(len(y) for _, y in rows)])
    indices, values = [i for x, _ in rows for i in x], [v for x, _ in rows for v in x.values()]
    return SparseMultiLabelDataset(
        indptr, indices, values, label_indptr, [c for _, y in rows for c in y], features, classes
    )


def dense(rows, features=5, classes=3):
    x, y = torch.zeros(len(rows), features), torch.zeros(len(rows), classes)
    for i, (found, labels) in enumerate(rows):
        for feature, value in found.items():
            x[i, feature] = value
        y[i, labels] = 1
    return x, y


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_a_batch_gives_what_dense_rows_give(chosen):
    """Model, loss and precision of the sparse form, empty rows and rows with no label included."""
    rows = [ROWS[i] for i in chosen]
    batch, (x, y) = dataset(ROWS).__getitems__(chosen), dense(rows)
    assert batch.size == len(rows)
    model = SparseMLP(5, 3, hidden=4)
    logits = model(batch)
    hidden = torch.relu(x @ model.embedding.weight + model.bias)
    torch.testing.assert_close(logits, hidden @ model.output.weight.T + model.output.bias)
    target = y / y.sum(dim=1, keepdim=True).clamp(min=1)
    loss = multilabel_cross_entropy(logits, batch.labels, batch.label_rows)
    torch.testing.assert_close(loss, -(target * torch.log_softmax(logits, dim=1)).sum(dim=1).mean())
    metric = PrecisionAtOne()
    metric.update(logits, batch.labels, batch.label_rows)
    hits = y[torch.arange(len(rows)), logits.argmax(dim=1)]
    assert metric.compute().item() == pytest.approx(hits.mean().item())


def test_the_first_layer_has_a_sparse_gradient():
    model, data = SparseMLP(5, 3, hidden=4), dataset(ROWS)
    (batch,) = sparse_loader(data, 4)
    model.training_step(batch, 0).backward()
    gradient = model.embedding.weight.grad
    assert gradient.is_sparse
    assert sorted(gradient.coalesce().indices()[0].tolist()) == [0, 1, 2, 3, 4]


def test_the_loader_draws_whole_batches():
    batches = list(sparse_loader(dataset(ROWS), 3))
    assert [batch.size for batch in batches] == [3, 1]
    assert batches[1].indices.tolist() == [1, 2, 4]


HEADER = "4 5 3\n"
LINES = "1,2 0:1.0 4:0.5\n0\n 3:2.0\n2 1:0.25 2:0.5 4:1.0\n"


@pytest.mark.parametrize("header", [HEADER, ""], ids=["with-header", "without"])
def test_a_file_is_read_as_it_is_written(tmp_path, header):
    path = tmp_path / "data.txt"
    path.write_text(header + LINES)
    found, expected = load_libsvm(path), dataset(ROWS)
    assert (len(found), found.num_features, found.num_classes) == (4, 5, 3)
    for name in ("indptr", "indices", "values", "label_indptr", "labels"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_the_header_says_how_many_there_are_and_arguments_overrule_it(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("4 90 80\n" + LINES)
    found = load_libsvm(path)
    assert (found.num_features, found.num_classes) == (90, 80)
    found = load_libsvm(path, num_features=10, num_classes=20)
    assert (found.num_features, found.num_classes) == (10, 20)


def test_bad_files_and_arrays(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("4 5 2\n" + LINES)
    with pytest.raises(ValueError, match="labels from 0 to 2 do not fit in 2"):
        load_libsvm(path)
    path.write_text("no such format\n")
    with pytest.raises(ValueError, match="could not convert"):
        load_libsvm(path)
    with pytest.raises(ValueError, match="1 values for 2 non-zeros"):
        SparseMultiLabelDataset([0, 2], [0, 1], [1.0], [0, 0], [], 5, 3)
    with pytest.raises(ValueError, match="rows that end at 3"):
        SparseMultiLabelDataset([0, 3], [0, 1], [1.0, 2.0], [0, 0], [], 5, 3)
