"""The weight travels with the batch: losses and the ways to fetch batches for them, and losses that no weight can fit.

Gradients are those of one process on the same global batches, in float64, to 1e-12. The rows are those of the table in
docs/what-gets-averaged.md.
"""

import itertools
import warnings
from itertools import islice
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests.helpers import Points, Regressor, collected, trainer_of
from tests.loops import SAMPLES, flat_grads, masked_count, network
from tests.ranks import run_ranks

SIZES, WINDOW = (7, 3), 3  # 73 samples: seven full batches and one of three, in the last window
EXACT = {"rtol": 1e-12, "atol": 1e-14}
ENV = {"OMP_NUM_THREADS": "1"}


def squares(model, x, y):
    """Sum over the samples that count, as over tokens that are no padding."""
    return ((model(x) - y).square() * (x[:, :1] > 0)).sum()


def mean(model, x, y):
    return nn.functional.mse_loss(model(x), y)


LOSSES = {
    "mean": mean,
    "sum": lambda model, x, y: nn.functional.mse_loss(model(x), y, reduction="sum"),
    "tokens": lambda model, x, y: squares(model, x, y) / (x[:, 0] > 0).sum().clamp(min=1),
    "normalised": squares,
}
SUM = {"loss_reduction": "sum"}
SETTINGS = {"mean": {}, "sum": SUM, "tokens": {"weight_fn": masked_count}, "normalised": SUM}


def window_losses(kind, model, batches, everyone):
    """Loss of each micro-batch of a window as users write it; ``everyone`` adds a number up over the ranks."""
    if kind == "normalised":
        counted = everyone(sum(map(masked_count, batches)))
        return [lambda b=b: 2 * squares(model, b[0], b[1]) / counted for b in batches]  # DDP averages over two ranks
    return [lambda b=b: LOSSES[kind](model, b[0], b[1]) / len(batches) for b in batches]


# loops of the user's own: a wrapped model, its batches, backward, a sum over ranks, and what prepares another loader


class Accelerated:
    def __init__(self, model, loader, rank, settings):
        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        api = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
        self.model, self.loader = api.prepare(model, loader)
        self.backward, self.prepared = api.backward, api.prepare
        self.sum = lambda n: api.gather(torch.tensor([float(n)])).sum()


class WithFabric:
    def __init__(self, model, loader, rank, settings):
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

        api = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**settings))
        api.launch()
        self.model, self.loader = api.setup(model), api.setup_dataloaders(loader)
        self.backward, self.prepared = api.backward, api.setup_dataloaders
        self.sum = lambda n: api.all_reduce(torch.tensor(float(n)), reduce_op="sum")


class Plain:
    def __init__(self, model, loader, rank, settings):
        from lightning_hetero.comm import gradient_hook
        from lightning_hetero.config import HeteroConfig
        from lightning_hetero.data import PermutationStream
        from lightning_hetero.engine import HeteroEngine
        from lightning_hetero.session import HeteroSession

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
        self.session = HeteroSession(self.engine)
        sampler = self.session.shard(PermutationStream(SAMPLES, shuffle=True, seed=0), batch_size=5)
        self.batches = DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)
        self.model = DistributedDataParallel(model)
        self.model.register_comm_hook(self.engine.hook_state, gradient_hook)
        self.session.watch(self.model)

    @property
    def loader(self):
        return self.session.steps(lambda: iter(self.batches))

    def backward(self, loss):
        with self.engine.backward():
            self.engine.scale_loss(loss).backward()

    def sum(self, n):
        value = torch.tensor(float(n))
        dist.all_reduce(value)
        return value


OWN = {"fabric": WithFabric, "accelerate": Accelerated, "plain torch": Plain}


def front(name, rank, model=None, collate_fn=None, **settings):
    loader = DataLoader(Points(SAMPLES), 5, shuffle=True, collate_fn=collate_fn)
    return OWN[name](network() if model is None else model, loader, rank, {"local_batch_sizes": SIZES, **settings})


# batches that are fetched before their backward passes


def windows(iterator, fetched):
    """The micro-batches of each optimizer step: all fetched first, or one while the next is fetched already."""
    if fetched == "window":
        while batches := list(islice(iterator, WINDOW)):
            yield batches
        return
    following = next(iterator)
    while following is not None:
        batch, following = following, next(iterator, None)
        yield [batch]


def _own_loop(rank, name, cases):
    """Gradients and samples of every optimizer step of one pass."""
    results = []
    for kind, fetched in cases:
        ours, steps = front(name, rank, **SETTINGS[kind]), []
        for batches in windows(iter(ours.loader), fetched):
            ours.model.zero_grad()
            for loss in window_losses(kind, ours.model, batches, ours.sum):
                ours.backward(loss())
            steps.append((flat_grads(ours.model), [batch[2].tolist() for batch in batches]))
        results.append(steps)
    return results


def reference(kind, steps):
    """Gradients of one process, a sum divided by two as DDP does with two ranks."""
    data, model, grads = Points(SAMPLES), network(), []
    for micro_batches in steps:
        model.zero_grad()
        batches = [(data.x[indices], data.y[indices]) for indices in micro_batches]
        for loss in window_losses(kind, model, batches, lambda n: n):
            (loss() / (2 if kind in ("sum", "normalised") else 1)).backward()
        grads.append(flat_grads(model))
    return np.stack(grads)


@pytest.mark.parametrize("name", OWN)
def test_gradients_equal_one_process_however_batches_are_fetched(name):
    """The trainer of Lightning fetches one by one: test_front_ends.py."""
    cases = [(kind, fetched) for fetched in ("window", "ahead") for kind in LOSSES]
    results = run_ranks(_own_loop, 2, name, cases, env=ENV)
    for (kind, fetched), ranks in zip(cases, zip(*results, strict=True), strict=True):
        steps = [
            [sum(parts, []) for parts in zip(*(micro_batches for _, micro_batches in step), strict=True)]
            for step in zip(*ranks, strict=True)
        ]
        assert sorted(sum(sum(steps, []), [])) == list(range(SAMPLES))
        assert len(steps[-1][-1]) == SAMPLES % sum(SIZES)
        expected = reference(kind, steps)
        for rank in ranks:
            got = np.stack([grads for grads, _ in rank])
            np.testing.assert_allclose(got, expected, **EXACT, err_msg=f"{kind}, {fetched}")


# two loaders


def _two_loaders(rank, name):
    """Two ways to train on two loaders at once: the error of a loss of both, and gradients and samples."""
    found = {}
    for kind in ("apart", "joined"):
        ours, steps = front(name, rank), []
        second = ours.prepared(DataLoader(Points(SAMPLES, seed=1), 5, sampler=SubsetRandomSampler(range(SAMPLES))))
        try:
            for one, other in zip(ours.loader, second, strict=False):
                ours.model.zero_grad()
                if kind == "joined":
                    ours.backward(mean(ours.model, *one[:2]) + mean(ours.model, *other[:2]))
                for batch in (one, other):
                    ours.backward(mean(ours.model, *batch[:2]))
                steps.append((flat_grads(ours.model), one[2].tolist(), other[2].tolist()))
        except RuntimeError as error:
            steps = str(error), len(steps)
        found[kind] = steps
    return found


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_losses_of_two_loaders_equal_one_process_by_themselves_and_are_refused_joined(name):
    ranks = run_ranks(_two_loaders, 2, name, env=ENV)
    for found in ranks:
        text, step = found["joined"]
        assert (step, "two loaders" in text) == (0, True)
    data, others, model = Points(SAMPLES), Points(SAMPLES, seed=1), network()
    assert len(ranks[0]["apart"]) >= 7
    for (got, first, second), (same, *rest) in zip(*(found["apart"] for found in ranks), strict=True):
        model.zero_grad()
        for points, indices in ((data, first + rest[0]), (others, second + rest[1])):
            mean(model, points.x[indices], points.y[indices]).backward()
        np.testing.assert_allclose(got, flat_grads(model), **EXACT)
        np.testing.assert_array_equal(got, same)


# losses that need a setting, which rank 0 names


class Heads(nn.Module):
    """Fourteen features of each sample, twice as many as rank 0 has samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 14)).double()

    def forward(self, x):
        return self.net(x)


def entropy(ignored=0, **settings):
    def loss(z, net):
        labels = (z[:, 0].detach().abs() * 1000).long() % 14
        labels[:ignored] = -100
        return nn.functional.cross_entropy(z, labels, **settings)

    return loss


def causal_of(*lengths):
    """Each text has one label less than tokens, as language models are trained; lengths change from batch to batch."""
    of_batch = itertools.cycle(lengths)

    def loss(z, net):
        length = next(of_batch)
        labels = torch.tensor([[1] * (length - 1) + [-100]] * len(z))
        return nn.functional.cross_entropy(z.view(-1, 14 // length), labels.flatten())

    return loss


def contrastive(z, net):
    one, other = nn.functional.normalize(z[:, :6]), nn.functional.normalize(z[:, 6:12])
    return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(z)))


def gathered(z, net):
    """Contrastive over the rows of both ranks; as many features as rank 0 has rows."""
    others = torch.cat([z[:, 7:], z.new_ones(sum(SIZES) - len(z), 7)])
    return nn.functional.cross_entropy(z[:, :7] @ others.T, torch.arange(len(z)))


def loss_named(name, **attributes):
    """A class of losses that is known by its name."""
    return type(name, (nn.Module,), {"forward": lambda self, z: z.square().mean(), **attributes})


RELATING = (
    *("NTXentLoss", "DCLLoss", "BarlowTwinsLoss", "VICRegLoss", "SupConLoss", "BaseMetricLossFunction", "BaseMiner"),
    *("CoSENTLoss", "LovaszLoss"),
)
WEIGHTS = torch.linspace(0.1, 1.0, 14, dtype=torch.float64)
TOLD = {
    "weight_fn": {
        "class weights": lambda: lambda z, net: 0.5 * entropy(weight=WEIGHTS)(z, net) + z.mean(),
        "ignored labels": lambda: entropy(ignored=2),
    },
    "loss_reduction": {
        "entropy": lambda: entropy(reduction="sum"),
        "squares": lambda: lambda z, net: 0.5 * (z - 1).square().sum(),
        "variational": lambda: lambda z, net: z[:, :7].square().sum() - 0.5 * torch.sum(1 + z[:, 7:] - z[:, 7:].exp()),
    },
    "min_local_batch_size": {
        "contrastive": lambda: contrastive,
        **{name: loss_named(name) for name in RELATING},
        "Dice over the batch": loss_named("DiceLoss", batch=True),
        "Dice that knows no other way": loss_named("DiceLoss", __module__="segmentation_models_pytorch.losses.dice"),
    },
    None: {
        "entropy": entropy,
        "entropy, equal class weights": lambda: entropy(weight=torch.ones(14, dtype=torch.float64)),
        "entropy, summed and divided": lambda: lambda z, net: entropy(reduction="sum")(z, net) / len(z),
        "squares, summed and divided": lambda: lambda z, net: (z - 1).square().sum() * (1 / z.numel()),
        "and weights": lambda: lambda z, net: z.square().mean() + sum(p.square().sum() for p in net.parameters()),
        "causal, lengths that change": lambda: causal_of(2, 7),
        "gathered": lambda: gathered,
        "Dice of each sample": loss_named("DiceLoss", batch=False),
    },
}
TABLE = [(setting, name) for setting, losses in TOLD.items() for name in losses]
SILENCED = ({"weight_fn": len}, SUM, {"local_batch_sizes": (5, 5)}, {"local_batch_sizes": None, "policy": "even"})


def drop(rows):
    """Leave out broken files."""
    return torch.utils.data.default_collate([row for row in rows if row[2] % 5] or rows[:1])


class Stepping(L.LightningModule):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _told(rank, name, cases):
    """What a run with each loss says of settings, in one process group."""
    found = []
    for case, collate_fn, settings in cases:
        lines, net, loss = collected(), Heads(), TOLD[case[0]][case[1]]()
        if isinstance(loss, nn.Module):
            net.loss, loss = loss, lambda z, net: net.loss(z)
        if name == "lightning":
            from lightning_hetero import HeteroDDPStrategy

            loader = DataLoader(Points(SAMPLES), 5, shuffle=True, collate_fn=collate_fn)
            strategy = HeteroDDPStrategy(**{"local_batch_sizes": SIZES, **settings})
            trainer_of(strategy, 2, max_epochs=1).fit(Stepping(net, loss), loader)
        else:
            ours = front(name, rank, net, collate_fn, **settings)
            for batch in ours.loader:
                ours.backward(loss(ours.model(batch[0]), net))
        found.append([setting for line in lines for setting in TOLD if setting is not None and f"{setting}=" in line])
    return found


def told(name, *cases):
    """The settings that rank 0 names in each run; other ranks say nothing."""
    first, *others = run_ranks(_told, 2, name, cases, env=ENV)
    assert all(not any(found) for found in others)
    return first


@pytest.fixture(scope="module")
def table():
    return dict(zip(TABLE, told("plain torch", *((case, None, {}) for case in TABLE)), strict=True))


@pytest.mark.parametrize(("setting", "name"), TABLE)
def test_a_loss_that_the_weights_do_not_fit_is_named_with_its_setting_and_no_other(setting, name, table):
    said = table[setting, name]
    assert said.count(setting) == (setting is not None)
    assert set(said) <= ({setting, "weight_fn"} if setting else set())


CHOSEN = (("weight_fn", "class weights"), ("loss_reduction", "squares"), ("min_local_batch_size", "contrastive"))


@pytest.mark.parametrize("name", ["lightning", *OWN])
def test_every_front_end_names_losses_and_dropped_rows_once(name):
    said = told(name, *((case, None, {}) for case in CHOSEN), ((None, "entropy"), drop, {}))
    assert said == [["weight_fn"], ["loss_reduction"], ["min_local_batch_size"], ["weight_fn"]]


def test_nothing_is_said_where_the_user_has_decided_or_sizes_never_differ():
    cases = [(case, drop, settings) for settings in SILENCED for case in CHOSEN]
    assert told("plain torch", *cases) == [[]] * len(cases)


# collectives that a loss calls by itself


def _all_gather(rows):
    parts = [torch.zeros_like(rows) for _ in range(2)]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts)


GATHERS = {
    "all_gather": _all_gather,
    "all_gather_tensor": lambda rows: functional.all_gather_tensor(rows.detach(), 0, dist.group.WORLD) + 0,
    "all_gather_tensor with gradients": lambda rows: functional.all_gather_tensor_autograd(rows, 0, [0, 1]) + 0,
    "all_gather with gradients": lambda rows: torch.cat(dist.nn.functional.all_gather(rows)),
}


class Gathering:
    """A loss that calls each gather of torch and sums of means; ``found`` holds what came of it, by step."""

    def __init__(self):
        self.found = []

    def __call__(self, model, batch):
        output, found = model(batch[0]), {}
        for name, gather in GATHERS.items():
            try:
                found[name] = gather(output).detach().numpy()
            except ValueError as error:
                found[name] = str(error)
        dist.all_reduce(output.mean().detach())
        self.found.append((output.detach().numpy(), found))
        return mean(model, *batch[:2])


class GatheringModule(Regressor):
    def __init__(self):
        super().__init__()
        self.gathering = Gathering()

    def loss(self, batch):
        return self.gathering(self, batch)


SPLITS = {"unequal": SIZES, "equal": (4, 4), "may move": None}


def _gathering(rank, name):
    """What two steps of each split found, and what was said."""
    warnings.simplefilter("ignore", FutureWarning)
    found = {}
    for split, sizes in SPLITS.items():
        said = collected()
        if name == "lightning":
            from lightning_hetero import HeteroDDPStrategy

            model = GatheringModule()
            strategy = HeteroDDPStrategy(local_batch_sizes=sizes)
            trainer_of(strategy, 2, max_steps=2).fit(model, DataLoader(Points(SAMPLES), 5, shuffle=True))
            gathering = model.gathering
        else:
            ours, gathering = front(name, rank, local_batch_sizes=sizes), Gathering()
            for batch in islice(iter(ours.loader), 2):
                ours.backward(gathering(ours.model, batch))
        found[split] = gathering.found, [line for line in said if Path(__file__).name in line]
    return found


@pytest.mark.parametrize("name", ["lightning", *OWN])
def test_a_gather_by_the_loss_is_torchs_of_equal_batches_and_an_error_of_unequal_ones(name):
    """Sums, and gathers while the split may move, are named once, with the user's line."""
    first, second = run_ranks(_gathering, 2, name, env=ENV)
    assert [second[split][1] for split in SPLITS] == [[], [], []]
    (unequal, said), (same, _) = first["unequal"], second["unequal"]
    assert len(unequal) == 2
    for (_, found), (_, other) in zip(unequal, same, strict=True):
        assert found == other
        for called, text in found.items():
            assert f"{called.split()[0]}()" in text
            assert Path(__file__).name in text
    assert ["all_reduce()" in line for line in said] == [True]
    (equal, said), (others, _) = first["equal"], second["equal"]
    assert said == []
    for (rows, found), (more, _) in zip(equal, others, strict=True):
        for called in GATHERS:
            np.testing.assert_array_equal(found[called], np.concatenate([rows, more]))
    named = [line.partition("(")[0] for line in first["may move"][1]]
    assert sorted(named) == sorted({called.split()[0] for called in GATHERS})
