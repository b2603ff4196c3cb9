"""Optimizers that touch the blocks of compressed gradients only: torch's (``sparse_optimizer=True``), and ours."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.optim import SparseAdamW, SparseSGD
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

FEATURES, CLIP = 40, 0.2
FEW = BlockTopK(density=0.05, value_dtype="float32", dense_every=11)
NESTEROV = {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}
KINDS = {
    "decay, ahead": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, True),
    "momentum, later": (torch.optim.SGD, NESTEROV, "later"),
    "adamw, later": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}, "later"),
}
OURS = {"SparseSGD": (SparseSGD, {"lr": 0.01, "momentum": 0.5}), "SparseAdamW": (SparseAdamW, {"lr": 0.01})}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def flat(tensors):
    return torch.cat([(t.to_dense() if t.is_sparse else t).detach().flatten() for t in tensors]).clone()


class Watched(Regressor):
    """Remembers the merged gradients as the optimizer took them, its rates, and the weights it wrote."""

    def __init__(self, cls, settings, bad=None):
        super().__init__()
        self.net, self.cls, self.settings, self.bad = network(), cls, settings, bad
        self.rates, self.written, self.sparse = [], [], []

    def configure_optimizers(self):
        optimizer = self.cls(self.parameters(), **self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == self.bad
        return super().loss(batch) * (float("nan") if bad else 1.0)

    def on_before_optimizer_step(self, optimizer):
        self.before = flat(self.parameters())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *args):
        grads = [p.grad for p in self.parameters()]
        self.sparse.append([g.is_sparse for g in grads])
        self.grads.append(flat(grads))
        changed, touched = flat(self.parameters()) != self.before, self.grads[-1] != 0
        self.written.append(((changed & ~touched).sum().item(), changed.float().mean().item()))


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 10:
            trainer.save_checkpoint(self.path)


def train(model, sparse, ckpt_path=None, **kwargs):
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=sparse)
    trainer = trainer_of(strategy, 2, **{"max_epochs": 2, **kwargs})
    trainer.fit(model, DataLoader(Points(60, features=FEATURES), 2, shuffle=True), ckpt_path=ckpt_path)
    arrays = {name: np.array(getattr(model, name)) for name in ("rates", "sparse", "written")}
    return {**arrays, "weights": model.flat(), "grads": torch.stack(model.grads).numpy()}


def replay(cls, settings, grads, rates):
    """Torch's dense optimizer on the same gradients at the same rates."""
    net = network()
    optimizer = cls(net.parameters(), **settings)
    for gradient, rate in zip(torch.from_numpy(grads), rates, strict=True):
        parts = gradient.split([p.numel() for p in net.parameters()])
        for p, part in zip(net.parameters(), parts, strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return flat(net.parameters()).numpy()


def _trained(rank, folder):
    found = {}
    for kind, (cls, settings, sparse) in KINDS.items():
        found[kind] = train(Watched(cls, settings, bad=7), sparse, gradient_clip_val=CLIP, max_epochs=7)
    for name, (cls, settings) in OURS.items():
        found[name] = train(Watched(cls, settings), False)
    cls, settings, sparse = KINDS["adamw, later"]
    found["whole"] = train(Watched(cls, settings), sparse, callbacks=[Saves(f"{folder}/saved")])
    found["rest"] = train(Watched(cls, settings), sparse, f"{folder}/saved")
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    one, other = run_ranks(_trained, 2, str(folder), timeout=240)
    for name, result in one.items():
        np.testing.assert_array_equal(result["weights"], other[name]["weights"], name)
    return one, folder / "saved"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_dense_optimizer_on_the_same_gradients(kind, trained):
    """With clipping by the norm of the merged gradient, a scheduler, dense steps in between, a step left out."""
    found, (cls, settings, _) = trained[0][kind], KINDS[kind]
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if "adamw" in kind else {"rtol": 1e-9, "atol": 1e-11}
    expected = replay(cls, settings, found["grads"], found["rates"])
    np.testing.assert_allclose(found["weights"], expected, **tolerance)
    steps = np.arange(len(found["grads"]))
    dense = (steps < 2) | (steps % 11 == 0)
    assert (found["sparse"] == ~dense[:, None]).all()
    assert (found["written"][~dense, 0] == 0).all(), "a block that no gradient touched was written"
    assert 0 < found["written"][~dense, 1].mean() < 0.08
    norms = np.linalg.norm(found["grads"], axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 5
    assert norms[7] == 0
    assert len(set(found["rates"])) == 5


def test_our_optimizers_write_what_the_gradient_touches_and_a_resumed_run_goes_on_identically(trained):
    found, path = trained
    for name in OURS:
        written = found[name]["written"][:, 1]
        assert min(written[:2]) > 0.9, "warm-up steps are dense"
        assert 0 < np.mean(np.delete(written, [0, 1, 11, 22])) < 0.1
    np.testing.assert_array_equal(found["rest"]["weights"], found["whole"]["weights"])
    np.testing.assert_array_equal(found["rest"]["rates"], found["whole"]["rates"][10:])
    state = torch.load(path, weights_only=True)["optimizer_states"][0]
    torch.optim.AdamW(network().parameters()).load_state_dict(state)


class Freezing(BaseFinetuning):
    """Freezes the first layer and unfreezes it, with saves in between, or adds the one that was left out."""

    def __init__(self, left_out):
        super().__init__()
        self.left_out, self.frozen, self.moved = left_out, [], []

    def freeze_before_training(self, pl_module):
        """Nothing yet."""

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2 and self.left_out:
            self.unfreeze_and_add_param_group(pl_module.net[2], optimizer, lr=0.01)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in (20, 40) and not self.left_out:
            pl_module.net[0].requires_grad_(trainer.global_step == 40)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step % 5 == 0:
            trainer.optimizers[0].state_dict()
        if trainer.global_step > 20:
            (self.frozen if trainer.global_step <= 40 else self.moved).append(
                flat(pl_module.net[0].parameters()).numpy()
            )


class Plain(Watched):
    """Remembers nothing; without its last layer in the optimizer at first, if that is left out."""

    def __init__(self, cls, settings, left_out=False):
        super().__init__(cls, settings)
        self.left_out = left_out
        self.on_before_optimizer_step = self.on_train_batch_end = lambda *args: None

    def configure_optimizers(self):
        return self.cls((self.net[0] if self.left_out else self).parameters(), **self.settings)


def _events(rank):
    found = []
    for cls, settings, sparse in KINDS.values():
        for left_out in (False, True):
            model, freezing = Plain(cls, settings, left_out), Freezing(left_out)
            how = {"compression": FEW, "sparse_optimizer": sparse, "find_unused_parameters": not left_out}
            trainer = trainer_of(
                HeteroDDPStrategy(local_batch_sizes=[3, 1], **how), 2, max_epochs=4, callbacks=[freezing]
            )
            trainer.fit(model, DataLoader(Points(60, features=FEATURES), 2, shuffle=True))
            assert len(trainer.optimizers[0].param_groups) == 1 + left_out
            found.append((left_out, model.flat(), freezing.frozen, freezing.moved))
    return found


def test_layers_may_be_frozen_and_groups_added_in_the_run():
    """Also by Lightning's own callback: replicas stay equal, and what is frozen stays as it is."""
    for (left_out, weights, frozen, moved), (_, other, *_) in zip(*run_ranks(_events, 2, timeout=200), strict=True):
        np.testing.assert_array_equal(weights, other)
        assert np.isfinite(weights).all()
        if not left_out:
            assert len(frozen) == 20
            assert all(np.array_equal(frozen[0], later) for later in frozen[1:])
            assert not np.array_equal(moved[-1], frozen[0])


class Wrong(Plain):
    def __init__(self, what):
        super().__init__(torch.optim.SGD, {"lr": 0.1})
        self.what, self.automatic_optimization = what, what != "manual"

    def configure_optimizers(self):
        parameters = list(self.parameters())
        if self.what == "other":
            return torch.optim.Adam(parameters)
        return torch.optim.SGD(
            [*parameters, nn.Parameter(torch.zeros(3))] if self.what == "foreign" else parameters, lr=0.1
        )


WRONG = {"manual": "sparse_optimizer", "other": "Adam", "foreign": "1 parameters"}


def _wrong(rank):
    for what, match in WRONG.items():
        strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=True)
        with pytest.raises(Exception, match=match):
            trainer_of(strategy, 2).fit(Wrong(what), DataLoader(Points(8, features=FEATURES), 2))
    return True


def test_what_cannot_work_is_refused_on_every_rank():
    assert run_ranks(_wrong, 2, timeout=240) == [True, True]
    for settings in ({}, {"compression": "fp16"}, {"compression": "powersgd"}):
        with pytest.raises(ValueError, match="sparse_optimizer=True"):
            HeteroDDPStrategy(**settings, sparse_optimizer=True)
    with pytest.raises(ValueError, match="sparse_optimizer='never'"):
        HeteroDDPStrategy(compression="block_topk", sparse_optimizer="never")


def _loop(rank, front):
    """Gradients and weights after a few steps under Fabric or Accelerate, clipped by the front end's own means."""
    settings = {"local_batch_sizes": [3, 1], "compression": FEW, "sparse_optimizer": "later"}
    net, loader = network(), DataLoader(Points(60, features=FEATURES), 2, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), **NESTEROV)
    if front == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

        api = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings))
        api.launch()
        model, theirs = api.setup(net, optimizer)
        loader, clip = api.setup_dataloaders(loader), lambda: api.clip_gradients(model, theirs, max_norm=CLIP)
    else:
        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        api = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
        model, theirs, loader = api.prepare(net, optimizer, loader)
        clip = lambda: api.clip_grad_norm_(model.parameters(), CLIP)  # noqa: E731
    grads = []
    for x, y, _ in loader:
        theirs.zero_grad()
        api.backward(nn.functional.mse_loss(model(x), y))
        clip()
        theirs.step()
        grads.append(flat([p.grad for p in net.parameters()]))
    optimizer.state_dict()
    return flat(net.parameters()).numpy(), torch.stack(grads).numpy()


@pytest.mark.parametrize("front", ["fabric", "accelerate"])
def test_fabric_and_accelerate_step_and_clip_likewise(front):
    (weights, grads), (other, _) = run_ranks(_loop, 2, front, env={"OMP_NUM_THREADS": "1"}, timeout=240)
    np.testing.assert_array_equal(weights, other)
    expected = replay(torch.optim.SGD, NESTEROV, grads, [NESTEROV["lr"]] * len(grads))
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-11)
    norms = np.linalg.norm(grads, axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 3
    assert (grads[3] != 0).mean() < 0.08
