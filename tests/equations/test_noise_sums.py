"""Squared norms for the noise scale: taken without reading the device, summed, and put together once by all ranks."""

import json
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
from lightning_hetero.core.noise.estimators import estimate_noise_scale
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.optim import AdamPreconditioner

SIZES = (9, 3)
SHARES = np.array(SIZES) / 12


class Together(ControlPlane):
    """Ranks in one process, one after another: each answers what the others' parts are by calling them."""

    def __init__(self, rank, everyone):
        super().__init__(rank, 1)
        self.world_size, self.everyone = 2, everyone

    def gather(self, values):
        return np.stack([values if i == self.rank else other(self.rank) for i, other in enumerate(self.everyone)])


def parameters(device="cpu"):
    made = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in ((40, 30), (30,), (7,))]
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


class Worker:
    """One of two ranks whose gradients, and averages of them, are given."""

    def __init__(self, rank, control=None, device="cpu", **settings):
        self.weights, self.average = parameters(device), None
        hook = HookState(StepTimer(HostClock()), 2)
        hook.use_hook(self.averaged)
        self.noise = WorkersNoise(hook, control or Together(rank, [lambda _: None] * 2), **settings)
        self.hook, self.collector = hook, self.noise.collector

    def averaged(self, state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() if self.average is None else self.average)
        return future

    def step(self, *micro, average=None, sizes=SIZES):
        """Take gradients of micro-batches, which add up, and what they are on average over the ranks."""
        self.average = average
        for number, gradient in enumerate(micro or (None,)):
            self.collector.begin_step(sizes)
            if gradient is not None:
                begin = 0
                for p in self.weights:
                    p.grad = gradient[begin : begin + p.numel()].reshape(p.shape)
                    begin += p.numel()
            if number + 1 < len(micro):
                self.collector.after_backward()
        gradient_hook(self.hook, Bucket(weights=self.weights)).wait()
        self.collector.end_step()


def two_workers(**settings):
    workers = []
    controls = [
        Together(rank, [lambda _: workers[0].collector.pack(), lambda _: workers[1].collector.pack()])
        for rank in (0, 1)
    ]
    workers += [Worker(rank, control, **settings) for rank, control in enumerate(controls)]
    return workers


@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "two micro-batches"])
def test_what_two_ranks_have_seen_is_the_estimate_of_their_gradients(micro, seed):
    """Rank i's loss is weighted by ``W b_i / B``, and divided by the number of micro-batches; the rank's is its sum."""
    generator = torch.Generator().manual_seed(seed)
    workers, expected = two_workers(horizon=1e9), []
    for worker in workers:
        worker.collector.accumulate(lambda: micro, lambda worker=worker: worker.weights)
    for _ in range(5):
        g = 0.2 + torch.randn(micro, 2, 1237, generator=generator)
        mine = [2 * SHARES[i] * g[:, i].cumsum(dim=0) / micro for i in (0, 1)]
        whole = (mine[0][-1] + mine[1][-1]) / 2
        for worker, own in zip(workers, mine, strict=True):
            worker.step(*own, average=whole)
        means = [float(g[:, i].mean(dim=0).square().sum()) for i in (0, 1)]
        local = window_estimator((SIZES,) * micro, nested=micro > 1)
        first = [float((2 * SHARES[i] * g[0, i] / micro).square().sum()) for i in (0, 1)]
        norms = [[first[i], (2 * SHARES[i]) ** 2 * means[i], float(whole.square().sum())] for i in (0, 1)]
        expected.append(np.einsum("irk,ik->r", local.parts, norms))
        if micro == 1:
            plain = estimate_noise_scale(means, float(whole.square().sum()), SIZES)
            assert expected[-1][0] == pytest.approx(plain.trace, rel=1e-5)
    trace, square = np.mean(expected, axis=0)
    for worker in workers[::-1]:
        parts = [one.collector.pack() for one in workers]
        worker.noise.control.everyone = [lambda _, part=part: part for part in parts]
    for worker in workers:
        worker.noise.exchange()
        found = worker.noise.running
        assert (found.trace, found.samples) == pytest.approx((trace, 5 * 12 * micro), rel=1e-4)
        assert found.grad_sq_norm == pytest.approx(max(square - trace / (12 * micro), 0.0), rel=1e-3)
        assert worker.noise.interval()["parts"][worker.noise.control.rank] == [0.0] * 5, "it is not sent again"


def adam_of(weights):
    adam = torch.optim.Adam(weights)
    for p in weights:
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": torch.zeros_like(p)}
    return AdamPreconditioner([adam])


@pytest.mark.parametrize(("micro", "adam"), [(1, False), (2, False), (2, True)])
def test_no_step_of_an_interval_reads_the_device(micro, adam, monkeypatch):
    """On torch's meta device, whatever would wait for values is an error; more steps than norms may wait."""
    monkeypatch.setattr(WindowSums, "max_waiting", 12)
    worker = Worker(0, device="meta")
    worker.noise.precondition(adam_of(worker.weights) if adam else None)
    worker.noise.scaled_by(SimpleNamespace(_get_scale_async=lambda: torch.ones((), device="meta")))
    worker.collector.accumulate(lambda: micro, lambda: worker.weights)
    worker.collector.resume(20, [0.0] * 5)  # Adam's second moments are known
    for _ in range(20):
        worker.step(*[None] * micro)
    assert worker.collector.sums.steps == 20
    with pytest.raises(RuntimeError, match="meta tensor"):
        worker.collector.sums.pack()


def test_steps_between_those_that_are_observed_and_those_before_adam_knows_gradients_take_no_norms():
    worker, taken = Worker(0, every_n_steps=3), []
    for _ in range(7):
        worker.step()
        taken.append(worker.collector.sums.steps)
    assert taken == [1, 1, 1, 2, 2, 2, 3]
    worker = Worker(0)
    worker.noise.precondition(adam_of(worker.weights))
    for _ in range(12):
        worker.step()
    assert worker.collector.sums.steps == 2
    worker.collector.begin_anew()
    worker.step()
    assert worker.collector.sums.steps == 2
    worker.noise.precondition(None)
    worker.noise.scaled_by(None)
    worker.step(sizes=(12, 0))
    assert worker.collector.sums.steps == 2, "one rank with samples tells nothing"
    worker.step()
    assert worker.collector.sums.steps == 3


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
    ranks = [WindowSums(), WindowSums()]
    for rank, sums in enumerate(ranks):
        for step in range(3):
            add(sums, float("nan") if rank == 1 and step == 1 else 0.5, 1.0 + step)
    parts, asked = np.array([sums.pack() for sums in ranks]), []
    finite = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    for rank, sums in enumerate(ranks):

        def gather(values):
            asked.append(values)
            return finite if len(values) == 3 else np.array([values, values])

        agreed = sums.reconcile(parts, SimpleNamespace(gather=gather))[rank]
        alone = WindowSums()
        for step in (0, 2):
            add(alone, 0.5, 1.0 + step)
        assert agreed.tolist() == [*alone.take()[:4].tolist(), 3.0]
    assert [values.tolist() for values in asked if len(values) == 3] == finite.tolist()
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


def test_a_cut_interval_goes_on_with_any_number_of_ranks_as_if_it_had_not_been_cut():
    parts = [[6.0, 2.0, 3.0, 18.0, 3.0], [2.0, 4.0, 3.0, 18.0, 3.0]]
    for world_size in (1, 2, 3):
        shared = [own_part(parts, rank, world_size) for rank in range(world_size)]
        np.testing.assert_allclose(np.sum(shared, axis=0)[:2], np.sum(parts, axis=0)[:2])
        assert all(part[2:] == parts[0][2:] for part in shared)
    gradients = torch.randn(4, 1237, generator=torch.Generator().manual_seed(0))
    workers = two_workers(horizon=7.0)
    for gradient in gradients[:3]:
        for worker in workers:
            worker.step(gradient)
    interval = workers[0].noise.interval()
    assert (interval["steps"], json.loads(json.dumps(interval))) == (3, interval)
    assert workers[0].noise.interval() == interval, "a checkpoint takes nothing away"
    resumed = two_workers(horizon=7.0)
    for worker in resumed:
        worker.noise.resume(interval)
    for worker in (workers[1], *resumed):
        worker.step(gradients[3])
    workers[0].step(gradients[3])
    assert resumed[0].noise.interval() == workers[0].noise.interval()
    for one in (workers[0], resumed[0]):
        one.noise.exchange()
    assert resumed[0].noise.running == workers[0].noise.running != RunningNoiseScale()
    resumed[0].noise.take_over(RunningNoiseScale(horizon=9.0))
    assert resumed[0].noise.running.horizon == 9.0 != workers[0].noise.running.horizon == 7.0


# one worker: the first micro-batch of a window, or successive steps


class Alone:
    """One worker, of which only the order of what happens counts."""

    def __init__(self, window=1, every_n_steps=1, automatic=True, device="cpu"):
        self.weight = torch.nn.Parameter(torch.zeros(3, device=device))
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer, module = (
            torch.optim.SGD([self.weight], lr=0.1),
            SimpleNamespace(automatic_optimization=automatic),
        )
        self.trainer = SimpleNamespace(
            world_size=1, strategy=None, optimizers=[self.optimizer], accumulate_grad_batches=window,
            lightning_module=module, precision_plugin=None,
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
