"""``staleness=1``: sums that come a step later, by hand; nothing is lost wherever one cuts; who decides on delays."""

import logging

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, HeteroDDPStrategy
from lightning_hetero.comm.compressors import auto
from lightning_hetero.comm.timing.bucket_timer import BucketTimer
from lightning_hetero.core.compression.auto import LinkMeasurement
from lightning_hetero.core.compression.settings import blocks_per_rank
from lightning_hetero.optim import SparseSGD
from tests.helpers import Points, Regressor, collected, fit, trainer_of
from tests.ranks import run_ranks

SAMPLES = 64
INPUT, ALL = ["net.0.weight", "net.0.bias"], ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
STILL = {"replan": 10_000, "bucket_cap_mb": 1e-5}
BLOCKS = BlockTopK(density=0.3, block=8, value_dtype="float32", warmup_steps=1)
EXACT, CLOSE = {"rtol": 1e-12, "atol": 1e-14}, {"rtol": 1e-3, "atol": 1e-5}


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

    def __init__(self, error=None):
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            if self.error:
                raise self.error
            trainer.should_stop = True


class Saves(L.Callback):
    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def train(rank, schedule=None, sizes=(7, 3), model=Regressor, samples=SAMPLES, callbacks=(), **kwargs):
    """A training by its schedule of delays, in which nothing else moves."""
    model, delays = model(), Delays(schedule)
    features, dtype = model.net[0].in_features, model.net[0].weight.dtype
    strategy = {"staleness": 1, "local_batch_sizes": list(sizes), **STILL, **kwargs.pop("strategy", {})}
    data = {"dataset": Points(samples, features=features, dtype=dtype), "max_epochs": 2}
    total = kwargs.pop("total", 10)
    done = fit(
        rank, strategy, len(sizes), total // len(sizes), model, callbacks=[delays, *callbacks], **{**data, **kwargs}
    )
    return {**done, "delayed": delays.delayed}


def _each(rank, cases):
    """Trainings one after another; a callback is given as what makes it."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = train(rank, **{**case, "callbacks": [make() for make in case.get("callbacks", ())]})
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def alike(results):
    """The results of rank 0, which are those of the other ranks."""
    for result in results[1:]:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        assert result["delayed"] == results[0]["delayed"]
    return results[0]


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
        for name in now:
            held = owed.pop(name, torch.zeros_like(now[name]))
            if name in results[0]["delayed"][number // accumulate]:
                delivered[name], owed[name] = held, now[name]
            else:
                delivered[name] = now[name] + held
        step(delivered)
    if owed:
        step(owed)
    return model.flat(), given


class Validated(Regressor):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.features = self.net[0].in_features

    def val_dataloader(self):
        return DataLoader(Points(8, self.features, self.net[0].weight.dtype), 2)

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
}


def test_weights_are_those_of_sums_that_are_delayed_by_hand():
    """Ragged last batches and two epochs included; the sums of the last step are applied when training ends."""
    ranks = run_ranks(_each, 2, SUMS, timeout=240)
    for name, case in SUMS.items():
        results = [found[name] for found in ranks]
        how = {"clip": case.get("gradient_clip_val"), "accumulate": case.get("accumulate_grad_batches", 1)}
        weights, given = by_hand(results, **how)
        np.testing.assert_allclose(alike(results)["weights"], weights, **EXACT, err_msg=name)
        assert len(given) == results[0]["steps"] + 1, f"{name}: nothing was owed at the end"
        if how == {"clip": None, "accumulate": 1}:
            np.testing.assert_allclose(results[0]["grads"], given[:-1], **EXACT, err_msg=name)


# blocks, by a simulation


class Wide(Validated):
    def __init__(self):
        super().__init__(features=40, lr=0.02, dtype=torch.float32)


class Sparse(Wide):
    def on_before_optimizer_step(self, optimizer):
        """Gradients are blocks, which are not kept; weights are compared."""

    def configure_optimizers(self):
        return SparseSGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def simulated(results, *, clip=None, accumulate=1):
    """Delay-1 SGD with block top-k and error feedback on every worker, in one process: S sec. 3 and design.md 5, 6."""
    model, points, size = Wide(), Points(60, features=40, dtype=torch.float32), BLOCKS.block
    optimizer, parameters = model.configure_optimizers(), list(model.parameters())
    padded = [-(-p.numel() // size) * size for p in parameters]
    k = blocks_per_rank(sum(padded) // size, BLOCKS.density, len(results))
    residuals, owed = [np.zeros((sum(padded) // size, size), np.float32) for _ in results], 0.0

    def apply(flat):
        for p, part in zip(parameters, np.split(np.ravel(flat), np.cumsum(padded)[:-1]), strict=True):
            p.grad = torch.from_numpy(part[: p.numel()].astype(np.float32)).view_as(p).clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()

    batches = list(zip(*(r["seen"] for r in results), strict=True))
    for step, first in enumerate(range(0, len(batches), accumulate)):
        gradients = [0.0 * residual for residual in residuals]
        for parts in batches[first : first + accumulate]:
            total = sum(len(part) for *_, part in parts)
            for gradient, (*_, part) in zip(gradients, parts, strict=True):
                model.zero_grad()
                if part:
                    model.loss((points.x[part], points.y[part], None)).backward()
                    flat = [
                        nn.functional.pad(p.grad.flatten(), (0, n - p.numel()))
                        for p, n in zip(parameters, padded, strict=True)
                    ]
                    gradient += torch.cat(flat).view(-1, size).numpy() * len(part) / total / accumulate
        now = 0.0 * residuals[0]
        for residual, gradient in zip(residuals, gradients, strict=True):
            residual += gradient
            scores = np.abs(residual).sum(axis=1)
            chosen = np.arange(len(scores)) if step < BLOCKS.warmup_steps else np.argsort(-scores)[:k]
            now[chosen] += residual[chosen]
            residual[chosen] = 0.0
        late = bool(results[0]["delayed"][step]) and step >= BLOCKS.warmup_steps
        delivered, owed = (owed, now) if late else (owed + now, 0.0)
        apply(delivered + 0.0 * now)
    if np.any(owed):
        apply(owed)
    return model.flat()


SPARSE = {"sizes": (6, 2), "model": Wide, "samples": 60, "total": 8, "strategy": {"compression": BLOCKS}}
DELAYED = {
    "two epochs": {"schedule": {0: True, 5: False, 7: True}},
    "validation, cut": {"schedule": {1: True}, "max_steps": 5, "max_epochs": -1, "val_check_interval": 2},
    "windows": {
        "schedule": {1: True},
        "accumulate_grad_batches": 2,
        "limit_train_batches": 6,
        "gradient_clip_val": 0.3,
    },
}


def test_weights_are_those_of_a_simulation_of_delayed_blocks():
    ranks = run_ranks(_each, 2, {name: {**SPARSE, **case} for name, case in DELAYED.items()})
    for name, case in DELAYED.items():
        results = [found[name] for found in ranks]
        how = {"clip": case.get("gradient_clip_val"), "accumulate": case.get("accumulate_grad_batches", 1)}
        np.testing.assert_allclose(alike(results)["weights"], simulated(results, **how), **CLOSE, err_msg=name)


# nothing is lost


class Linear(Regressor):
    """Whose gradient does not depend on its weights, so that these are the sum of all gradients that were applied."""

    def __init__(self):
        super().__init__(momentum=0.0)
        self.net = nn.ModuleList(nn.Linear(5, n, dtype=torch.float64) for n in (3, 1, 4))

    def loss(self, batch):
        return sum((layer(batch[0]) * batch[1]).mean() for layer in self.net)


class DelaysItself(Linear):
    """Also while callbacks are left out."""

    def __init__(self):
        super().__init__()
        self.hparams["lr"] = self.lr

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step > 0:
            self.trainer.strategy.engine.hook_state.staleness.make_stale(LAYERS)


LAYERS = [name for name, _ in Linear().named_parameters()]
LATE = {"schedule": {1: LAYERS}, "model": Linear}
CUTS = {
    "two epochs": {},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "some batches": {"limit_train_batches": 3},
    "a callback": {"callbacks": [Ends]},
    "a search for the rate": {
        "schedule": {}, "model": DelaysItself,
        "callbacks": [lambda: LearningRateFinder(
            num_training_steps=5, update_attr=False, early_stop_threshold=None
        )],
    },
}  # fmt: skip
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
    """Trainings that end in each way, one that is saved, one that is interrupted and goes on with the same strategy."""
    found = _each(rank, {name: {**LATE, **case} for name, case in CUTS.items()})
    found["saved"] = train(rank, **LATE, callbacks=[Saves(folder, (5,))], max_epochs=1)
    model, strategy = Linear(), HeteroDDPStrategy(local_batch_sizes=[7, 3], **STILL, staleness=1)
    trainer = trainer_of(strategy, 2, max_epochs=1, callbacks=[Delays({1: LAYERS}), Ends(ValueError("interrupted"))])
    loader = DataLoader(Points(SAMPLES), 5, shuffle=True)
    with pytest.raises(ValueError, match="interrupted"):
        trainer.fit(model, loader)
    trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, Ends)]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    found["interrupted"] = {"weights": model.flat(), "seen": model.seen, "delayed": []}
    return found


def test_nothing_is_lost_wherever_training_ends_and_whatever_goes_on(tmp_path):
    ranks = run_ranks(_cut, 2, str(tmp_path), start="fork", timeout=240)  # the search leaves a thread of tqdm's
    for name in ranks[0]:
        results = [found[name] for found in ranks]
        if name == "a search for the rate":
            results = [{**result, "seen": result["seen"][5:]} for result in results]
        np.testing.assert_allclose(alike(results)["weights"], summed(results), **EXACT, err_msg=name)
        assert len(results[0]["seen"]) == {
            "steps": 5,
            "some batches": 6,
            "a callback": 4,
            "saved": 7,
            "interrupted": 18,
        }.get(name, 14)
    before = [{"seen": found["saved"]["seen"][:5]} for found in ranks]
    for name, case in ELSEWHERE.items():
        case = {**LATE, **case, "schedule": {5: []}, "ckpt_path": str(tmp_path / "5")}
        ranks = run_ranks(_each, len(case.get("sizes", (7, 3))), {"rest": case}, timeout=240)
        rest = [found["rest"] for found in ranks]
        np.testing.assert_allclose(rest[0]["weights"], summed(before, rest), **EXACT, err_msg=name)


def _resumed(rank, folder):
    """Whole runs and their ends, which go on from a checkpoint."""
    found = {}
    dense = {"schedule": {1: INPUT, 8: ALL}}
    blocks = {**SPARSE, "schedule": {1: True, 12: False}}
    few = {"compression": BlockTopK(density=0.05, block=8, warmup_steps=1)}
    for name, case in {
        "dense": dense,
        "blocks": blocks,
        "sparse": {**blocks, "model": Sparse, "strategy": few},
    }.items():
        place = f"{folder}/{name}"
        steps = (3, 9) if name == "dense" else (9,)
        found[name] = [train(rank, **case, callbacks=[Saves(place, steps)])]
        later = {step: delayed for step, delayed in case["schedule"].items() if step > 1}
        found[name] += [train(rank, **{**case, "schedule": later}, ckpt_path=f"{place}/{step}") for step in steps]
    return found


def test_a_resumed_run_goes_on_identically(tmp_path):
    for found in run_ranks(_resumed, 2, str(tmp_path), timeout=240):
        for name, (whole, *ends) in found.items():
            for rest in ends:
                assert rest["seen"] == whole["seen"][-len(rest["seen"]) :]
                np.testing.assert_array_equal(rest["weights"], whole["weights"], err_msg=name)


class Dies(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4 and trainer.global_rank == 1:
            raise ValueError("this worker fails")


@pytest.mark.parametrize("case", [{"schedule": {1: ALL}}, {**SPARSE, "schedule": {1: True}}], ids=["sums", "blocks"])
def test_a_worker_that_fails_ends_the_others_while_something_is_under_way(case):
    errors = run_ranks(_each, 2, {"fails": {**case, "callbacks": [Dies]}}, expect_errors=True)
    assert {rank for rank, *_ in errors} == {0, 1}


# the decision

INTERVALS = {
    "follows": ([0.5, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 9.0], {}),
    "a third, if 90 % are asked for": ([0.5] * 7, {"hysteresis": 0.9}),
    "2.8 %, if 3 % are by default": ([0.029] * 7, {}),
    "2.8 %, if anything is asked for": ([0.029] * 7, {"hysteresis": 0.0}),
}


def _given_times(rank):
    """The link is busy for some seconds of a step of 1 s when the ranks look at it for the n-th time."""
    found = {}
    for name, (seconds, settings) in INTERVALS.items():
        left, lines = list(seconds), collected()

        def take(self, buckets, left=left):
            table = np.full((32, 2 + buckets), np.nan)
            if left and buckets > 1:
                table[0] = [len(left), left.pop(0), *np.linspace(0.9, 1.0, buckets)]
            return table

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BucketTimer, "take", take)
            done = train(rank, strategy={"replan": 2, **settings})
        found[name] = {**done, "said": [line for line in lines if "communication-bound" in line]}
    return found


def test_delays_follow_the_link_if_that_gains_enough_and_no_gradient_is_lost():
    ranks = run_ranks(_given_times, 2, timeout=240)
    for name in INTERVALS:
        results = [found[name] for found in ranks]
        np.testing.assert_allclose(alike(results)["weights"], by_hand(results)[0], **EXACT, err_msg=name)
    delayed = {name: result["delayed"] for name, result in ranks[0].items()}
    seen = list(dict.fromkeys(map(tuple, delayed["follows"])))
    assert set(INPUT) <= set(seen[1])
    assert "net.2.bias" not in seen[1], "the output side, which is first to be ready"
    assert delayed["follows"][13] == [], "something is still delayed although the link is fast"
    assert "net.0.weight" in delayed["follows"][-1]
    assert [bool(found["follows"]["said"]) for found in ranks] == [True, False]
    assert [any(steps) for steps in delayed.values()] == [True, False, False, True]


class DelaysAll(L.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.strategy.engine.hook_state.staleness.make_all_stale()


class Still(Wide):
    def __init__(self):
        super().__init__()
        self.lr = 0.0


def _dense(rank):
    def measure(parameters, control, topology, settings):
        return LinkMeasurement(1e-6, 1e20, 1e-6, 2, 10**8)

    how = {"sizes": (2, 2), "model": Still, "samples": 60, "total": 4, "max_epochs": 1}  # then ranks look at the link
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measure", measure)
        late = train(rank, {}, **how, callbacks=[DelaysAll()], strategy={"compression": "auto"})
    return late["grads"], train(rank, **how, strategy={"staleness": 0})["grads"]


def test_where_auto_chooses_dense_sums_those_are_delayed_and_none_is_lost():
    """At weights that stay: the gradients of plain training, and from the choice on each a step later."""
    chosen = auto.AUTO.first_try_step
    for ours, plain in run_ranks(_dense, 2, timeout=240):
        np.testing.assert_allclose(ours[:chosen], plain[:chosen], rtol=1e-5, atol=1e-6)
        assert not ours[chosen].any()
        np.testing.assert_allclose(ours[chosen + 1 : len(plain)], plain[chosen:-1], rtol=1e-5, atol=1e-6)


# the noise scale


class Quiet(Regressor):
    """Its weights stay where they are; one rank's loss is not finite in one step, if the model says so."""

    bad = None

    def __init__(self):
        super().__init__(lr=0.0)

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == self.bad
        return super().loss(batch) * (float("inf") if bad else 1.0)


class Poisoned(Quiet):
    bad = 7


NORMS = {
    "sums": {"sizes": (5, 5), "schedule": {1: ALL}, "model": Quiet},
    "blocks": {"schedule": {3: True}, "model": Poisoned,
               "strategy": {"compression": BlockTopK(density=0.4, block=8, warmup_steps=2)}},
}  # fmt: skip
RESUMED = {
    "two of four buckets": ({}, INPUT),
    "one bucket": ({"bucket_cap_mb": 25}, ALL),
    "blocks": ({"compression": BlockTopK(density=0.4)}, True),
}


def _estimate(rank, **case):
    noise = GNSCallback(horizon=1e9)
    train(rank, **{**case, "callbacks": [noise, *case.get("callbacks", ())]})
    return noise.estimate.state_dict()


def _norms(rank, folder):
    found = {}
    for name, case in NORMS.items():
        given = {**case, "max_epochs": -1}
        at_once = {"schedule": None, "strategy": {**case.get("strategy", {}), "staleness": 0}}
        found[name] = _estimate(rank, **given, max_steps=13), _estimate(rank, **{**given, **at_once}, max_steps=12)
    for name, (settings, delayed) in RESUMED.items():
        case, path = {"strategy": {"replan": "epoch", **settings}, "max_epochs": 3}, f"{folder}/{name}"
        whole = _estimate(rank, **case, schedule={3: delayed}, callbacks=[Saves(path, (9,))])
        found[name] = _estimate(rank, **case, schedule={9: delayed}, ckpt_path=f"{path}/9"), whole
    return found


def test_norms_of_delayed_sums_are_matched_with_those_of_their_own_step(tmp_path):
    """All steps count but the last, whose sums come too late; also of a run that goes on inside an epoch."""
    for found in run_ranks(_norms, 2, str(tmp_path), timeout=240):
        for name, (late, at_once) in found.items():
            assert at_once["samples"] > 60
            assert late == pytest.approx(at_once, rel=0.05 if name == "blocks" else 1e-12), name


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
        with pytest.raises(Exception, match="staleness=0") as raised:
            train(rank, **case)
        assert match in str(raised.value)
    return True


def test_what_would_lose_a_delayed_gradient_is_refused_on_every_rank():
    """More of it: docs/limits.md."""
    assert run_ranks(_refused, 2, timeout=240) == [True, True]
