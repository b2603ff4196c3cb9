"""Parameters that are frozen, unfrozen and added in the run, through every front end."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.helpers import Points, Regressor, collected, fit, trainer_of
from tests.loops import flat, network
from tests.ranks import run_ranks

SAMPLES, UNFREEZE, FREEZE, BACK = 60, 4, 8, 12


def change(model, optimizer, step, seed=0):
    """The first layer is trained from ``UNFREEZE`` on, the last one rests in between, and a layer is added."""
    if step == 0:
        model[0].requires_grad_(False)
    elif step == UNFREEZE:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
    elif step in (FREEZE, BACK):
        model[2].requires_grad_(step == BACK)
    elif step == FREEZE + 1:
        torch.manual_seed(seed)  # rank 0's counts
        model.append(nn.Linear(1, 1, dtype=torch.float64))
        optimizer.add_param_group({"params": list(model[3].parameters())})


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def fabric_of(**settings):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings))
    fabric.launch()
    return fabric


def _loop(rank, front, accumulate, find_unused, compiled):
    """Two passes over the data; what each step saw, and the weights after it."""
    net, loader, seen, weights, lines = network(), DataLoader(Points(SAMPLES), 3, shuffle=True), [], [], collected()
    change(net, None, 0)
    if front == "fabric":
        fabric = fabric_of(local_batch_sizes=[4, 2], find_unused_parameters=find_unused)
        optimizer = sgd(net)
        model, optimizer = fabric.setup(torch.compile(net, backend="eager") if compiled else net, optimizer)
        loader, backward, end = fabric.setup_dataloaders(loader), fabric.backward, fabric.strategy.teardown
        window = lambda last: fabric.no_backward_sync(model, enabled=not last)  # noqa: E731
    else:
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=find_unused)]
        plugin = HeteroPlugin(local_batch_sizes=[4, 2])
        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=plugin, kwargs_handlers=handlers)
        model, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
        backward, end = accelerator.backward, accelerator.end_training
        window = lambda last: nullcontext() if last else accelerator.no_sync(model)  # noqa: E731
    step = 0
    for _ in range(2):
        for number, (x, y, index) in enumerate(loader):
            change(net, optimizer.optimizer, step, rank) if step else None
            with torch.no_grad():
                model(x)
            last = (number + 1) % accumulate == 0
            with window(last):
                backward(nn.functional.mse_loss(model(x), y) / accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(index.tolist())
            weights.append(flat(net))
            step += 1
    end()
    said = [line for line in lines if "other parameters are trained" in line]
    return {"seen": seen, "weights": weights, "lines": said}


def alone(results, accumulate):
    """Weights of one process after each step, on the batches of both ranks."""
    data, net = Points(SAMPLES), network()
    change(net, None, 0)
    optimizer = sgd(net)
    for step, (one, other) in enumerate(zip(*(r["seen"] for r in results), strict=True)):
        change(net, optimizer, step) if step else None
        chosen = one + other
        (nn.functional.mse_loss(net(data.x[chosen]), data.y[chosen]) / accumulate).backward()
        if (step % 10 + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        yield flat(net)


@pytest.mark.parametrize(
    ("front", "accumulate", "find_unused", "compiled"),
    [
        ("fabric", 5, False, False),
        ("fabric", 1, True, False),
        ("fabric", 1, False, True),
        ("accelerate", 5, False, False),
    ],
)
def test_other_parameters_are_trained_as_on_one_process(front, accumulate, find_unused, compiled):
    """Also where they change inside an accumulation window; rank 0 says so at the 1st, 2nd, 4th ... change."""
    first, second = results = run_ranks(_loop, 2, front, accumulate, find_unused, compiled)
    for step, expected in enumerate(alone(results, accumulate)):
        np.testing.assert_array_equal(first["weights"][step], second["weights"][step], err_msg=str(step))
        np.testing.assert_allclose(first["weights"][step], expected, rtol=1e-10, atol=1e-12, err_msg=str(step))
    assert (len(first["lines"]), second["lines"]) == (2 if find_unused else 3, [])
    assert "0.weight" in first["lines"][0]


def _evaluates_alone(rank):
    """Rank 0 looks at its model in between."""
    fabric, net = fabric_of(replan=1000), network()
    net[0].requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for step, (x, y, _) in enumerate(fabric.setup_dataloaders(DataLoader(Points(40), 2))):
        net[0].requires_grad_(step >= 6)
        if rank == 0:
            with torch.no_grad():
                model(x)
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    return flat(net)


def test_nobody_is_waited_for_in_an_evaluation():
    np.testing.assert_array_equal(*run_ranks(_evaluates_alone, 2, timeout=45.0))


# under Lightning's Trainer


class Rests(Callback):
    """The last layer rests for a while; its residuals are looked at by the checkpoints of the run."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in (FREEZE, FREEZE + 3, BACK):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
        if trainer.global_step in (FREEZE, BACK):
            pl_module.net[2].requires_grad_(trainer.global_step == BACK)


def _resting(rank, folder):
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression="block_topk(density=0.1, block=1)")
    model, trainer = Regressor(), trainer_of(strategy, 2, max_epochs=2, callbacks=[Rests(folder)])
    trainer.fit(model, DataLoader(Points(SAMPLES), 2, shuffle=True))
    return model.flat()


def test_what_a_frozen_layer_has_not_sent_waits_for_it(tmp_path):
    np.testing.assert_array_equal(*run_ranks(_resting, 2, tmp_path))
    states = [torch.load(tmp_path / f"{step}.ckpt", weights_only=True) for step in (FREEZE, FREEZE + 3, BACK)]
    first, later, last = (state["lightning_hetero_residuals"]["ranks"][0]["residuals"] for state in states)
    assert first["net.2.weight"].abs().sum() > 0
    assert torch.equal(first["net.2.weight"], later["net.2.weight"])
    assert torch.equal(first["net.2.weight"], last["net.2.weight"])
    assert not torch.equal(first["net.0.weight"], last["net.0.weight"])


class Inside(Regressor):
    """Unfreezes a layer when the forward pass has begun."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx >= 2)
        return super().training_step(batch, batch_idx)


class Another(Callback):
    """A bias of another layer from the third step on, on each rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for layer in (0, 2):
            trained = layer == 2 * trainer.global_rank
            pl_module.net[layer].bias.requires_grad_(trainer.global_step > 2 and trained)


def _drifts(rank, what):
    model, callbacks = (Inside(), []) if what == "inside" else (Regressor(), [Another()])
    fit(rank, {"local_batch_sizes": [3, 1]}, 2, 2, model=model, callbacks=callbacks)


@pytest.mark.parametrize(("what", "says"), [("inside", "inside of a training step"), ("another", "trained")])
def test_what_would_let_replicas_drift_apart_is_refused_on_every_rank(what, says):
    errors = run_ranks(_drifts, 2, what, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in message for *_, message in errors), errors
