"""In a Trainer, each worker is as fast as its device, and the split follows."""

import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import DeviceProfile, EmulatedDevice, EmulatedDeviceCallback, ThinLink
from lightning_hetero.simulate.devices.emulated_device import HostClock
from tests.counted import CountedTime
from tests.helpers import Points, RankError, Regressor, run_ranks, trainer_of
from tests.simulate.devices.virtual_clock import Clock

FAST = DeviceProfile(q=0.0005, s=0.001, k=0.0005, m=0.001, name="fast")
SLOW = DeviceProfile(q=0.0015, s=0.001, k=0.0015, m=0.001, name="slow")


class Plain(Regressor):
    """Keeps no gradients, which may be sharded."""

    def on_before_optimizer_step(self, optimizer):
        pass


def train(rank, strategy, profiles, world_size=2, samples=48, batch=8, **settings):
    """Train on this rank; what its device did."""
    model, callback = Plain(dtype=torch.float32), EmulatedDeviceCallback(profiles)
    trainer = trainer_of(strategy, world_size, callbacks=[callback], max_epochs=1, **settings)
    trainer.fit(model, DataLoader(Points(samples, dtype=torch.float32), batch, shuffle=True))
    return [(one.kind, one.batch_size, one.device, one.host) for one in callback.device.times]


@pytest.mark.parametrize("strategy", ["ddp", "hetero_ddp", "hetero_fsdp", "hetero_elastic"])
def test_every_step_takes_the_time_of_the_ranks_own_device(strategy):
    for rank, times in enumerate(run_ranks(train, 2, strategy, [FAST, SLOW])):
        model = (FAST, SLOW)[rank].model
        assert [kind for kind, *_ in times] == ["forward", "backward"] * (len(times) // 2)
        assert len(times) == 6 or strategy == "hetero_elastic"
        for kind, size, device, host in times:
            expected = model.forward_time(size) if kind == "forward" else model.backward_time(size)
            assert device == pytest.approx(expected)
            assert host >= -1e-9


def _learns(rank):
    """Splits that are learned where no time passes but that of the devices, which scatters by 3 %."""
    counted, profile = CountedTime(rank, 1e9), replace((FAST, SLOW)[rank], jitter=0.03)
    callback = EmulatedDeviceCallback(profile)
    callback.device = EmulatedDevice(profile, rank, host=HostClock(lambda: counted.now, counted.sleep))
    trainer = trainer_of("hetero_ddp", 2, callbacks=[callback], max_epochs=1)
    trainer.fit(Plain(dtype=torch.float32), DataLoader(Points(16 * 120, dtype=torch.float32), 16, shuffle=True))
    return [entry.plan.local_batch_sizes for entry in trainer.strategy.plan_history]


def test_the_split_is_learned_and_is_the_optimum_of_the_profiles():
    """Three times as fast, with equal fixed times: 24 samples to 8."""
    for plans in run_ranks(_learns, 2):
        assert plans[0] == (16, 16)
        assert abs(plans[-1][0] - 24) <= 1, plans
        assert sum(plans[-1]) == 32


def test_accumulated_micro_batches_take_their_time_each():
    (times,) = run_ranks(train, 1, "auto", FAST, 1, 32, 8, timeout=60)
    assert len(times) == 8


def _accumulate(rank):
    return train(rank, HeteroDDPStrategy(), [FAST, SLOW], accumulate_grad_batches=2)


def test_accumulation_over_two_workers():
    for times in run_ranks(_accumulate, 2):
        assert len(times) == 6


def _wrong_number(rank):
    train(rank, "ddp", [FAST, SLOW, SLOW])


def test_a_wrong_number_of_profiles_is_an_error_on_every_rank():
    with pytest.raises(RankError) as info:
        run_ranks(_wrong_number, 2)
    assert sorted(rank for rank, *_ in info.value.errors) == [0, 1]
    assert all("3 profiles for 2 ranks" in message for _, _, message in info.value.errors)


@pytest.mark.parametrize("wrong", [3, [FAST, 3], "A100", None, []])
def test_what_is_no_profile_is_refused_when_it_is_made(wrong):
    with pytest.raises(TypeError):
        EmulatedDeviceCallback(wrong)


def test_evaluation_takes_the_forward_pass():
    callback = EmulatedDeviceCallback(DeviceProfile(q=0.01, s=0.05, k=1.0, m=1.0))
    model = Regressor(dtype=torch.float32)
    model.validation_step = model.test_step = lambda batch, batch_idx: None
    model.predict_step = lambda batch, batch_idx: batch[0]
    trainer = trainer_of("auto", 1, callbacks=[callback])
    loader = DataLoader(Points(16, dtype=torch.float32), 8)
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        began = time.perf_counter()
        evaluate(model, loader, **({"verbose": False} if evaluate != trainer.predict else {}))
        assert time.perf_counter() - began >= 2 * 0.13
    assert [one.kind for one in callback.device.times] == ["forward"] * 6
    assert callback.device.passes == 0, "jitter and slowdowns are those of passes of training"


class Manual(Regressor):
    """Optimizes by hand, with two backward passes of which the first is the device's."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_optimization_by_hand():
    callback = EmulatedDeviceCallback(FAST)
    trainer = trainer_of("auto", 1, callbacks=[callback], max_epochs=1)
    trainer.fit(Manual(), DataLoader(Points(16, dtype=torch.float32), 8))
    assert [one.kind for one in callback.device.times] == ["forward", "backward"] * 2


def test_a_second_fit_goes_on_with_the_same_device():
    callback = EmulatedDeviceCallback(FAST)
    for _ in range(2):
        trainer = trainer_of("auto", 1, callbacks=[callback], max_epochs=1)
        trainer.fit(Regressor(dtype=torch.float32), DataLoader(Points(16, dtype=torch.float32), 8))
    assert callback.device.passes == 4


def counted(profile, model, batch=8, samples=32, **given):
    """Train a model on a device whose clock passes by sleeping only; the callback, and the clock."""
    clock, callback = Clock(), EmulatedDeviceCallback(profile, **given)
    callback.device = EmulatedDevice(profile, host=clock.host())
    model.clock = clock
    trainer = trainer_of("auto", 1, callbacks=[callback], max_epochs=1)
    trainer.fit(model, DataLoader(Points(samples, dtype=torch.float32), batch))
    return callback, clock


class Skips(Plain):
    """Skips the first two batches after their forward pass."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if batch_idx < 2 else loss


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_batch_without_a_backward_pass_takes_its_forward_pass():
    callback, clock = counted(FAST, Skips(dtype=torch.float32))
    assert [one.kind for one in callback.device.times] == ["forward"] * 3 + ["backward", "forward", "backward"]
    assert {one.batch_size for one in callback.device.times} == {8}
    assert clock.seconds == pytest.approx(4 * FAST.model.forward_time(8) + 2 * FAST.model.backward_time(8))


class Slow(Regressor):
    """Computes for 2 ms between the gradient of its output and those of its parameters."""

    def loss(self, batch):
        out = self(batch[0])
        if out.requires_grad:
            out.register_hook(lambda _: self.clock.work(0.002))
        return out.square().mean()


def test_the_backward_pass_begins_with_the_gradient_of_the_loss():
    _, clock = counted(FAST, Slow(dtype=torch.float32))
    assert clock.seconds == pytest.approx(4 * FAST.seconds(8))


def test_the_batch_size_is_that_of_the_function():
    callback, _ = counted(FAST, Regressor(dtype=torch.float32), batch_size=lambda batch: 2 * len(batch[0]))
    assert {one.batch_size for one in callback.device.times} == {16}


def test_each_rank_has_a_seed_of_its_own():
    profile = DeviceProfile(0.001, 0.0, 0.002, 0.0, jitter=0.2)
    for rank in range(2):
        callback = EmulatedDeviceCallback(profile, seed=5)
        callback.setup(SimpleNamespace(world_size=2, global_rank=rank), None, "fit")
        callback.device.host = Clock().host()
        callback.device.begin_forward(8)
        callback.device.end_forward()
        assert callback.device.times[0].device == pytest.approx(0.008 * next(profile.times(5 + rank))[0])


def test_an_error_leaves_no_hook():
    callback, model = EmulatedDeviceCallback(FAST), Regressor(dtype=torch.float32)
    model.on_before_optimizer_step = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        trainer_of("auto", 1, callbacks=[callback]).fit(model, DataLoader(Points(16, dtype=torch.float32), 8))
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert isinstance(callback, L.Callback)


def _thin(rank):
    """Seconds of each step of a device behind a thin link."""
    ends = []
    model = Plain(dtype=torch.float32)
    model.on_train_batch_end = lambda *_: ends.append(time.perf_counter())
    bytes_of_gradient = 4 * sum(parameter.numel() for parameter in model.parameters())
    device = DeviceProfile(q=0.0, s=0.05, k=0.0, m=0.05)
    trainer = trainer_of("hetero_ddp", 2, callbacks=[EmulatedDeviceCallback(device)], max_epochs=1)
    with ThinLink(bytes_of_gradient / 0.2, world_size=2):  # the all-reduce of two workers sends each byte once
        trainer.fit(model, DataLoader(Points(64, dtype=torch.float32), 4))
    return [after - before for before, after in pairwise(ends)]


def test_a_thin_link_comes_on_top():
    for seconds in run_ranks(_thin, 2):
        assert len(seconds) == 7
        assert min(seconds) >= 0.1 + 0.2 - 0.01  # one bucket, which is ready when the backward pass ends


def _observed(rank, own):
    """Seconds outside of and in the backward pass that the strategy's timers see, and those of the device."""
    model, seen = Plain(dtype=torch.float32), []
    model.automatic_optimization = not own
    if own:
        model.training_step = lambda batch, batch_idx: Manual.training_step(model, batch, batch_idx)
    model.on_train_batch_end = lambda *_: seen.append(model.trainer.strategy.observations())
    device = DeviceProfile(q=0.0, s=0.06, k=0.0, m=0.02)
    trainer = trainer_of(HeteroDDPStrategy(replan=4), 2, callbacks=[EmulatedDeviceCallback(device)], max_epochs=1)
    trainer.fit(model, DataLoader(Points(12 * 8, dtype=torch.float32), 4))
    rows = seen[-1]
    return float(rows.forward.min()), float(rows.backward.min())


@pytest.mark.parametrize("own", [False, True], ids=["automatic", "manual"])
def test_the_forward_pass_is_timed_as_one(own):
    """Lightning calls ``on_before_backward`` inside of the strategy's ``backward``: too late for a forward pass."""
    for forward, backward in run_ranks(_observed, 2, own):
        assert forward >= 0.06
        assert backward >= 0.02


def test_a_resumed_training_goes_on_with_the_next_pass(tmp_path):
    profile = DeviceProfile(q=0.0, s=1e-4, k=0.0, m=1e-4, jitter=0.3, slowdown={2: 3.0})
    callback = EmulatedDeviceCallback(profile)
    loader = DataLoader(Points(16, dtype=torch.float32), 8)
    trainer = trainer_of("auto", 1, callbacks=[callback], max_epochs=1)
    trainer.fit(Plain(dtype=torch.float32), loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = EmulatedDeviceCallback(profile)
    trainer_of("auto", 1, callbacks=[again], max_epochs=2).fit(
        Plain(dtype=torch.float32), loader, ckpt_path=tmp_path / "last.ckpt"
    )
    factors = profile.times(0)
    expected = [1e-4 * factor for _ in range(4) for factor in next(factors)]
    assert [one.device for one in again.device.times] == pytest.approx(expected[4:])


def test_evaluation_counts_the_samples_of_the_function():
    clock, callback = Clock(), EmulatedDeviceCallback(FAST, batch_size=lambda batch: 2 * len(batch[0]))
    callback.device = EmulatedDevice(FAST, host=clock.host())
    model = Regressor(dtype=torch.float32)
    model.validation_step = lambda batch, batch_idx: None
    trainer_of("auto", 1, callbacks=[callback]).validate(model, DataLoader(Points(16, dtype=torch.float32), 8))
    assert [one.batch_size for one in callback.device.times] == [16, 16]
    assert clock.seconds == pytest.approx(2 * FAST.model.forward_time(16))


def test_the_end_of_a_training_leaves_no_hook():
    model = Regressor(dtype=torch.float32)
    counted(FAST, model)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


class Bare(L.LightningModule):
    """Parameter without a layer; skips its second batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5))

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else (batch[0] * self.weight).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_forward_pass_without_a_layer_ends_before_the_backward_pass_or_with_its_batch():
    callback, clock = counted(FAST, Bare())
    kinds = [one.kind for one in callback.device.times]
    assert kinds == ["forward", "backward", "forward", *["forward", "backward"] * 2]
    assert clock.seconds == pytest.approx(4 * FAST.model.forward_time(8) + 3 * FAST.model.backward_time(8))
