"""Modules and trainers of every kind under ``hetero_ddp`` and ``hetero_fsdp``: weights of Lightning on one process.

``CASES`` has a row for each; docs/limits.md has more of them (tests/test_limits.py).
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, HeteroFSDPStrategy
from tests.helpers import Points, covered, trainer_of
from tests.loops import SAMPLES, Sharded
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
D = torch.float64


class Quiet(Sharded):
    """Keeps no gradients: a parameter may have none."""

    def on_before_optimizer_step(self, optimizer):
        """Nothing."""


# how the optimizer is driven


class Adversaries(Quiet):
    """Two networks, two optimizers that are toggled as Lightning's documentation does, two backward passes a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 5)).double()
        self.critic = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch_idx, self.counted(batch)))
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            fake = self.net(batch[0])
            made = nn.functional.softplus(-self.critic(fake) if optimizer is first else self.critic(fake.detach()))
            optimizer.zero_grad()
            self.manual_backward(made.mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def counted(self, batch):
        size = getattr(getattr(self.trainer.strategy, "engine", None), "own_size", None)
        return [] if size == 0 else batch[2].tolist()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.net, self.critic)]


# which parameters there are, and which a batch uses


class Shapes(Quiet):
    """A scalar, an empty parameter, a shared one, one in the order of channels last, and one of another type."""

    def __init__(self):
        super().__init__()
        self.net, self.again = nn.Linear(5, 5, dtype=D), nn.Linear(5, 5, dtype=D)
        self.again.weight = self.net.weight
        self.table, self.head = nn.Embedding(SAMPLES, 5, dtype=D), nn.Linear(4, 1)
        self.conv = nn.Conv2d(2, 4, (2, 1), dtype=D).to(memory_format=torch.channels_last)
        self.scale, self.empty = nn.Parameter(torch.tensor(0.1, dtype=D)), nn.Parameter(torch.empty(0, 3, dtype=D))

    def loss(self, batch):
        x, y, index = batch
        hidden = self.again(self.net(x + self.table(index)).tanh()).tanh()
        images = hidden[:, :4].reshape(-1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
        out = self.head(self.conv(images).flatten(1).float()).double() * self.scale.exp() + self.empty.sum()
        return nn.functional.mse_loss(out, y)


class Complex(Quiet):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x):
        return self.net(x) + (x * self.phase).sum(1, keepdim=True).abs()


class Grows(Quiet):
    """Another layer from the second epoch on, which ranks begin with different weights."""

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            with torch.random.fork_rng():
                torch.manual_seed(self.global_rank)
                self.more = nn.Linear(5, 1, dtype=D)
            self.optimizers().add_param_group({"params": list(self.more.parameters())})

    def forward(self, x):
        return self.net(x) + (self.more(x) if hasattr(self, "more") else 0.0)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


class Finetuned(Quiet):
    """Its first layer joins in the second epoch, as by Lightning's callback."""

    def configure_callbacks(self):
        return [Unfreeze()]

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


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


class Experts(Quiet):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = Router()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Unfrozen(Quiet):
    """Trains its first layer from the second epoch on, and clamps its weights, both after a validation."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.trainer.current_epoch > 0)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def val_dataloader(self):
        return DataLoader(Points(8), 4)

    def on_validation_epoch_end(self):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)


# what happens in a forward pass


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


class Centered(Quiet):
    """Subtracts the global mean of the outputs: an operation that crosses ranks inside the model."""

    def loss(self, batch):
        x, y, _ = batch
        out = self(x)
        total, count = out.sum().reshape(1), torch.tensor([float(len(x))], dtype=out.dtype)
        if getattr(self.trainer.strategy, "engine", None) is not None and self.trainer.strategy.engine.own_size == 0:
            total, count = total * 0, count * 0
        stacked = SumOverRanks.apply(torch.cat([total, count]))
        return nn.functional.mse_loss(out - stacked[0] / stacked[1], y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 9, dtype=D), nn.Linear(9, 5, dtype=D)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Body(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Deep(Sharded):
    def __init__(self, compiled=False):
        super().__init__()
        self.body = Body()
        if compiled:
            self.body.compile(dynamic=True, backend="aot_eager")

    def forward(self, x):
        return self.net(self.body(x))


def compiled():
    return Deep(compiled=True)


class ShardsItself(Sharded):
    def configure_model(self):
        mesh = getattr(self.trainer.strategy, "data_parallel_mesh", None)
        if mesh is not None and not isinstance(self.net, FSDPModule):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh)


def single():
    return Sharded(dtype=torch.float32)


# all of them


@dataclass(frozen=True)
class Case:
    """A module, with the settings of each strategy that it is for."""

    model: object
    ddp: dict | None = field(default_factory=dict)
    fsdp: dict | None = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    sizes: tuple[int, ...] = (7, 3)
    tolerance: float = 1e-12


UNUSED, HALF = {"find_unused_parameters": True}, {"precision": "bf16-mixed"}
CASES = {
    "adversaries": Case(Adversaries, UNUSED),
    "experts, accumulated": Case(
        Experts, UNUSED, trainer={"accumulate_grad_batches": 2}, sizes=(2, 1, 1), tolerance=1e-10
    ),
    "experts, none on a rank": Case(Experts, UNUSED, sizes=(4, 0), tolerance=1e-10),
    "odd parameters": Case(Shapes, fsdp=None, tolerance=1e-4),
    "complex": Case(Complex, fsdp=None),
    "another layer": Case(Grows, fsdp=None),
    "finetuned": Case(Finetuned, fsdp=None),
    "unfrozen": Case(Unfrozen),
    "centered": Case(Centered, fsdp=None, sizes=(7, 2, 1)),
    "static graph": Case(Sharded, {"static_graph": True}, None),
    "views of buckets": Case(Sharded, {"gradient_as_bucket_view": True}, None),
    "clipped values": Case(Sharded, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "recomputed": Case(Deep),
    "compiled": Case(compiled, None, {"auto_wrap_policy": {Block}}),
    "kept gathered": Case(Deep, None, {"reshard_after_forward": False}),
    "shards itself": Case(ShardsItself, None),
    "replicas": Case(Deep, None, {"replicate_size": 2}, sizes=(4, 1, 2, 3)),
    "bfloat16": Case(single, trainer=HALF, tolerance=2e-2),
}
STRATEGIES = {"hetero_ddp": HeteroDDPStrategy, "hetero_fsdp": HeteroFSDPStrategy}
ROWS = [
    (strategy, name)
    for name, case in CASES.items()
    for strategy, given in (("hetero_ddp", case.ddp), ("hetero_fsdp", case.fsdp))
    if given is not None
]


def _fit(case, strategy, ranks):
    model, dtype = case.model(), torch.float32 if case.trainer == HALF else D
    trainer = trainer_of(strategy, ranks, **case.trainer)
    trainer.fit(model, DataLoader(Points(SAMPLES, dtype=dtype), sum(case.sizes) // ranks, shuffle=True))
    found = {"seen": model.seen, "weights": model.flat(), "steps": trainer.global_step}
    parts = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()]
    return {**found, "grads": np.stack([g.numpy() for g in model.grads]) if model.grads else None, "held": sum(parts)}


def _split(rank, rows):
    found = []
    for strategy, name in rows:
        case = CASES[name]
        settings = case.ddp if strategy == "hetero_ddp" else case.fsdp
        try:
            given = STRATEGIES[strategy](local_batch_sizes=list(case.sizes), **settings)
            found.append(_fit(case, given, len(case.sizes)))
        except Exception as error:
            error.add_note(f"in the case {name!r} of {strategy}")
            raise
    return found


@cache
def split(strategy, ranks):
    rows = [row for row in ROWS if row[0] == strategy and len(CASES[row[1]].sizes) == ranks]
    try:
        results = run_ranks(_split, ranks, rows)
    except Exception as error:  # noqa: BLE001 - raised by each case's own test
        return error
    return dict(zip(rows, zip(*results, strict=True), strict=True))


def _alone(rank):
    return {name: _fit(case, "ddp_find_unused_parameters_true", 1) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone():
    return run_ranks(_alone, 1)[0]


@pytest.mark.parametrize(("strategy", "name"), ROWS)
def test_weights_equal_one_process(strategy, name, alone):
    case, expected = CASES[name], alone[name]
    group = split(strategy, len(case.sizes))
    if isinstance(group, Exception):
        raise group
    results = group[strategy, name]
    for epoch in range(2):
        assert covered(results, epoch) == list(range(SAMPLES))
    for result in results:
        assert result["steps"] == expected["steps"]
        for key in ("weights", "grads"):
            if expected[key] is not None:
                np.testing.assert_allclose(result[key], expected[key], rtol=case.tolerance, atol=case.tolerance / 2)
    if strategy == "hetero_fsdp":  # each rank has its own part of the model
        copies = case.fsdp.get("replicate_size", 1)
        assert sum(result["held"] for result in results) == copies * len(expected["weights"])
