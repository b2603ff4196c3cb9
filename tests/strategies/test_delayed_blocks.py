"""``staleness=1`` with block top-k: the simulation's weights, checkpoints, ends of a training, who decides."""

import time
from dataclasses import replace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.compressors import auto as link
from lightning_hetero.comm.staleness.block_topk import BlockTopKStaleAverager
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.core.compression.auto import LinkMeasurement
from lightning_hetero.optim import SparseSGD
from lightning_hetero.simulate import ThinLink
from tests.comm.staleness.test_block_topk import Simulation
from tests.helpers import Points, RankError, Regressor, fit, run_ranks, trainer_of
from tests.strategies.test_staleness import Dies

N, FEATURES = 60, 40
SETTINGS = BlockTopK(density=0.3, block=8, value_dtype="float32", warmup_steps=1)
CLOSE = {"rtol": 1e-3, "atol": 1e-5}


class Wide(Regressor):
    def __init__(self, lr=0.02, momentum=0.9):
        super().__init__(features=FEATURES, lr=lr, momentum=momentum, dtype=torch.float32)


class Sparse(Wide):
    def on_before_optimizer_step(self, optimizer):
        """Gradients are blocks, which are not kept; weights are compared."""

    def configure_optimizers(self):
        return SparseSGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Validated(Wide):
    def val_dataloader(self):
        return DataLoader(Points(8, features=FEATURES, dtype=torch.float32), 2)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


class Delays(L.Callback):
    """Delays by a schedule of steps, ``None`` for what the ranks decide; keeps what was delayed when."""

    def __init__(self, schedule):
        self.schedule, self.delayed = schedule, []

    def on_train_start(self, trainer, pl_module):
        if self.schedule is not None:
            trainer.strategy.engine.hook_state.staleness.control_externally(True)
        self._follow(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._follow(trainer)

    def _follow(self, trainer):
        staleness = trainer.strategy.engine.hook_state.staleness
        if self.schedule and trainer.global_step in self.schedule:
            staleness.make_stale(self.schedule[trainer.global_step])
        self.delayed.append(staleness.stale_share)


def _run(rank, sizes, schedule, kwargs):
    delays = Delays(schedule)
    strategy = {"compression": SETTINGS, "staleness": 1, "replan": 10_000, **kwargs.pop("strategy", {})}
    defaults = {"model": Wide(), "dataset": Points(N, features=FEATURES, dtype=torch.float32), "max_epochs": 2}
    callbacks = [delays, *kwargs.pop("callbacks", [])]
    strategy = {"local_batch_sizes": list(sizes), **strategy}
    done = fit(rank, strategy, len(sizes), 4, callbacks=callbacks, **{**defaults, **kwargs})
    return {**done, "delayed": delays.delayed}


def run(schedule, sizes=(6, 2), **kwargs):
    results = run_ranks(_run, len(sizes), sizes, schedule, kwargs)
    for result in results[1:]:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        np.testing.assert_array_equal(result["grads"], results[0]["grads"])
        assert result["delayed"] == results[0]["delayed"]
    return results


def simulated(results, *, clip=None, accumulate=1):
    """The same batches in one process, and the sum that is owed at the end."""
    model, points = Wide(), Points(N, features=FEATURES, dtype=torch.float32)
    simulation = Simulation(model, model.configure_optimizers(), SETTINGS, len(results), clip)
    batches = list(zip(*(r["seen"] for r in results), strict=True))
    for number in range(0, len(batches), accumulate):
        gradients = [torch.zeros(simulation.layout.numel) for _ in results]
        for parts in batches[number : number + accumulate]:
            total = sum(len(part) for _, _, part in parts)
            for gradient, (_, _, part) in zip(gradients, parts, strict=True):
                model.zero_grad()
                if part:
                    model.loss((points.x[part], points.y[part], None)).backward()
                    gradient += simulation.flat() * len(part) / total / accumulate
        simulation.step(gradients, bool(results[0]["delayed"][number // accumulate]))
    if simulation.owed is not None:
        simulation.apply(simulation.owed)
    return model.flat(), simulation


@pytest.mark.parametrize(
    ("schedule", "kwargs", "how"),
    [
        ({0: True, 5: False, 7: True}, {}, {}),
        ({1: True}, {"max_steps": 5, "max_epochs": -1, "model": Validated(), "val_check_interval": 2}, {}),
        ({1: True}, {"accumulate_grad_batches": 2, "limit_train_batches": 6, "gradient_clip_val": 0.3},
         {"accumulate": 2, "clip": 0.3}),
    ],
    ids=["two epochs", "validation, cut after five steps", "accumulation and clipping"],
)  # fmt: skip
def test_weights_are_those_of_the_simulation(schedule, kwargs, how):
    """Uneven batches, a ragged last one; what is under way when training ends is applied once."""
    results = run(schedule, **kwargs)
    weights, simulation = simulated(results, **how)
    np.testing.assert_allclose(results[0]["weights"], weights, **CLOSE)
    assert len(simulation.given) == results[0]["steps"] + 1, "nothing was owed at the end"


# checkpoints


def saving(folder):
    return {
        "callbacks": [ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)],
        "enable_checkpointing": True,
    }


@pytest.mark.parametrize(("model", "density"), [(Wide, 0.3), (Sparse, 0.05)], ids=["dense", "sparse optimizer"])
def test_a_resumed_run_goes_on_identically(tmp_path, model, density):
    """A sparse optimizer updates the blocks that were touched, also of the sum that rode in the checkpoint."""
    strategy = {"compression": BlockTopK(density=density, block=8, warmup_steps=1)}
    whole = run({1: True, 12: False}, model=model(), strategy=strategy, **saving(tmp_path))
    rest = run({12: False}, model=model(), strategy=strategy, ckpt_path=str(tmp_path / "step=9.ckpt"))
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][9:]
        np.testing.assert_array_equal(part["grads"], full["grads"][9:])
        np.testing.assert_array_equal(part["weights"], full["weights"])


def _goes_on(rank, path, world_size, settings):
    """What the first step after a resume gives to the optimizer, and the residuals then."""
    strategy = HeteroDDPStrategy(policy="even", **settings)
    trainer = trainer_of(strategy, world_size, max_steps=10, max_epochs=-1)
    model = Wide(lr=0.0)
    trainer.fit(model, DataLoader(Points(N, features=FEATURES, dtype=torch.float32), 4), ckpt_path=path)
    compression = strategy.engine.compression
    left = compression.averager.residuals() if compression is not None and compression.averager is not None else {}
    last = strategy.engine.hook_state.staleness
    assert last is None or last.drain() == {}
    return model.grads[0].numpy(), np.concatenate([left[n].numpy() for n, _ in model.named_parameters()]) if left else 0


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (3, {"compression": BlockTopK(density=0.3, warmup_steps=0), "staleness": 1}),
        (2, {"compression": BlockTopK(density=0.3, warmup_steps=20), "staleness": 0}),
        (2, {"staleness": 1}),
    ],
    ids=["three ranks", "no delay", "no compression"],
)
def test_what_was_under_way_is_applied_once_by_whatever_goes_on(tmp_path, world_size, settings):
    """The first gradient holds it: the difference to a resume from the same checkpoint without it."""
    run({1: True}, **saving(tmp_path))
    path = tmp_path / "step=9.ckpt"
    state = torch.load(path, weights_only=True)
    late = state["callbacks"]["PolicyCallback"]["engine"]["staleness"]
    owed = torch.cat([late["sums"][name].flatten() for name, _ in Wide().named_parameters()]).numpy()
    assert np.abs(owed).max() > 0
    late["sums"] = {}
    torch.save(state, tmp_path / "without.ckpt")
    ours = run_ranks(_goes_on, world_size, str(path), world_size, settings)
    other = run_ranks(_goes_on, world_size, str(tmp_path / "without.ckpt"), world_size, settings)
    for (gradient, left), (without, left_without) in zip(ours, other, strict=True):
        np.testing.assert_allclose(gradient - without, owed, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(left, left_without)


class Interrupts(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            raise ValueError("interrupted")


def _twice(rank):
    """A training that is interrupted, and a second one with the same strategy: what is owed and left in between."""
    model, delays, found = Wide(), Delays({1: True}), []
    strategy = HeteroDDPStrategy(local_batch_sizes=[6, 2], replan=10_000, compression=SETTINGS, staleness=1)
    trainer = trainer_of(strategy, 2, max_epochs=1, callbacks=[delays, Interrupts()])
    loader = DataLoader(Points(N, features=FEATURES, dtype=torch.float32), 4, shuffle=True)

    def look(*args):
        sums = strategy.engine.hook_state.staleness.state_dict()["sums"]
        parts = (sums, strategy.engine.compression.averager.residuals())
        found.append([torch.cat([part[name] for name in sorted(part)]).numpy() for part in parts])

    with pytest.raises(ValueError, match="interrupted"):
        trainer.fit(model, loader)
    look()
    trainer.callbacks.pop()
    delays.on_train_start, trainer.fit_loop.max_epochs = look, 2
    trainer.fit(model, loader)
    return found, model.flat()


def test_a_second_training_takes_over_what_an_interrupted_one_owes():
    results = run_ranks(_twice, 2)
    for (before, after), weights in results:
        assert np.abs(before[0]).max() > 0
        np.testing.assert_array_equal(before, after)
        np.testing.assert_array_equal(weights, results[0][1])


def test_a_worker_that_fails_ends_the_others_while_messages_are_under_way():
    with pytest.raises(RankError) as raised:
        run({1: True}, callbacks=[Dies()])
    assert {rank for rank, *_ in raised.value.errors} == {0, 1}


# the decision


class Slow(Wide):
    def training_step(self, batch, batch_idx):
        time.sleep(0.06)
        return super().training_step(batch, batch_idx)


def _thin(rank, folder):
    logger = CSVLogger(folder, name="", version="") if rank == 0 else False
    kwargs = {"model": Slow(), "max_steps": 24, "max_epochs": -1, "logger": logger, "strategy": {"replan": 6}}
    with ThinLink(9e3, world_size=2):
        return _run(rank, (6, 2), None, kwargs)


@pytest.mark.alone
def test_ranks_delay_messages_that_a_thin_link_would_make_them_wait_for(tmp_path):
    """A message of 264 bytes takes 29 ms of a link of 9 kB/s; a step computes for 60 ms."""
    results = run_ranks(_thin, 2, str(tmp_path))
    delayed = results[0]["delayed"]
    assert delayed == results[1]["delayed"]
    assert set(delayed[:6]) == {0.0}, "something was delayed before anything was measured"
    assert delayed[-1] == 1.0
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    weights, _ = simulated(results)
    np.testing.assert_allclose(results[0]["weights"], weights, **CLOSE)
    table = np.genfromtxt(tmp_path / "metrics.csv", delimiter=",", names=True)
    assert table["heterodelayed_share"][-1] == 1.0
    assert 4e3 < table["heterobandwidth"][-1] < 30e3


@pytest.mark.parametrize("compression", ["powersgd", "bf16"])
def test_other_compressors_are_refused_on_every_rank(compression):
    errors = run_ranks(_run, 2, (6, 2), {}, {"strategy": {"compression": compression}}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("block_topk" in message and "staleness=0" in message for *_, message in errors)


# the density is chosen when some steps were timed


class Timed(Regressor):
    """So wide that the message decides on the step."""

    def __init__(self):
        super().__init__(features=4000, lr=1e-4, dtype=torch.float32)


def _auto(rank, rate):
    """Over a link that is thin from the beginning."""
    link.BENCHMARK, lines = replace(link.BENCHMARK, probe_bytes=100_000), []
    link.log.info = lambda text, *args: lines.append(text % args)
    kwargs = {"model": Timed(), "dataset": Points(40, features=4000, dtype=torch.float32), "max_epochs": 2}
    strategy = {"compression": "auto(densities=[0.01, 0.1])", "staleness": 1, "replan": 4}
    with ThinLink(rate, world_size=2):
        done = fit(rank, strategy, 2, 2, **kwargs)
    return done["grads"], [line for line in lines if line.startswith("compression='auto'")]


@pytest.mark.alone
def test_auto_chooses_when_steps_were_timed_and_the_next_message_is_as_chosen():
    """With gradients that may come late as without: dense sums until then."""
    (ours, lines), (other, _) = run_ranks(_auto, 2, 1e6)
    np.testing.assert_array_equal(ours, other)
    touched = (ours != 0).mean(axis=1)
    assert touched[: link.AUTO.first_try_step].min() > 0.5
    assert touched[link.AUTO.first_try_step :].max() < 0.15
    assert touched[link.AUTO.first_try_step] > 0, "what is sent is awaited until the link speaks for a delay"
    assert len(lines) == 1
    assert "computing and hides what is sent takes " in lines[0]
    assert float(lines[0].split("takes ")[-1].removesuffix(" ms")) > 0


class DelaysAll(L.Callback):
    """Delays what can be; keeps the kind of the delays at every step."""

    def __init__(self):
        self.kinds = []

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.engine.hook_state.staleness.make_all_stale()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kinds.append(type(trainer.strategy.engine.hook_state.staleness))


def _dense(rank):
    link.measure = lambda parameters, control, topology, settings: LinkMeasurement(1e-6, 1e20, 1e-6, 2, 10**8)
    strategy = {"compression": "auto", "staleness": 1, "replan": 10_000}
    kept = DelaysAll()
    done = _run(rank, (2, 2), None, {"model": Wide(lr=0.0), "strategy": strategy, "callbacks": [kept]})
    return {**done, "kinds": kept.kinds}


def _plain(rank):
    strategy = {"local_batch_sizes": [2, 2], "replan": 10_000}
    return fit(
        rank,
        strategy,
        2,
        2,
        model=Wide(lr=0.0),
        dataset=Points(N, features=FEATURES, dtype=torch.float32),
        max_epochs=2,
    )


def test_where_auto_chooses_dense_sums_those_are_delayed_and_none_is_lost():
    """At weights that stay: the gradients of plain training, and from the choice on each a step later."""
    results, plain = run_ranks(_dense, 2), run_ranks(_plain, 2)[0]["grads"]
    for result in results:
        assert result["kinds"][: link.AUTO.first_try_step] == [BlockTopKStaleAverager] * link.AUTO.first_try_step
        assert set(result["kinds"][link.AUTO.first_try_step :]) == {DenseStaleAverager}
        ours = result["grads"]
        np.testing.assert_allclose(
            ours[: link.AUTO.first_try_step], plain[: link.AUTO.first_try_step], rtol=1e-5, atol=1e-6
        )
        assert not ours[link.AUTO.first_try_step].any()
        late = ours[link.AUTO.first_try_step + 1 : len(plain)]
        np.testing.assert_allclose(late, plain[link.AUTO.first_try_step : -1], rtol=1e-5, atol=1e-6)
