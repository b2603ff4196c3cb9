"""Torch's own SGD and AdamW on the blocks of compressed gradients, in real processes: ``sparse_optimizer=True``."""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from tests.helpers import Points, Regressor, run_ranks, trainer_of

FEATURES, CLIP = 40, 0.2
FEW = BlockTopK(density=0.05, value_dtype="float32", dense_every=11)
KINDS = {
    "decay, ahead": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, True),
    "momentum, later": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}, "later"),
    "adamw, later": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}, "later"),
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).clone()


class Watched(Regressor):
    """Remembers the merged gradients as the optimizer took them, its rates, and the share of weights it wrote."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = network(), kind
        self.rates, self.written, self.sparse, self.bad = [], [], [], {}

    def configure_optimizers(self):
        cls, settings, _ = KINDS[self.kind]
        optimizer = cls(self.parameters(), **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch):
        loss = super().loss(batch)
        bad = self.trainer.global_rank == 1 and self.trainer.global_step in self.bad
        return loss * self.bad[self.trainer.global_step] if bad else loss

    def on_before_optimizer_step(self, optimizer):
        self.before = flat(self.parameters())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *args):
        grads = [p.grad for p in self.parameters()]
        self.sparse.append([g.is_sparse for g in grads])
        self.grads.append(flat([g.to_dense() if g.is_sparse else g for g in grads]))
        changed, touched = flat(self.parameters()) != self.before, self.grads[-1] != 0
        self.written.append(((changed & ~touched).sum().item(), changed.float().mean().item()))


def _fit(rank, kind, kwargs):
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    model, ckpt_path = Watched(kind), kwargs.pop("ckpt_path", None)
    model.bad = kwargs.pop("bad", {})
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=KINDS[kind][2])
    trainer = trainer_of(strategy, 2, **{"max_epochs": 2, **kwargs})
    loader = DataLoader(Points(60, features=FEATURES), 2, shuffle=True)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "weights": model.flat(),
        "grads": torch.stack(model.grads).numpy(),
        "rates": model.rates,
        "sparse": np.array(model.sparse),
        "written": np.array(model.written),
        "dense sum": "merged" in vars(strategy.engine.compression.averager.encoder),
        "optimizer": type(trainer.optimizers[0]).__name__,
    }


def replay(kind, result):
    """Torch's dense optimizer on the same gradients at the same rates."""
    cls, settings, _ = KINDS[kind]
    net = network()
    optimizer = cls(net.parameters(), **settings)
    for gradient, rate in zip(torch.from_numpy(result["grads"]), result["rates"], strict=True):
        parts = gradient.split([p.numel() for p in net.parameters()])
        for p, part in zip(net.parameters(), parts, strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return flat(net.parameters()).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_dense_optimizer_on_the_same_gradients(kind):
    """With clipping by the norm of the merged gradient, a scheduler, dense steps in between, a step left out."""
    a, b = run_ranks(_fit, 2, kind, {"gradient_clip_val": CLIP, "bad": {7: float("nan")}, "max_epochs": 7})
    np.testing.assert_array_equal(a["weights"], b["weights"])
    np.testing.assert_array_equal(a["grads"], b["grads"])
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if "adamw" in kind else {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(a["weights"], replay(kind, a), **tolerance)
    steps = np.arange(len(a["grads"]))
    assert len(steps) >= 100
    dense = (steps < 2) | (steps % 11 == 0)
    assert (a["sparse"] == ~dense[:, None]).all()
    assert not a["dense sum"], "the sum was never a tensor of the model's size"
    assert a["optimizer"] in kind.upper().replace("DECAY", "SGD").replace("MOMENTUM", "SGD").replace("ADAMW", "AdamW")
    assert (a["written"][~dense, 0] == 0).all(), "a block that no gradient touched was written"
    assert 0 < a["written"][~dense, 1].mean() < 0.08
    norms = np.linalg.norm(a["grads"], axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 5
    assert norms[7] == 0
    assert len(set(a["rates"])) == 5


def test_a_resumed_run_goes_on_identically(tmp_path):
    save = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", every_n_train_steps=1)
    saving = {"callbacks": [save], "enable_checkpointing": True}
    whole = run_ranks(_fit, 2, "adamw, later", saving)[0]
    path = next(tmp_path.glob("*step=10.ckpt"))
    rest = run_ranks(_fit, 2, "adamw, later", {**saving, "ckpt_path": str(path)})[0]
    np.testing.assert_array_equal(rest["weights"], whole["weights"])
    np.testing.assert_array_equal(rest["rates"], whole["rates"][10:])
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
        if 20 < trainer.global_step <= 40:
            self.frozen.append(flat(pl_module.net[0].parameters()).numpy())
        elif trainer.global_step > 40:
            self.moved.append(flat(pl_module.net[0].parameters()).numpy())


class LeavesOut(Watched):
    """Without its last layer in the optimizer, at first."""

    def configure_optimizers(self):
        cls, settings, _ = KINDS[self.kind]
        return cls(self.net[0].parameters(), **settings)


def _events(rank):
    found = []
    for kind in KINDS:
        for left_out in (False, True):
            model, freezing = (LeavesOut if left_out else Watched)(kind), Freezing(left_out)
            model.on_train_batch_end = model.on_before_optimizer_step = lambda *args: None
            strategy = HeteroDDPStrategy(
                local_batch_sizes=[3, 1],
                compression=FEW,
                sparse_optimizer=KINDS[kind][2],
                find_unused_parameters=not left_out,
            )
            trainer = trainer_of(strategy, 2, max_epochs=4, callbacks=[freezing])
            trainer.fit(model, DataLoader(Points(60, features=FEATURES), 2, shuffle=True))
            found.append(
                (kind, left_out, model.flat(), freezing.frozen, freezing.moved, len(trainer.optimizers[0].param_groups))
            )
    return found


def test_layers_may_be_frozen_and_groups_added_in_the_run():
    """Also by Lightning's own callback: replicas stay equal, and what is frozen stays as it is."""
    for one, other in zip(*run_ranks(_events, 2, timeout=200), strict=True):
        kind, left_out, weights, frozen, moved, groups = one
        np.testing.assert_array_equal(weights, other[2], err_msg=kind)
        assert np.isfinite(weights).all()
        assert groups == 1 + left_out
        if not left_out:
            assert len(frozen) == 20
            assert all(np.array_equal(frozen[0], later) for later in frozen[1:])
            assert not np.array_equal(moved[-1], frozen[0])


class Wrong(Watched):
    def __init__(self, what):
        super().__init__("decay, ahead")
        self.what, self.automatic_optimization = what, what != "manual"

    def configure_optimizers(self):
        p = list(self.parameters())
        return {
            "manual": lambda: torch.optim.SGD(p, lr=0.1),
            "other": lambda: torch.optim.Adam(p),
            "foreign": lambda: torch.optim.SGD([*p, nn.Parameter(torch.zeros(3))], lr=0.1),
        }[self.what]()


def _refused(rank, what):
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=True)
    trainer_of(strategy, 2).fit(Wrong(what), DataLoader(Points(8, features=FEATURES), 2))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("manual", "MisconfigurationException", "sparse_optimizer and manual optimization"),
        ("other", "ValueError", "Adam has no sparse steps"),
        ("foreign", "ValueError", "1 parameters outside of the module"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(what, kind, words):
    errors = run_ranks(_refused, 2, what, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    for _, name, message in errors:
        assert name == kind
        assert words in message


def test_several_optimizers_are_refused():
    compression = GradientCompression(FEW, ControlPlane(0, 1), HookState(StepTimer(HostClock()), 1), sparse=True)
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1) for _ in range(2)]
    compression.bind_optimizers(optimizers[:1])
    with pytest.raises(ValueError, match="sparse_optimizer=True is for one optimizer, .* there are 2"):
        compression.bind_optimizers(optimizers[1:], more=True)


def test_without_block_top_k_it_is_refused():
    for compression in (None, "fp16", "powersgd"):
        with pytest.raises(ValueError, match="sparse_optimizer=True updates the blocks that block top-k sends"):
            HeteroDDPStrategy(compression=compression, sparse_optimizer=True)
    with pytest.raises(ValueError, match="sparse_optimizer='never'"):
        HeteroDDPStrategy(compression="block_topk", sparse_optimizer="never")
    assert HeteroDDPStrategy(compression="auto", sparse_optimizer=True).config.sparse_optimizer is True


# loops of the user's own


def _loop(front):
    """Gradients and weights after a few steps under Fabric or Accelerate, clipped by the front end's own means."""
    settings = {"local_batch_sizes": [3, 1], "compression": FEW, "sparse_optimizer": "later"}
    net, loader = network(), DataLoader(Points(60, features=FEATURES), 2, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.8, weight_decay=0.1, nesterov=True)
    if front == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings))
        fabric.launch()
        model, theirs = fabric.setup(net, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward, clip = fabric.backward, lambda: fabric.clip_gradients(model, theirs, max_norm=CLIP)
    else:
        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
        model, theirs, loader = accelerator.prepare(net, optimizer, loader)
        backward, clip = accelerator.backward, lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP)
    grads, rates = [], []
    for x, y, _ in loader:
        theirs.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        clip()
        theirs.step()
        grads.append(flat([p.grad.to_dense() if p.grad.is_sparse else p.grad for p in net.parameters()]))
        rates.append(0.02)
    optimizer.state_dict()
    return {"weights": flat(net.parameters()).numpy(), "grads": torch.stack(grads).numpy(), "rates": rates}


@pytest.mark.parametrize("front", ["fabric", "accelerate"])
def test_fabric_and_accelerate_step_and_clip_likewise(front):
    a, b = run_ranks(lambda rank: _loop(front), 2, env={"OMP_NUM_THREADS": "1"})
    np.testing.assert_array_equal(a["weights"], b["weights"])
    np.testing.assert_allclose(a["weights"], replay("momentum, later", a), rtol=1e-9, atol=1e-11)
    norms = np.linalg.norm(a["grads"], axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 3
    assert (a["grads"][3] != 0).mean() < 0.08
