"""The table of docs/limits.md, row by row: what works gives the promised steps, what is refused says how to go on."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import DynamicBatchPIDCallback, HeteroDDPStrategy, HeteroFSDPStrategy, PerfModelCallback
from lightning_hetero.data import SamplerStream
from tests.helpers import Points, Regressor, run_ranks, trainer_of

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
TABLE = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES]
ROWS = {feature: status for feature, status, _ in TABLE[2:]}
STATUSES = ("works", "works, with a rule", "refused")

# Lightning's advice, which it gives on rank 0 only: as an error there it would leave the other ranks waiting.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),  # of Lightning's all_gather
]

N, SPLIT, STEPS = 11, {"local_batch_sizes": [3, 1]}, 3  # batches of 4, 4 and 3 samples
SECONDS = 60
CASES = {}


def case(row, gpu=False):
    """Enter the test of a row of the table."""

    def enter(function):
        CASES[row] = (function, gpu)
        return function

    return enter


def test_table_and_cases_name_the_same_rows():
    assert set(ROWS) == set(CASES)
    assert len(TABLE) == 2 + len(ROWS), "a row is there twice"
    assert set(ROWS.values()) == set(STATUSES)


def test_what_is_refused_shows_the_lines_to_change():
    for feature, status, advice in TABLE[2:]:
        if status == "refused":
            assert re.search(r"\*\*\d lines?\*\*: .*`.+`", advice), f"{feature}: how many lines, and which?"


class Model(Regressor):
    """Counts validations and test batches besides."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.validations, self.sanity, self.evaluated = [], 0, 0

    def validation_step(self, batch, batch_idx):
        self.evaluated += len(batch[0])
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            self.sanity += 1
        else:
            self.validations.append((self.trainer.current_epoch, self.trainer.global_step))

    def test_step(self, batch, batch_idx):
        self.evaluated += len(batch[0])
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch[2]


def points(n=N, batch_size=2, dtype=torch.float64, **kwargs):
    return DataLoader(Points(n, dtype=dtype), batch_size, **kwargs)


def trained(model, trainer):
    return {
        "weights": model.flat(),
        "seen": model.seen,
        "steps": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        **{name: getattr(model, name, None) for name in ("validations", "sanity", "evaluated", "extra")},
    }


def _fit(rank, model=None, data=None, val=None, strategy=SPLIT, world_size=2, **kwargs):
    model = Model() if model is None else model
    strategy = HeteroDDPStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = trainer_of(strategy, world_size, **kwargs)
    trainer.fit(model, points() if data is None else data, val)
    return trained(getattr(model, "_orig_mod", model), trainer)


def _job(rank, job):
    return _fit(rank, **job)


def run(**job):
    """Fit on two ranks, the first of which takes three samples of every four."""
    return run_ranks(_job, job.get("world_size", 2), job, timeout=SECONDS)


def refused(words, errors=("MisconfigurationException", "ValueError"), **job):
    """Fit on two ranks, both of which have to raise one of these errors with the words of the cure."""
    raised = run_ranks(_job, 2, job, timeout=SECONDS, expect_errors=True)
    assert [rank for rank, *_ in raised] == [0, 1], raised
    for _, kind, message in raised:
        assert kind in errors, (kind, message)
        assert re.search(words, message), message


def epochs_of(results, n=N, epochs=2, batches=STEPS, times=1):
    """Every sample once an epoch, the same batches, steps and weights on every rank."""
    for result in results:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        assert result["steps"] == results[0]["steps"]
        assert [s[:2] for s in result["seen"]] == [(e, b) for e in range(epochs) for b in range(batches)] * times
    for epoch in range(epochs):
        seen = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        assert seen == sorted(list(range(n)) * times)
    return results[0]


def like_one_process(job, reference, rtol=1e-12, **kwargs):
    """The weights of the split run are those of plain Lightning on one process with the same total batch."""
    ours = epochs_of(run(**job), **kwargs)
    plain = run(world_size=1, strategy="ddp", data=points(batch_size=4, shuffle=True), **reference)[0]
    np.testing.assert_allclose(ours["weights"], plain["weights"], rtol=rtol, atol=rtol)
    assert ours["steps"] == plain["steps"]
    return ours


# optimization


@case("automatic optimization")
def automatic():
    like_one_process({}, {})


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_pass(self.loss(batch))
        optimizer.step()

    def backward_pass(self, loss):
        self.manual_backward(loss)


class Direct(Manual):
    def backward_pass(self, loss):
        loss.backward()


@case("manual optimization")
def manual():
    like_one_process({"model": Manual()}, {"model": Manual()})
    refused("manual_backward", ("RuntimeError",), model=Direct())


class Adversaries(Manual):
    """Two nets with an optimizer each that are trained in turn on one batch."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(5, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        Regressor.training_step(self, batch, batch_idx)
        x, y, _ = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.net, self.other)]


@case("several optimizers")
def several_optimizers():
    unused = {"find_unused_parameters": True}
    plain = "ddp_find_unused_parameters_true"
    ours = epochs_of(run(model=Adversaries(), strategy={**SPLIT, **unused}))
    alone = run(world_size=1, strategy=plain, data=points(batch_size=4, shuffle=True), model=Adversaries())[0]
    np.testing.assert_allclose(ours["weights"], alone["weights"], rtol=1e-12)


@case("`accumulate_grad_batches`")
def accumulation():
    window = {"accumulate_grad_batches": 2}
    assert like_one_process(window, window)["steps"] == 4


@case("`GradientAccumulationScheduler`")
def accumulation_scheduler():
    def windows():
        return {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]}

    assert like_one_process(windows(), windows())["steps"] == 4


@case("gradient clipping")
def clipping():
    for how in ({"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}):
        like_one_process(how, how)


@case('`precision="bf16-mixed"`')
def bf16():
    single = {"dtype": torch.float32}
    ours = epochs_of(run(precision="bf16-mixed", model=Model(**single), data=points(**single)))
    exact = epochs_of(run(model=Model(**single), data=points(**single)))
    np.testing.assert_allclose(ours["weights"], exact["weights"], rtol=0.05, atol=5e-3)


def _on_one_gpu(rank, job):
    """Two nodes of one device each, which is the same GPU; gloo, because NCCL wants a GPU per rank."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    strategy = {**SPLIT, "process_group_backend": "gloo"}
    return _fit(rank, strategy=strategy, world_size=1, num_nodes=2, accelerator="gpu", **job)


def on_one_gpu(**job):
    single = {"dtype": torch.float32}
    job = {"model": Model(**single), "data": points(**single), **job}
    return epochs_of(run_ranks(_on_one_gpu, 2, job, timeout=2 * SECONDS, start="spawn"))


@case('`precision="16-mixed"`', gpu=True)
def fp16():
    scaled, exact = on_one_gpu(precision="16-mixed"), on_one_gpu()
    np.testing.assert_allclose(scaled["weights"], exact["weights"], rtol=0.05, atol=5e-3)


@case("`torch.compile`")
def compiled():
    exact = epochs_of(run())
    ours = epochs_of(run(model=torch.compile(Model(), backend="eager")))
    np.testing.assert_allclose(ours["weights"], exact["weights"], rtol=1e-12)


# what DDP offers


class Unused(Model):
    """A branch that takes no part in every other batch."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(5, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.branch(batch[0]).square().mean() if batch_idx % 2 else loss

    def on_before_optimizer_step(self, optimizer):
        pass


@case("`find_unused_parameters`")
def unused_parameters():
    epochs_of(run(model=Unused(), strategy={**SPLIT, "find_unused_parameters": True}))
    aliased = run(model=Unused(), strategy="hetero_ddp_find_unused_parameters_true", data=points(batch_size=2))
    epochs_of(aliased)
    cure = "strategy='hetero_ddp_find_unused_parameters_true'.*=HeteroDDPStrategy.find_unused_parameters=True"
    refused(cure, errors=("RuntimeError",), model=Unused())


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Head(Model):
    """Whose optimizer begins with the layers that are not frozen."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


@case("freezing and unfreezing in the run (`BaseFinetuning`)")
def unfreezing():
    like_one_process({"model": Head(), "callbacks": [Finetuning()]}, {"model": Head(), "callbacks": [Finetuning()]})


class Embedded(Model):
    def __init__(self):
        super().__init__(momentum=0.0)
        self.table = nn.Embedding(N, 1, sparse=True, dtype=torch.float64)

    def loss(self, batch):
        x, y, index = batch
        return nn.functional.mse_loss(self(x) + self.table(index), y)

    def on_before_optimizer_step(self, optimizer):
        """Keep no gradients, which are sparse."""


@case("sparse gradients (`nn.Embedding(sparse=True)`)")
def sparse_gradients():
    like_one_process({"model": Embedded()}, {"model": Embedded()})
    refused("Set sparse=False", model=Embedded(), strategy={**SPLIT, "compression": "block_topk"})
    refused("Set sparse=False", model=Embedded(), strategy={**SPLIT, "staleness": 1})


class Bounded(Embedded):
    """Rows of an embedding that are kept short: by its forward pass, or on all ranks before each batch."""

    def __init__(self, by_forward):
        super().__init__()
        self.by_forward = by_forward
        self.table = nn.Embedding(N, 1, max_norm=0.5 if by_forward else None, dtype=torch.float64)

    def on_train_batch_start(self, batch, batch_idx):
        if not self.by_forward:
            self.table.weight.data.renorm_(2.0, 0, 0.5)


@case("`nn.Embedding(max_norm=...)`")
def bounded_embeddings():
    refused("max_norm=0.5: .* would train different models. Set max_norm=None", model=Bounded(by_forward=True))
    like_one_process({"model": Bounded(by_forward=False)}, {"model": Bounded(by_forward=False)})
    epochs_of(run(world_size=1, strategy="hetero_ddp", model=Bounded(by_forward=True)), batches=6)


@case("`static_graph`")
def static_graph():
    exact, ours = epochs_of(run()), epochs_of(run(strategy={**SPLIT, "static_graph": True}))
    np.testing.assert_allclose(ours["weights"], exact["weights"], rtol=1e-12)


class Normalised(Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        first, *rest = self.net
        self.net = nn.Sequential(first, nn.BatchNorm1d(7, dtype=first.weight.dtype), *rest)


@case("`SyncBatchNorm`", gpu=True)
def sync_batch_norm():
    model = {"dtype": torch.float32}
    ours = on_one_gpu(sync_batchnorm=True, model=Normalised(**model))
    plain = {"world_size": 1, "strategy": "ddp", "model": Normalised(**model)}
    alone = run(data=points(batch_size=4, shuffle=True, **model), **plain)[0]
    np.testing.assert_allclose(ours["weights"], alone["weights"], rtol=1e-3, atol=1e-4)


@case("batch normalization")
def batch_norm():
    """Sizes below 2 are no plan, and the tail of 3 samples goes to one rank whole."""
    for strategy, data in (({"local_batch_sizes": [2, 2]}, None), ("hetero_ddp", None)):
        results = run(model=Normalised(), strategy=strategy, data=data)
        assert all(len(indices) != 1 for result in results for *_, indices in result["seen"])
        epochs_of(results)
    refused("min_local_batch_size", model=Normalised())
    refused("batch_size", model=Normalised(), strategy="hetero_ddp", data=points(batch_size=1))
    refused("more than 1 value per channel", model=Normalised(), strategy="hetero_ddp", data=points(9))
    epochs_of(run(model=Normalised(), strategy="hetero_ddp", data=points(8, drop_last=True)), n=8, batches=2)


def counted_hook(state, bucket):
    state.append(bucket.buffer().numel())
    return fp16_compress_hook(None, bucket)


@case("`ddp_comm_hook`")
def comm_hook():
    single, calls = {"dtype": torch.float32}, []
    exact = epochs_of(run(model=Model(**single), data=points(**single)))
    hooks = [
        {"ddp_comm_hook": counted_hook, "ddp_comm_state": calls},
        {"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": fp16_compress_wrapper},
    ]
    for hook in hooks:
        ours = epochs_of(run(model=Model(**single), data=points(**single), strategy={**SPLIT, **hook}))
        np.testing.assert_allclose(ours["weights"], exact["weights"], rtol=1e-2, atol=1e-3)
        assert not np.array_equal(ours["weights"], exact["weights"]), "the hook was not used"


@case("`compression`")
def compression():
    single = {"dtype": torch.float32}
    exact = epochs_of(run(model=Model(**single), data=points(**single)))
    whole = {**SPLIT, "compression": "block_topk(density=1.0, value_dtype='float32')"}
    ours = epochs_of(run(model=Model(**single), data=points(**single), strategy=whole))
    np.testing.assert_allclose(ours["weights"], exact["weights"], rtol=1e-4, atol=1e-6)
    for name in ("block_topk", "powersgd", "fp16", "bf16"):
        epochs_of(run(model=Model(**single), data=points(**single), strategy={**SPLIT, "compression": name}))


@case("`hierarchy`")
def hierarchy():
    exact = epochs_of(run(data=points()))
    ours = epochs_of(run(data=points(), strategy={**SPLIT, "hierarchy": [[0], [1]]}))  # more: test_hierarchy.py
    np.testing.assert_array_equal(ours["weights"], exact["weights"])
    refused("torch's own hooks", strategy={**SPLIT, "hierarchy": "nodes", "compression": "fp16"})
    refused("Give one", strategy={**SPLIT, "hierarchy": "nodes", "ddp_comm_hook": fp16_compress_hook})


@case("`staleness=1`")
def staleness():
    late = {**SPLIT, "staleness": 1}
    exact = epochs_of(run(data=points()))
    ours = epochs_of(run(data=points(), strategy=late))
    np.testing.assert_array_equal(ours["weights"], exact["weights"])  # nothing is delayed before it was measured
    refused("staleness=0", model=Manual(), strategy=late)
    refused("staleness=0", strategy={**late, "find_unused_parameters": True})
    refused("staleness=0", strategy={**late, "ddp_comm_hook": fp16_compress_hook})
    refused("staleness=0", strategy={**late, "compression": "bf16"})


@case("model averaging (`model_averaging_period`)")
def model_averaging():
    refused("[Ll]eave", strategy={"model_averaging_period": 2})


# data


class Several(Model):
    """A loss of the batches of two loaders."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch[0], batch_idx)
        return self.loss(batch[0]) + self.loss(batch[1])


@case("several train DataLoaders")
def several_loaders():
    for strategy in (SPLIT, {"policy": "even"}):
        epochs_of(run(model=Several(), data=[points(), points(7)], strategy=strategy))
    three = {"world_size": 3, "strategy": "hetero_ddp"}
    raised = run_ranks(
        _job, 3, {"model": Several(), "data": [points(3, 1), points(7)], **three}, timeout=SECONDS, expect_errors=True
    )
    assert [rank for rank, *_ in raised] == [0, 1, 2]
    assert all("Set drop_last=True" in message for *_, message in raised)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Points(8))


class Gathers(Model):
    def __init__(self):
        super().__init__()
        self.extra = []

    def training_step(self, batch, batch_idx):
        self.extra.append(self.all_gather(batch[2]).flatten().tolist())
        return super().training_step(batch, batch_idx)


@case("`self.all_gather`")
def all_gather():
    results = run(model=Gathers())
    for step, rows in enumerate(epochs_of(results)["extra"]):
        assert rows == sum((result["seen"][step][2] for result in results), [])
    assert [len(rows) for rows in results[1]["extra"]] == [4, 4, 3] * 2


class SelfGathering(Model):
    def training_step(self, batch, batch_idx):
        dist.all_gather([torch.zeros_like(batch[0]) for _ in range(2)], batch[0])
        return super().training_step(batch, batch_idx)


@case("a loss that gathers over ranks by itself")
def own_gather():
    refused(r"all_gather\(\).*policy='even'", ("ValueError",), model=SelfGathering())


@case("`IterableDataset`")
def iterable():
    for strategy in (SPLIT, "hetero_ddp"):
        for result in run(data=DataLoader(Stream(), 2), strategy=strategy):
            assert result["steps"] == 8
    for result in run(data=DataLoader(Stream(), 2), strategy={"local_batch_sizes": (3, 1), "shard": "whole"}):
        assert result["steps"] == 4
    refused("set shard=.mine.", data=DataLoader(Stream(), 2), strategy={"shard": "claim"})
    for result in run(data=DataLoader(Stream(), 2), strategy={"policy": "even"}):
        assert result["steps"] == 8


@case("`batch_size=None`")
def no_batch_size():
    items = [(d.x[:], d.y[:], torch.arange(4 * i, 4 * i + len(d))) for i, d in enumerate(map(Points, (4, 4, 3)))]
    results = run(data=DataLoader(items, batch_size=None))
    epochs_of(results, batches=2)
    strings = DataLoader([object() for _ in range(4)], batch_size=None, collate_fn=lambda item: item)
    refused("rows of a batch of type object cannot be counted", ("TypeError",), data=strings)


class Buckets(BatchSampler):
    pass


class OwnBatches:
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


@case("own batch sampler")
def own_batch_sampler():
    dataset = Points(N)
    buckets = DataLoader(dataset, batch_sampler=Buckets(RandomSampler(dataset), 2, drop_last=False))
    epochs_of(run(data=buckets))
    own = DataLoader(dataset, batch_sampler=OwnBatches())
    epochs_of(run(data=own), n=4, batches=1)
    refused("shard='whole'.*shard='mine'", data=own, use_distributed_sampler=False)
    epochs_of(run(data=own, use_distributed_sampler=False, strategy={**SPLIT, "shard": "whole"}), n=4, batches=1)
    for result in run(data=own, use_distributed_sampler=False, strategy={"policy": "even"}):
        assert result["steps"] == 4


class OwnDistributed(DistributedSampler):
    pass


@case("own `DistributedSampler`")
def own_distributed_sampler():
    def loader(cls):
        return points(sampler=cls(Points(N), num_replicas=2, rank=0, shuffle=True, seed=3))

    results = run(data=loader(DistributedSampler), max_epochs=1)
    epochs_of(results, epochs=1)
    first = [i for r in results for i in r["seen"][0][2]]
    assert first == list(DistributedSampler(Points(N), 1, 0, seed=3))[:4]
    refused("shard='mine'", data=loader(OwnDistributed))
    mine = run_ranks(_own, 2, timeout=SECONDS)
    epochs_of(mine, n=N - 1, batches=3)


def _own(rank):
    sampler = OwnDistributed(Points(N - 1), num_replicas=2, rank=rank)
    return _fit(rank, strategy={"shard": "mine"}, data=DataLoader(Points(N - 1), 2, sampler=sampler))


@case("`use_distributed_sampler=False`")
def no_distributed_sampler():
    for data in (points(shuffle=True), points(), points(sampler=WeightedRandomSampler([1.0] * N, N))):
        refused("use_distributed_sampler.*shard='whole'", data=data, use_distributed_sampler=False)
    whole = {**SPLIT, "shard": "whole"}
    epochs_of(run(data=points(shuffle=True), use_distributed_sampler=False, strategy=whole))
    own = points(sampler=DistributedSampler(Points(N), 2, 0))
    epochs_of(run(data=own, use_distributed_sampler=False))
    alone = run(data=points(shuffle=True), use_distributed_sampler=False, world_size=1, strategy="hetero_ddp")
    epochs_of(alone, batches=6)


@case("`WeightedRandomSampler` and other samplers")
def weighted_sampler():
    sampler = WeightedRandomSampler(torch.arange(1.0, N + 1), 13)
    results = run(data=points(sampler=sampler))
    for epoch in range(2):
        drawn = sorted(SamplerStream(sampler, seed=0).indices(epoch))
        assert sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices) == drawn
    assert [r["steps"] for r in results] == [8, 8]


@case("`drop_last`")
def drop_last():
    results = run(data=points(drop_last=True))
    assert [r["steps"] for r in results] == [4, 4]
    assert [[len(i) for *_, i in r["seen"]] for r in results] == [[3] * 4, [1] * 4]


@case("dataset smaller than a batch")
def small_dataset():
    epochs_of(run(data=points(3)), n=3, batches=1)
    epochs_of(run(data=points(3, batch_size=8), strategy="hetero_ddp"), n=3, batches=1)


@case("dataset smaller than the number of ranks")
def tiny_dataset():
    for strategy in (SPLIT, "hetero_ddp"):
        results = run(data=points(1), strategy=strategy)
        epochs_of(results, n=1, batches=1)


@case("`num_workers`")
def workers():
    epochs_of(run(data=points(num_workers=1), strategy={"replan": 2}))


@case("`persistent_workers`")
def persistent():
    epochs_of(run(data=points(num_workers=1, persistent_workers=True)))


# the length of a run


@case("`overfit_batches`")
def overfit():
    results = run(overfit_batches=2, strategy=SPLIT)
    assert [r["steps"] for r in results] == [4, 4]
    for result in results:
        first, again = ([i for e, _, i in result["seen"] if e == epoch] for epoch in (0, 1))
        assert first == again
    assert sorted(i for r in results for e, _, indices in r["seen"] if e == 0 for i in indices) == list(range(8))


@case("`fast_dev_run`")
def fast_dev_run():
    for result in run(fast_dev_run=True, val=points(4), strategy="hetero_ddp"):
        assert (result["steps"], len(result["validations"])) == (1, 1)


@case("`limit_train_batches`")
def limit_train_batches():
    for limit in (2, 0.7):
        for result in run(limit_train_batches=limit, strategy={"replan": 1}):
            assert [s[:2] for s in result["seen"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@case("`max_steps`")
def max_steps():
    for result in run(max_steps=4, max_epochs=-1):
        assert result["steps"] == 4
        assert [s[:2] for s in result["seen"]] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@case("`val_check_interval` as a share of the epoch")
def val_check_share():
    results = run(data=points(15), val=points(4), val_check_interval=0.5, num_sanity_val_steps=0)
    assert [r["validations"] for r in results] == [[(0, 2), (0, 4), (1, 6), (1, 8)]] * 2
    epochs_of(results, n=15, batches=4)


@case("`val_check_interval` in batches")
def val_check_batches():
    results = run(val=points(4), val_check_interval=2)
    assert [r["validations"] for r in results] == [[(0, 2), (1, 5)]] * 2
    results = run(val=points(4), val_check_interval=2, check_val_every_n_epoch=None)
    assert [r["validations"] for r in results] == [[(0, 2), (1, 4), (1, 6)]] * 2
    epochs_of(results)
    refused("val_check_interval", val=points(4), val_check_interval=5)


@case("`check_val_every_n_epoch`")
def val_every_second_epoch():
    results = run(val=points(4), check_val_every_n_epoch=2, max_epochs=4)
    assert [r["validations"] for r in results] == [[(1, 6), (3, 12)]] * 2


@case("`num_sanity_val_steps`")
def sanity():
    results = run(val=points(8), num_sanity_val_steps=1, strategy={**SPLIT, "balance_evaluation": True})
    assert [r["sanity"] for r in results] == [1, 1]
    epochs_of(results)


class Reloads(Model):
    def train_dataloader(self):
        return points(N + 4 * self.trainer.current_epoch, shuffle=True)


def _reloads(rank, strategy):
    trainer, model = trainer_of(HeteroDDPStrategy(**strategy), 2, reload_dataloaders_every_n_epochs=1), Reloads()
    trainer.fit(model)
    return trained(model, trainer)


@case("`reload_dataloaders_every_n_epochs`")
def reload():
    for strategy in (SPLIT, {"replan": 1}):
        results = run_ranks(_reloads, 2, strategy, timeout=SECONDS)
        assert [r["steps"] for r in results] == [7, 7]
        for epoch in range(2):
            seen = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
            assert seen == list(range(N + 4 * epoch))


class Early(EarlyStopping):
    def __init__(self):
        super().__init__("val", patience=1, min_delta=1e6, check_finite=False)


@case("`EarlyStopping`")
def early_stopping():
    results = run(val=points(4), callbacks=[Early()], max_epochs=9)
    assert [r["steps"] for r in results] == [6, 6]
    epochs_of(results)


@case("`estimated_stepping_batches` in `configure_optimizers`")
def stepping_batches():
    for result in run(model=Asks(), accumulate_grad_batches=2):
        assert result["extra"] == result["steps"] == 4


class Asks(Model):
    def configure_optimizers(self):
        self.extra = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


# the module and its callbacks


class Iterates(Model):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@case("`training_step(dataloader_iter)`")
def dataloader_iter():
    refused("Take `batch` in training_step", model=Iterates())


class Skips(Model):
    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.global_rank in self.ranks else loss

    def on_before_optimizer_step(self, optimizer):
        pass


@case("`training_step` returning `None`")
def skipped_step():
    refused("returning None", ("RuntimeError",), model=Skips((0, 1)))
    raised = run_ranks(_job, 2, {"model": Skips((1,))}, timeout=SECONDS, expect_errors=True)
    assert [rank for rank, *_ in raised] == [0, 1]
    assert "returning None" in raised[1][2]
    alone = run(world_size=1, strategy="hetero_ddp", model=Skips((0,)), data=points(batch_size=4))
    epochs_of(alone)


@case("FSDP, DeepSpeed or ModelParallel with our callbacks")
def other_strategies():
    for strategy in ("ddp", ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)):
        refused("hetero_ddp", strategy=strategy, callbacks=[PerfModelCallback()])


@case("sharded models (`hetero_fsdp`)")
def sharded_models():
    like_one_process({"strategy": HeteroFSDPStrategy(**SPLIT), "model": Whole()}, {})
    refused("is not sharded", strategy=HeteroFSDPStrategy(**SPLIT), model=Partly())


class Whole(Model):
    """Knows its whole weights, of which a rank has shards."""

    def on_before_optimizer_step(self, optimizer):
        pass

    def flat(self):
        weights = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters())
        return torch.cat([weight.detach().flatten() for weight in weights]).numpy()


class Partly(Whole):
    def configure_model(self):
        fully_shard(self.net[0], mesh=self.trainer.strategy.data_parallel_mesh)


@case("two policies")
def two_policies():
    refused("Keep one", strategy="hetero_ddp", callbacks=[PerfModelCallback(), DynamicBatchPIDCallback()])
    refused("Keep one", strategy={"policy": "pid"}, callbacks=[PerfModelCallback()])
    refused("Keep one", callbacks=[PerfModelCallback()])
    refused("Give one", strategy={"policy": "static", **SPLIT})


@case("`LearningRateFinder`")
def lr_finder():
    finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    for strategy in (SPLIT, {"replan": 1}):
        results = run(strategy=strategy, callbacks=[finder])
        seen = [r["seen"][5:] for r in results]
        epochs_of([{**r, "seen": s} for r, s in zip(results, seen, strict=True)])
        assert [r["steps"] for r in results] == [6, 6]


@case("`BatchSizeFinder`")
def batch_size_finder():
    refused("not supported with distributed strategies", callbacks=[BatchSizeFinder()])


@case("`StochasticWeightAveraging`")
def swa():
    def job(**kwargs):
        return {"callbacks": [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], "max_epochs": 3, **kwargs}

    like_one_process(job(), job(), epochs=3)
    results = run(**job(model=Normalised(), strategy={"local_batch_sizes": [2, 2]}))
    for result in results:
        assert result["steps"] == 10  # Lightning counts the epoch without backward passes as one step
        assert [s[:2] for s in result["seen"]] == [(e, b) for e in range(4) for b in range(3)]


@case("`WeightAveraging`, `EMAWeightAveraging`")
def ema():
    def job():
        return {"callbacks": [EMAWeightAveraging(decay=0.5)]}

    like_one_process(job(), job())


@case("`barebones=True`")
def barebones():
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    epochs_of(run(barebones=True, **off))


# how processes start, and other entry points


@case("`devices=1`")
def one_device():
    results = run(world_size=1, strategy="hetero_ddp")
    epochs_of(results, batches=6)
    results = run(world_size=1, strategy={"local_batch_sizes": [4]})
    epochs_of(results)


class Counts(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        count = float(len(batch[0])) if self.trainer.strategy.engine.own_size else 0.0
        self.log("count", count, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss


def _launch(rank, alias):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]
    return _fit(rank, model=Counts(), strategy=alias)


@case("`hetero_ddp_spawn`, `hetero_ddp_fork`")
def launchers():
    for alias in ("hetero_ddp_fork", "hetero_ddp_spawn"):
        (result,) = run_ranks(_launch, 1, alias, timeout=2 * SECONDS)
        assert result["metrics"]["count"] == N


def _evaluate(rank, strategy, n):
    model, trainer = Model(), trainer_of(HeteroDDPStrategy(**strategy), 2)
    trainer.validate(model, points(n), verbose=False)
    trainer.test(model, points(n), verbose=False)
    return model.evaluated, torch.cat(trainer.predict(model, points(n))).tolist()


@case("`trainer.validate`, `test`, `predict`")
def evaluation():
    for strategy, n, evaluated in (({}, 7, 16), ({"balance_evaluation": True}, 7, 14)):
        results = run_ranks(_evaluate, 2, strategy, n, timeout=SECONDS)
        assert sum(count for count, _ in results) == evaluated
        assert {i for _, indices in results for i in indices} == set(range(7))


def _again(rank, strategy):
    model, loader = Model(), points()
    trainer = trainer_of(HeteroDDPStrategy(**strategy), 2, max_epochs=1)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    first = trained(model, trainer)
    model.seen = []
    other = trainer_of(HeteroDDPStrategy(**strategy), 2)
    other.fit(model, loader)
    return first, trained(model, other)


@case("`trainer.fit` twice")
def fit_twice():
    for strategy in (SPLIT, {"replan": 1}):
        firsts, others = zip(*run_ranks(_again, 2, strategy, timeout=SECONDS), strict=True)
        assert epochs_of(firsts)["steps"] == 6
        assert epochs_of(others)["steps"] == 6


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.gpu if gpu else ()) for row, (_, gpu) in CASES.items()]
)
def test_row(row):
    check, gpu = CASES[row]
    if gpu and torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    check()
