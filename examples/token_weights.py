"""Padded sequences whose loss is a mean over tokens: ``weight_fn`` counts the tokens of a batch.

Weighted by samples, a token in a batch of short sequences would count more than one in a batch of long ones. Weighted
by tokens, the gradient is that of the mean over all tokens of the total batch, whatever the split.
"""

import lightning as L
import torch
from _model import SlowSecondWorker, report
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy

PADDING = -100  # the label that cross_entropy leaves out
VOCABULARY = 64


class NextToken(L.LightningModule):
    """Predicts each token from those before it; the loss is the mean over the tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 128)
        self.rnn = nn.GRU(128, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(self.embed(batch["inputs"]))
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), batch["labels"], ignore_index=PADDING)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def count_tokens(batch):
    return (batch["labels"] != PADDING).sum()


def collate(sequences):
    return {
        "inputs": pad_sequence([s[:-1] for s in sequences], batch_first=True),
        "labels": pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=PADDING),
    }


def text(num_sequences=24 * 128):
    """Sequences of 4 to 40 tokens, each token near the one before it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 41, (num_sequences,), generator=generator).tolist()
    return [torch.randint(-2, 4, (n,), generator=generator).cumsum(0) % VOCABULARY for n in lengths]


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroDDPStrategy(weight_fn=count_tokens),
        max_epochs=2,
        callbacks=[SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NextToken(), DataLoader(text(), batch_size=64, shuffle=True, collate_fn=collate))
    report(trainer)
