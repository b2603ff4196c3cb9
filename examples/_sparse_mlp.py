"""The model of the sparse examples and benchmarks: a 3-layer perceptron whose input is never dense."""

import lightning as L
import torch
from torch import nn

from lightning_hetero.data import SparseBatch
from lightning_hetero.datasets.multilabel_loss import PrecisionAtOne, multilabel_cross_entropy


class SparseMLP(L.LightningModule):
    """Sparse features, one hidden layer, softmax over all classes.

    The first layer is an ``EmbeddingBag``: its work and its gradient go with the non-zeros of a batch, which is why the
    time of a batch cannot be told from its size.
    """

    def __init__(self, num_features: int, num_classes: int, hidden: int = 128, lr: float = 1.0, sparse: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.EmbeddingBag(num_features, hidden, mode="sum", sparse=sparse)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.output = nn.Linear(hidden, num_classes)
        with torch.no_grad():
            self.embedding.weight.normal_(0, hidden**-0.5, generator=generator)
            self.output.weight.normal_(0, hidden**-0.5, generator=generator)
            self.output.bias.zero_()
        self.lr = lr
        self.precision_at_one = PrecisionAtOne()

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        hidden = self.embedding(batch.indices, batch.offsets, per_sample_weights=batch.values)
        return self.output(torch.relu(hidden + self.bias))

    def training_step(self, batch: SparseBatch, batch_idx: int) -> torch.Tensor:
        return multilabel_cross_entropy(self(batch), batch.labels, batch.label_rows)

    def validation_step(self, batch: SparseBatch, batch_idx: int) -> None:
        self.precision_at_one.update(self(batch), batch.labels, batch.label_rows)
        self.log("precision_at_1", self.precision_at_one, on_step=False, on_epoch=True, batch_size=batch.size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
