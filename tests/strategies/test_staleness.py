"""``staleness=1`` end to end: delayed sums by hand, checkpoints, the end of a training, and who decides on delays."""

import logging
import re
import time

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, HeteroDDPStrategy
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.timing.bucket_timer import BucketTimer
from lightning_hetero.simulate import ThinLink
from tests.helpers import Points, RankError, Regressor, fit, run_ranks, trainer_of

SAMPLES = 64
SPLIT = {"local_batch_sizes": [7, 3], "replan": 10_000, "bucket_cap_mb": 1e-5}
INPUT, ALL = ["net.0.weight", "net.0.bias"], ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
EXACT = {"rtol": 1e-12, "atol": 1e-14}


class Delays(L.Callback):
    """Delays what a schedule of steps says, ``None`` for what the ranks decide; keeps what was delayed when."""

    def __init__(self, schedule=None):
        self.schedule, self.delayed, self.priority = schedule, [], None

    def on_train_start(self, trainer, pl_module):
        staleness = trainer.strategy.engine.hook_state.staleness
        if staleness is not None:
            self.priority = getattr(getattr(staleness, "queue", None), "running", None)
        if self.schedule is not None and staleness is not None:
            staleness.control_externally(True)
        self._follow(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._follow(trainer)

    def _follow(self, trainer):
        staleness = trainer.strategy.engine.hook_state.staleness
        if self.schedule and trainer.global_step in self.schedule:
            staleness.make_stale(self.schedule[trainer.global_step])
        delayed = None if staleness is None else staleness.stale  # with block top-k True or False, for all of them
        self.delayed.append(sorted(delayed) if isinstance(delayed, frozenset) else delayed)


def _run(rank, strategy, kwargs):
    kwargs = {"max_epochs": 2, "dataset": Points(SAMPLES), **kwargs}
    delays = Delays(kwargs.pop("schedule", None))
    callbacks = [delays, *kwargs.pop("callbacks", [])]
    world_size = len(strategy["local_batch_sizes"])
    done = fit(rank, strategy, world_size, 5, callbacks=callbacks, **kwargs)
    return {**done, "delayed": delays.delayed, "priority": delays.priority}


def run(schedule, strategy=None, **kwargs):
    strategy = {**SPLIT, "staleness": 1, **(strategy or {})}
    return run_ranks(_run, len(strategy["local_batch_sizes"]), strategy, {"schedule": schedule, **kwargs})


def by_hand(results, *, clip=None, accumulate=1, model=None, from_step=0, owed=None):
    """One process that takes the same batches and applies delayed sums by hand; weights at the end, and gradients."""
    model, points = model or Regressor(), Points(SAMPLES)
    optimizer = model.configure_optimizers()
    owed, given = owed or {}, []

    def step(grads):
        for name, p in model.named_parameters():
            p.grad = grads.get(name)
        given.append(torch.cat([g.flatten() for g in grads.values()]).numpy())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    batches = list(zip(*(r["seen"] for r in results), strict=True))
    windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    for number, window in enumerate(windows):
        now = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for parts in window:
            indices = [i for _, _, part in parts for i in part]
            model.zero_grad()
            model.loss((points.x[indices], points.y[indices], None)).backward()
            now = {name: now[name] + p.grad / accumulate for name, p in model.named_parameters()}
        delivered = {}
        for name in now:
            held = owed.pop(name, torch.zeros_like(now[name]))
            if name in results[0]["delayed"][number + from_step]:
                delivered[name], owed[name] = held, now[name]
            else:
                delivered[name] = now[name] + held
        step(delivered)
    if owed:
        step(owed)
    return {"weights": model.flat(), "grads": given}


def check(results, **kwargs):
    expected = by_hand(results, **kwargs)
    for result in results:
        np.testing.assert_array_equal(result["grads"], results[0]["grads"])  # so that replicas are equal at every step
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        assert result["delayed"] == results[0]["delayed"]
        np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT)
    return expected


def test_priority_of_transfers_is_for_who_asks_for_it():
    """The order in which all-reduces cross the link changes no gradient."""
    plain, first = (run({1: INPUT}, {"transfer_priority": asked}) for asked in (False, True))
    assert [r["priority"] for r in (*plain, *first)] == [False, False, True, True]
    for one, other in zip(plain, first, strict=True):
        np.testing.assert_array_equal(one["weights"], other["weights"])


SCHEDULES = {
    "input side": {1: INPUT},
    "all, from the first step": {0: ALL},
    "less, none, more": {1: ALL, 4: INPUT, 6: [], 9: ALL},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_gradients_and_weights_are_those_by_hand(schedule):
    """Ragged last batches and two epochs included; the sums of the last step are applied when training ends."""
    results = run(schedule)
    expected = check(results)
    steps = len(results[0]["grads"])
    assert steps == 14
    np.testing.assert_allclose(results[0]["grads"], np.stack(expected["grads"][:steps]), **EXACT)
    assert len(expected["grads"]) == steps + 1, "nothing was owed at the end"
    synchronous = run({}, {"staleness": 0})
    assert np.abs(synchronous[0]["weights"] - results[0]["weights"]).max() > 1e-4
    assert [(r["priority"], s["priority"]) for r, s in zip(results, synchronous, strict=True)] == [(False, None)] * 2


def test_clipping_and_accumulation():
    check(run({1: INPUT, 3: ALL}, gradient_clip_val=0.02), clip=0.02)
    check(run({1: INPUT, 2: ALL}, accumulate_grad_batches=2, limit_train_batches=6), accumulate=2)


class WithValidation(Regressor):
    def val_dataloader(self):
        return DataLoader(Points(8), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


def test_validation_between_leaves_sums_alone():
    check(run({1: ALL}, model=WithValidation(), val_check_interval=2), model=WithValidation())


@pytest.mark.parametrize(
    "end", [{"max_steps": 5, "max_epochs": -1}, {"max_epochs": 1}, {"limit_train_batches": 3}], ids=str
)
def test_nothing_is_lost_wherever_training_ends(end):
    check(run({1: ALL}, **end))


class Stops(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.should_stop = True


def test_nothing_is_lost_if_a_callback_ends_training():
    results = run({1: ALL}, callbacks=[Stops()])
    assert len(results[0]["seen"]) == 4
    check(results)


def test_without_delays_it_is_as_before():
    plain = run_ranks(_run, 2, SPLIT, {})
    zero = run_ranks(_run, 2, {**SPLIT, "staleness": 0}, {})
    assert set(map(str, zero[0]["delayed"])) == {"None"}, "something stands between the gradients and their sum"
    one = run({})
    for a, b, c in zip(plain, zero, one, strict=True):
        np.testing.assert_array_equal(a["weights"], b["weights"])
        np.testing.assert_array_equal(a["weights"], c["weights"])


# checkpoints


def saving(folder):
    return {"callbacks": [ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)]}


@pytest.mark.parametrize("step", [3, 7, 9])
def test_resume_continues_identically(tmp_path, step):
    whole = run({1: INPUT, 8: ALL}, enable_checkpointing=True, **saving(tmp_path))
    rest = run({8: ALL}, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][step:]
        np.testing.assert_array_equal(part["weights"], full["weights"])


@pytest.mark.parametrize(
    "strategy", [{"staleness": 0}, {"local_batch_sizes": [10]}, {"local_batch_sizes": [4, 4, 2]}], ids=str
)
def test_what_is_owed_is_applied_once_by_any_number_of_ranks_and_without_delays(tmp_path, strategy):
    whole = run({1: ALL}, enable_checkpointing=True, **saving(tmp_path))
    path = tmp_path / "step=5.ckpt"
    state = torch.load(path, weights_only=True)
    owed = state["callbacks"]["PolicyCallback"]["engine"]["staleness"]["sums"]
    assert set(owed) == set(ALL)
    rest = run({5: []}, strategy, ckpt_path=str(path))
    model = Regressor()
    model.load_state_dict(state["state_dict"])
    shaped = {name: owed[name].view_as(p) for name, p in model.named_parameters()}
    momentum = state["optimizer_states"][0]
    configure = model.configure_optimizers

    def restored():
        optimizer = configure()
        optimizer.load_state_dict(momentum)
        return optimizer

    model.configure_optimizers = restored
    fresh = [{**r, "delayed": [[]] * 20} for r in rest]
    expected = by_hand(fresh, model=model, owed=shaped)
    for result in rest:
        assert result["seen"]
        np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT)
    assert np.abs(rest[0]["weights"] - whole[0]["weights"]).max() > 1e-6


class Interrupts(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            raise ValueError("interrupted")


def _twice(rank, interrupted):
    """Two trainings with one strategy; what the second starts from."""
    model, delays = Regressor(), Delays({1: ALL})
    callbacks = [delays, Interrupts()] if interrupted else [delays]
    trainer = trainer_of(HeteroDDPStrategy(**SPLIT, staleness=1), 2, max_epochs=1, callbacks=callbacks)
    loader = DataLoader(Points(SAMPLES), 5, shuffle=True)
    try:
        trainer.fit(model, loader)
    except ValueError:
        trainer.callbacks.remove(callbacks[-1])
    else:
        assert not interrupted
    before = trainer.strategy.engine.hook_state.staleness
    owed = {name: value.clone() for name, value in before.state_dict().get("sums", {}).items()}
    delays.schedule, found = {}, []
    delays.on_train_start = lambda trainer, module: found.append(
        trainer.strategy.engine.hook_state.staleness.state_dict().get("sums", {})
    )
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    return *({name: value.numpy() for name, value in sums.items()} for sums in (owed, found[0])), model.flat()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_second_training_takes_over_what_an_interrupted_one_owes(interrupted):
    results = run_ranks(_twice, 2, interrupted)
    for owed, found, weights in results:
        assert set(owed) == set(found) == (set(ALL) if interrupted else set())
        for name, value in owed.items():
            np.testing.assert_array_equal(found[name], value)
        np.testing.assert_array_equal(weights, results[0][2])


class DelaysItself(Regressor):
    """Its gradients are late from the second step on, also while callbacks are left out."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step > 0:
            self.trainer.strategy.engine.hook_state.staleness.make_stale(ALL)

    def on_train_end(self):
        held = self.trainer.strategy.engine.hook_state.staleness.state_dict().get("sums", {})
        self.left = [*getattr(self, "left", []), sorted(held)]


def _searches(rank):
    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    model = DelaysItself()
    model.hparams["lr"] = model.lr
    done = _run(rank, {**SPLIT, "staleness": 1}, {"schedule": {}, "model": model, "callbacks": [finder]})
    return done["weights"], model.left


def test_a_search_for_the_learning_rate_leaves_nothing_behind():
    """Its steps are taken back, and so are the delayed sums of the last of them."""
    plain = run({}, model=DelaysItself())
    for weights, left in run_ranks(_searches, 2):
        assert left[0] == sorted(ALL), "nothing was under way at the end of the search"
        np.testing.assert_array_equal(weights, plain[0]["weights"])


class Dies(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4 and trainer.global_rank == 1:
            raise ValueError("this worker fails")


def test_a_worker_that_fails_ends_the_others_while_sums_are_under_way():
    with pytest.raises(RankError) as raised:
        run({1: ALL}, callbacks=[Dies()])
    assert {rank for rank, *_ in raised.value.errors} == {0, 1}


# the decision


class Slow(Regressor):
    """Computes for 80 ms a step; nearly all of its parameters are in the first layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 2000), torch.nn.AvgPool1d(500), torch.nn.Linear(4, 1)
        ).double()

    def forward(self, x):
        time.sleep(0.08)
        return self.net(x)


def _thin(rank, folder):
    logger = CSVLogger(folder, name="", version="") if rank == 0 else False
    kwargs = {"model": Slow(), "dataset": Points(240), "max_epochs": 1, "logger": logger}
    with ThinLink(1.6e6, world_size=2):
        return _run(rank, {**SPLIT, "replan": 8, "staleness": 1}, kwargs)


@pytest.mark.alone
def test_ranks_delay_what_a_thin_link_would_make_them_wait_for(tmp_path):
    """96 kB of gradients on a link of 1.6 MB/s take 60 ms of a step that computes for 80 ms."""
    results = run_ranks(_thin, 2, str(tmp_path))
    delayed = results[0]["delayed"]
    assert delayed == results[1]["delayed"]
    assert delayed[0] == delayed[7] == [], "something was delayed before anything was measured"
    for step in (9, 16, 23):
        assert "net.0.weight" in delayed[step], "the input side is not delayed"
        assert "net.2.bias" not in delayed[step], "the output side, which is first to be ready, is delayed"
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    table = np.genfromtxt(tmp_path / "metrics.csv", delimiter=",", names=True)
    share, rate = (table[f"hetero{name}"][-1] for name in ("delayed_share", "bandwidth"))
    assert share > 0.8
    assert 0.8e6 < rate < 1.7e6


def _given_times(rank, seconds, **settings):
    """The link is busy for ``seconds[n]`` of a step of 1 s when the ranks look at it for the n-th time."""
    left = list(seconds)

    def take(self, buckets):
        table = np.full((32, 2 + buckets), np.nan)
        if left and buckets > 1:
            table[0] = [len(left), left.pop(0), *np.linspace(0.9, 1.0, buckets)]
        return table

    BucketTimer.take = take
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("lightning_hetero").addHandler(handler)
    done = _run(rank, {**SPLIT, "replan": 2, "staleness": 1, **settings}, {"dataset": Points(SAMPLES)})
    return {**done, "said": [line for line in said if line[1].startswith("staleness: ")]}


def test_delays_follow_the_link_and_no_gradient_is_lost():
    """Half a second of each, next to nothing five times, then more than the whole step."""
    results = run_ranks(_given_times, 2, [0.5, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 9.0])
    seen = list(dict.fromkeys(map(tuple, results[0]["delayed"])))
    assert set(INPUT) <= set(seen[1])
    assert "net.2.bias" not in seen[1]
    assert results[0]["delayed"][13] == [], "something is still delayed although the link is fast"
    assert "net.0.weight" in results[0]["delayed"][-1]
    check(results)
    *usual, last = results[0]["said"]
    assert {level for level, _ in usual} == {"INFO"}
    assert last[0] == "WARNING"
    assert re.search(r"communication-bound: the gradients of a step take (799|800)\d ms on the link$", last[1])
    assert results[1]["said"] == [], "a rank other than 0 speaks"


def _little_gain(rank):
    """Gains of a third, where 90 % are asked for, and of 2.8 %, where 3 % are by default."""
    cases = {"most": (0.5, {"hysteresis": 0.9}), "default": (0.029, {}), "none": (0.029, {"hysteresis": 0.0})}
    return {name: _given_times(rank, [busy] * 7, **settings)["delayed"] for name, (busy, settings) in cases.items()}


def test_what_gains_less_than_the_hysteresis_is_not_delayed():
    delayed = run_ranks(_little_gain, 2)[0]
    assert all(len(steps) > 14 for steps in delayed.values())
    assert not any(delayed["most"])
    assert not any(delayed["default"])
    assert any(delayed["none"])


# the noise scale


class Still(Regressor):
    """Its weights stay where they are; one rank's loss is not finite in one step, if that is asked for."""

    def __init__(self, bad):
        super().__init__(lr=0.0)
        self.bad = bad

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == self.bad
        return super().loss(batch) * (float("inf") if bad else 1.0)


def _norms(rank, schedule, strategy, bad):
    """Squared norms of the own and of the summed gradient of each step that counts."""
    seen, added = [], NoiseCollector.add

    def add(self, estimator, first, local, whole):
        seen.append([float(sum(local)), float(sum(whole))])
        return added(self, estimator, first, local, whole)

    NoiseCollector.add = add
    callback = GNSCallback(horizon=1e9)
    kwargs = {"schedule": schedule, "model": Still(bad), "callbacks": [callback]}
    _run(rank, {**SPLIT, "replan": 5, **strategy}, kwargs)
    return np.array(seen), callback.estimate.noise_scale


@pytest.mark.parametrize(
    ("strategy", "schedule", "missing"),
    [
        ({"local_batch_sizes": [5, 5]}, {1: INPUT, 8: ALL}, [7, 13]),
        ({"compression": BlockTopK(density=0.4, block=8, warmup_steps=2)}, {3: True}, [13]),
    ],
    ids=["equal batches, plain sums", "unequal batches, block top-k"],
)
def test_norms_of_delayed_sums_are_matched_with_those_of_their_own_step(strategy, schedule, missing):
    """All steps count but the last before a change and at the end; one that is not finite is left out on all ranks."""
    bad = 9 if "compression" in strategy else None
    expected = run_ranks(_norms, 2, {}, {**strategy, "staleness": 0}, bad)
    ours = run_ranks(_norms, 2, schedule, {**strategy, "staleness": 1}, bad)
    for (seen, scale), (other, _) in zip(ours, expected, strict=True):
        other = np.delete(other, missing, axis=0)
        finite = np.isfinite(other[:, 1])
        np.testing.assert_array_equal(np.isfinite(seen[:, 1]), finite)
        assert finite.sum() == len(other) - (bad is not None)
        np.testing.assert_allclose(seen[finite, 0], other[finite, 0], rtol=1e-12)
        if bad is None:
            np.testing.assert_allclose(seen[:, 1], other[:, 1], rtol=1e-12)
        assert scale == ours[0][1]
        assert not np.isnan(scale), "no step has counted"


class SavesAt(L.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _estimated(rank, schedule, strategy, more):
    callback = GNSCallback(horizon=1e9)
    kwargs = {"schedule": schedule, "max_epochs": 3, **more, "callbacks": [callback, *more.get("callbacks", [])]}
    done = _run(rank, {**SPLIT, **strategy, "staleness": 1}, kwargs)
    return len(done["seen"]), callback.estimate.state_dict()


@pytest.mark.parametrize(
    ("strategy", "delayed"),
    [({}, INPUT), ({"bucket_cap_mb": 25}, ALL), ({"compression": BlockTopK(density=0.4)}, True)],
    ids=["two of four buckets", "one bucket", "block top-k"],
)
def test_a_resume_keeps_the_norms_of_the_step_whose_sums_are_under_way(tmp_path, strategy, delayed):
    """In the first step of a resumed run, one bucket holds all parameters: those of the step before and its own.

    Norms are sums of squares, which torch adds in an order that depends on where a bucket begins in memory.
    """
    path, strategy = tmp_path / "inside.ckpt", {"replan": "epoch", **strategy}
    whole = run_ranks(_estimated, 2, {3: delayed}, strategy, {"callbacks": [SavesAt(path, 9)]})
    rest = run_ranks(_estimated, 2, {9: delayed}, strategy, {"ckpt_path": str(path)})
    uncut = run_ranks(_estimated, 2, {3: delayed}, strategy, {})
    for (steps, full), (left, part), (_, other) in zip(whole, rest, uncut, strict=True):
        assert (steps, left) == (21, 12)
        assert full["samples"] == other["samples"] > 100
        assert part == pytest.approx(full, rel=1e-13)
        assert full == pytest.approx(other, rel=1e-13)


# what it does not go with


class Manual(Regressor):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Closure(Regressor):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("strategy", "kwargs", "says"),
    [
        ({}, {"model": Manual()}, "manual optimization"),
        ({}, {"model": Closure()}, "LBFGS"),
        ({"find_unused_parameters": True}, {}, "find_unused_parameters=True"),
        ({"ddp_comm_hook": fp16_compress_hook}, {}, "communication hook"),
        ({"local_batch_sizes": None, "policy": "even"}, {"use_distributed_sampler": False}, "policy='even'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_lose_a_delayed_gradient_is_refused_on_every_rank(strategy, kwargs, says):
    strategy = {**SPLIT, "staleness": 1, **strategy}
    errors = run_ranks(_refused, 2, strategy, kwargs, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in message and "staleness=0" in message for *_, message in errors)


def _refused(rank, strategy, kwargs):
    fit(rank, strategy, 2, 5, **{"dataset": Points(SAMPLES), **kwargs})
