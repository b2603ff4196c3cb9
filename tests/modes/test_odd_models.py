"""Models that are unlike most, under every way of sending gradients: each trains as its reference, or is refused.

A mode that is exact gives the weights of one process on the same batches. The others lose something on the way: there
the loss falls, and replicas are the same bit by bit. What a mode cannot send is refused at set-up, with the cure.
"""

import logging
import re
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy, LookAheadCallback
from lightning_hetero.data import PermutationStream
from tests.helpers import trainer_of
from tests.ranks import run_ranks

TOTAL, STEPS_AN_EPOCH, WIDTH = 8, 25, 32
KINDS = {
    "shapes": ("scalar", "empty", "tied", "embedding dense", "mixed dtypes", "channels last"),
    "embedding sparse": ("embedding sparse",),
    "unused": ("unused",),
    "changed": ("frozen", "unfrozen", "added"),
    "complex": ("complex",),
}
"""Name of a model, and what it has."""


def points():
    """A regression problem with a category."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOTAL * STEPS_AN_EPOCH, 6, generator=generator, dtype=torch.float64)
    category = torch.randint(0, 12, (len(x), 2), generator=generator)
    return TensorDataset(x, category, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * category[:, :1] - 1.0)


class Odd(L.LightningModule):
    """A perceptron, and what a kind adds to it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.has, self.losses = KINDS.get(kind, (kind,)), []
        self.first, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.extra = None
        if "scalar" in self.has:
            self.scale = nn.Parameter(torch.tensor(0.1))
        if "empty" in self.has:
            self.nothing = nn.Parameter(torch.empty(0, 3))
        if "tied" in self.has:
            self.body[3].weight = self.body[1].weight
        if "embedding dense" in self.has or "embedding sparse" in self.has:
            self.emb = nn.Embedding(12, WIDTH, sparse="embedding sparse" in self.has)
        if "unused" in self.has:
            self.sometimes = nn.Linear(6, 1)
        if "channels last" in self.has:
            self.conv = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
            self.out = nn.Linear(16, 1)
        if "complex" in self.has:
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.double()
        if "mixed dtypes" in self.has:
            self.head.float()
        if "frozen" in self.has:
            self.first.requires_grad_(False)

    def grow(self, seed):
        """Another layer."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.extra = nn.Linear(6, 1).double()

    def forward(self, x, category, number):
        h = self.first(x)
        if hasattr(self, "emb"):
            h = h + self.emb(category).sum(1)
        out = self.head(self.body(h).tanh().to(self.head.weight.dtype)).double()
        if "scalar" in self.has:
            out = out * self.scale.exp()
        if "empty" in self.has:
            out = out + self.nothing.sum()
        if "unused" in self.has and number % 2:
            out = out + self.sometimes(x)
        if "channels last" in self.has:
            images = x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last)
            out = out + self.out(self.conv(images).flatten(1))
        if "complex" in self.has:
            out = out + (x * self.phase).sum(1, keepdim=True).abs()
        return out if self.extra is None else out + self.extra(x)

    def training_step(self, batch, batch_idx):
        x, category, y = batch
        loss = nn.functional.mse_loss(self(x, category, batch_idx), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.5)

    def flat(self):
        """All weights as one vector of float64."""
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in self.parameters()]
        return torch.cat([p.detach().double().flatten() for p in parts]).numpy()


def one_process(kind, steps, change):
    """Weights and losses of one process on the same batches."""
    model, data, order = Odd(kind), points(), None
    if "unfrozen" in model.has:
        model.body.requires_grad_(False)
    optimizer = model.configure_optimizers()
    for step in range(steps):
        epoch, number = divmod(step, STEPS_AN_EPOCH)
        if number == 0:
            order = list(PermutationStream(len(data), shuffle=True, seed=0).indices(epoch))
        if step == change and "unfrozen" in model.has:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.02})
        if step == change and "added" in model.has:
            model.grow(0)
            optimizer.add_param_group({"params": list(model.extra.parameters())})
        optimizer.zero_grad()
        model.training_step(data[order[number * TOTAL : (number + 1) * TOTAL]], number).backward()
        optimizer.step()
    return model.flat(), model.losses


# every mode

STEPS = 100
CHANGE = 25  # the step at which layers are unfrozen or added
EPOCHS = STEPS // STEPS_AN_EPOCH
FEW = {"compression": "block_topk(density=0.1, block=4)"}

MODES = {
    "plain": {},
    "block top-k": FEW,
    "sparse optimizer": {**FEW, "sparse_optimizer": True},
    "look-ahead": {"staleness": 1},
    "powersgd": {"compression": "powersgd(rank=1, start=4)"},
    "stale block top-k": {**FEW, "staleness": 1},
}
EXACT = ("plain", "hierarchy")
HIERARCHY = {"hierarchy": {"hierarchy": [[0, 1], [2]]}}

ANY = [mode for mode in (*MODES, "hierarchy") if mode != "plain"]
REFUSED = {
    "embedding sparse": dict.fromkeys(ANY, "emb.weight.*sparse=False"),
    "unused": dict.fromkeys(("look-ahead", "stale block top-k"), "find_unused_parameters"),
    "complex": {
        **dict.fromkeys(("block top-k", "sparse optimizer", "powersgd", "stale block top-k"), "phase"),
        **dict.fromkeys(("look-ahead",), "phase.*staleness=0"),
    },
}


class Unfreeze(BaseFinetuning):
    """As users unfreeze a layer: Lightning's callback, at the beginning of the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == CHANGE // STEPS_AN_EPOCH:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.02)


class Add(Callback):
    """A layer that joins the model in the run, other on each rank until then."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == CHANGE:
            pl_module.grow(trainer.global_rank)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.extra.parameters())})


class Delay(Callback):
    """What a low-bandwidth link would make ranks decide on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        late = trainer.strategy.engine.hook_state.staleness
        if trainer.global_step == 5:
            late.make_all_stale()
            late.control_externally(True)


class Watch(Callback):
    """Weights every so many steps."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step % 50 == 0:
            self.weights.append(pl_module.flat())


def callbacks(kind, mode):
    has = KINDS.get(kind, (kind,))
    changes = [make() for name, make in (("unfrozen", Unfreeze), ("added", Add)) if name in has]
    delays = {"look-ahead": [Delay(), LookAheadCallback()], "stale block top-k": [Delay()]}
    return [*changes, *delays.get(mode, [])]


def _train(kind, mode, settings, world_size):
    model, watch = Odd(kind), Watch()
    sizes = {2: [6, 2], 3: [3, 4, 1]}[world_size]
    strategy = HeteroDDPStrategy(local_batch_sizes=sizes, find_unused_parameters=kind == "unused", **settings)
    trainer = trainer_of(strategy, world_size, max_epochs=EPOCHS, callbacks=[*callbacks(kind, mode), watch])
    trainer.fit(model, DataLoader(points(), 4, shuffle=True))
    return {"weights": watch.weights, "end": model.flat(), "losses": model.losses, "steps": trainer.global_step}


def _modes(rank, kind, modes, world_size):
    """Each mode in turn: what came of it, or what was raised."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_hetero").setLevel(logging.ERROR)
    found = {}
    for mode, settings in modes.items():
        try:
            found[mode] = _train(kind, mode, settings, world_size)
        except Exception as error:  # noqa: BLE001 - what it says is looked at
            found[mode] = f"{type(error).__name__}: {error}"
    return found


def check(kind, mode, results):
    """Trained as it has to be, or refused on all ranks as it has to be."""
    if mode in REFUSED.get(kind, {}):
        for result in results:
            assert isinstance(result, str), f"{kind}, {mode}: was not refused"
            assert re.match(f"(ValueError|MisconfigurationException): .*{REFUSED[kind][mode]}", result), result
        return
    for result in results:
        assert not isinstance(result, str), f"{kind}, {mode}: {result}"
        assert result["steps"] == STEPS
        for own, others in zip(result["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, others, err_msg=f"{kind}, {mode}: replicas differ")
        np.testing.assert_array_equal(result["end"], results[0]["end"])
    if mode in EXACT:
        weights = one_process(kind, STEPS, CHANGE)[0]
        tolerance = 1e-4 if "mixed dtypes" in KINDS.get(kind, (kind,)) else 1e-10
        np.testing.assert_allclose(results[0]["end"], weights, rtol=tolerance, atol=tolerance)
    first, last = (np.mean([r["losses"][part] for r in results]) for part in (slice(25), slice(-25, None)))
    assert last < 0.7 * first, f"{kind}, {mode}: the loss went from {first} to {last}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_trains_it_or_refuses_it(kind):
    for ranks, modes in ((2, MODES), (3, HIERARCHY)):
        results = run_ranks(_modes, ranks, kind, modes, ranks, start="pool" if ranks == 2 else "fork", timeout=240)
        for mode in modes:
            check(kind, mode, [result[mode] for result in results])
