"""Losses, gradients and weights that went wrong: told once by name, left out, or an error, as the settings say."""

import logging
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.gradients.health import Health, NonFiniteError
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.hardware import call_device
from tests.helpers import Points, Regressor, collected, fit, run_ranks, trainer_of

N, STEPS, AT = 80, 10, 4
NAN = float("nan")


# by itself


class Ahead(HostClock):
    """A host that is ahead of its device, which has come to the first so many losses."""

    synchronous = False

    def __init__(self):
        self.marked, self.reached = 0, 0

    def mark(self):
        self.marked += 1
        return self.marked

    def ready(self, mark):
        return mark <= self.reached

    def wait(self):
        self.reached = self.marked


class Hook:
    """What the health of a training asks of the gradient hook."""

    def __init__(self):
        self.num_bytes, self.step_skipped, self.averager = 0, False, DDPMean(2)

    def skip_step(self):
        self.step_skipped = True


class Both:
    """Two ranks in one process, which sample as if they could send from devices of different kinds."""

    def __init__(self, make, mode="ignore", scaled=False):
        self.hook = Hook()
        self.clock, self.health, self.models = Ahead(), [], []
        for rank in range(2):
            control = SimpleNamespace(rank=rank, world_size=2, gather=lambda mine: np.stack([mine, mine]))
            torch.manual_seed(0)
            models = make()
            self.health.append(Health(mode, control, self.hook, self.clock))
            for model in models:
                self.health[-1].attach(model, scaled=scaled)
            self.models.append(models)

    def look(self, times=1):
        for _ in range(times):
            everyone = np.stack([health.pack() for health in self.health])
            everyone.reshape(2, 3, -1)[:, 2] = [[1.0], [2.0]]
            for health in self.health:
                health.unpack(everyone, None)


@pytest.fixture
def said():
    logger, lines = logging.getLogger("lightning_hetero"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(before)
    logger.removeHandler(handler)


def many(dtype=torch.float64):
    return nn.ParameterDict({f"p{i:02}": nn.Parameter(torch.ones((), dtype=dtype) * (i + 1)) for i in range(40)})


def odd():
    """Without elements, without dimensions, complex, and in another order of memory."""
    one = nn.ParameterDict({"empty": torch.zeros(0, 3), "number": torch.ones(())})
    one["complex"] = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    one["turned"] = nn.Parameter(torch.ones(3, 4).T)
    return one


@pytest.mark.parametrize("by", [0.5, -0.5])
def test_each_weight_is_compared_sooner_or_later_and_told_once(said, by):
    both = Both(lambda: [many()])
    with torch.no_grad():
        both.models[1][0]["p35"].add_(by)
    both.look()
    assert said == []
    both.look()
    assert len(said) == 1
    both.look(4)
    assert len(said) == 1
    assert "element 0 of p35 is 36 on rank 0 and " in said[0]
    assert "on rank 1. They train different models" in said[0]
    both.health[0].begin()
    both.health[0].attach(both.models[0][0])
    both.look(2)
    assert len(said) == 2, "another training says so again"


def test_each_element_is_compared_sooner_or_later(said):
    both = Both(lambda: [nn.Linear(8, 1)])
    with torch.no_grad():
        both.models[1][0].weight[0, 5] += 1.0
    both.look(100)
    assert ["element 5 of weight" in line for line in said] == [True]


def test_weights_of_every_kind_and_of_several_models_are_compared(said):
    both = Both(lambda: [odd(), odd()])
    both.look(20)
    assert said == []
    with torch.no_grad():
        both.models[1][1]["number"].add_(1.0)
    both.look(20)
    assert "of number (model 1) is 1 on rank 0 and 2 on rank 1" in said[0]


def test_what_is_frozen_is_not_compared(said):
    both = Both(lambda: [nn.Linear(8, 1)])
    for models in both.models:
        models[0].bias.requires_grad_(False)
    with torch.no_grad():
        both.models[1][0].bias.add_(1.0)
    both.look(20)
    assert said == []


@pytest.mark.parametrize(
    ("dtype", "name", "by", "told"),
    [
        (torch.float64, "p09", 0.3, True),
        (torch.bfloat16, "p09", 0.3, False),  # four roundings
        (torch.float64, "p31", 0.02, False),  # of 32, while most are near 19
        (torch.float64, "p31", 0.2, True),
    ],
    ids=str,
)
def test_as_much_as_devices_may_round_differently_is_not_told(said, dtype, name, by, told):
    both = Both(lambda: [many(dtype)])
    with torch.no_grad():
        both.models[1][0][name].add_(by)
    both.look(3)
    assert len(said) == told


@pytest.mark.parametrize(("size", "by"), [(1e-9, 1e-4), (1e4, 5.0)], ids=["small among large", "large among small"])
def test_a_difference_is_weighed_by_the_weight_and_by_the_others(said, size, by):
    both = Both(lambda: [many()])
    for rank, models in enumerate(both.models):
        models[0]["p03"].data.fill_(size + rank * by)
    both.look(3)
    assert said == []


def test_weights_that_are_not_finite_hide_no_difference_of_others(said):
    both = Both(lambda: [many()])
    with torch.no_grad():
        both.models[0][0]["p03"].fill_(NAN)
        both.models[1][0]["p04"].add_(1.0)
    both.look()
    assert "of p04 is 5 on rank 0 and 6 on rank 1" in said[0]


def test_a_loss_is_read_when_the_device_has_come_to_it(said):
    both = Both(lambda: [nn.Linear(1, 1)])
    health, losses = both.health[0], (torch.tensor(1.0), torch.tensor([1.0, NAN]), torch.tensor(NAN))
    for batch, loss in enumerate(losses):
        health.see(loss, (0, batch))
    both.clock.reached = 1
    health.see(torch.tensor(2.0), (0, 3))
    assert said == []
    both.clock.reached = 3
    health.see(torch.tensor(2.0), (0, 4))
    assert "rank 0: the loss is nan in batch 1 of epoch 0; nothing is said of later ones" in said[0]
    health.see(torch.tensor(NAN), (0, 5))
    health.finish()
    assert len(said) == 1


def test_what_an_earlier_training_has_left_is_not_told_of_the_next(said):
    """Neither its last losses nor its weights."""
    both = Both(lambda: [nn.Linear(1, 1)])
    health, good = both.health[0], nn.Linear(1, 1)
    both.models[0][0].weight.data.fill_(NAN)
    health.see(torch.tensor(NAN), (0, 0))
    health.begin()
    health.attach(good)
    health.finish()
    assert said == []
    good.weight.data.fill_(NAN)
    health.finish()
    assert said == ["training has ended with weights that are not finite, after losses that all were"]
    health.begin()
    health.attach(good)
    health.see(torch.tensor(NAN), (1, 2))
    health.finish()
    assert [line.partition(";")[0] for line in said[1:]] == ["rank 0: the loss is nan in batch 2 of epoch 1"]


@pytest.mark.parametrize(
    ("mode", "scaled", "inner", "follows"),
    [
        ("ignore", False, None, "on_nonfinite='skip' leaves such gradients out on all ranks, on_nonfinite='raise'"),
        ("skip", False, None, "Such gradients are left out on all ranks"),
        ("ignore", True, None, "Such gradients are left out on all ranks"),
        ("ignore", False, SimpleNamespace(dropped=0), "Such gradients are left out on all ranks"),
        ("raise", False, None, "Training ends with such a gradient, because of on_nonfinite='raise'"),
    ],
    ids=["ignore", "skip", "scaler", "compression", "raise"],
)
def test_what_follows_from_a_bad_loss_is_said(said, mode, scaled, inner, follows):
    both = Both(lambda: [nn.Linear(1, 1)], mode, scaled=scaled)
    both.hook.averager = SimpleNamespace(skips_nonfinite=inner is not None, shards=False)
    both.health[0].see(torch.tensor(NAN), (0, 0))
    both.health[0].finish()
    assert follows in said[0]
    assert ("on_nonfinite='skip'" in said[0]) == (follows.startswith("on_nonfinite"))


def test_a_loss_scaler_leaves_nothing_to_do(said):
    both = Both(lambda: [nn.Linear(1, 1)], "skip", scaled=True)
    assert both.health[0].scaled  # which is told when training begins, see tests/frontend/test_without_effect.py
    (model,) = both.models[0]
    model.weight.grad = torch.full_like(model.weight, NAN)
    both.hook.num_bytes = 8
    both.health[0].after_backward()
    assert model.weight.grad.isnan().all()
    assert said == []


def test_only_gradients_that_were_averaged_are_dropped(said):
    """In the middle of an accumulation window, each rank has its own."""
    both = Both(lambda: [nn.Linear(1, 1)], "skip")
    (model,), health = both.models[0], both.health[0]
    model.weight.grad = torch.full_like(model.weight, NAN)
    health.see(torch.tensor(1.0), (3, 7))
    health.after_backward()
    assert model.weight.grad.isnan().all()
    both.hook.num_bytes = 8
    health.after_backward()
    assert not model.weight.grad.any()
    assert both.hook.step_skipped
    momentum = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    momentum.step()
    assert not momentum.state, "the step was not skipped"
    model.weight.grad = torch.zeros(1, 1)
    health.close()
    momentum.step()
    assert momentum.state
    assert any("step 7 of epoch 3" in line for line in said)


@pytest.mark.parametrize("how", ["loss", "late", "gradient", "left out"])
def test_stopping_waits_for_the_newest_loss(how, said):
    """Compression may have left the gradient out, so that what is there is finite; a late one is of an earlier loss."""
    both = Both(lambda: [nn.Linear(1, 1)], "raise")
    (model,), health = both.models[0], both.health[0]
    model.weight.grad = torch.full_like(model.weight, 1.0 if how == "left out" else NAN)
    health.see(torch.tensor(NAN if how == "late" else 1.0), (0, 6))
    health.see(torch.tensor(NAN if how == "loss" else 1.0), (0, 7))
    both.hook.num_bytes, both.hook.step_skipped = 8, how == "left out"
    batch = {"loss": 7, "late": 6}.get(how)
    one = f"the loss of rank {{}} was not, in batch {batch}"
    blamed = f"{one.format(0)}, {one.format(1)}" if batch else "the losses of all ranks were"
    with pytest.raises(NonFiniteError, match=f"not finite in batch 7 of epoch 0; {blamed}"):
        health.after_backward()
    assert both.clock.reached == both.clock.marked, "the loss was read before the device had come to it"


@pytest.mark.parametrize("batch", [0, 1])
def test_stopping_names_the_first_bad_loss_and_the_batch_in_which_training_ends(said, batch):
    """A loss that was told of may be one of an earlier batch, whose gradient did not matter; or of the first one."""
    both = Both(lambda: [nn.Linear(1, 1)], "raise")
    (model,), health = both.models[0], both.health[0]
    health.see(torch.tensor(NAN), (2, batch))
    both.clock.wait()
    health.see(torch.tensor(1.0), (2, 4))
    health.see(torch.tensor(1.0), (2, 5))
    model.weight.grad, both.hook.num_bytes = torch.full_like(model.weight, NAN), 8
    with pytest.raises(NonFiniteError, match=f"in batch 5 of epoch 2; the loss of rank 0 was not, in batch {batch}, "):
        health.after_backward()


def test_a_bad_loss_of_an_earlier_training_is_not_to_blame(said):
    both = Both(lambda: [nn.Linear(1, 1)], "raise")
    (model,), health = both.models[0], both.health[0]
    health.see(torch.tensor(NAN), (0, 3))
    health.finish()
    health.begin()
    health.attach(model)
    health.see(torch.tensor(1.0), (0, 1))
    model.weight.grad, both.hook.num_bytes = torch.full_like(model.weight, NAN), 8
    with pytest.raises(NonFiniteError, match="in batch 1 of epoch 0; the losses of all ranks were"):
        health.after_backward()


# in a training


class Ill(Regressor):
    """On one rank the loss or only the gradient is not finite, in one batch or from it on."""

    def __init__(self, what, rank, at=AT, lasting=False):
        super().__init__()
        self.what, self.mine, self.at, self.lasting, self.batch = what, rank, at, lasting, -1
        self.net[0].weight.register_hook(self._spoil)

    @property
    def strikes(self):
        due = self.batch == self.at or (self.lasting and self.batch > self.at)
        return due and self.trainer.global_rank == self.mine

    def _spoil(self, gradient):
        return gradient * float(self.what[1]) if self.what[0] == "gradient" and self.strikes else gradient

    def training_step(self, batch, batch_idx):
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)
        return loss * float(self.what[1]) if self.what[0] == "loss" and self.strikes else loss


def _train(rank, settings, what, at, callbacks, lasting):
    said = []
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    model = Ill(what, 1, at, lasting)
    try:
        result = fit(rank, settings, 2, 4, model=model, dataset=Points(N), max_epochs=1, callbacks=callbacks)
        error = None
    except RuntimeError as raised:
        result, error = None, (type(raised).__name__, str(raised))
    lines = [line for line in said if "finite" in line or "different weights" in line]
    return {"lines": lines, "error": error, "result": result, "weights": model.flat(), "seen": len(model.seen)}


def run(settings=None, what=("loss", "nan"), at=AT, callbacks=(), lasting=False):
    return run_ranks(_train, 2, {"replan": 3, **(settings or {})}, what, at, list(callbacks), lasting)


@pytest.mark.parametrize("settings", [{}, {"policy": "even"}, {"staleness": 1}, {"compression": "fp16"}], ids=str)
@pytest.mark.parametrize("what", [("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf")], ids=str)
def test_what_is_not_finite_is_told_once_with_rank_and_batch(settings, what):
    """The rank on which it begins sees it first; the others see it in their losses, once it is in the weights."""
    results = run(settings, what, lasting=True)
    for rank, result in enumerate(results):
        assert len(result["lines"]) == 1, result["lines"]
        assert f"rank {rank}: the loss is " in result["lines"][0]
    first = AT if what[0] == "loss" else AT + 1
    batches = (first, first + 1) if "staleness" in settings else (first,)
    assert any(f"in batch {batch} of epoch 0" in results[1]["lines"][0] for batch in batches)


class Spread(Regressor):
    """Its loss is a variance, which a single sample does not have."""

    def loss(self, batch):
        out = self(batch[0])
        return (out - out.mean()).square().sum() / (len(out) - 1)


def _spread(rank, n, where):
    said = collected()
    model = Spread() if where == "single" else Ill(("loss", "nan"), 1)
    fit(rank, {"policy": "even"}, 2, 4, model=model, dataset=Points(n), max_epochs=1)
    return [line for line in said if "the loss is nan" in line]


@pytest.mark.parametrize(("where", "n"), [("single", 11), ("elsewhere", N)])
def test_a_batch_of_one_sample_is_named_as_the_cause(where, n):
    """The last batch has three samples for two ranks."""
    (line,) = run_ranks(_spread, 2, n, where)[1]
    assert [name in line for name in ("min_local_batch_size", "local_batch_multiple")] == [where == "single"] * 2


def test_a_good_training_says_nothing():
    assert [result["lines"] for result in run(what=("loss", "1"))] == [[], []]


def test_weights_that_the_last_step_has_ruined_are_told():
    results = run(what=("gradient", "nan"), at=STEPS - 1)
    assert results[0]["lines"] == ["training has ended with weights that are not finite, after losses that all were"]
    assert np.isnan(results[0]["weights"]).any()


@pytest.mark.parametrize("settings", [{}, {"staleness": 1}, {"compression": "fp16"}], ids=str)
@pytest.mark.parametrize("what", [("loss", "nan"), ("gradient", "inf")], ids=str)
def test_dropped_gradients_reach_no_weight(settings, what):
    results = run({"on_nonfinite": "skip", **settings}, what)
    for result in results:
        assert result["seen"] == STEPS
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        batch = AT + (1 if "staleness" in settings else 0)
        left_out = [line for line in result["lines"] if "all ranks left that gradient out" in line]
        assert any(f"in step {b} of epoch 0" in line for line in left_out for b in (AT, batch))


class Keeps(L.Callback):
    """Remembers weights and momentum at the end of each batch."""

    def __init__(self):
        self.kept = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.optimizers[0].state.values()
        momentum = [
            own["momentum_buffer"].flatten().tolist() for own in state if own.get("momentum_buffer") is not None
        ]
        self.kept.append((pl_module.flat().tolist(), momentum))


def _keeps(rank, settings, what, window, mode="skip"):
    keeps, model = Keeps(), Ill(what, 1)
    strategy = {"replan": 3, "on_nonfinite": mode, **settings}
    more = {"callbacks": [keeps], "accumulate_grad_batches": window, "max_epochs": 1}
    fit(rank, strategy, 2, 4, model=model, dataset=Points(N), **more)
    return keeps.kept[window - 1 :: window]


TOPK = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}


def test_momentum_acts_on_zeros_unless_the_step_is_skipped():
    for steps in run_ranks(_keeps, 2, TOPK, ("loss", "nan"), 1, "ignore"):
        assert all(before != after for before, after in pairwise(steps))
        assert np.isfinite(steps[-1][0]).all()


@pytest.mark.parametrize("what", [("loss", "nan"), ("gradient", "inf")], ids=str)
@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, 1),
        ({}, 2),
        ({"compression": "fp16"}, 1),
        ({"staleness": 1}, 1),
        (TOPK, 1),
        ({**TOPK, "staleness": 1}, 1),
        ({"compression": BlockTopK(density=0.3, block=8, warmup_steps=100)}, 1),
        ({"compression": "powersgd"}, 1),
    ],
    ids=["plain", "window", "fp16", "stale", "top-k", "stale top-k", "warm-up", "powersgd"],
)
def test_a_skipped_step_leaves_weights_and_momentum_as_they_are(settings, window, what):
    """On all ranks, and no other step. A late gradient is skipped a batch later; late blocks wait for a better one."""
    kept = run_ranks(_keeps, 2, settings, what, window)
    for steps in kept:
        stays = [before == after for before, after in pairwise(steps)]
        assert [at + 1 for at, same in enumerate(stays) if same] == [AT // window + int(settings == {"staleness": 1})]
        assert np.isfinite(steps[-1][0]).all()
        assert steps[-1][0] == kept[0][-1][0]


class Two(L.LightningModule):
    """Two networks whose optimizers step after both backward passes; the loss of the first is bad once, on rank 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()
        self.automatic_optimization, self.kept = False, []

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        optimizers = self.optimizers()
        bad = float("nan") if batch_idx == AT and self.global_rank == 1 else 1.0
        for optimizer, net, factor in zip(optimizers, (self.first, self.second), (bad, 1.0), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(net(x), y) * factor)
        for optimizer in optimizers:
            optimizer.step()
        self.kept.append([net.weight.detach().flatten().tolist() for net in (self.first, self.second)])

    def configure_optimizers(self):
        return [torch.optim.AdamW(net.parameters(), 0.05, weight_decay=0.1) for net in (self.first, self.second)]


def _two(rank):
    model, strategy = Two(), HeteroDDPStrategy(on_nonfinite="skip", find_unused_parameters=True)
    trainer_of(strategy, 2, max_epochs=1).fit(model, DataLoader(Points(N), 4, shuffle=True))
    return model.kept


def test_each_of_two_optimizers_skips_its_own_step():
    """Found from outside: the good backward pass that came second made the first optimizer step on zeros."""
    for steps in run_ranks(_two, 2):
        still = [[one == other for one, other in zip(*pair, strict=True)] for pair in pairwise(steps)]
        assert [at + 1 for at, (first, _) in enumerate(still) if first] == [AT]
        assert not any(second for _, second in still)
        assert np.isfinite(steps[-1]).all()


@pytest.mark.parametrize("what", [("loss", "nan"), ("gradient", "inf")], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}], ids=["plain", "block top-k"]
)
def test_stopping_is_an_error_on_all_ranks_that_names_rank_and_batch(settings, what):
    results = run({"on_nonfinite": "raise", **settings}, what)
    for result in results:
        kind, text = result["error"]
        assert kind == "NonFiniteError"
        assert f"in batch {AT} of epoch 0" in text
        assert ("the loss of rank 1 was not" if what[0] == "loss" else "the losses of all ranks were") in text
        assert result["seen"] == AT + 1
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])


class Perturbs(L.Callback):
    """Changes the weights of a layer on one rank only."""

    def __init__(self, by):
        self.by = by

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == AT:
            with torch.no_grad():
                pl_module.net[2].weight.add_(self.by)


@pytest.mark.parametrize("settings", [{}, {"policy": "even"}, {"replan": "epoch"}], ids=str)
def test_ranks_with_different_weights_are_told_by_rank_and_parameter(settings):
    results = run(settings, ("loss", "1"), callbacks=[Perturbs(0.05)])
    assert len(results[0]["lines"]) == 1
    assert "ranks hold different weights" in results[0]["lines"][0]
    assert "of net.2.weight is" in results[0]["lines"][0]
    assert "on rank 1" in results[0]["lines"][0]
    assert results[1]["lines"] == []


class Named(L.Callback):
    """Each rank has a device of its own kind."""

    def setup(self, trainer, pl_module, stage):
        call_device(f"device {trainer.global_rank}")


def test_roundings_are_told_of_devices_of_one_kind_only():
    results = run(what=("loss", "1"), callbacks=[Perturbs(1e-6)])
    assert ["bits of net.2.weight are not the same on rank 0 and rank 1" in line for line in results[0]["lines"]] == [
        True
    ]
    assert results[1]["lines"] == []
    results = run(what=("loss", "1"), callbacks=[Perturbs(1e-6), Named()])
    assert [result["lines"] for result in results] == [[], []]


def _fabric(mode):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(on_nonfinite=mode))
    fabric.launch()
    return lambda model, optimizer, loader: (*fabric.setup(model, optimizer), fabric.setup_dataloaders(loader)), fabric


def _accelerate(mode):
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(on_nonfinite=mode))
    return accelerator.prepare, accelerator


def _own_loop(rank, prepare, mode):
    """Return the weights after each step, with AdamW, whose decay and moments act even on zeros."""
    prepare, backend = prepare(mode)
    torch.manual_seed(1)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(Points(N), 4, shuffle=True))
    kept = []
    for step, (x, y, _) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        backend.backward(loss * (float("nan") if step == AT and rank == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return kept


@pytest.mark.parametrize("prepare", [_fabric, _accelerate])
def test_loops_of_the_users_skip_and_raise_too(prepare):
    kept = run_ranks(_own_loop, 2, prepare, "skip")
    assert kept[0] == kept[1]
    assert [at + 1 for at, (one, other) in enumerate(pairwise(kept[0])) if one == other] == [AT]
    assert np.isfinite(kept[0][-1]).all()
    errors = run_ranks(_own_loop, 2, prepare, "raise", expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["NonFiniteError"] * 2
