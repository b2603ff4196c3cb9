"""Torch's optimizers that touch the blocks of compressed gradients only (``sparse_optimizer=True``)."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from tests.helpers import Points, Regressor, trainer_of
from tests.modes.runs import Saves
from tests.ranks import run_ranks

FEATURES, CLIP = 40, 0.2
FEW = BlockTopK(density=0.05, value_dtype="float32", warmup_steps=2, dense_every=11)
NESTEROV = {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}
KINDS = {
    "decay, ahead": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, True),
    "momentum, later": (torch.optim.SGD, NESTEROV, "later"),
    "adamw, later": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}, "later"),
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def flat(tensors):
    return torch.cat([(t.to_dense() if t.is_sparse else t).detach().flatten() for t in tensors]).clone()


class Watched(Regressor):
    """Remembers the merged gradients as the optimizer took them, and its rates."""

    def __init__(self, cls, settings, bad=None):
        super().__init__()
        self.net, self.cls, self.settings, self.bad = network(), cls, settings, bad
        self.rates, self.sparse = [], []

    def configure_optimizers(self):
        optimizer = self.cls(self.parameters(), **self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == self.bad
        return super().loss(batch) * (float("nan") if bad else 1.0)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *args):
        grads = [p.grad for p in self.parameters()]
        self.sparse.append([g.is_sparse for g in grads])
        self.grads.append(flat(grads))


def train(model, sparse, ckpt_path=None, **kwargs):
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=sparse)
    trainer = trainer_of(strategy, 2, **{"max_epochs": 2, **kwargs})
    trainer.fit(model, DataLoader(Points(60, features=FEATURES), 2, shuffle=True), ckpt_path=ckpt_path)
    arrays = {name: np.array(getattr(model, name)) for name in ("rates", "sparse")}
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
    cls, settings, sparse = KINDS["adamw, later"]
    found["whole"] = train(Watched(cls, settings), sparse, callbacks=[Saves(folder, 10)])
    found["rest"] = train(Watched(cls, settings), sparse, f"{folder}/10")
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    one, other = run_ranks(_trained, 2, str(folder))
    for name, result in one.items():
        np.testing.assert_array_equal(result["weights"], other[name]["weights"], name)
    return one, folder / "10"


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
    norms = np.linalg.norm(found["grads"], axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 5
    assert norms[7] == 0
    assert len(set(found["rates"])) == 5


def test_a_resumed_run_goes_on_identically_and_its_state_is_torchs(trained):
    found, path = trained
    np.testing.assert_array_equal(found["rest"]["weights"], found["whole"]["weights"])
    np.testing.assert_array_equal(found["rest"]["rates"], found["whole"]["rates"][10:])
    state = torch.load(path, weights_only=True)["optimizer_states"][0]
    torch.optim.AdamW(network().parameters()).load_state_dict(state)


class Wrong(Regressor):
    def __init__(self, what):
        super().__init__(features=FEATURES)
        self.what, self.automatic_optimization = what, what != "manual"

    def configure_optimizers(self):
        if self.what == "other":
            return torch.optim.Adam(self.parameters())
        strange = [nn.Parameter(torch.zeros(3))] if self.what == "foreign" else []
        return torch.optim.SGD([*self.parameters(), *strange], lr=0.1)


WRONG = {"manual": "sparse_optimizer", "other": "Adam", "foreign": "1 parameters"}


def _wrong(rank):
    for what, match in WRONG.items():
        strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=FEW, sparse_optimizer=True)
        with pytest.raises(Exception, match=match):
            trainer_of(strategy, 2).fit(Wrong(what), DataLoader(Points(8, features=FEATURES), 2))
    return True


def test_what_cannot_work_is_refused_on_every_rank():
    assert run_ranks(_wrong, 2) == [True, True]
    for settings in ({}, {"compression": "fp16"}):
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
    (weights, grads), (other, _) = run_ranks(_loop, 2, front, env={"OMP_NUM_THREADS": "1"})
    np.testing.assert_array_equal(weights, other)
    expected = replay(torch.optim.SGD, NESTEROV, grads, [NESTEROV["lr"]] * len(grads))
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-11)
    norms = np.linalg.norm(grads, axis=1)
    assert norms.max() <= CLIP * (1 + 1e-6)
    assert np.isclose(norms, CLIP).sum() > 3
    assert (grads[3] != 0).mean() < 0.08
