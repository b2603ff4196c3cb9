"""All-gather of unequal numbers of rows: shapes, order, gradients, errors on every rank; through every front end."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points, Regressor, run_ranks, trainer_of
from tests.loops import SAMPLES, flat_grads, network

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed.nn.functional:FutureWarning"
)  # Lightning's own gather

SIZES = (7, 3)


def rows(rank, sizes, width=2):
    """Numbered over all ranks, so that the order can be seen."""
    first = sum(sizes[:rank])
    return torch.arange(first * width, (first + sizes[rank]) * width, dtype=torch.float64).view(-1, width)


def strategy_of(name, **settings):
    if name == "lightning":
        from lightning_hetero import HeteroDDPStrategy
    else:
        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy
    return HeteroDDPStrategy(**{"local_batch_sizes": SIZES, **settings})


def fabric_of(world_size):
    from lightning.fabric import Fabric

    sizes = (7, 3, 2)[:world_size]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy_of("fabric", local_batch_sizes=sizes))
    fabric.launch()
    return fabric


def _gathers(rank):
    fabric = fabric_of(3)
    pair = dist.new_group([0, 1])
    found = {
        "uneven": fabric.all_gather(rows(rank, (4, 1, 2))),
        "some have none": fabric.all_gather(rows(rank, (0, 3, 0))),
        "one dimension": fabric.all_gather(torch.arange(rank + 1)),
        "equal": fabric.all_gather(rows(rank, (2, 2, 2))),
        "numbers": fabric.all_gather(float(rank)),
        "nested": fabric.all_gather({"a": [torch.full((rank + 1, 1), rank)]})["a"][0],
    }
    if rank < 2:
        found["pair"] = fabric.all_gather(rows(rank, (4, 1)), group=pair)
    errors = []
    for tensor in (
        torch.zeros(2 + rank, 1 + rank),
        torch.zeros(rank + 1, dtype=(torch.int64, torch.bool)[rank % 2]),
        torch.zeros(()) if rank == 0 else torch.zeros(2),
    ):
        with pytest.raises(ValueError, match="do not fit together") as error:
            fabric.all_gather(tensor)
        errors.append(str(error.value))
    found = {name: gathered.tolist() for name, gathered in found.items()} | {"errors": errors}
    fabric.strategy.teardown()
    return found


def test_rows_come_in_the_order_of_the_ranks_and_equal_shapes_are_stacked():
    results = run_ranks(_gathers, 3)
    for rank, found in enumerate(results):
        assert found["uneven"] == [rows(0, (7,)).tolist()]
        assert found["some have none"] == [rows(0, (3,)).tolist()]
        assert found["one dimension"] == [[0, 0, 1, 0, 1, 2]]
        assert found["equal"] == rows(0, (6,)).view(3, 2, 2).tolist()
        assert found["numbers"] == [0.0, 1.0, 2.0]
        assert found["nested"] == [[[0], [1], [1], [2], [2], [2]]]
        if rank < 2:
            assert found["pair"] == [rows(0, (5,)).tolist()]
        assert "rank 0: float32[2, 1], rank 1: float32[3, 2], rank 2: float32[4, 3]" in found["errors"][0]
        assert "rank 0: int64[1], rank 1: bool[2], rank 2: int64[3]" in found["errors"][1]
        assert "rank 0: float32[], rank 1: float32[2], rank 2: float32[2]" in found["errors"][2]


# gradients: a contrastive loss over the samples of all ranks


def views(model, x):
    return nn.functional.normalize(model(x)), nn.functional.normalize(model(0.9 * x + 0.1))


def embedding():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def contrastive(model, x, rank, all_gather):
    """As in docs/what-gets-averaged.md: each sample's second view against those of all ranks, and the other way."""
    first, second = views(model, x)
    others = [all_gather(view, sync_grads=True).flatten(0, 1) for view in (first, second)]
    before = int(all_gather(torch.tensor(len(x)))[:rank].sum())
    labels = before + torch.arange(len(x))
    return nn.functional.cross_entropy(first @ others[1].T, labels) + nn.functional.cross_entropy(
        second @ others[0].T, labels
    )


class Contrastive(Regressor):
    def __init__(self):
        super().__init__(lr=0.0)
        self.net, self.steps, self.outputs, self.shares = embedding(), [], [], []

    def training_step(self, batch, batch_idx):
        x, _, index = batch
        self.indices = index.tolist()
        self.outputs.append(index)
        self.shares.append(self.all_gather(index.double()).mean().item())
        return contrastive(self.net, x, self.global_rank, self.all_gather)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append((flat_grads(self.net), self.indices))

    def on_train_epoch_end(self):
        self.gathered = self.all_gather(torch.cat(self.outputs)).flatten().tolist()

    def on_validation_epoch_start(self):
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.net(batch[0]), batch[2]))

    def on_validation_epoch_end(self):
        outputs, indices = map(torch.cat, zip(*self.validated, strict=True))
        self.evaluated = self.all_gather(outputs).flatten(0, -2), self.all_gather({"at": indices})["at"].flatten()


def _lightning(rank):
    model = Contrastive()
    trainer = trainer_of(strategy_of("lightning", balance_evaluation=True), 2, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, DataLoader(Points(SAMPLES), 5, shuffle=True), DataLoader(Points(31), 4))
    outputs, indices = model.evaluated
    right = torch.allclose(outputs, model.net(Points(31).x[indices]), rtol=1e-12)
    return model.steps, model.gathered, model.shares, (sorted(indices.tolist()), right)


def _fabric(rank):
    fabric = fabric_of(2)
    raw, steps = embedding(), []
    model, loader = fabric.setup(raw), fabric.setup_dataloaders(DataLoader(Points(SAMPLES), 5, shuffle=True))
    for x, _, index in loader:
        raw.zero_grad()
        fabric.backward(contrastive(model, x, rank, fabric.all_gather))
        steps.append((flat_grads(raw), index.tolist()))
    gathered = fabric.all_gather(torch.tensor(sum((indices for _, indices in steps), []))).flatten().tolist()
    fabric.strategy.teardown()
    return steps, gathered


def check_contrastive(results):
    model, data = embedding(), Points(SAMPLES)
    assert len(results[0][0]) == 8
    for (got, first), (same, second) in zip(*(result[0] for result in results), strict=True):
        model.zero_grad()
        one, other = views(model, data.x[first + second])
        labels = torch.arange(len(one))
        loss = nn.functional.cross_entropy(one @ other.T, labels) + nn.functional.cross_entropy(other @ one.T, labels)
        loss.backward()
        np.testing.assert_allclose(got, flat_grads(model), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(got, same)
    assert all(sorted(result[1]) == list(range(SAMPLES)) for result in results)


def test_contrastive_losses_and_gathers_in_every_hook_of_lightning():
    results = run_ranks(_lightning, 2)
    check_contrastive(results)
    for i, step in enumerate(zip(*(result[0] for result in results), strict=True)):
        expected = np.mean(sum((indices for _, indices in step), []))
        np.testing.assert_allclose([result[2][i] for result in results], expected)
    assert all(result[3] == (list(range(31)), True) for result in results)


def test_contrastive_losses_through_fabric():
    check_contrastive(run_ranks(_fabric, 2))


def _accelerate(rank):
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(local_batch_sizes=SIZES))
    model, loader = accelerator.prepare(network(), DataLoader(Points(SAMPLES), 5, shuffle=True))
    seen = []
    for x, y, index in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        seen.append(index)
    everyone = accelerator.gather(torch.cat(seen)).tolist()
    equal = accelerator.gather({"rank": torch.tensor([rank]), "number": torch.tensor(rank)})
    accelerator.end_training()
    return everyone, len(torch.cat(seen)), {name: value.tolist() for name, value in equal.items()}


def test_accelerators_gather_after_a_pass():
    results = run_ranks(_accelerate, 2)
    assert results[0][1] != results[1][1]
    for everyone, _, equal in results:
        assert sorted(everyone) == list(range(SAMPLES))
        assert equal == {"rank": [0, 1], "number": [0, 1]}
