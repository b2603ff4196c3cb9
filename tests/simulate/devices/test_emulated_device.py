"""A module takes exactly the time of a device, on a clock that only moves when somebody sleeps or computes."""

import copy
import pickle
import time
from collections import UserDict

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.agreement.group_lifetime import free_group_last
from lightning_hetero.simulate import DeviceProfile, EmulatedDevice
from lightning_hetero.simulate.devices.emulated_device import first_dimension
from tests.helpers import run_ranks
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


def test_what_the_host_takes_beyond_it_is_reported():
    device, clock = emulated()
    net = model()
    net[1].register_forward_hook(lambda *_: clock.__dict__.update(seconds=clock.seconds + 0.5))
    with device.attach(net):
        net(torch.zeros(8, 4))
    (forward,) = device.times
    assert forward.host == pytest.approx(0.5 - 0.018)
    assert forward.taken == pytest.approx(0.5)


def test_jitter_is_that_of_the_profile():
    profile = DeviceProfile(0.001, 0.01, 0.002, 0.02, jitter=0.2, slowdown={1: 2.0})
    device, _ = emulated(profile, seed=5)
    with device.attach(net := model()):
        for _ in range(4):
            net(torch.zeros(8, 4)).sum().backward()
    factors = profile.times(5)
    expected = [seconds for _ in range(4) for a, p in [next(factors)] for seconds in (0.018 * a, 0.036 * p)]
    assert [one.device for one in device.times] == pytest.approx(expected)


def test_evaluation_takes_the_forward_pass_and_no_jitter():
    device, clock = emulated(DeviceProfile(0.001, 0.01, 0.002, 0.02, jitter=0.5, slowdown={1: 3.0}))
    with device.attach(net := model()), torch.no_grad():
        net(torch.zeros(8, 4))
        assert clock.seconds == pytest.approx(0.018)
        with torch.enable_grad():
            net(torch.zeros(8, 4)).sum().backward()
        before = clock.seconds
        net(torch.zeros(8, 4))
    assert clock.seconds - before == pytest.approx(3 * 0.018)
    assert device.passes == 1


def test_memory_is_a_bound_for_one_batch():
    device, _ = emulated(DeviceProfile(0.001, 0.01, 0.002, 0.02, memory=8, name="small"))
    with device.attach(net := model()):
        with pytest.raises(torch.OutOfMemoryError, match="small holds 8 samples and got 9"):
            net(torch.zeros(9, 4))
        net(torch.zeros(8, 4)).sum().backward()
    assert device.passes == 1


def test_two_forward_passes_and_one_backward_pass():
    device, clock = emulated()
    with device.attach(net := model()):
        (net(torch.zeros(8, 4)) + net(torch.ones(8, 4))).sum().backward()
    assert clock.seconds == pytest.approx(2 * 0.018 + 2 * 0.036)
    assert device.times[-1].batch_size == 16


def test_a_second_backward_pass_takes_nothing():
    device, clock = emulated()
    with device.attach(net := model()):
        loss = net(torch.zeros(8, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert clock.seconds == pytest.approx(0.018 + 0.036)


def test_unused_and_frozen_parameters_leave_the_time_whole():
    device, clock = emulated()
    net = model()
    net.unused = nn.Parameter(torch.zeros(100))
    net[0].requires_grad_(False)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    with device.attach(net):
        net(torch.zeros(8, 4)).sum().backward()
    assert clock.seconds == pytest.approx(0.018 + 0.036)


def test_a_loss_of_the_parameters_alone_takes_the_backward_pass():
    device, clock = emulated()
    with device.attach(net := model()):
        net(torch.zeros(8, 4))
        sum(p.square().sum() for p in net.parameters()).backward()
    assert clock.seconds == pytest.approx(0.018 + 0.036)


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


class Output(UserDict):
    """Mapping that PyTorch does not know, as the models and tokenizers of other packages use."""


def test_a_model_may_take_and_return_mappings_by_name():
    """The backward pass begins with the gradient of the output, not with the first one of a parameter."""
    device, clock = emulated()
    net = model()
    net.forward = lambda inputs: Output(logits=net[2](net[1](net[0](inputs["x"]))))
    with device.attach(net):
        logits = net(inputs=Output(x=torch.zeros(8, 4)))["logits"]
        logits.register_hook(lambda _: clock.work(0.005))
        logits.sum().backward()
    assert [one.batch_size for one in device.times] == [8, 8]
    assert clock.seconds == pytest.approx(0.018 + 0.036)


def test_no_share_of_the_backward_pass_takes_longer_than_the_whole():
    """A hook of a parameter runs more than once where parts of the model are computed again (checkpointing)."""
    device, clock = emulated()
    device.begin_forward(8)
    device.end_forward()
    loss = torch.zeros(1, requires_grad=True).square().sum()
    for _ in range(2):
        loss.register_hook(lambda _: device.advance_backward(0.7))
    loss.backward()
    assert clock.seconds == pytest.approx(0.018 + 0.036)


def test_the_newest_times_are_kept():
    device, _ = emulated(keep=3)
    with device.attach(net := model()):
        for size in (1, 2, 3):
            net(torch.zeros(size, 4)).sum().backward()
    assert [(one.kind, one.batch_size) for one in device.times] == [("backward", 2), ("forward", 3), ("backward", 3)]


def test_a_device_that_is_detached_forgets_the_pass_that_runs():
    device, clock = emulated()
    with device.attach(net := model()):
        net(torch.zeros(8, 4))
    with device.attach(net):
        net(torch.zeros(8, 4)).sum().backward()
    assert clock.seconds == pytest.approx(2 * 0.018 + 0.036)


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ((Output(ids=torch.zeros(7, 5)),), 7),
        ((torch.zeros(3, 5),), 3),
        (({"a": 1, "ids": torch.zeros(4, 5)},), 4),
        ((torch.tensor(1.0), [torch.zeros(6)]), 6),
    ],
)
def test_the_batch_size_is_the_first_dimension(inputs, size):
    assert first_dimension(*inputs) == size


def test_a_batch_without_tensors_needs_a_function():
    device, clock = emulated()
    net = nn.Linear(4, 1)
    net.forward = lambda texts: nn.functional.linear(torch.zeros(len(texts), 4), net.weight)
    with device.attach(net), pytest.raises(ValueError, match="Give batch_size="):
        net(["a", "b"])
    device.detach()
    with device.attach(net, batch_size=len):
        net(["a", "b"])
    assert clock.seconds == pytest.approx(0.012)


@pytest.mark.parametrize("wrong", [{"profile": 3}, {"seed": -1}, {"keep": 0}])
def test_bad_input_is_refused_when_it_is_made(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        EmulatedDevice(**{"profile": PROFILE, **wrong})


def test_waiting_uses_no_processor_time():
    device = EmulatedDevice(DeviceProfile(0.0, 0.5, 0.0, 0.5))
    with device.attach(net := model()):
        began = time.process_time()
        net(torch.zeros(8, 4)).sum().backward()
        assert time.process_time() - began < 0.5
    assert sum(one.taken for one in device.times) >= 1.0


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


def _buckets(rank):
    """When each bucket of a DDP model is ready.

    The process group is left as it is: DDP, freed as its last owner, would wait for a thread that waits for Python.
    """
    torch.distributed.init_process_group("gloo")
    device, clock = emulated()
    net = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(6)])
    device.attach(net)
    wrapped, ready = DistributedDataParallel(net, bucket_cap_mb=0.05), []
    free_group_last(wrapped)

    def hook(state, bucket):
        ready.append(clock.seconds)
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        begin = clock.seconds
        ready.clear()
        wrapped(torch.zeros(8, 100)).sum().backward()
        end = clock.seconds
    return [(moment - begin - 0.018) / 0.036 for moment in ready], end - begin


def test_ddp_gets_its_buckets_one_after_the_other():
    for shares, seconds in run_ranks(_buckets, 2):
        assert shares == pytest.approx([i / len(shares) for i in range(1, len(shares) + 1)])
        assert len(shares) > 2
        assert seconds == pytest.approx(0.054)


def test_a_copy_runs_on_no_device():
    device, clock = emulated()
    device.attach(net := model())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(torch.zeros(8, 4)).sum().backward()
    assert clock.seconds == device.passes == 0
    device.detach()


def test_a_copied_device_goes_on_where_it_was():
    device = EmulatedDevice(DeviceProfile(0.0, 1e-4, 0.0, 1e-4, jitter=0.3), seed=2)
    with device.attach(net := model()):
        net(torch.zeros(8, 4)).sum().backward()
    for other in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert (other.passes, list(other.times)) == (1, list(device.times))
        with other.attach(net):
            net(torch.zeros(8, 4))
        factors = device.profile.times(2)
        next(factors)
        assert other.times[-1].device == pytest.approx(1e-4 * next(factors)[0])


@pytest.mark.parametrize("wrong", [-1, 1.5, None, True])
def test_a_batch_size_is_a_number_of_samples(wrong):
    device, _ = emulated()
    with device.attach(net := model(), batch_size=lambda x: wrong), pytest.raises((TypeError, ValueError)) as info:
        net(torch.zeros(8, 4))
    assert "batch_size() returned" in str(info.value)


def test_what_cannot_be_attached_is_refused():
    device, _ = emulated()
    with pytest.raises(TypeError, match="module=None"):
        device.attach(None)
    with pytest.raises(TypeError, match="batch_size=3"):
        device.attach(model(), batch_size=3)
