"""In a Trainer, each worker is as fast as its device, and the split follows."""

import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

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


def _wrong_number(rank):
    train(rank, "ddp", [FAST, SLOW, SLOW])


def test_a_wrong_number_of_profiles_is_an_error_on_every_rank():
    with pytest.raises(RankError) as info:
        run_ranks(_wrong_number, 2)
    assert sorted(rank for rank, *_ in info.value.errors) == [0, 1]
    assert all("3 profiles for 2 ranks" in message for _, _, message in info.value.errors)


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
