"""A module takes exactly the time of a device: alone and on each rank of a Trainer."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.simulate import DeviceProfile, EmulatedDevice, EmulatedDeviceCallback
from lightning_hetero.simulate.devices.emulated_device import HostClock
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import RankError, run_ranks

PROFILE = DeviceProfile(q=0.001, s=0.01, k=0.002, m=0.02)
FORWARD, BACKWARD = 0.018, 0.036  # seconds of its passes with eight samples


class Clock:
    """Time that passes only by sleeping, and by what a test says that the host takes."""

    def __init__(self):
        self.seconds = self.asleep = 0.0

    def sleep(self, seconds):
        assert seconds > 0.0
        self.seconds += seconds
        self.asleep += seconds

    def work(self, seconds):
        self.seconds += seconds


def emulated(profile=PROFILE, **given):
    clock = Clock()
    return EmulatedDevice(profile, host=HostClock(lambda: clock.seconds, clock.sleep), **given), clock


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2))


def passes(net, batch=8):
    net(torch.zeros(batch, 4)).sum().backward()


def test_a_step_takes_the_time_of_the_profile_which_includes_what_the_host_computes():
    device, clock = emulated()
    net = model()
    net[1].register_forward_hook(lambda *_: clock.work(0.005))
    with device.attach(net):
        out = net(torch.zeros(8, 4))
        assert (clock.seconds, clock.asleep) == pytest.approx((FORWARD, FORWARD - 0.005))
        out.sum().backward()
        assert clock.seconds == pytest.approx(FORWARD + BACKWARD)
    assert [(one.kind, one.batch_size) for one in device.times] == [("forward", 8), ("backward", 8)]
    assert [one.device for one in device.times] == pytest.approx([FORWARD, BACKWARD])
    assert [one.host for one in device.times] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(("trained", "share"), [("all", 22 / 72), ("the last layer", 1.0)])
def test_gradients_become_ready_by_the_elements_of_the_parameters_that_are_trained(trained, share):
    device, clock = emulated()
    net, ready = model(), {}
    net[0].requires_grad_(trained == "all")
    with device.attach(net):
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.update({name: clock.seconds}))
        passes(net)
    assert max(ready["2.bias"], ready["2.weight"]) == pytest.approx(FORWARD + BACKWARD * share)
    assert max(ready.values()) == pytest.approx(FORWARD + BACKWARD)
    assert all(at >= max(ready["2.bias"], ready["2.weight"]) for name, at in ready.items() if name.startswith("0"))


def test_jitter_and_slowdowns_are_those_of_the_profile():
    profile = replace(PROFILE, jitter=0.2, slowdown={1: 2.0})
    device, _ = emulated(profile, seed=5)
    with device.attach(net := model()):
        for _ in range(4):
            passes(net)
    factors = profile.factors(5)
    expected = [seconds for _ in range(4) for a, p in [next(factors)] for seconds in (FORWARD * a, BACKWARD * p)]
    assert [one.device for one in device.times] == pytest.approx(expected)


def test_memory_is_a_bound_for_one_batch():
    device, _ = emulated(replace(PROFILE, memory=8, name="small"))
    with device.attach(net := model()):
        with pytest.raises(torch.OutOfMemoryError, match=r"small.* 8 .* 9"):
            net(torch.zeros(9, 4))
        passes(net)
    assert device.passes == 1


def test_gradients_are_those_without_a_device_and_nothing_is_left_after_it():
    plain, paced, x = model(), model(), torch.randn(8, 4)
    device, clock = emulated()
    plain(x).square().sum().backward()
    with device.attach(paced):
        paced(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), paced.parameters(), strict=True))
    ended = clock.seconds
    passes(paced)
    assert clock.seconds == ended


@pytest.mark.parametrize("wrong", [{"profile": 3}, {"seed": -1}, {"keep": 0}])
def test_bad_input_is_named(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        EmulatedDevice(**{"profile": PROFILE, **wrong})


# in a Trainer

FAST = DeviceProfile(q=0.0005, s=0.001, k=0.0005, m=0.001, jitter=0.1, name="fast")
SLOW = DeviceProfile(q=0.0015, s=0.001, k=0.0015, m=0.001, jitter=0.1, name="slow")


class Plain(Regressor):
    """Keeps no gradients, which may be sharded."""

    def __init__(self):
        super().__init__(dtype=torch.float32)

    def on_before_optimizer_step(self, optimizer):
        pass


def loader(samples, batch=8):
    return DataLoader(Points(samples, dtype=torch.float32), batch, shuffle=True)


def virtual(profile):
    """A callback whose device passes time by sleeping only, and its clock."""
    callback = EmulatedDeviceCallback(profile)
    callback.device, clock = emulated(profile)
    return callback, clock


def _train(rank, strategy, profiles):
    callback = EmulatedDeviceCallback(profiles, seed=3)
    trainer_of(strategy, 2, callbacks=[callback], max_epochs=1).fit(Plain(), loader(48))
    return [(one.kind, one.batch_size, one.device, one.host) for one in callback.device.times]


@pytest.mark.parametrize("strategy", ["ddp", "hetero_ddp", "hetero_fsdp", "hetero_elastic"])
def test_every_step_takes_the_time_of_the_ranks_own_device_with_a_seed_of_its_own(strategy):
    for rank, times in enumerate(run_ranks(_train, 2, strategy, [FAST, SLOW])):
        profile = (FAST, SLOW)[rank]
        factors = profile.factors(3 + rank)
        assert [kind for kind, *_ in times] == ["forward", "backward"] * (len(times) // 2)
        assert len(times) == 6 or strategy == "hetero_elastic"
        for (_, size, forward, _), (_, _, backward, _) in zip(times[::2], times[1::2], strict=True):
            a, p = next(factors)
            assert forward == pytest.approx(profile.model.forward_time(size) * a)
            assert backward == pytest.approx(profile.model.backward_time(size) * p)
        assert min(host for *_, host in times) >= -1e-9


def test_a_wrong_number_of_profiles_is_an_error_on_every_rank():
    with pytest.raises(RankError) as info:
        run_ranks(_train, 2, "ddp", [FAST, SLOW, SLOW])
    assert sorted(rank for rank, *_ in info.value.errors) == [0, 1]
    assert all("3 profiles for 2 ranks" in message for _, _, message in info.value.errors)


def test_accumulated_micro_batches_take_their_time_each_also_in_a_second_fit():
    callback, clock = virtual(PROFILE)
    for _ in range(2):
        trainer_of("auto", 1, callbacks=[callback], max_epochs=1, accumulate_grad_batches=2).fit(Plain(), loader(32))
    assert callback.device.passes == 8
    assert clock.seconds == pytest.approx(8 * (FORWARD + BACKWARD))


def test_evaluation_takes_the_forward_pass():
    callback, clock = virtual(PROFILE)
    net = Plain()
    net.validation_step = lambda batch, batch_idx: None
    net.predict_step = lambda batch, batch_idx: batch[0]
    trainer = trainer_of("auto", 1, callbacks=[callback])
    data = DataLoader(Points(16, dtype=torch.float32), 8)
    trainer.validate(net, data, verbose=False)
    trainer.predict(net, data)
    assert clock.seconds == pytest.approx(4 * FORWARD)
    assert callback.device.passes == 0, "jitter and slowdowns are those of passes of training"
