"""A module takes exactly the time of a device, on a clock that only moves when somebody sleeps or computes."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_hetero.simulate import DeviceProfile, EmulatedDevice
from tests.simulate.devices.virtual_clock import Clock

PROFILE = DeviceProfile(q=0.001, s=0.01, k=0.002, m=0.02)


def emulated(profile=PROFILE, **given):
    clock = Clock()
    return EmulatedDevice(profile, host=clock.host(), **given), clock


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2))


def test_a_step_takes_the_time_of_the_profile():
    device, clock = emulated()
    with device.attach(net := model()):
        out = net(torch.zeros(8, 4))
        assert clock.seconds == pytest.approx(0.018)
        out.sum().backward()
        assert clock.seconds == pytest.approx(0.018 + 0.036)
    assert [(one.kind, one.batch_size) for one in device.times] == [("forward", 8), ("backward", 8)]
    assert [one.device for one in device.times] == pytest.approx([0.018, 0.036])
    assert [one.host for one in device.times] == pytest.approx([0.0, 0.0])


def test_gradients_become_ready_by_the_elements_of_their_parameters():
    device, clock = emulated()
    ready = {}
    with device.attach(net := model()):
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.update({name: clock.seconds}))
        net(torch.zeros(8, 4)).sum().backward()
    of = [ready[name] for name in ("2.bias", "2.weight", "0.bias", "0.weight")]
    assert sorted(of) == [*sorted(of[:2]), *sorted(of[2:])]
    assert max(of[:2]) == pytest.approx(0.018 + 0.036 * 22 / 72)
    assert max(of) == pytest.approx(0.018 + 0.036)


def test_frozen_parameters_have_no_share_of_the_backward_pass():
    device, clock = emulated()
    net, ready = model(), []
    net[0].requires_grad_(False)
    with device.attach(net):
        for parameter in net[2].parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(clock.seconds))
        net(torch.zeros(8, 4)).sum().backward()
    assert ready[-1] == pytest.approx(0.018 + 0.036)


def test_what_the_host_computes_is_a_part_of_the_device_time():
    device, clock = emulated()
    net = model()
    net[1].register_forward_hook(lambda *_: clock.__dict__.update(seconds=clock.seconds + 0.005))
    with device.attach(net):
        net(torch.zeros(8, 4))
    assert clock.seconds == pytest.approx(0.018)
    assert clock.asleep == pytest.approx(0.013)


def test_jitter_is_that_of_the_profile():
    profile = DeviceProfile(0.001, 0.01, 0.002, 0.02, jitter=0.2, slowdown={1: 2.0})
    device, _ = emulated(profile, seed=5)
    with device.attach(net := model()):
        for _ in range(4):
            net(torch.zeros(8, 4)).sum().backward()
    factors = profile.times(5)
    expected = [seconds for _ in range(4) for a, p in [next(factors)] for seconds in (0.018 * a, 0.036 * p)]
    assert [one.device for one in device.times] == pytest.approx(expected)


def test_memory_is_a_bound_for_one_batch():
    device, _ = emulated(DeviceProfile(0.001, 0.01, 0.002, 0.02, memory=8, name="small"))
    with device.attach(net := model()):
        with pytest.raises(torch.OutOfMemoryError, match="small holds 8 samples and got 9"):
            net(torch.zeros(9, 4))
        net(torch.zeros(8, 4)).sum().backward()
    assert device.passes == 1


class RefusedError(RuntimeError):
    """Error of a pass."""


def refuse(*_):
    raise RefusedError


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_one_that_failed_takes_its_time(where):
    device, clock = emulated()
    net = model()
    with device.attach(net):
        failing = net[1].register_forward_hook(refuse) if where == "forward" else net[0].weight.register_hook(refuse)
        with pytest.raises(RefusedError):
            net(torch.zeros(8, 4)).sum().backward()
        failing.remove()
        before = clock.seconds
        net(torch.zeros(8, 4)).sum().backward()
    assert clock.seconds - before == pytest.approx(0.018 + 0.036)


def test_gradients_are_those_without_a_device():
    plain, paced = model(), model()
    x = torch.randn(8, 4)
    plain(x).square().sum().backward()
    with emulated()[0].attach(paced):
        paced(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), paced.parameters(), strict=True))


def test_nothing_is_left_after_it():
    device, clock = emulated()
    net = model()
    with device.attach(net):
        pass
    net(torch.zeros(8, 4)).sum().backward()
    assert clock.seconds == 0.0
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    device.attach(net)
    with pytest.raises(RuntimeError, match="attached to a model already"):
        device.attach(net)


@pytest.mark.parametrize("wrong", [{"profile": 3}, {"seed": -1}, {"keep": 0}])
def test_bad_input_is_refused_when_it_is_made(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        EmulatedDevice(**{"profile": PROFILE, **wrong})


def test_fabric_and_accelerate_train_at_its_speed():
    accelerate = pytest.importorskip("accelerate")
    fabric, accelerator = Fabric(accelerator="cpu", devices=1), accelerate.Accelerator(cpu=True)
    for prepare, backward in ((fabric.setup, fabric.backward), (accelerator.prepare, accelerator.backward)):
        device, clock = emulated()
        net = model()
        device.attach(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        wrapped, optimizer = prepare(net, optimizer)
        for step in range(1, 4):
            backward(wrapped(torch.zeros(8, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert clock.seconds == pytest.approx(step * 0.054)


def test_what_cannot_be_attached_is_refused():
    device, _ = emulated()
    with pytest.raises(TypeError, match="module=None"):
        device.attach(None)
    with pytest.raises(TypeError, match="batch_size=3"):
        device.attach(model(), batch_size=3)
