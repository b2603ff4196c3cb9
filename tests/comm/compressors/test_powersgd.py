"""When PowerSGD waits for torch's hook, and when the host reads what the device has found."""

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.comm.compressors import powersgd as torch_hooks
from lightning_hetero.comm.compressors.powersgd import PowerSGDAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.core.compression.settings import LowRank


class SlowClock(HostClock):
    """Of a device that reaches its marks when it is told to."""

    reached = False

    def ready(self, mark):
        return self.reached


@pytest.fixture
def exchange(monkeypatch):
    """PowerSGD on one rank, whose sums are what it gives."""

    def made(backend="gloo", clock=None):
        waited, p = [], torch.nn.Parameter(torch.zeros(8, 8))
        monkeypatch.setattr(torch_hooks, "backend_of", lambda device: backend)
        monkeypatch.setattr(torch_hooks, "powerSGD_hook", lambda s, b: SimpleNamespace(wait=lambda: waited.append(1)))
        monkeypatch.setattr(torch_hooks.dist, "all_reduce", lambda tensor, op: None)
        one = PowerSGDAverager(LowRank(rank=1, start=2), {"p": p}, 1, clock or HostClock())

        def step(value=1.0):
            flat = torch.full((64,), value)
            bucket = SimpleNamespace(
                buffer=lambda: flat,
                gradients=lambda: [flat.view(8, 8)],
                parameters=lambda: [p],
                index=lambda: 0,
                is_last=lambda: True,
            )
            one.average(bucket)
            p.grad = flat.view(8, 8).clone()
            one.after_backward()
            return p.grad

        return one, step, waited

    return made


@pytest.mark.parametrize(("backend", "waits"), [("gloo", 1), ("mpi", 1), ("nccl", 0)])
def test_it_waits_unless_the_backend_orders_what_callbacks_begin(exchange, backend, waits):
    _, step, waited = exchange(backend)
    step()
    assert len(waited) == waits


def test_what_the_device_has_found_is_read_when_it_is_there(exchange):
    clock, said = SlowClock(), []
    one, step, _ = exchange(clock=clock)
    one.deferred, one.state.iter = True, 5
    one.dropped.add = lambda number, where: said.append(number)
    assert (step(float("nan")) == 0.0).all(), "the device clears the gradient"
    assert float(one.flags.skipped) == 1.0
    assert (step() == 1.0).all()
    assert float(one.flags.skipped) == 0.0
    assert said == [], "the device has not come so far yet"
    clock.reached = True
    step()
    assert said == [0]


def test_residuals_follow_the_loss_scale_of_the_step(exchange):
    one, step, _ = exchange()
    one.state.iter, scale = 5, 4.0
    one.grad_scale = lambda: scale
    one.load_residuals({"p": torch.ones(64)})
    for scale in (4.0, 2.0):  # noqa: B007 - the averager reads it
        step()
        assert (one.state.error_dict[0] == scale).all()
        assert (one.residuals()["p"] == 1.0).all(), "checkpoints have no scale"


@pytest.mark.parametrize(("grad_scale", "skips"), [(None, True), (lambda: 4.0, False)], ids=["without", "with"])
def test_a_dense_step_that_is_not_finite_is_left_to_a_loss_scaler(exchange, grad_scale, skips):
    one, step, _ = exchange()
    one.grad_scale = grad_scale
    gradient = step(float("nan"))
    assert bool(one.flags.skipped) == skips
    assert gradient.isnan().all() != skips, "the scaler has to see it"
    assert one.dropped.count == skips


def test_a_resumed_run_goes_on_counting_steps(exchange):
    one, step, _ = exchange()
    for _ in range(3):
        step()
    resumed, step, _ = exchange()
    resumed.load_extra_state(one.extra_state())
    said = []
    resumed.dropped.add = lambda number, where: said.append(number)
    step(float("nan"))
    assert said == [3]
