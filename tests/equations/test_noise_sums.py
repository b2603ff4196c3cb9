"""Squared norms for the noise scale: taken without reading the device, summed, and put together once by all ranks.

That estimates are those of the gradients, also after a resume: tests/decisions/test_noise_scale.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.callbacks._gns.base import INTERVAL
from lightning_hetero.callbacks._gns.sources import source_of
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.noise.window_sums import WindowSums, merge_parts, own_part
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.optim import AdamPreconditioner


def parameters():
    """On torch's meta device, whatever would wait for values is an error."""
    made = [torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in ((40, 30), (30,), (7,))]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


class Bucket(SimpleNamespace):
    """What DDP hands to a hook: all gradients."""

    def buffer(self):
        return torch.cat([p.grad.flatten() for p in self.weights])

    def parameters(self):
        return self.weights

    def is_last(self):
        return True

    def index(self):
        return 0


def averaged(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def adam_of(weights):
    adam = torch.optim.Adam(weights)
    for p in weights:
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": torch.zeros_like(p)}
    return AdamPreconditioner([adam])


@pytest.mark.parametrize(("micro", "adam"), [(1, False), (2, False), (2, True)])
def test_no_step_of_an_interval_reads_the_device(micro, adam, monkeypatch):
    """More steps than norms may wait."""
    monkeypatch.setattr(WindowSums, "max_waiting", 12)
    weights, hook = parameters(), HookState(StepTimer(HostClock()), 2)
    hook.use_hook(averaged)
    noise = WorkersNoise(hook, ControlPlane(0, 1))
    noise.precondition(adam_of(weights) if adam else None)
    noise.scaled_by(SimpleNamespace(_get_scale_async=lambda: torch.ones((), device="meta")))
    collector = noise.collector
    collector.accumulate(lambda: micro, lambda: weights)
    collector.resume(20, [0.0] * 5)  # Adam's second moments are known
    for _ in range(20):
        for number in range(micro):
            collector.begin_step((9, 3))
            if number + 1 < micro:
                collector.after_backward()
        gradient_hook(hook, Bucket(weights=weights)).wait()
        collector.end_step()
    assert collector.sums.steps == 20
    with pytest.raises(RuntimeError, match="meta tensor"):
        collector.sums.pack()


# sums of one rank, and what the ranks agree on

ESTIMATOR = window_estimator(((4,), (4,)), nested=True)


def add(sums, first, whole):
    average = [torch.tensor(whole)]
    sums.add(ESTIMATOR.parts[0], ESTIMATOR.samples, [[torch.tensor(first)], average, average])


@pytest.mark.parametrize("steps", [1, 3, WindowSums.max_waiting // 2])
def test_what_is_taken_is_all_since_the_last_time(steps):
    sums, expected = WindowSums(), np.zeros(5)
    for step in range(steps):
        first, whole = 0.5, 0.25 * (1 + step)
        add(sums, first, whole)
        trace, square = np.array(ESTIMATOR.parts[0]) @ [first, whole, whole]
        expected += [8 * trace, 8 * square, 1, 8, 1]
    assert sums.pack() == pytest.approx([*expected, 0.0])
    assert sums.take() == pytest.approx(expected)
    assert (sums.steps, sums.take().tolist()) == (0, [0.0] * 5)
    sums.load(expected)
    add(sums, float("nan"), 1.0)
    assert sums.take() == pytest.approx(expected + [0, 0, 0, 0, 1]), "steps that are not finite are counted"


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all():
    ranks, alone = [WindowSums(), WindowSums()], WindowSums()
    for step in range(3):
        add(ranks[0], 0.5, 1.0 + step)
        add(ranks[1], float("nan") if step == 1 else 0.5, 1.0 + step)
        if step != 1:
            add(alone, 0.5, 1.0 + step)
    parts, finite = np.array([sums.pack() for sums in ranks]), np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    for rank, sums in enumerate(ranks):

        def gather(values, own=finite[rank]):
            if len(values) == 3:
                assert values.tolist() == own.tolist()
                return finite
            return np.array([values, values])

        agreed = sums.reconcile(parts, SimpleNamespace(gather=gather))[rank]
        assert agreed.tolist() == [*alone.pack()[:4].tolist(), 3.0]
    same = np.array([ranks[0].pack()] * 2)
    assert ranks[0].reconcile(same, control=None).tolist() == same[:, :5].tolist(), "nothing more is sent"


@pytest.mark.parametrize("finite", [0.0, 2.0])
def test_parts_of_all_ranks_are_merged_by_their_samples(finite):
    parts = np.array([[16.0, 6.0, finite, 8 * finite, 5.0], [8.0, 3.0, finite, 8 * finite, 5.0]])
    merged = merge_parts(RunningNoiseScale(), parts, biased=True, weight=0.5)
    expected = RunningNoiseScale().left_out(int(5 - finite))
    if finite:
        step = {"trace": 24 / 16, "global_sq_norm": 9 / 16, "total_batch_size": 8.0}
        expected = expected.update(**step, steps=1.0, biased=True)
    assert merged == expected


def test_a_cut_interval_goes_on_with_any_number_of_ranks():
    parts = [[6.0, 2.0, 3.0, 18.0, 3.0], [2.0, 4.0, 3.0, 18.0, 3.0]]
    for world_size in (1, 2, 3):
        shared = [own_part(parts, rank, world_size) for rank in range(world_size)]
        np.testing.assert_allclose(np.sum(shared, axis=0)[:2], np.sum(parts, axis=0)[:2])
        assert all(part[2:] == parts[0][2:] for part in shared)


# one worker: the first micro-batch of a window, or successive steps


class Alone:
    """One worker, of which only the order of what happens counts."""

    def __init__(self, window=1, every_n_steps=1, automatic=True, device="cpu"):
        self.weight = torch.nn.Parameter(torch.zeros(3, device=device))
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.trainer = SimpleNamespace(
            world_size=1, strategy=None, optimizers=[self.optimizer], accumulate_grad_batches=window,
            lightning_module=SimpleNamespace(automatic_optimization=automatic), precision_plugin=None,
        )  # fmt: skip
        self.source = source_of(self.trainer, method="pooled", every_n_steps=every_n_steps, horizon=1e9)

    def step(self, size=4):
        for number in range(self.trainer.accumulate_grad_batches):
            self.source.begin(self.trainer, size)
            self.source.backward(self.trainer)
            if number + 1 == self.trainer.accumulate_grad_batches:
                self.source.before_step(self.optimizer)
            self.source.end(self.trainer)

    @property
    def seen(self):
        """How many windows, and pairs of successive steps, were compared."""
        interval = self.source.interval()
        return interval["parts"][0][4], interval["pairs"][4]


@pytest.mark.parametrize("window", [1, 2], ids=["successive steps", "accumulation"])
def test_no_step_of_one_worker_reads_the_device(window):
    alone = Alone(window, device="meta")
    for _ in range(INTERVAL - 1 + (window == 1)):  # the first step has nothing to compare with
        alone.step()
    with pytest.raises(RuntimeError, match="meta tensor"):
        alone.step()


@pytest.mark.parametrize(
    ("how", "sizes", "expected"),
    [
        ({}, (4, 4, 2, 4, 4, 4), [(0, 0), (0, 1), (0, 1), (0, 1), (0, 2), (0, 3)]),
        ({"every_n_steps": 3}, (4,) * 7, [(0, 0)] * 3 + [(0, 1)] * 3 + [(0, 2)]),
        ({"window": 2, "automatic": False}, (4,) * 3, [(0, 0), (1, 0), (2, 0)]),
        ({"window": 2}, (4,) * 2, [(1, 0), (2, 0)]),
    ],
    ids=["batches of one size", "those that are observed", "accumulation by hand, from the second on", "accumulation"],
)
def test_which_steps_of_one_worker_are_compared(how, sizes, expected):
    alone, found = Alone(**how), []
    for size in sizes:
        alone.step(size)
        found.append(alone.seen)
    assert found == expected


def test_a_window_without_a_loss_is_not_part_of_the_next_one():
    alone = Alone(window=2)
    for _ in range(2):
        alone.source.begin(alone.trainer, 4)
        alone.source.end(alone.trainer)  # training_step gave no loss
    alone.step()
    assert alone.seen == (1, 0)
