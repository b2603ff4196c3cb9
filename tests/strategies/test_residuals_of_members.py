"""What compression has not sent yet stays with the workers that go on: no gradient is lost, and none counted twice."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from tests.kept import run_kept

SLOTS, SAMPLES, LOCAL, WIDTH, RATE = 3, 120, 4, 64, 0.1


class Inputs(Dataset):
    """The sum of gradients of an epoch is the sum of these, whatever the weights are."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))


class Scores(L.LightningModule):
    """A loss that is linear in the weights; in one step the messages of all workers do not arrive."""

    def __init__(self, fails):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(WIDTH))
        self.fails, self.done = fails, 0

    def training_step(self, x, batch_idx):
        if self.trainer.global_step == 5 and self.fails:
            self.fails = False
            self.trainer.strategy.engine.compression.averager.path.receive = _connection_lost
        self.done += 1
        return (x @ self.weights).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def _connection_lost(averager, sent):
    raise RuntimeError("gloo: Connection closed by peer")


def _train(folder, fails):
    strategy = HeteroDDPStrategy(
        compression=BlockTopK(density=0.25, block=8, warmup_steps=0), local_batch_sizes=(4,) * 3
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=SLOTS,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Scores(fails)
    trainer.fit(model, DataLoader(Inputs(), batch_size=LOCAL, shuffle=True))
    residual = strategy.engine.compression.state_dict_of_rank()["residuals"]["weights"]
    found = {"weights": model.weights.detach(), "residual": residual, "done": model.done}
    torch.save(found, folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_not_sent_is_neither_lost_nor_counted_twice(tmp_path, fails):
    assert run_kept(_train, SLOTS, tmp_path, fails) == [0] * SLOTS
    ranks = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))]
    steps = SAMPLES // (SLOTS * LOCAL)
    assert [rank["done"] for rank in ranks] == [steps + fails] * SLOTS, "the step that failed is done again"
    unsent = torch.stack([rank["residual"] for rank in ranks]).sum(0)
    assert unsent.abs().max() > 0.1, "else this test would see nothing"
    everything = torch.stack([Inputs()[i] for i in range(SAMPLES)]).sum(0) / (SLOTS * LOCAL)
    for rank in ranks:
        torch.testing.assert_close(-rank["weights"] / RATE + unsent, everything, rtol=1e-5, atol=1e-5)
