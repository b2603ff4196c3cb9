"""Parameters that are frozen, unfrozen and added in the run, through every front end."""

import copy
import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader

from lightning_hetero import GNSCallback, HeteroDDPStrategy, LookAheadCallback
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of
from tests.loops import flat, network

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
        torch.manual_seed(seed)
        model.append(nn.Linear(1, 1, dtype=torch.float64))
        optimizer.add_param_group({"params": list(model[3].parameters())})


class Lines(logging.Handler):
    """What is said to users."""

    def __init__(self):
        super().__init__()
        self.lines = []
        log = logging.getLogger("lightning_hetero")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record):
        if "other parameters are trained" in record.getMessage():
            self.lines.append(record.getMessage())


def _optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def _loop(rank, front, settings, accumulate, find_unused=False):
    """Two passes over the data; what each step saw, and the weights after it."""
    net, loader, seen, weights, lines = network(), DataLoader(Points(SAMPLES), 3, shuffle=True), [], [], Lines()
    settings = {"local_batch_sizes": [4, 2], **settings}
    change(net, None, 0)
    optimizer = _optimizer(net)
    if front == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

        strategy = FabricStrategy(find_unused_parameters=find_unused, **settings)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model, theirs = fabric.setup(net, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward, engine = fabric.backward, fabric.strategy.engine
        window = lambda last: fabric.no_backward_sync(model, enabled=not last)  # noqa: E731
    else:
        from accelerate.utils import DistributedDataParallelKwargs

        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        handlers = [DistributedDataParallelKwargs(find_unused_parameters=find_unused)]
        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings), kwargs_handlers=handlers)
        model, theirs, loader = accelerator.prepare(net, optimizer, loader)
        backward, engine = accelerator.backward, accelerator.engine
        window = lambda last: nullcontext() if last else accelerator.no_sync(model)  # noqa: E731
    step = 0
    for _ in range(2):
        for number, (x, y, index) in enumerate(loader):
            change(net, theirs.optimizer, step, rank) if step else None
            with torch.no_grad():
                model(x)
            last = (number + 1) % accumulate == 0
            with window(last):
                backward(nn.functional.mse_loss(model(x), y) / accumulate)
            if last:
                theirs.step()
                theirs.zero_grad()
            seen.append(index.tolist())
            weights.append(flat(net))
            step += 1
    changes = engine.models[net].changes
    return {
        "seen": seen,
        "weights": weights,
        "changes": changes,
        "lines": lines.lines,
        "buckets": engine.observer.buckets,
    }


def alone(results, accumulate):
    """One process, on the batches of both ranks."""
    data, net, weights = Points(SAMPLES), network(), []
    change(net, None, 0)
    optimizer = _optimizer(net)
    for step, (one, other) in enumerate(zip(*(r["seen"] for r in results), strict=True)):
        change(net, optimizer, step) if step else None
        chosen = one + other
        (nn.functional.mse_loss(net(data.x[chosen]), data.y[chosen]) / accumulate).backward()
        if (step % 10 + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        weights.append(flat(net))
    return weights


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("front", ["fabric", "accelerate"])
def test_other_parameters_are_trained_as_on_one_process(front, accumulate):
    """Also where they change inside an accumulation window."""
    results = run_ranks(_loop, 2, front, {}, accumulate)
    expected = alone(results, accumulate)
    for step, weights in enumerate(expected):
        np.testing.assert_array_equal(results[0]["weights"][step], results[1]["weights"][step], err_msg=str(step))
        np.testing.assert_allclose(results[0]["weights"][step], weights, rtol=1e-10, atol=1e-12, err_msg=str(step))
    assert [r["changes"] for r in results] == [4, 4]
    assert [len(r["lines"]) for r in results] == [3, 0], "the 1st, 2nd, 4th ... change is a line of rank 0's"
    assert "2 new (0.weight, ...), 0 frozen, 4 in all" in results[0]["lines"][0]


def test_with_unused_parameters_frozen_ones_need_nothing():
    """To freeze a layer lays out no buckets anew; a layer that other buckets were laid out without has to come back."""
    results = run_ranks(_loop, 2, "fabric", {}, 1, True)
    np.testing.assert_array_equal(results[0]["weights"][-1], results[1]["weights"][-1])
    np.testing.assert_allclose(results[0]["weights"][-1], alone(results, 1)[-1], rtol=1e-10, atol=1e-12)
    assert [r["changes"] for r in results] == [3, 3], "not for the layer that is frozen"


def _compiled(rank):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(local_batch_sizes=[4, 2]))
    fabric.launch()
    net = network()
    net[0].requires_grad_(False)
    model, optimizer = fabric.setup(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), lr=0.05))
    for step, (x, y, _) in enumerate(fabric.setup_dataloaders(DataLoader(Points(SAMPLES), 3, shuffle=True))):
        net[0].requires_grad_(step >= UNFREEZE)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    return flat(net), [one.changes for one in fabric.strategy.engine.models.values()]


def test_a_compiled_model_is_followed_too():
    (weights, changes), (others, _) = run_ranks(_compiled, 2)
    np.testing.assert_array_equal(weights, others)
    assert changes == [1]


class Rest(Callback):
    """Freezes the last layer for a while, and looks at what compression holds of it."""

    def __init__(self):
        self.held = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        compression = trainer.strategy.engine.compression
        if trainer.global_step in (FREEZE, BACK):
            pl_module.net[2].requires_grad_(trainer.global_step == BACK)
        if trainer.global_step in (FREEZE, FREEZE + 3, BACK):
            state = compression.state_dict_of_rank()["residuals"]
            self.held[trainer.global_step] = {name: r.clone().numpy() for name, r in state.items()}
        if trainer.global_step in (FREEZE - 1, FREEZE + 2):
            compression.set_density(0.3)


def _resting(rank, compression):
    rest = Rest()
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], compression=compression)
    model = Regressor()
    trainer = trainer_of(strategy, 2, max_epochs=2, callbacks=[rest])
    trainer.fit(model, DataLoader(Points(SAMPLES), 2, shuffle=True))
    exchange = strategy.engine.compression.averager
    return rest.held, model.flat(), getattr(exchange, "density", None), list(exchange.residuals())


@pytest.mark.parametrize("compression", ["block_topk(density=0.1, block=1)", "powersgd(rank=1, start=2)"])
def test_what_a_frozen_layer_has_not_sent_waits_for_it(compression):
    (held, weights, density, names), (_, others, *_) = run_ranks(_resting, 2, compression)
    np.testing.assert_array_equal(weights, others)
    assert names == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"] or set(names) == set(held[BACK])
    for name in ("net.2.weight", "net.2.bias"):
        for step in (FREEZE + 3, BACK):
            np.testing.assert_array_equal(held[step][name].ravel(), held[FREEZE][name].ravel())
    assert np.abs(held[FREEZE]["net.2.weight"]).sum() > 0
    assert not np.array_equal(held[BACK]["net.0.weight"], held[FREEZE]["net.0.weight"])
    assert density in (0.3, None), "a density that was set holds on"


class Late(Callback):
    """Delays all gradients, and unfreezes a layer when weights are predicted ones already."""

    def __init__(self, look_ahead):
        self.look_ahead, self.predicted, self.at_change = look_ahead, 0, []

    def on_fit_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(False)

    def on_train_start(self, trainer, pl_module):
        compression = trainer.strategy.engine.compression
        attach = compression.attach

        def watched(*args, **kwargs):
            self.at_change.append(len(self.look_ahead._kept))
            attach(*args, **kwargs)

        compression.attach = watched

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        late = trainer.strategy.engine.hook_state.staleness
        if trainer.global_step == UNFREEZE:
            late.make_all_stale()
            late.control_externally(True)
        if trainer.global_step == BACK:
            self.predicted = len(self.look_ahead._kept)
            pl_module.net[0].requires_grad_(True)
        if trainer.global_step == BACK + 1:
            assert late.stale_share == 1.0, "what was delayed as a whole still is"
            assert late.externally_controlled
            assert late.keeps_own


def _predicted(rank):
    look_ahead = LookAheadCallback()
    late = Late(look_ahead)
    model = Regressor()
    strategy = {"compression": "block_topk(density=0.2, block=4)", "sparse_optimizer": "later", "staleness": 1}
    strategy = HeteroDDPStrategy(local_batch_sizes=[3, 1], **strategy)
    model.on_before_optimizer_step = lambda optimizer: None
    trainer = trainer_of(strategy, 2, max_epochs=2, callbacks=[look_ahead, late])
    trainer.fit(model, DataLoader(Points(SAMPLES), 2, shuffle=True))
    return late.predicted, late.at_change, model.flat()


def test_buckets_are_laid_out_anew_with_weights_as_they_are():
    """Else what the optimizer has deferred would be paid to predicted weights, and be lost with them."""
    (predicted, at_change, weights), (_, _, others) = run_ranks(_predicted, 2)
    assert predicted > 0
    assert at_change == [0, 0]
    np.testing.assert_array_equal(weights, others)


class Adam(Regressor):
    def __init__(self):
        super().__init__(features=40)

    def on_before_optimizer_step(self, optimizer):
        """Keep no gradients, which are of more and more layers."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Join(Callback):
    """A layer that is trained from the second epoch on, whose first gradient is delayed: until then Adam sees zeros."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_epoch > 0)
        late = trainer.strategy.engine.hook_state.staleness
        late.make_all_stale()
        late.control_externally(True)


def _noise(rank):
    noise = GNSCallback(preconditioner="adam")
    strategy = {"local_batch_sizes": [3, 1], "replan": 10, "staleness": 1}
    fit(rank, strategy, 2, 2, model=Adam(), dataset=Points(120, features=40), callbacks=[Join(), noise], max_epochs=4)
    return noise.estimate


def test_the_noise_scale_is_not_flooded_by_layers_that_adam_knows_no_gradients_of():
    for estimate in run_ranks(_noise, 2):
        assert estimate.samples > 100
        assert estimate.trace < 1e4


def _evaluates_alone(rank):
    """Rank 0 looks at its model in between; at last there is nothing to train."""
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

    net = network()
    net[0].requires_grad_(False)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(replan=1000))
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for step, (x, y, _) in enumerate(fabric.setup_dataloaders(DataLoader(Points(40), 2))):
        net[0].requires_grad_(step >= 6)
        if rank == 0:
            with torch.no_grad():
                model(x)
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        net[0].requires_grad_(False)
        with torch.no_grad():
            model(x)
        net[0].requires_grad_(True)
    copied = copy.deepcopy(model._forward_module)  # has nothing of this run, and goes on as torch's
    np.testing.assert_array_equal(copied(x).detach().numpy(), net(x).detach().numpy())
    net.requires_grad_(False)
    assert not model(x).requires_grad
    engine = fabric.strategy.engine
    steps = [int(row[0]) for row in engine.observer.rows]
    return engine.models[net].changes, steps, flat(net)


def test_nobody_is_waited_for_in_an_evaluation_or_where_nothing_is_trained():
    """And the step in which buckets are laid out anew tells nothing of the speed of a worker."""
    (changes, steps, weights), (_, _, others) = run_ranks(_evaluates_alone, 2, timeout=45.0)
    assert changes == 1
    assert steps == [4, 5, 6, 8, 9, 10]
    np.testing.assert_array_equal(weights, others)


class Branches(nn.Module):
    """Of two layers, one is used at times."""

    def __init__(self):
        super().__init__()
        self.always, self.at_times = nn.Linear(5, 1, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x, both):
        return self.always(x) + self.at_times(x) if both else self.always(x)


def _used_on_one_rank(rank):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

    torch.manual_seed(0)
    net = Branches()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy())
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    (x, y, _), (other, target, _) = list(fabric.setup_dataloaders(DataLoader(Points(8), 2)))
    with fabric.no_backward_sync(model):
        fabric.backward(nn.functional.mse_loss(model(x, rank == 0), y))
    own = 0.0 if net.at_times.bias.grad is None else net.at_times.bias.grad.item()
    net.at_times.requires_grad_(False)
    fabric.backward(nn.functional.mse_loss(model(other, False), target))
    return own, net.at_times.bias.grad.item()


def test_what_one_rank_has_used_before_it_was_frozen_is_averaged_on_all():
    (own, first), (nothing, second) = run_ranks(_used_on_one_rank, 2, timeout=45.0)
    assert (own != 0.0, nothing) == (True, 0.0)
    assert first == second == pytest.approx(own / 2)


class KeepsNothing(Regressor):
    def on_before_optimizer_step(self, optimizer):
        """Keep no gradients, which are of more and more layers."""


class UnfreezesForLater(Callback):
    """A layer that is unfrozen behind the forward pass gets no gradient in this step."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(False)

    def on_before_backward(self, trainer, pl_module, loss):
        pl_module.net[0].requires_grad_(trainer.global_step >= 3)


def test_a_layer_may_be_unfrozen_behind_the_forward_pass_for_the_next_step():
    more = {"callbacks": [UnfreezesForLater()]}
    results = run_ranks(
        lambda rank: fit(rank, {"local_batch_sizes": [3, 1]}, 2, 2, model=KeepsNothing(), **more)["weights"], 2
    )
    np.testing.assert_array_equal(*results)


class Inside(Regressor):
    """Unfreezes a layer when the forward pass has begun."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


def _own_power(rank):
    state = PowerSGDState(None, 1, 2)
    strategy = {"local_batch_sizes": [3, 1], "ddp_comm_hook": powerSGD_hook, "ddp_comm_state": state}
    fit(rank, strategy, 2, 2, callbacks=[Unfreeze()])


class Unfreeze(Callback):
    def on_fit_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.net[0].requires_grad_(trainer.global_step != 3)


class UnfreezesAnother(Callback):
    """A bias of another layer on each rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for layer in (0, 2):
            pl_module.net[layer].bias.requires_grad_(trainer.global_step > 2 and layer == 2 * trainer.global_rank)


def test_what_would_let_replicas_drift_apart_is_refused_on_every_rank():
    cases = {
        "were unfrozen inside of a training step": lambda rank: fit(
            rank, {"local_batch_sizes": [3, 1]}, 2, 2, model=Inside()
        ),
        "PowerSGDState that was given": _own_power,
        "what is trained": lambda rank: fit(
            rank, {"local_batch_sizes": [3, 1]}, 2, 2, model=Regressor(), callbacks=[UnfreezesAnother()]
        ),
    }
    for words, run in cases.items():
        errors = run_ranks(run, 2, expect_errors=True)
        assert [rank for rank, *_ in errors] == [0, 1]
        assert all(words in message for *_, message in errors), errors
