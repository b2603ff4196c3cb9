"""The table of docs/limits.md, row by row: what works gives the promised steps, what is refused says how to go on.

``ROWS`` has for each row the trainings that show it. A row's trainings run one after another on two ranks, the first of
which takes three samples of every four.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import DynamicBatchPIDCallback, HeteroDDPStrategy, PerfModelCallback
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
TABLE = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES][2:]

# Lightning's advice, which it gives on rank 0 only: as an error there it would leave the other ranks waiting.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),  # of Lightning's all_gather
]

N, SPLIT = 11, {"local_batch_sizes": [3, 1]}  # batches of 4, 4 and 3 samples


# a training


class Model(Regressor):
    """Counts validations and evaluated samples besides."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.validations, self.sanity, self.evaluated, self.extra = [], 0, 0, []

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

    def predict_step(self, batch, batch_idx):
        return batch[2]


class Quiet(Model):
    """Keeps no gradients, which may be sparse, sharded or none."""

    def on_before_optimizer_step(self, optimizer):
        """Nothing."""


def single():
    return Model(dtype=torch.float32)


def points(n=N, batch_size=2, dtype=torch.float64, **kwargs):
    return lambda: DataLoader(Points(n, dtype=dtype), batch_size, **kwargs)


SINGLE = {"model": single, "data": points(dtype=torch.float32)}


def trained(model, trainer):
    found = {name: getattr(model, name) for name in ("seen", "validations", "sanity", "evaluated", "extra")}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**found, "weights": model.flat(), "steps": trainer.global_step, "metrics": metrics}


def fit(model=Model, data=None, val=None, strategy=SPLIT, ranks=2, callbacks=None, **kwargs):
    """Loaders, models and callbacks are given as what makes them."""
    model, strategy = model(), strategy() if callable(strategy) else strategy
    strategy = HeteroDDPStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = trainer_of(strategy, ranks, callbacks=callbacks and callbacks(), **kwargs)
    trainer.fit(model, (data or points())(), val and val())
    return trained(getattr(model, "_orig_mod", model), trainer)


# what a training shows


@dataclass
class Shown:
    """A training of a row, and the check of its results on all ranks."""

    job: dict
    check: object = None
    refused: str | None = None
    alone: dict | None = None
    run: object = fit


def once(n=N, epochs=2, batches=3, *, then=None, **job):
    """Every sample once an epoch, the same batches, steps and weights on every rank."""

    def check(results):
        for result in results:
            np.testing.assert_array_equal(result["weights"], results[0]["weights"])
            assert result["steps"] == results[0]["steps"]
            assert [s[:2] for s in result["seen"]] == [(e, b) for e in range(epochs) for b in range(batches)]
        for epoch in range(epochs):
            assert sorted(i for r in results for e, _, own in r["seen"] if e == epoch for i in own) == list(range(n))
        assert then is None or then(results)

    return Shown(job, check)


def like(rtol=1e-12, *, both=None, model=Model, other="ddp", changed=False, epochs=2, then=None, **job):
    """Besides, the weights and steps are those of stock Lightning on one process with the same total batch."""
    both = {"model": model, **(both or {})}
    shown = once(epochs=epochs, then=then, **{**both, **job})
    dtype = torch.float32 if model is single else torch.float64
    shown.alone = {**both, "ranks": 1, "strategy": other, "data": points(batch_size=4, shuffle=True, dtype=dtype)}
    once_ok = shown.check

    def check(results, plain):
        once_ok(results)
        np.testing.assert_allclose(results[0]["weights"], plain["weights"], rtol=rtol, atol=rtol / 10)
        assert results[0]["steps"] == plain["steps"]
        assert not changed or not np.array_equal(results[0]["weights"], plain["weights"]), "nothing was rounded"

    shown.check = check
    return shown


def no(words, **job):
    """Both ranks raise an error with these words, of a setting or of the cure."""
    return Shown(job, refused=words)


def shows(then, **job):
    def check(results):
        assert then(results), results

    return Shown(job, check)


def steps(number, **job):
    return shows(lambda results: [r["steps"] for r in results] == [number] * len(results), **job)


# modules


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


class Unused(Quiet):
    """A branch that takes no part in every other batch."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(5, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.branch(batch[0]).square().mean() if batch_idx % 2 else loss


class Embedded(Quiet):
    def __init__(self, **settings):
        super().__init__(momentum=0.0)
        self.table = nn.Embedding(N, 1, dtype=torch.float64, **(settings or {"sparse": True}))

    def loss(self, batch):
        x, y, index = batch
        return nn.functional.mse_loss(self(x) + self.table(index), y)


def bounded():
    return Embedded(max_norm=0.5)


class Renormed(Embedded):
    """Rows of an embedding that are kept short on all ranks before each batch."""

    def __init__(self):
        super().__init__(sparse=False)

    def on_train_batch_start(self, batch, batch_idx):
        self.table.weight.data.renorm_(2.0, 0, 0.5)


class Normalised(Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        first, *rest = self.net
        self.net = nn.Sequential(first, nn.BatchNorm1d(7, dtype=first.weight.dtype), *rest)


def compiled():
    return torch.compile(Model(), backend="eager")


class Several(Model):
    """A loss of the batches of two loaders."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch[0], batch_idx)
        return self.loss(batch[0]) + self.loss(batch[1])


class Gathers(Model):
    def training_step(self, batch, batch_idx):
        self.extra.append(self.all_gather(batch[2]).flatten().tolist())
        return super().training_step(batch, batch_idx)


class Asks(Model):
    def configure_optimizers(self):
        self.extra = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Iterates(Model):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Skips(Quiet):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class SkipsOnOne(Skips):
    def training_step(self, batch, batch_idx):
        return (super() if self.global_rank else super(Skips, self)).training_step(batch, batch_idx)


class Reloads(Model):
    def train_dataloader(self):
        return points(N + 4 * self.trainer.current_epoch, shuffle=True)()


class Early(EarlyStopping):
    def __init__(self):
        super().__init__("val", patience=1, min_delta=1e6, check_finite=False)


# loaders


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Points(8))


def stream():
    return DataLoader(Stream(), 2)


def both_loaders():
    return [points()(), points(7)()]


def indivisible():
    return [points(3, 1)(), points(7)()]


class Buckets(BatchSampler):
    pass


class OwnBatches:
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


def buckets():
    dataset = Points(N)
    return DataLoader(dataset, batch_sampler=Buckets(RandomSampler(dataset), 2, drop_last=False))


def own_batches():
    return DataLoader(Points(N), batch_sampler=OwnBatches())


class OwnDistributed(DistributedSampler):
    pass


def distributed(cls=DistributedSampler, n=N, rank=0):
    return DataLoader(Points(n), 2, sampler=cls(Points(n), num_replicas=2, rank=rank, shuffle=True, seed=3))


def own_distributed():
    return distributed(OwnDistributed)


def mine():
    return distributed(OwnDistributed, N - 1, int(os.environ["RANK"]))


def weighted(n=13):
    return DataLoader(Points(N), 2, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), n))


def counted_hook(state, bucket):
    state.append(bucket.buffer().numel())
    return default_hooks.fp16_compress_hook(None, bucket)


# other entry points


def fit_without_loader(model=Reloads, strategy=SPLIT):
    trainer, model = trainer_of(HeteroDDPStrategy(**strategy), 2, reload_dataloaders_every_n_epochs=1), model()
    trainer.fit(model)
    return trained(model, trainer)


def fit_twice(strategy):
    model, loader = Model(), points()()
    trainer = trainer_of(HeteroDDPStrategy(**strategy), 2, max_epochs=1)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    first, model.seen = model.seen, []
    other = trainer_of(HeteroDDPStrategy(**strategy), 2)
    other.fit(model, loader)
    return {**trained(model, other), "first": first}


def like_two_fits(results):
    once().check([{**result, "seen": result["first"]} for result in results])
    once().check(results)
    return True


def from_the_sixth(results):
    """Five steps of a search come first."""
    once().check([{**result, "seen": result["seen"][5:]} for result in results])
    return True


# the table

LATE, HOOK = {**SPLIT, "staleness": 1}, {"ddp_comm_hook": default_hooks.fp16_compress_hook}
DDP, MOVES, EVEN = {"strategy": "hetero_ddp"}, {"strategy": {"replan": 1}}, {"strategy": {"policy": "even"}}
UNUSED, MINE, WHOLE = {"find_unused_parameters": True}, {"shard": "mine"}, {**SPLIT, "shard": "whole"}
OWN_SAMPLER, VAL, ALONE = {"use_distributed_sampler": False}, {"val": points(4)}, {"ranks": 1}


def of(*settings, **more):
    return {"strategy": {**SPLIT, **more, **{name: value for one in settings for name, value in one.items()}}}


def averaging():
    return {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], "max_epochs": 3}


ROWS = {
    "manual optimization": [like(model=Manual), no("manual_backward", model=Direct)],
    "`GradientAccumulationScheduler`": [
        like(both={"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]})
    ],
    '`precision="16-mixed"`': "gpu",
    "`torch.compile`": [like(model=compiled)],
    "`find_unused_parameters`": [
        once(model=Unused, **of(UNUSED)),
        once(model=Unused, strategy="hetero_ddp_find_unused_parameters_true"),
        no("find_unused_parameters=True", model=Unused),
    ],
    "sparse gradients (`nn.Embedding(sparse=True)`)": [
        like(model=Embedded),
        no("sparse=False", model=Embedded, **of(compression="block_topk")),
        no("sparse=False", model=Embedded, strategy=LATE),
    ],
    "`nn.Embedding(max_norm=...)`": [
        no("max_norm=None", model=bounded),
        like(model=Renormed),
        once(model=bounded, batches=6, **ALONE, **DDP),
    ],
    "`SyncBatchNorm`": "gpu",
    "batch normalization": [
        once(model=Normalised, strategy={"local_batch_sizes": [2, 2]}),
        once(model=Normalised, **DDP, then=lambda rs: all(len(i) != 1 for r in rs for *_, i in r["seen"])),
        once(8, batches=2, model=Normalised, data=points(8, drop_last=True), **DDP),
        no("min_local_batch_size", model=Normalised),
        no("batch_size", model=Normalised, data=points(batch_size=1), **DDP),
        no("more than 1 value per channel", model=Normalised, data=points(9), **DDP),
    ],
    "`ddp_comm_hook`": [
        like(
            1e-2, model=single, changed=True, data=SINGLE["data"], **of(ddp_comm_hook=counted_hook, ddp_comm_state=[])
        ),
        like(
            1e-2, model=single, changed=True, data=SINGLE["data"],
            **of(ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper),
        ),
    ],
    "`staleness=1`": [
        like(strategy=LATE),  # nothing is delayed before it was measured
        no("staleness=0", model=Manual, strategy=LATE),
        *(no("staleness=0", **of(LATE, more)) for more in (UNUSED, HOOK, {"compression": "bf16"})),
    ],
    "model averaging (`model_averaging_period`)": [
        no("model_averaging_period", strategy={"model_averaging_period": 2})
    ],
    "several train DataLoaders": [
        once(model=Several, data=both_loaders),
        once(model=Several, data=both_loaders, **EVEN),
        no("drop_last=True", model=Several, data=indivisible, ranks=3, **DDP),
    ],
    "`self.all_gather`": [
        once(
            model=Gathers,
            then=lambda rs: rs[1]["extra"] == [a[2] + b[2] for a, b in zip(*(r["seen"] for r in rs), strict=True)],
        )
    ],
    "own batch sampler": [
        once(data=buckets),
        once(4, batches=1, data=own_batches),
        once(4, batches=1, data=own_batches, strategy=WHOLE, **OWN_SAMPLER),
        steps(4, data=own_batches, **OWN_SAMPLER, **EVEN),
        no("shard='whole'.*shard='mine'", data=own_batches, **OWN_SAMPLER),
    ],
    "own `DistributedSampler`": [
        once(
            epochs=1, data=distributed, max_epochs=1,
            then=lambda rs: rs[0]["seen"][0][2] == list(DistributedSampler(Points(N), 1, 0, seed=3))[:3],
        ),
        once(N - 1, data=mine, strategy=MINE),
        no("shard='mine'", data=own_distributed),
    ],
    "`use_distributed_sampler=False`": [
        once(data=points(shuffle=True), strategy=WHOLE, **OWN_SAMPLER),
        once(data=distributed, **OWN_SAMPLER),
        once(batches=6, data=points(shuffle=True), **OWN_SAMPLER, **ALONE, **DDP),
        *(no("use_distributed_sampler.*shard='whole'", data=data, **OWN_SAMPLER) for data in (points(), weighted)),
    ],
    "`WeightedRandomSampler` and other samplers": [
        steps(8, data=weighted),
        shows(lambda rs: [sum(len(own) for r in rs for e, _, own in r["seen"] if e == k) for k in (0, 1)] == [13, 13],
              data=weighted),
    ],
    "`drop_last`": [
        shows(
            lambda rs: [[len(i) for *_, i in r["seen"]] for r in rs] == [[3] * 4, [1] * 4], data=points(drop_last=True)
        )
    ],
    "dataset smaller than a batch": [once(3, batches=1, data=points(3)), once(3, batches=1, data=points(3, 8), **DDP)],
    "dataset smaller than the number of ranks": [once(1, batches=1, data=points(1), **how) for how in ({}, DDP)],
    "`persistent_workers`": [once(data=points(num_workers=1, persistent_workers=True))],
    "`overfit_batches`": [
        shows(
            lambda rs: all([s[2] for s in r["seen"][:2]] == [s[2] for s in r["seen"][2:]] for r in rs)
            and sorted(i for r in rs for *_, own in r["seen"][:2] for i in own) == list(range(8)),
            overfit_batches=2,
        )
    ],
    "`fast_dev_run`": [
        shows(
            lambda rs: [(r["steps"], len(r["validations"])) for r in rs] == [(1, 1)] * 2,
            fast_dev_run=True, **VAL, **DDP,
        )
    ],
    "`limit_train_batches`": [
        shows(lambda rs: all([s[:2] for s in r["seen"]] == [(0, 0), (0, 1), (1, 0), (1, 1)] for r in rs),
              limit_train_batches=limit, **MOVES)
        for limit in (2, 0.7)
    ],
    "`max_steps`": [
        shows(lambda rs: all([s[:2] for s in r["seen"]] == [(0, 0), (0, 1), (0, 2), (1, 0)] for r in rs),
              max_steps=4, max_epochs=-1)
    ],
    "`val_check_interval` as a share of the epoch": [
        once(15, batches=4, data=points(15), **VAL, val_check_interval=0.5, num_sanity_val_steps=0,
             then=lambda rs: [r["validations"] for r in rs] == [[(0, 2), (0, 4), (1, 6), (1, 8)]] * 2)
    ],
    "`val_check_interval` in batches": [
        once(**VAL, val_check_interval=2, then=lambda rs: [r["validations"] for r in rs] == [[(0, 2), (1, 5)]] * 2),
        once(**VAL, val_check_interval=2, check_val_every_n_epoch=None,
             then=lambda rs: [r["validations"] for r in rs] == [[(0, 2), (1, 4), (1, 6)]] * 2),
        no("val_check_interval", **VAL, val_check_interval=5),
    ],
    "`check_val_every_n_epoch`": [
        once(epochs=4, max_epochs=4, **VAL, check_val_every_n_epoch=2,
             then=lambda rs: [r["validations"] for r in rs] == [[(1, 6), (3, 12)]] * 2)
    ],
    "`num_sanity_val_steps`": [
        once(val=points(8), num_sanity_val_steps=1, **of(balance_evaluation=True),
             then=lambda rs: [r["sanity"] for r in rs] == [1, 1])
    ],
    "`reload_dataloaders_every_n_epochs`": [
        Shown({"strategy": strategy}, run=fit_without_loader, check=lambda rs: [
            np.testing.assert_array_equal(
                sorted(i for r in rs for e, _, own in r["seen"] if e == epoch for i in own), np.arange(N + 4 * epoch)
            )
            for epoch in range(2)
        ])
        for strategy in (SPLIT, {"replan": 1})
    ],
    "`EarlyStopping`": [
        once(**VAL, callbacks=lambda: [Early()], max_epochs=9, then=lambda rs: [r["steps"] for r in rs] == [6, 6])
    ],
    "`estimated_stepping_batches` in `configure_optimizers`": [
        shows(lambda rs: all(r["extra"] == r["steps"] == 4 for r in rs), model=Asks, accumulate_grad_batches=2)
    ],
    "`training_step(dataloader_iter)`": [no("training_step", model=Iterates)],
    "`training_step` returning `None`": [
        no("returning None", model=Skips),
        once(model=Skips, data=points(batch_size=4), **ALONE, **DDP),
    ],
    "FSDP, DeepSpeed or ModelParallel with our callbacks": [
        no("hetero_ddp", strategy=strategy, callbacks=lambda: [PerfModelCallback()])
        for strategy in ("ddp", lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    ],
    "two policies": [
        no("Keep one", **DDP, callbacks=lambda: [PerfModelCallback(), DynamicBatchPIDCallback()]),
        no("Keep one", strategy={"policy": "pid"}, callbacks=lambda: [PerfModelCallback()]),
        no("Keep one", callbacks=lambda: [PerfModelCallback()]),
        no("policy", **of(policy="static")),
    ],
    "`LearningRateFinder`": [
        shows(from_the_sixth, **how,
              callbacks=lambda: [LearningRateFinder(num_training_steps=5, early_stop_threshold=None)])
        for how in ({}, MOVES)
    ],
    "`BatchSizeFinder`": [no("distributed strategies", callbacks=lambda: [BatchSizeFinder()])],
    "`StochasticWeightAveraging`": [
        like(both=averaging(), epochs=3),
        steps(10, model=Normalised, strategy={"local_batch_sizes": [2, 2]}, **averaging()),
    ],
    "`WeightAveraging`, `EMAWeightAveraging`": [like(both={"callbacks": lambda: [EMAWeightAveraging(decay=0.5)]})],
    "`barebones=True`": [
        once(barebones=True,
             **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")))
    ],
    "`devices=1`": [once(batches=6, **ALONE, **DDP), once(**ALONE, strategy={"local_batch_sizes": [4]})],
    "`hetero_ddp_spawn`, `hetero_ddp_fork`": "launched",
    "`trainer.fit` twice": [
        Shown({"strategy": strategy}, run=fit_twice, check=like_two_fits) for strategy in (SPLIT, {"replan": 1})
    ],
}  # fmt: skip
ELSEWHERE = {
    "automatic optimization": ("one_process/test_front_ends.py", '"mean"'),
    "several optimizers": ("one_process/test_modules.py", '"adversaries"'),
    "`accumulate_grad_batches`": ("one_process/test_front_ends.py", '"accumulation"'),
    "gradient clipping": ("one_process/test_front_ends.py", '"clipping"'),
    '`precision="bf16-mixed"`': ("one_process/test_modules.py", '"bfloat16"'),
    "`static_graph`": ("one_process/test_modules.py", '"static graph"'),
    "freezing and unfreezing in the run (`BaseFinetuning`)": ("one_process/test_modules.py", '"finetuned"'),
    "`compression`": ("modes/test_compression.py", "def test_what_is_applied_is_the_compressed_gradient"),
    "`hierarchy`": ("one_process/test_front_ends.py", '"clusters"'),
    "a loss that gathers over ranks by itself": ("one_process/test_losses.py", "def test_a_gather_by_the_loss"),
    "`IterableDataset`": ("one_process/test_front_ends.py", '"a stream of each"'),
    "`batch_size=None`": ("one_process/test_front_ends.py", '"batches of a dataset"'),
    "`num_workers`": ("one_process/test_front_ends.py", '"loader workers"'),
    "sharded models (`hetero_fsdp`)": ("modes/test_fsdp.py", "def test_one_file_leads_from_hetero_ddp"),
    "`trainer.validate`, `test`, `predict`": ("modes/test_balance.py", "def test_balanced_evaluation"),
}
COSTLY = {
    "`LearningRateFinder`", "`StochasticWeightAveraging`", "`WeightAveraging`, `EMAWeightAveraging`",
    "`barebones=True`",
    "`persistent_workers`", "`check_val_every_n_epoch`", "`num_sanity_val_steps`", "`fast_dev_run`",
    "`val_check_interval` as a share of the epoch", "`EarlyStopping`", "`GradientAccumulationScheduler`",
    "`estimated_stepping_batches` in `configure_optimizers`", "`max_steps`", "dataset smaller than a batch",
    "`reload_dataloaders_every_n_epochs`", "`torch.compile`", "`overfit_batches`",
}  # fmt: skip
MARK = pytest.mark.slow("rows that others of the quick run cover in part, or whose work is Lightning's own")


def test_table_and_rows_name_the_same_features():
    assert sorted(feature for feature, *_ in TABLE) == sorted([*ROWS, *ELSEWHERE])
    assert {status for _, status, _ in TABLE} == {"works", "works, with a rule", "refused"}
    assert set(ROWS) >= COSTLY
    for path, case in ELSEWHERE.values():
        assert case in (Path(__file__).parent / path).read_text()


def test_what_is_refused_shows_the_lines_to_change():
    for feature, status, advice in TABLE:
        if status == "refused":
            assert re.search(r"\*\*\d lines?\*\*: .*`.+`", advice), f"{feature}: how many lines, and which?"


def _row(rank, row, ranks):
    """What came of each training of a row on so many ranks, or what was raised."""
    found = []
    for shown in ROWS[row]:
        if shown.job.get("ranks", 2) != ranks:
            found.append(None)
            continue
        try:
            found.append(shown.run(**shown.job))
        except Exception as error:  # noqa: BLE001 - is looked at
            if shown.refused is None:
                raise
            found.append(f"{type(error).__name__}: {error}")
    return found


def _alone(rank, row, number):
    return fit(**ROWS[row][number].alone)


@cache
def alone(row, number):
    return run_ranks(_alone, 1, row, number, timeout=240)[0]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=MARK if row in COSTLY else ()) for row, shown in ROWS.items() if isinstance(shown, list)],
)
def test_a_row_shows_what_it_says(row):
    several = sorted({shown.job.get("ranks", 2) for shown in ROWS[row]})
    start = "fork" if row in COSTLY else "pool"  # threads go on behind searches
    found = {ranks: run_ranks(_row, ranks, row, ranks, start=start, timeout=240) for ranks in several}
    for number, shown in enumerate(ROWS[row]):
        results = [result[number] for result in found[shown.job.get("ranks", 2)]]
        if shown.refused is not None:
            for result in results:
                assert isinstance(result, str), f"{shown.job} was not refused"
                kind, _, text = result.partition(": ")
                assert kind in ("MisconfigurationException", "RuntimeError", "ValueError"), result
                assert re.search(shown.refused, text), result
        elif shown.alone is not None:
            shown.check(results, alone(row, number))
        else:
            shown.check(results)


# rows that need more


def _skips(rank):
    fit(model=SkipsOnOne)


def test_a_step_that_one_rank_skips_is_an_error_there_and_ends_the_others():
    raised = run_ranks(_skips, 2, expect_errors=True)
    assert [rank for rank, *_ in raised] == [0, 1]
    assert "returning None" in raised[1][2]


class Counts(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        count = float(len(batch[0])) if self.trainer.strategy.engine.own_size else 0.0
        self.log("count", count, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss


def _launch(rank, alias):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]
    return fit(model=Counts, strategy=alias)


@pytest.mark.slow("starts interpreters")
@pytest.mark.parametrize("alias", ["hetero_ddp_fork", "hetero_ddp_spawn"])
def test_lightning_launches_its_processes(alias):
    (result,) = run_ranks(_launch, 1, alias, timeout=120)
    assert result["metrics"]["count"] == N


def _on_one_gpu(rank, job):
    """Two nodes of one device each, which is the same GPU; gloo, because NCCL wants a GPU per rank."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    strategy = {**SPLIT, "process_group_backend": "gloo"}
    model, given = (Normalised if job else Model)(dtype=torch.float32), job or {"precision": "16-mixed"}
    trainer = trainer_of(HeteroDDPStrategy(**strategy), 1, num_nodes=2, accelerator="gpu", **given)
    trainer.fit(model, SINGLE["data"]())
    return trained(model, trainer)


def _like_on_a_cpu(rank, model):
    data = points(batch_size=4, shuffle=True, dtype=torch.float32)
    return fit(lambda: model(dtype=torch.float32), data, strategy="ddp", ranks=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "job", "rtol"), [(Model, {}, 0.05), (Normalised, {"sync_batchnorm": True}, 1e-3)])
def test_what_needs_a_gpu_equals_one_process_without_one(model, job, rtol):
    """``precision="16-mixed"`` and ``SyncBatchNorm``."""
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    results = run_ranks(_on_one_gpu, 2, job, timeout=120, start="spawn")
    once().check(results)
    plain = run_ranks(_like_on_a_cpu, 1, model, timeout=240)[0]
    np.testing.assert_allclose(results[0]["weights"], plain["weights"], rtol=rtol, atol=rtol / 10)
