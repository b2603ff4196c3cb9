"""Sharded models (``hetero_fsdp``) that use their parameters in unusual ways: gradients of one process, or an error."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_hetero import HeteroFSDPStrategy
from lightning_hetero.strategies._lightning.fsdp.sharding import networks_of
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of

D = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command|ignore::FutureWarning", "ignore::UserWarning")


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Sharded(Regressor):
    validates = False

    def on_before_optimizer_step(self, optimizer):
        """Keep no gradients: a parameter may have none."""

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def val_dataloader(self):
        return DataLoader(Points(8), 4) if self.validates else []

    def flat(self):
        return torch.cat([whole(p).detach().flatten() for p in self.parameters()])


class Router(nn.Module):
    """Two experts, each for some samples, and one parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.unused = (nn.Linear(5, 5, dtype=D) for _ in range(3))
        self.head = nn.Linear(5, 1, dtype=D)

    def forward(self, x):
        left = x[:, 0] > 0
        for expert, mine in ((self.left, left), (self.right, ~left)):
            if mine.any():
                x = x.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.head(x)


class Experts(Sharded):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = Router()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Adversarial(Sharded):
    """Needs the gradient of its input for the loss."""

    def loss(self, batch):
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(nn.functional.mse_loss(self(x), batch[1], reduction="sum"), x)
        return nn.functional.mse_loss(self(batch[0] + 0.1 * slope.sign()), batch[1])


class Gan(Sharded):
    """Toggles its optimizers, as Lightning's documentation does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 5)).double()
        self.critic = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            fake = self.net(batch[0])
            made = nn.functional.softplus(-self.critic(fake) if optimizer is first else self.critic(fake.detach()))
            optimizer.zero_grad()
            self.manual_backward(made.mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.net, self.critic)]


class Probe(Sharded):
    """Looks at its output between the backward pass and the optimizer step."""

    def on_after_backward(self):
        with torch.no_grad():
            self(torch.ones(2, 5, dtype=D))


class Unfrozen(Sharded):
    """Trains its first layer from the second epoch on, and clamps its weights, both after a validation."""

    validates = True

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.trainer.current_epoch > 0)

    def on_validation_epoch_end(self):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)


CASES = {
    "experts, a sample per rank": (Experts, (1, 1), 1),
    "experts, accumulated": (Experts, (2, 1), 2),
    "experts, one rank without samples": (Experts, (3, 0), 1),
    "gradient of the input": (Adversarial, (6, 2), 1),
    "toggled optimizers": (Gan, (6, 2), 1),
    "a look at the model before the step": (Probe, (6, 2), 1),
    "unfrozen after a validation": (Unfrozen, (6, 2), 1),
}


def _weights(rank, sizes):
    """Weights at the end of each case, on one process or split."""
    found = {}
    for name, (kind, split, accumulated) in CASES.items():
        alone = "ddp_find_unused_parameters_true"
        strategy = alone if sizes == 1 else HeteroFSDPStrategy(local_batch_sizes=list(split))
        manual = {} if kind is Gan else {"accumulate_grad_batches": accumulated}
        model, trainer = kind(), trainer_of(strategy, sizes, **manual)
        trainer.fit(model, DataLoader(Points(24), sum(split) // sizes, shuffle=True))
        found[name] = model.flat().numpy()
    return found


@pytest.fixture(scope="module")
def ends():
    (one,) = run_ranks(_weights, 1, 1)
    return one, run_ranks(_weights, 2, 2)


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_one_process(ends, name):
    """With experts, ranks have gradients of different parameters, and some steps have none of an expert at all."""
    one, ranks = ends
    for rank in ranks:
        torch.testing.assert_close(torch.from_numpy(rank[name]), torch.from_numpy(one[name]), rtol=1e-10, atol=1e-11)


class Scaled(Sharded):
    """Has a frozen parameter without shards, which is trained from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=D), requires_grad=False)

    def forward(self, x):
        return self.net(x) * self.scale

    def on_train_epoch_start(self):
        self.scale.requires_grad_(self.trainer.current_epoch > 0)


class Grown(Sharded):
    """Gets a further layer in the run."""

    def forward(self, x):
        return self.late(self.net(x)) if hasattr(self, "late") else self.net(x)

    def on_train_epoch_start(self):
        self.late = nn.Linear(1, 1, dtype=D)
        self.trainer.optimizers[0].add_param_group({"params": list(self.late.parameters())})


def _fails(rank, kind):
    trainer_of(HeteroFSDPStrategy(local_batch_sizes=[6, 2]), 2).fit(kind(), DataLoader(Points(16), 4))


@pytest.mark.parametrize(("kind", "name"), [(Scaled, "scale"), (Grown, "late.weight")])
def test_training_a_parameter_without_shards_is_an_error_on_every_rank(kind, name):
    errors = run_ranks(_fails, 2, kind, expect_errors=True)
    assert [error for _, error, _ in errors] == ["MisconfigurationException"] * 2
    assert all(f"the parameter {name} is trained from now on, and it is not sharded" in text for _, _, text in errors)


@pytest.mark.parametrize("container", [nn.ParameterList, lambda ps: nn.ParameterDict({"0": ps[0]})])
def test_parameters_in_a_container_without_forward_are_refused_by_name(container):
    model = Sharded()
    model.weights = container([torch.ones(2)])
    with pytest.raises(ValueError, match=r"the parameter weights\.0 belongs to the LightningModule itself"):
        networks_of(model)


class Looks(Sharded):
    """Its own sharding leaves the outermost module gathered after an evaluation."""

    def configure_model(self):
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.trainer.strategy.data_parallel_mesh)

    def test_step(self, batch, batch_idx):
        self.log("t", self.loss(batch), sync_dist=True)

    validation_step = test_step


def _calls(rank, model, calls):
    module, data = model(), DataLoader(Points(16), 4)
    trainer = trainer_of(HeteroFSDPStrategy(), 2, max_epochs=1)
    for call in calls:
        getattr(trainer, call)(module, data)


@pytest.mark.parametrize("model", [Looks, type("Default", (Looks,), {"configure_model": Sharded.configure_model})])
@pytest.mark.parametrize("calls", [("fit", "test"), ("validate", "fit"), ("test", "test")], ids="-".join)
def test_a_trainer_may_evaluate_before_and_after(model, calls):
    run_ranks(_calls, 2, model, calls)


def _deeper(rank):
    """Rank 1 has a layer more than rank 0."""
    model = Sharded()
    if rank == 1:
        model.more = nn.Linear(3, 3, dtype=torch.float64)
    fit(rank, HeteroFSDPStrategy(), 2, 4, model=model)


def test_models_that_differ_between_ranks_are_refused():
    errors = run_ranks(_deeper, 2, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("the model and how it is sharded" in message for *_, message in errors)
