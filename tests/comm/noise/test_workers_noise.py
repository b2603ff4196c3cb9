"""The noise scale of several workers: what each has seen is put together once, also when a run goes on in between."""

import numpy as np
import pytest
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.running import RunningNoiseScale

SIZES = (3, 5)


class Together(ControlPlane):
    """Ranks in one process: what the others send is given."""

    def __init__(self, rank, others=()):
        super().__init__(rank, 1)
        self.world_size, self.others = 1 + len(others), others

    def gather(self, values):
        rows = [other(values) for other in self.others]
        rows.insert(self.rank, values)
        return np.stack(rows)


def noise_of(control, **settings):
    return WorkersNoise(HookState(StepTimer(HostClock()), control.world_size), control, **settings)


def step(noise, seed):
    """Add a step by random norms; return its part of ``B S`` and ``B |g|^2``."""
    local, whole = (torch.rand((), generator=torch.Generator().manual_seed(seed + i)).double() for i in (0, 1000))
    estimator = window_estimator((SIZES,))
    noise.collector.number += 1
    noise.collector.add(estimator, [], [local], [whole])
    part = estimator.part(noise.control.rank, divided=noise.collector.hook.squares.norms.in_parts)
    return sum(SIZES) * np.array(part) @ [0.0, float(local), float(whole)]


def filled(rank, others=(), steps=(1, 2, 3), **settings):
    noise = noise_of(Together(rank, others), **settings)
    return noise, sum(step(noise, 10 * seed + rank) for seed in steps)


def test_parts_of_all_workers_are_in_the_estimate_once():
    second, other = filled(1, others=(lambda mine: mine,))
    first, own = filled(0, others=(lambda mine: second.collector.sums.pack(),))
    first.exchange()
    samples = 3 * sum(SIZES)
    expected = RunningNoiseScale(horizon=50_000.0).update(
        trace=(own + other)[0] / samples,
        global_sq_norm=(own + other)[1] / samples,
        total_batch_size=float(sum(SIZES)),
        steps=3.0,
        biased=False,
    )
    assert first.running == expected
    assert first.interval()["parts"][0] == [0.0] * 5, "what is in the estimate is not sent again"


def test_settings_are_those_of_the_collector():
    noise = noise_of(Together(1, (lambda mine: mine,)), horizon=7.0, every_n_steps=4)
    assert (noise.running.horizon, noise.collector.every_n_steps, noise.collector.rank) == (7.0, 4, 1)
    noise.take_over(RunningNoiseScale(horizon=9.0))
    assert noise.collector.running.horizon == noise.running.horizon == 9.0


def test_norms_are_preconditioned_and_unscaled():
    class Scaler:
        def _get_scale_async(self):
            return torch.tensor(4.0)

        def get_scale(self):
            raise AssertionError("this waits for the device")

    noise = noise_of(Together(0))
    norms = noise.collector.hook.squares.norms
    noise.scaled_by(Scaler())
    assert [float(value) for value in norms.of_bucket(torch.tensor([4.0, 8.0]), list)] == [5.0]
    noise.scaled_by(None)
    assert norms.loss_scale is None
    marker = object()
    noise.precondition(marker)
    assert norms.preconditioner is marker
    noise.precondition(None)
    assert norms.preconditioner is None


def test_an_interval_is_the_sums_so_far_of_each_worker():
    second, other = filled(1, others=(lambda mine: mine,))
    first, own = filled(0, others=(lambda mine: second.collector.sums.pack(),))
    interval = first.interval()
    assert interval["steps"] == 3
    for part, (trace, norm) in zip(interval["parts"], (own, other), strict=True):
        assert part == pytest.approx([trace, norm, 3, 24, 3])
    assert first.interval() == interval, "a checkpoint takes nothing away"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_resumes_goes_on_as_one_that_was_not_cut(rank):
    same = (lambda mine: 2.0 * mine,)
    whole, _ = filled(rank, same)
    interval = whole.interval()
    resumed = noise_of(Together(rank, same))
    resumed.resume(interval)
    assert resumed.collector.number == 3
    for noise in (whole, resumed):
        step(noise, 99)
    assert resumed.interval() == whole.interval()
    for noise in (whole, resumed):
        noise.exchange()
    assert resumed.running == whole.running


def test_an_interval_of_two_workers_goes_on_with_one():
    noise = noise_of(Together(0))
    noise.resume({"steps": 4, "parts": [[6.0, 2.0, 3, 18, 3], [2.0, 3.0, 3, 18, 3]]})
    assert noise.interval() == {"steps": 4, "parts": [[8.0, 5.0, 3, 18, 3]]}
