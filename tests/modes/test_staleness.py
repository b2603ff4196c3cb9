"""``staleness=1``: sums that come a step later, by hand; nothing is lost wherever one cuts; who decides on delays."""

import logging

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK
from lightning_hetero.comm.timing.bucket_timer import BucketTimer
from tests.helpers import Points, Regressor, collected, fit
from tests.modes.runs import Saves, alike, by_name, each
from tests.ranks import run_ranks

SAMPLES = 64
INPUT, ALL = ["net.0.weight", "net.0.bias"], ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
STILL = {"replan": 10_000, "bucket_cap_mb": 1e-5}
WHOLE = BlockTopK(density=1.0, value_dtype="float32", warmup_steps=0)
EXACT, ROUNDED = {"rtol": 1e-12, "atol": 1e-14}, {"rtol": 1e-6, "atol": 1e-7}


class Delays(L.Callback):
    """Delays what a schedule of steps says, ``None`` for what the ranks decide; keeps what was delayed when."""

    def __init__(self, schedule):
        self.schedule, self.delayed = schedule, []

    def on_train_start(self, trainer, pl_module):
        late = trainer.strategy.engine.hook_state.staleness
        if self.schedule is not None and late is not None:
            late.control_externally(True)
        self.follow(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self.follow(trainer)

    def follow(self, trainer):
        late = trainer.strategy.engine.hook_state.staleness
        if late is not None and self.schedule and trainer.global_step in self.schedule:
            late.make_stale(self.schedule[trainer.global_step])
        self.delayed.append([] if late is None else late.stale if isinstance(late.stale, bool) else sorted(late.stale))


class Ends(L.Callback):
    """Ends a training after four steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 4


def train(rank, schedule=None, sizes=(7, 3), model=Regressor, callbacks=(), **kwargs):
    """A training by its schedule of delays, in which nothing else moves."""
    model, delays = model(), Delays(schedule)
    strategy = {"staleness": 1, "local_batch_sizes": list(sizes), **STILL, **kwargs.pop("strategy", {})}
    given = {"dataset": Points(SAMPLES), "max_epochs": 2, "callbacks": [delays, *callbacks], **kwargs}
    return {**fit(rank, strategy, len(sizes), 10 // len(sizes), model, **given), "delayed": delays.delayed}


# sums, by hand


def by_hand(results, *, clip=None, accumulate=1):
    """One process that takes the same batches and applies delayed sums by hand; weights at the end, and gradients."""
    model, points, owed, given = Regressor(), Points(SAMPLES), {}, []
    optimizer = model.configure_optimizers()

    def step(grads):
        for name, p in model.named_parameters():
            p.grad = grads.get(name)
        given.append(torch.cat([g.flatten() for g in grads.values()]).numpy())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    batches = list(zip(*(r["seen"] for r in results), strict=True))
    for number in range(0, len(batches), accumulate):
        now = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for parts in batches[number : number + accumulate]:
            indices = [i for _, _, part in parts for i in part]
            model.zero_grad()
            model.loss((points.x[indices], points.y[indices], None)).backward()
            now = {name: now[name] + p.grad / accumulate for name, p in model.named_parameters()}
        delivered = {}
        delayed = results[0]["delayed"][number // accumulate]
        for name in now:
            held = owed.pop(name, torch.zeros_like(now[name]))
            if name in (ALL if delayed is True else delayed or ()):
                delivered[name], owed[name] = held, now[name]
            else:
                delivered[name] = now[name] + held
        step(delivered)
    if owed:
        step(owed)
    return model.flat(), given


class Validated(Regressor):
    def val_dataloader(self):
        return DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


SUMS = {
    "input side": {"schedule": {1: INPUT}},
    "all, from the first step": {"schedule": {0: ALL}},
    "less, none, more": {"schedule": {1: ALL, 4: INPUT, 6: [], 9: ALL}},
    "priority": {"schedule": {1: INPUT}, "strategy": {"transfer_priority": True}},
    "clipping": {"schedule": {1: INPUT, 3: ALL}, "gradient_clip_val": 0.02},
    "accumulation": {"schedule": {1: INPUT, 2: ALL}, "accumulate_grad_batches": 2, "limit_train_batches": 6},
    "validation": {"schedule": {1: ALL}, "model": Validated, "val_check_interval": 2, "max_epochs": 1},
    "all blocks": {"schedule": {1: True, 5: False, 7: True}, "strategy": {"compression": WHOLE}},
}


def test_weights_are_those_of_sums_that_are_delayed_by_hand():
    """Ragged last batches and two epochs included; the sums of the last step are applied when training ends."""
    for name, results in by_name(run_ranks(each, 2, train, SUMS)).items():
        case = SUMS[name]
        how = {"clip": case.get("gradient_clip_val"), "accumulate": case.get("accumulate_grad_batches", 1)}
        weights, given = by_hand(results, **how)
        near = ROUNDED if name == "all blocks" else EXACT
        np.testing.assert_allclose(alike(results)["weights"], weights, **near, err_msg=name)
        assert len(given) == results[0]["steps"] + 1, f"{name}: nothing was owed at the end"
        if how == {"clip": None, "accumulate": 1}:
            np.testing.assert_allclose(results[0]["grads"], given[:-1], **near, err_msg=name)


# nothing is lost


class Linear(Regressor):
    """Whose gradient does not depend on its weights, so that these are the sum of all gradients that were applied."""

    def __init__(self):
        super().__init__(momentum=0.0)
        self.net = nn.ModuleList(nn.Linear(5, n, dtype=torch.float64) for n in (3, 1, 4))

    def loss(self, batch):
        return sum((layer(batch[0]) * batch[1]).mean() for layer in self.net)


LAYERS = [name for name, _ in Linear().named_parameters()]
LATE = {"schedule": {1: LAYERS}, "model": Linear}
CUTS = {
    "two epochs": {},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "some batches": {"limit_train_batches": 3},
    "a callback": {"callbacks": [Ends]},
}
ELSEWHERE = {
    "staleness 0": {"strategy": {"staleness": 0}},
    "one rank": {"sizes": (10,)},
    "three ranks": {"sizes": (4, 4, 2)},
    "delays": {},
    "clusters": {"sizes": (4, 4, 2), "strategy": {"hierarchy": [[0, 1], [2]]}},
}


def summed(*runs):
    """Weights to which all gradients add up, of runs one after another."""
    model, points = Linear(), Points(SAMPLES)
    optimizer = model.configure_optimizers()
    for results in runs:
        for parts in zip(*(r["seen"] for r in results), strict=True):
            indices = [i for *_, own in parts for i in own]
            optimizer.zero_grad()
            model.loss((points.x[indices], points.y[indices], None)).backward()
            optimizer.step()
    return model.flat()


def _cut(rank, folder):
    """Trainings that end in each way, and one that is saved."""
    found = each(rank, train, {name: {**LATE, **case} for name, case in CUTS.items()})
    return {**found, "saved": train(rank, **LATE, callbacks=[Saves(folder, 5)], max_epochs=1)}


def test_nothing_is_lost_wherever_training_ends_and_whatever_goes_on(tmp_path):
    found = by_name(run_ranks(_cut, 2, str(tmp_path)))
    for name, results in found.items():
        np.testing.assert_allclose(alike(results)["weights"], summed(results), **EXACT, err_msg=name)
        steps = {"steps": 5, "some batches": 6, "a callback": 4, "saved": 7}.get(name, 14)
        assert len(results[0]["seen"]) == steps
    before = [{"seen": saved["seen"][:5]} for saved in found["saved"]]
    for name, case in ELSEWHERE.items():
        case = {**LATE, **case, "schedule": {5: []}, "ckpt_path": str(tmp_path / "5")}
        rest = [found["rest"] for found in run_ranks(each, len(case.get("sizes", (7, 3))), train, {"rest": case})]
        np.testing.assert_allclose(rest[0]["weights"], summed(before, rest), **EXACT, err_msg=name)


# the decision


def _given_times(rank):
    """The link is busy for half of a step of 1 s when the ranks look at it first, then fast, then slower than ever."""
    left, lines = [0.5, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 9.0], collected()

    def take(self, buckets):
        table = np.full((32, 2 + buckets), np.nan)
        if left and buckets > 1:
            table[0] = [len(left), left.pop(0), *np.linspace(0.9, 1.0, buckets)]
        return table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketTimer, "take", take)
        done = train(rank, strategy={"replan": 2})
    return {**done, "said": [line for line in lines if "communication-bound" in line]}


def test_delays_follow_the_link_and_no_gradient_is_lost():
    """Whether that gains enough: tests/gradients/test_staleness.py."""
    results = run_ranks(_given_times, 2)
    np.testing.assert_allclose(alike(results)["weights"], by_hand(results)[0], **EXACT)
    delayed, theirs = (result["delayed"] for result in results)
    assert delayed == theirs
    first = next(names for names in delayed if names)
    assert set(INPUT) <= set(first)
    assert "net.2.bias" not in first, "the output side, which is first to be ready"
    assert delayed[13] == [], "something is still delayed although the link is fast"
    assert "net.0.weight" in delayed[-1]
    assert [bool(result["said"]) for result in results] == [True, False]


# what it does not go with


class Closure(Regressor):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


REFUSED = {
    "LBFGS": {"model": Closure},
    "policy='even'": {"strategy": {"local_batch_sizes": None, "policy": "even"}, "use_distributed_sampler": False},
    "block_topk": {"strategy": {"compression": "powersgd"}},
}


def _refused(rank):
    logging.disable(logging.CRITICAL)
    for match, case in REFUSED.items():
        with pytest.raises((ValueError, MisconfigurationException), match="staleness=0") as raised:
            train(rank, **case)
        assert match in str(raised.value)
    return True


def test_what_would_lose_a_delayed_gradient_is_refused_on_every_rank():
    """More of it: docs/limits.md."""
    assert run_ranks(_refused, 2) == [True, True]
