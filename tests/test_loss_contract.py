"""The weight travels with the batch: kinds of losses, windows fetched before their backward passes, several loaders.

Gradients of every window are compared with one process on the same global batches, in float64, to 1e-12. The rows are
those of the table in docs/what-gets-averaged.md.
"""

import itertools
import logging
import warnings
from functools import cache
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
from torch.utils.data import DataLoader

from tests.helpers import Points, Regressor, collected, run_ranks, trainer_of
from tests.loops import SAMPLES, flat_grads, network

SIZES, WINDOW = (7, 3), 3  # 73 samples: seven full batches and one of three, in the last window
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def squares(model, x, y):
    """Sum over the samples that count, those with a positive first feature, as over tokens that are no padding."""
    keep = (x[:, :1] > 0).to(x.dtype)
    return ((model(x) - y).square() * keep).sum()


def count(batch):
    return (batch[0][:, 0] > 0).sum()


def mean(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def total(model, x, y):
    return nn.functional.mse_loss(model(x), y, reduction="sum")


def per_token(model, x, y):
    return squares(model, x, y) / (x[:, 0] > 0).sum().clamp(min=1)


LOSSES = {"mean": mean, "sum": total, "tokens": per_token, "normalised": squares}
SETTINGS = {
    "mean": {},
    "sum": {"loss_reduction": "sum"},
    "tokens": {"weight_fn": count},
    "normalised": {"loss_reduction": "sum"},
}


def window_losses(kind, model, batches, everyone):
    """Loss of each micro-batch of a window as users write it; ``everyone`` adds a number up over the ranks."""
    if kind == "normalised":
        counted = everyone(sum(map(count, batches)))
        return [lambda b=b: 2 * squares(model, b[0], b[1]) / counted for b in batches]  # DDP averages over two ranks
    return [lambda b=b: LOSSES[kind](model, b[0], b[1]) / len(batches) for b in batches]


class Front:
    """A front end of a user's own loop: a wrapped model, a loader, backward, and a sum over ranks."""

    def __init__(self, name, kind, rank, raw=None, collate_fn=None, **settings):
        settings = {"local_batch_sizes": SIZES, **SETTINGS[kind], **settings}
        raw = network() if raw is None else raw
        self.loader = DataLoader(Points(SAMPLES), 5, shuffle=True, collate_fn=collate_fn)
        getattr(self, f"_{name}")(raw, rank, settings)

    def _accelerate(self, raw, rank, settings):
        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        self.api = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
        self.model, self.loader = self.api.prepare(raw, self.loader)
        self.backward, self.sum = self.api.backward, lambda n: self.api.gather(torch.tensor([float(n)])).sum()
        self.prepared, self.session = self.api.prepare, self.api.hetero_session

    def _fabric(self, raw, rank, settings):
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

        self.api = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**settings))
        self.api.launch()
        self.model, self.loader = self.api.setup(raw), self.api.setup_dataloaders(self.loader)
        self.backward = self.api.backward
        self.sum = lambda n: self.api.all_reduce(torch.tensor(float(n)), reduce_op="sum")
        self.prepared, self.session = self.api.setup_dataloaders, self.api.strategy.session

    def _plain(self, raw, rank, settings):
        from lightning_hetero.comm import gradient_hook
        from lightning_hetero.config import HeteroConfig
        from lightning_hetero.data import PermutationStream
        from lightning_hetero.engine import HeteroEngine
        from lightning_hetero.session import HeteroSession

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
        self.session = session = HeteroSession(engine)
        stream = PermutationStream(SAMPLES, shuffle=True, seed=0)
        sampler = session.shard(stream, batch_size=5)
        loader = DataLoader(Points(SAMPLES), batch_sampler=sampler, collate_fn=self.loader.collate_fn)
        self.model = DistributedDataParallel(raw)
        self.model.register_comm_hook(engine.hook_state, gradient_hook)
        session.watch(self.model)

        class Steps:
            def __iter__(self):
                return session.steps(lambda: iter(loader))

        def backward(loss):
            with engine.backward():
                engine.scale_loss(loss).backward()

        def added(n):
            value = torch.tensor(float(n))
            torch.distributed.all_reduce(value)
            return value

        self.loader, self.backward, self.sum = Steps(), backward, added


def windows(iterator, fetched):
    """The micro-batches of each optimizer step: one, all fetched first, or one while the next is fetched already."""
    if fetched == "window":
        while batches := list(islice(iterator, WINDOW)):
            yield batches
    elif fetched == "one":
        yield from ([batch] for batch in iterator)
    else:
        following = next(iterator)
        while following is not None:
            batch, following = following, next(iterator, None)
            yield [batch]


def _own_loop(rank, name, cases):
    """Gradients and samples of every optimizer step of one pass."""
    results = []
    for kind, fetched in cases:
        front, steps = Front(name, kind, rank), []
        for batches in windows(iter(front.loader), fetched):
            front.model.zero_grad()
            for loss in window_losses(kind, front.model, batches, front.sum):
                front.backward(loss())
            steps.append((flat_grads(front.model), [batch[2].tolist() for batch in batches]))
        results.append(steps)
    return results


class Losses(Regressor):
    """Lightning: the trainer fetches batches one by one."""

    def __init__(self, kind):
        super().__init__(lr=0.0)
        self.kind, self.steps = kind, []

    def training_step(self, batch, batch_idx):
        self.indices = batch[2].tolist()
        everyone = lambda n: self.trainer.strategy.reduce(n.clone().double(), reduce_op="sum")  # noqa: E731
        return window_losses(self.kind, self, [batch], everyone)[0]()

    def on_before_optimizer_step(self, optimizer):
        self.steps.append((flat_grads(self), [self.indices]))


def _lightning(rank, name, cases):
    from lightning_hetero import HeteroDDPStrategy

    results = []
    for kind, _ in cases:
        model = Losses(kind)
        strategy = HeteroDDPStrategy(local_batch_sizes=SIZES, **SETTINGS[kind])
        trainer_of(strategy, 2, max_epochs=1).fit(model, DataLoader(Points(SAMPLES), 5, shuffle=True))
        results.append(model.steps)
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


FETCHED = {"lightning": ("one",), **dict.fromkeys(("fabric", "accelerate", "plain"), ("one", "window", "ahead"))}
CASES = [(name, kind, fetched) for name in FETCHED for fetched in FETCHED[name] for kind in LOSSES]


@cache
def trained(name):
    """All cases of a front end, in one process group."""
    cases = [(kind, fetched) for front, kind, fetched in CASES if front == name]
    ranks = run_ranks(_lightning if name == "lightning" else _own_loop, 2, name, cases, env={"OMP_NUM_THREADS": "1"})
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize(("name", "kind", "fetched"), CASES, ids=map("-".join, CASES))
def test_gradients_equal_one_process(name, kind, fetched):
    ranks = trained(name)[kind, fetched]
    steps = [
        [sum(parts, []) for parts in zip(*(micro_batches for _, micro_batches in step), strict=True)]
        for step in zip(*ranks, strict=True)
    ]
    assert sorted(sum(sum(steps, []), [])) == list(range(SAMPLES))
    assert len(steps[-1][-1]) == SAMPLES % sum(SIZES)
    expected = reference(kind, steps)
    for rank in ranks:
        np.testing.assert_allclose(np.stack([grads for grads, _ in rank]), expected, **EXACT)


# two loaders


class Ordered(torch.utils.data.Sampler):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(range(SAMPLES))


def _two_loaders(rank, name, kinds, settings):
    """What comes of each way to train on two loaders at once: the error's text, or gradients and samples."""
    results = {}
    for kind in kinds:
        front, steps = Front(name, "mean", rank, **settings), []
        second = front.prepared(DataLoader(Points(SAMPLES, seed=1), 5, sampler=Ordered()))
        try:
            for first, other in zip(front.loader, second, strict=False):
                front.model.zero_grad()
                if kind == "joined":
                    front.backward(mean(front.model, *first[:2]) + mean(front.model, *other[:2]))
                elif kind == "concatenated":
                    inputs = torch.cat([first[0], other[0]])
                    front.backward(front.model(inputs).square().mean())
                else:
                    front.backward(mean(front.model, *first[:2]))
                    front.backward(mean(front.model, *other[:2]))
                steps.append((flat_grads(front.model), first[2].tolist(), other[2].tolist()))
        except RuntimeError as error:
            steps = str(error), len(steps)
        results[kind] = steps
    return results


@pytest.mark.parametrize("settings", [{}, {"local_batch_sizes": None}], ids=["uneven", "may become uneven"])
@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_a_loss_of_two_loaders_is_refused_on_every_rank_at_its_first_step(name, settings):
    for result in run_ranks(_two_loaders, 2, name, ["joined", "concatenated"], settings):
        assert [steps for _, steps in result.values()] == [0, 0]
        assert "a loss is made of batches of two loaders" in result["joined"][0]
        assert "backward() for the loss of each loader by itself" in result["concatenated"][0]


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_losses_of_two_loaders_by_themselves_equal_one_process(name):
    ranks = [result["apart"] for result in run_ranks(_two_loaders, 2, name, ["apart"], {})]
    data, others, model = Points(SAMPLES), Points(SAMPLES, seed=1), network()
    assert len(ranks[0]) >= 7
    for (got, first, second), (same, *rest) in zip(*ranks, strict=True):
        model.zero_grad()
        for points, indices in ((data, first + rest[0]), (others, second + rest[1])):
            mean(model, points.x[indices], points.y[indices]).backward()
        np.testing.assert_allclose(got, flat_grads(model), **EXACT)
        np.testing.assert_array_equal(got, same)


# losses that need a setting


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


def causal(z, net):
    """Each text has one label less than tokens, as language models are trained."""
    labels = torch.tensor([[1, -100]] * len(z))
    return nn.functional.cross_entropy(z.view(-1, 7), labels.flatten())


def causal_of_lengths():
    """The same, of texts that are longer in every other batch."""
    lengths = itertools.cycle([2, 7])

    def loss(z, net):
        length = next(lengths)
        labels = torch.tensor([[1] * (length - 1) + [-100]] * len(z))
        return nn.functional.cross_entropy(z.view(-1, 14 // length), labels.flatten())

    return loss


def labelled_by_chance():
    """Labels of the first batch are the numbers of its rows."""
    batches = itertools.count()

    def loss(z, net):
        labels = torch.arange(len(z))
        return nn.functional.cross_entropy(z, labels if next(batches) == 0 else labels.flip(0))

    return loss


def pairs(z):
    return nn.functional.normalize(z[:, :6]), nn.functional.normalize(z[:, 6:12])


def contrastive(z, net):
    one, other = pairs(z)
    return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(z)))


def two_views(z, net):
    scores = torch.cat([z[:, :7] @ torch.ones(7, 7).double(), z[:, 7:]])[:, : len(z)]
    return nn.functional.cross_entropy(scores, torch.arange(len(z)).repeat(2))


def gathered(z, net):
    """Contrastive over the rows of both ranks; as many features as rank 0 has rows."""
    others = torch.cat([z[:, 7:], z.new_ones(sum(SIZES) - len(z), 7)])
    return nn.functional.cross_entropy(z[:, :7] @ others.T, torch.arange(len(z)))


class Known(nn.Module):
    """A loss that a library has under some name."""

    def forward(self, z):
        return z.square().mean()


def known(name, *bases, **settings):
    """Return a loss of a library by its name."""
    loss = type(name, (*bases, Known), {})()
    vars(loss).update(settings)
    return loss


class BaseMetricLossFunction:
    """Base of the losses of pytorch-metric-learning."""


class WeightRegularizerMixin:
    """Base of those with learned classes."""


def arcface(z, net):
    """Products with the normalized weights of twice as many classes as samples."""
    classes = nn.functional.normalize(next(reversed(list(net.parameters())[:-1])))
    return nn.functional.cross_entropy(nn.functional.normalize(z[:, :9]) @ classes.T, torch.arange(len(z)) // 2)


def uncertain(z, net):
    """Losses of two tasks, weighted by their learned noise."""
    noise = list(net.parameters())[1]
    first, second = z[:, :6].square().mean(), z[:, 6:].abs().mean()
    return first / (2 * noise[0] ** 2) + second * torch.exp(-noise[1]) + noise.square().sum().log()


def focal(z, net):
    each = entropy(reduction="none")(z, net)
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def distilled(z, net):
    return nn.functional.kl_div((z / 2).log_softmax(1), torch.full_like(z, 1 / 14), reduction="batchmean") * 4


def variational(z, net):
    center, spread = z[:, :7], z[:, 7:]
    return center.square().sum() - 0.5 * torch.sum(1 + spread - center**2 - spread.exp())


def binary(reduction):
    return lambda z, net: nn.functional.binary_cross_entropy(z.sigmoid(), torch.ones_like(z), reduction=reduction)


WEIGHTS = torch.linspace(0.1, 1.0, 14, dtype=torch.float64)
TOLD = {
    "weight_fn": {
        "class weights": entropy(weight=WEIGHTS),
        "class weights in a sum of losses": lambda z, net: 0.5 * entropy(weight=WEIGHTS)(z, net) + z.mean(),
        "ignored labels": entropy(ignored=2),
    },
    "loss_reduction": {
        "entropy": entropy(reduction="sum"),
        "squares": lambda z, net: 0.5 * (z - 1).square().sum(),
        "binary": binary("sum"),
        "variational": variational,
    },
    "min_local_batch_size": {
        "contrastive": contrastive,
        "contrastive of two views": two_views,
        "CoSENT": known("CoSENTLoss"),
        "NTXent": known("NTXentLoss", BaseMetricLossFunction),
        "Dice over the batch": known("GeneralizedDiceLoss", batch=True),
    },
    None: {
        "entropy": entropy(),
        "entropy, smoothed": entropy(label_smoothing=0.1),
        "entropy, equal class weights": entropy(weight=torch.ones(14, dtype=torch.float64)),
        "entropy, a mean of weighted rows": lambda z, net: entropy(weight=WEIGHTS, reduction="none")(z, net).mean(),
        "entropy, summed and divided": lambda z, net: entropy(reduction="sum")(z, net) / len(z),
        "squares": lambda z, net: nn.functional.mse_loss(z, torch.ones_like(z)),
        "squares, summed and divided": lambda z, net: (z - 1).square().sum() * (1 / z.numel()),
        "entropy, weighted by hand": lambda z, net: entropy(reduction="sum")(z, net) / z.new_ones(3).sum(),
        "squares, masked by hand": lambda z, net: ((z - 1).square() * (z > 0)).sum() / (z > 0).sum(),
        "squares, features summed": lambda z, net: (z - 1).square().sum(1).mean(),
        "squares, and weights": lambda z, net: z.square().mean() + sum(p.square().sum() for p in net.parameters()),
        "root of a mean": lambda z, net: z.square().mean().sqrt(),
        "roots of rows": lambda z, net: z.square().mean(1).sqrt().mean(),
        "roots, row by row": lambda z, net: sum(row.square().mean().sqrt() for row in z) / len(z),
        "binary": binary("mean"),
        "causal": causal,
        "causal, lengths that change": causal_of_lengths(),
        "labelled by chance": labelled_by_chance(),
        "gathered": gathered,
        "ArcFace": arcface,
        "uncertain": uncertain,
        "focal": focal,
        "distilled": distilled,
        "ArcFace of a library": known("ArcFaceLoss", WeightRegularizerMixin, BaseMetricLossFunction),
        "Dice": known("DiceLoss", batch=False),
        "pairs": lambda z, net: nn.functional.cosine_embedding_loss(*pairs(z), z.new_ones(len(z))),
        "triplets": lambda z, net: nn.functional.triplet_margin_loss(z[:, :4], z[:, 4:8], z[:, 8:12]),
    },
}
TABLE = [(setting, name) for setting, losses in TOLD.items() for name in losses]
SILENCED = (
    {"weight_fn": len},
    {"loss_reduction": "sum"},
    {"local_batch_sizes": (5, 5)},
    {"local_batch_sizes": None, "policy": "even"},
)


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


def _told(rank, front_end, cases):
    """What a run with each loss says of settings, in one process group."""
    results = []
    for loss, collate_fn, settings in cases:
        lines, net = collected(), Heads()
        if isinstance(loss, Known):
            net.loss, loss = loss, lambda z, net: net.loss(z)
        if front_end == "lightning":
            from lightning_hetero import HeteroDDPStrategy

            strategy = HeteroDDPStrategy(**{"local_batch_sizes": SIZES, **settings})
            loader = DataLoader(Points(SAMPLES), 5, shuffle=True, collate_fn=collate_fn)
            trainer_of(strategy, 2, max_epochs=1).fit(Stepping(net, loss), loader)
        else:
            front = Front(front_end, "mean", rank, net, collate_fn, **settings)
            for batch in front.loader:
                front.backward(loss(front.model(batch[0]), net))
        results.append([name for line in lines for name in TOLD if name is not None and f"{name}=" in line])
    return results


def told(front_end, *cases):
    """The settings that rank 0 names in each run; other ranks say nothing."""
    (first, *others) = run_ranks(_told, 2, front_end, cases, env={"OMP_NUM_THREADS": "1"})
    assert all(not any(results) for results in others)
    return first


@cache
def table():
    return dict(zip(TABLE, told("plain", *((TOLD[setting][name], None, {}) for setting, name in TABLE)), strict=True))


@pytest.mark.parametrize(("setting", "name"), TABLE, ids=lambda value: str(value).replace(" ", "-"))
def test_a_loss_that_the_weights_do_not_fit_is_named_with_its_setting_and_no_other(setting, name):
    assert table()[setting, name].count(setting) == (setting is not None)
    assert set(table()[setting, name]) <= {setting, "weight_fn"} if setting else not table()[setting, name]


@pytest.mark.parametrize("front_end", FETCHED)
def test_every_front_end_names_losses_and_dropped_rows_once(front_end):
    chosen = (("weight_fn", "class weights"), ("loss_reduction", "squares"), ("min_local_batch_size", "contrastive"))
    cases = [(TOLD[setting][name], None) for setting, name in (*chosen, (None, "causal"))]
    said = told(front_end, *((loss, collate_fn, {}) for loss, collate_fn in [*cases, (entropy(), drop)]))
    assert said == [["weight_fn"], ["loss_reduction"], ["min_local_batch_size"], [], ["weight_fn"]]


def test_nothing_is_said_where_the_user_has_decided_or_sizes_never_differ():
    losses = [TOLD["weight_fn"]["class weights"], TOLD["loss_reduction"]["squares"], contrastive]
    cases = [(loss, drop, settings) for settings in SILENCED for loss in losses]
    assert told("plain", *cases) == [[]] * len(cases)


# collectives that a loss calls by itself


def _all_gather(rows):
    parts = [torch.zeros_like(rows) for _ in range(2)]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts)


def _into_tensor(rows):
    everyone = rows.new_zeros(2 * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, rows.detach())
    return everyone


def _gather(rows):
    parts = [torch.zeros_like(rows) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(rows.detach(), parts)
    return torch.cat(parts or [rows.detach(), rows.detach()])


def _all_to_all_single(rows):
    everyone = rows.new_zeros(2 * len(rows), *rows.shape[1:])
    dist.all_to_all_single(everyone, torch.cat([rows, rows]).detach())
    return everyone


GATHERS = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _into_tensor,
    "gather": _gather,
    "all_to_all_single": _all_to_all_single,
    "all_gather_tensor": lambda rows: functional.all_gather_tensor(rows.detach(), 0, dist.group.WORLD) + 0,
    "all_gather_tensor with gradients": lambda rows: functional.all_gather_tensor_autograd(rows, 0, [0, 1]) + 0,
    "all_gather with gradients": lambda rows: torch.cat(dist.nn.functional.all_gather(rows)),
    "all_gather of a part": lambda rows: torch.cat(dist.nn.functional.all_gather(rows, group=PAIR[0])),
}
PAIR = []


class Gathering:
    """A loss that calls each gather of torch and a sum of means; ``found`` holds what came of it, by step."""

    def __init__(self):
        self.found = []

    def __call__(self, model, batch):
        if not PAIR:
            PAIR.append(dist.new_group([0, 1]))
        output, found = model(batch[0]), {}
        loss, equal = mean(model, *batch[:2]), False
        for name, gather in GATHERS.items():
            try:
                everyone = gather(output)
            except ValueError as error:
                found[name] = str(error)
            else:
                found[name], equal = everyone.detach().numpy(), True
        if equal:
            loss = nn.functional.mse_loss(everyone, _all_gather(batch[1]))
        dist.reduce(output.max().detach(), 0, op=dist.ReduceOp.MAX)
        dist.all_reduce(output.mean().detach())
        self.found.append((output.detach().numpy(), found))
        return loss


class GatheringModule(Losses):
    def __init__(self):
        super().__init__("mean")
        self.validated = []

    def training_step(self, batch, batch_idx):
        self.indices = batch[2].tolist()
        return self.trainer.gathering(self, batch)

    def validation_step(self, batch, batch_idx):
        with pytest.raises(ValueError, match="all_gather") as error:
            _all_gather(batch[0])
        self.validated.append(str(error.value))


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("lightning_hetero").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def _gathering(rank, name, sizes):
    """What two steps found, their gradients and samples, and the warnings."""
    warnings.simplefilter("ignore", FutureWarning)
    warned, settings, differ = Warnings(), {"local_batch_sizes": sizes}, len(set(sizes or ())) > 1
    if name == "lightning":
        from lightning_hetero import HeteroDDPStrategy

        model = GatheringModule()
        strategy = HeteroDDPStrategy(**settings, balance_evaluation=True)
        validation = {"limit_val_batches": int(differ), "val_check_interval": 2, "num_sanity_val_steps": 0}
        trainer = trainer_of(strategy, 2, max_steps=2, **validation)
        trainer.gathering = gathering = Gathering()
        trainer.fit(model, DataLoader(Points(SAMPLES), 5, shuffle=True), DataLoader(Points(SAMPLES), 5))
        assert bool(model.validated) == differ
        return gathering.found, model.steps, warned.texts
    front, steps = Front(name, "mean", rank, **settings), []
    gathering = Gathering()
    for batch in islice(iter(front.loader), 2):
        front.model.zero_grad()
        front.backward(gathering(front.model, batch))
        steps.append((flat_grads(front.model), [batch[2].tolist()]))
    return gathering.found, steps, warned.texts


@pytest.mark.parametrize("name", FETCHED)
def test_a_gather_of_unequal_batches_by_the_loss_is_an_error_on_every_rank(name):
    """Also in a validation with unequal shares; a sum over ranks is named once, on one rank."""
    first, second = run_ranks(_gathering, 2, name, SIZES)
    for (_, found), (_, same) in zip(first[0], second[0], strict=True):
        assert found == same
        assert set(found) == set(GATHERS)
        for called, text in found.items():
            assert f"{called.split()[0]}()" in text
            assert Path(__file__).name in text
            assert "policy='even'" in text
    assert len(first[0]) == 2
    assert ["all_reduce()" in text and Path(__file__).name in text for text in first[2]] == [True]
    assert second[2] == []


@pytest.mark.parametrize("name", FETCHED)
def test_a_gather_of_equal_batches_by_the_loss_is_that_of_torch(name):
    ranks = run_ranks(_gathering, 2, name, (4, 4))
    for (one, found), (other, _) in zip(*(rank[0] for rank in ranks), strict=True):
        assert set(found) == set(GATHERS)
        for called in set(found) - {"all_to_all_single"}:
            np.testing.assert_array_equal(found[called], np.concatenate([one, other]))
    steps = [[first[0] + second[0]] for (_, first), (_, second) in zip(*(rank[1] for rank in ranks), strict=True)]
    for _, got, warned in ranks:
        np.testing.assert_allclose(np.stack([grads for grads, _ in got]), reference("mean", steps), **EXACT)
        assert warned == []


@pytest.mark.parametrize("name", FETCHED)
def test_a_gather_of_equal_batches_is_named_while_the_split_may_move(name):
    first, second = run_ranks(_gathering, 2, name, None)
    gathers = {called.split()[0] for called in GATHERS} - {"all_to_all_single"}
    assert {text.partition("(")[0] for text in first[2]} == gathers
    assert len(first[2]) == len(set(first[2])), "each is named once"
    assert all(Path(__file__).name in text and "policy='even'" in text for text in first[2])
    assert second[2] == []
