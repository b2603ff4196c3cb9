"""What went wrong is told once by name, left out, or an error, as the settings say: losses, gradients, weights."""

import gc
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.gradients.health import Health, NonFiniteError
from lightning_hetero.comm.gradients.nonfinite import StepSkipper, all_finite, clear
from lightning_hetero.comm.gradients.weight_check import WeightCheck, WeightSettings
from tests.gradients.runs import Run, Way
from tests.helpers import Points, Regressor, collected, fit
from tests.ranks import run_ranks
from tests.timing.clocks import Hand

NAN, STEPS, AT = math.nan, 9, 5


# by itself


class Ahead(Hand):
    """A host that is ahead of its device."""

    def __init__(self):
        super().__init__(tick=1.0)
        self.reached = 0.0


class Alone:
    """The health of one of two ranks that see the same, and the hook that averages for them."""

    def __init__(self, mode="ignore", *, scaled=False, rank=0):
        self.hook = SimpleNamespace(num_bytes=0, step_skipped=False, averager=DDPMean(2))
        self.hook.skip_step = lambda: vars(self.hook).update(step_skipped=True)
        control = SimpleNamespace(rank=rank, world_size=2, gather=lambda mine: np.stack([mine, mine]))
        self.clock, self.model = Ahead(), nn.Linear(1, 1)
        self.health = Health(mode, control, self.hook, self.clock)
        self.health.attach(self.model, scaled=scaled)

    def averaged(self, value):
        self.model.weight.grad = torch.full((1, 1), float(value))
        self.hook.num_bytes += 8
        self.health.after_backward()


def test_a_loss_is_read_when_the_device_has_come_to_it_and_told_once(caplog):
    one = Alone()
    for batch, loss in enumerate((torch.tensor(1.0), torch.tensor([1.0, NAN]), torch.tensor(NAN))):
        one.health.see(loss, (0, batch), rows=4)
    one.clock.reached = 1.0
    one.health.see(torch.tensor(2.0), (0, 3))
    assert not caplog.messages
    one.clock.reached = 3.0
    one.health.see(torch.tensor(2.0), (0, 4))
    (line,) = caplog.messages
    assert "rank 0" in line
    assert "batch 1 of epoch 0" in line
    one.health.see(torch.tensor(NAN), (0, 5))
    one.health.finish()
    assert len(caplog.messages) == 1
    one.health.begin()
    one.health.attach(one.model)
    one.health.see(torch.tensor(NAN), (1, 2), rows=1)
    one.health.finish()
    assert "batch 2 of epoch 1" in caplog.messages[1], "another training says so again"
    assert ["min_local_batch_size" in text for text in caplog.messages] == [False, True], "of a single sample"


def test_weights_that_are_not_finite_are_told_at_the_end_unless_a_loss_was(caplog):
    for rank, bad_loss in ((0, False), (1, False), (0, True)):
        one = Alone(rank=rank)
        one.health.see(torch.tensor(NAN if bad_loss else 1.0), (0, 0))
        one.model.weight.data.fill_(NAN)
        one.health.finish()
        assert [("ended with weights" in line) for line in caplog.messages] == ([] if rank else [not bad_loss])
        caplog.clear()


def test_only_gradients_that_were_averaged_are_dropped(caplog):
    """In the middle of an accumulation window, each rank has its own; a loss scaler leaves nothing to do."""
    for mode in ("skip", "raise"):
        one = Alone(mode, scaled=True)
        one.averaged(NAN)
        assert one.model.weight.grad.isnan().all()
    one = Alone("skip")
    one.health.see(torch.tensor(1.0), (3, 7))
    one.model.weight.grad = torch.full((1, 1), NAN)
    one.health.after_backward()
    assert one.model.weight.grad.isnan().all()
    one.averaged(NAN)
    assert not one.model.weight.grad.any()
    assert one.hook.step_skipped
    momentum = torch.optim.SGD(one.model.parameters(), lr=1.0, momentum=0.9)
    momentum.step()
    assert not momentum.state, "the step was not skipped"
    one.model.weight.grad = torch.zeros(1, 1)
    one.health.close()
    momentum.step()
    assert momentum.state
    assert any("step 7" in line and "epoch 3" in line for line in caplog.messages)


# gradients


def parameter(*values, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_one_bad_value_is_found_among_all_and_cleared(bad, dtype):
    none = nn.Parameter(torch.zeros(2))
    good = [parameter(1.0, -2.0), none, parameter(3.0, dtype=torch.float64), parameter(6e4, 6e4, dtype=torch.float16)]
    assert all_finite([none])
    assert all_finite(good), "large numbers of a short type are, though their sum is not in it"
    assert not all_finite(both := [*good, parameter(0.0, bad, dtype=dtype)])
    clear(both)
    assert none.grad is None
    assert not any(p.grad.any() for p in both if p is not none)


class Steps:
    """An optimizer with momentum and decay, one step old, for two parameters; steps of the first may be skipped."""

    def __init__(self):
        self.meant, self.other = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(2))
        both = [self.meant, self.other]
        self.optimizer, self.skipper = torch.optim.SGD(both, lr=0.1, momentum=0.9), StepSkipper()
        self.moved(1.0)

    def backward(self, value, skips=(), sparse=False):
        for p in (self.meant, self.other):
            full = torch.full_like(p, value)
            p.grad = full.to_sparse(1) if sparse and p is self.meant else full
        self.skipper.skip(skips)
        return value

    def moved(self, value, closure=False, **given):
        """Whether each parameter moves in a step."""
        before = [p.detach().clone() for p in (self.meant, self.other)]
        if closure:
            assert self.optimizer.step(lambda: self.backward(value, **given)) == value
        else:
            self.backward(value, **given)
            self.optimizer.step()
        return [not torch.equal(a, b.detach()) for a, b in zip(before, (self.meant, self.other), strict=True)]


@pytest.mark.parametrize(("closure", "sparse"), [(False, False), (True, False), (False, True)])
def test_a_skipped_step_moves_nothing_and_leaves_the_momentum(closure, sparse):
    """Only that step, of those parameters, whose gradient is zero; another one is late, or of another pass."""
    steps = Steps()
    momentum = steps.optimizer.state[steps.meant]["momentum_buffer"].clone()
    assert steps.moved(0.0, closure, skips=[steps.meant], sparse=sparse) == [False, True]
    assert steps.optimizer.state[steps.meant]["momentum_buffer"].equal(momentum)
    assert steps.moved(0.0, closure) == [True, True]
    assert steps.moved(1.0, closure, skips=[steps.meant], sparse=sparse) == [True, True]
    steps.meant.grad, steps.other.grad = torch.zeros(3, 1), torch.ones(2)
    steps.skipper.skip([steps.meant, steps.other])
    before = steps.meant.detach().clone()
    steps.optimizer.step()
    assert not torch.equal(steps.meant.detach(), before), "one late gradient shows that all are late"


@pytest.mark.parametrize("end", ["removed", "forgotten"])
def test_nothing_is_skipped_any_more_once_the_skipper_has_gone(end):
    steps = Steps()
    steps.backward(0.0, [steps.meant])
    if end == "removed":
        steps.skipper.remove()
    steps.skipper.cycle, steps.skipper = steps.skipper, SimpleNamespace(skip=lambda parameters: None)
    gc.collect()
    assert steps.moved(0.0) == [True, True]


# in a training


TOPK = "block_topk(density=0.3, block=8, warmup_steps=2)"
WAYS = {
    "plain": Way(),
    "fp16": Way("fp16"),
    "stale": Way(stale={0: True}),
    "blocks": Way(TOPK),
    "blocks, stale": Way(TOPK, stale={0: True}),
    "blocks, only dense steps": Way("block_topk(warmup_steps=100)"),
    "low rank": Way("powersgd(rank=1, start=2)"),
}


def _ill(rank, mode):
    """Weights, lines and errors of trainings in which a loss or only a gradient of rank 1 is once not finite."""
    found = {}
    for name, way in WAYS.items():
        for what in ("loss", "gradient"):
            run, lines = Run(rank, way, mode=mode), collected()
            hit = lambda run=run: rank == 1 and len(run.seen["weights"]) == AT  # noqa: E731
            if what == "gradient":
                run.model.get_submodule("0").weight.register_hook(lambda g, hit=hit: g * (math.inf if hit() else 1.0))
            error = None
            try:
                for step in range(STEPS):
                    run.step(step, bad=what == "loss" and hit())
                run.health.finish()
            except NonFiniteError as raised:
                error = str(raised)
            weights = np.stack(run.seen["weights"])
            still = [at + 1 for at, (one, other) in enumerate(pairwise(weights)) if (one == other).all()]
            lines = [line for line in lines if "the loss is" in line or "weights" in line]
            found[name, what] = {"weights": weights, "still": still, "lines": lines, "error": error}
            run.close()
    return found


@pytest.fixture(scope="module")
def ill():
    return {mode: run_ranks(_ill, 2, mode) for mode in ("ignore", "skip", "raise")}


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("name", WAYS)
def test_a_skipped_step_leaves_weights_and_momentum_as_they_are(name, what, ill):
    """On all ranks, and no other step. A late gradient is skipped a step later; late blocks wait for a better one."""
    results = [result[name, what] for result in ill["skip"]]
    for result in results:
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        assert np.isfinite(result["weights"]).all()
        assert result["still"] == [AT + ("stale" in name)]
    assert [len(result["lines"]) for result in results] == ([0, 1] if what == "loss" else [0, 0])


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("name", WAYS)
def test_what_is_not_finite_is_told_once_with_rank_and_batch(name, what, ill):
    """The rank on which it begins sees it first; the others in their losses, once it is in the weights."""
    compressed = name.startswith(("blocks", "low"))
    for rank, result in enumerate(ill["ignore"]):
        lines = result[name, what]["lines"]
        if compressed:
            assert len(lines) == (what == "loss" and rank == 1)
            assert not result[name, what]["still"], "momentum acts on zeros unless the step is skipped"
            assert np.isfinite(result[name, what]["weights"]).all()
        else:
            assert len(lines) == 1
            first = AT if what == "loss" and rank == 1 else AT + 1 + (name == "stale")
            assert f"rank {rank}" in lines[0]
            assert f"batch {first} of" in lines[0]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("name", WAYS)
def test_stopping_is_an_error_on_all_ranks_that_names_rank_and_batch(name, what, ill):
    for result in ill["raise"]:
        end = AT + (name in ("stale", "blocks, stale"))
        assert f"batch {end} of epoch 0" in result[name, what]["error"]
        assert ("rank 1" in result[name, what]["error"]) == (what == "loss")
        assert len(result[name, what]["weights"]) == end
        assert np.isfinite(result[name, what]["weights"]).all()


def _single(rank):
    lines = collected()
    fit(rank, {"local_batch_sizes": [7, 1]}, 2, 4, Regressor(loss_scale=NAN), Points(16), max_epochs=1)
    return ["min_local_batch_size" in line for line in lines if "the loss is" in line]


def test_only_a_rank_with_a_single_sample_is_told_how_to_avoid_such_batches():
    assert run_ranks(_single, 2) == [[False], [True]]


# weights of all ranks


def many(dtype=torch.float64):
    return {f"p{i:02}": nn.Parameter(torch.ones((), dtype=dtype) * (i + 1)) for i in range(40)}


class Ranks:
    """Checks of some ranks; devices are of one kind if not told otherwise."""

    def __init__(self, count=2, **settings):
        controls = [SimpleNamespace(rank=rank, world_size=count) for rank in range(count)]
        self.checks = [WeightCheck(control, WeightSettings(**settings)) for control in controls]

    def look(self, *weights, times=1, kinds=None):
        for _ in range(times):
            rows = np.array([check.sample(own) for check, own in zip(self.checks, weights, strict=True)])
            if kinds is not None:
                rows.reshape(len(rows), 3, -1)[:, 2] = np.array(kinds)[:, None]
            for check in self.checks:
                check.judge(rows, (1, 7))


APART = (1.0, 2.0)


def changed(weights, name, by, place=0):
    other = {n: nn.Parameter(p.detach().clone()) for n, p in weights.items()}
    other[name].data.view(-1)[place] += by
    return other


def test_each_weight_is_compared_sooner_or_later_and_told_once_by_rank_0(caplog):
    ranks, weights = Ranks(), many()
    other = changed(weights, "p35", 0.5)
    ranks.look(weights, other, kinds=APART)
    assert not caplog.messages
    ranks.look(weights, other, times=5, kinds=APART)
    (line,) = caplog.messages
    for word in ("batch 7 of epoch 1", "p35", "36 on rank 0", "36.5 on rank 1"):
        assert word in line
    for check in ranks.checks:
        check.begin()
    ranks.look(weights, other, times=2, kinds=APART)
    assert len(caplog.messages) == 2, "another training says so again"
    whole = {"w": nn.Parameter(torch.ones(8)), "none": nn.Parameter(torch.zeros(0, 3))}
    Ranks().look(whole, changed(whole, "w", 1.0, place=5), times=100, kinds=APART)
    assert "element 5 of w" in caplog.messages[2]


@pytest.mark.parametrize(
    ("dtype", "name", "by", "told"),
    [
        (torch.float64, "p09", -0.3, True),
        (torch.bfloat16, "p09", 0.3, False),  # four roundings
        (torch.float64, "p31", 0.02, False),  # of 32, while most are near 19
    ],
    ids=str,
)
def test_as_much_as_devices_may_round_differently_is_not_told(dtype, name, by, told, caplog):
    """A difference is weighed by the weight and by the size of the others."""
    weights = many(dtype)
    Ranks().look(weights, changed(weights, name, by), times=3, kinds=APART)
    assert len(caplog.messages) == told


ODD = [
    torch.ones(()),
    torch.ones(3, 4).t(),
    torch.ones(3, 4)[:, ::2],
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    *[torch.ones(5, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)],
]


def one_bit(tensor, place=-1):
    """The same tensor with one bit of one element changed."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.clone().reshape(-1)
    flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])[place] ^= 1
    changed = flat.reshape(real.shape)
    return nn.Parameter(torch.view_as_complex(changed) if tensor.is_complex() else changed)


@pytest.mark.parametrize("like", ODD, ids=lambda one: f"{tuple(one.shape)} {one.dtype}")
def test_one_bit_of_one_weight_is_found_on_devices_of_one_kind(like, caplog):
    fine = {"a": nn.Parameter(torch.ones(2)), "p": nn.Parameter(like), "q": nn.Parameter(torch.ones(2))}
    off = {**fine, "p": one_bit(like), "q": one_bit(torch.ones(2))}
    Ranks().look(fine, {**fine, "p": nn.Parameter(like.clone())}, times=3)
    Ranks(3).look(fine, fine, off, kinds=(1.0, 1.0, 2.0), times=3)
    assert not caplog.messages
    Ranks(3).look(off, fine, off, kinds=(2.0, 1.0, 2.0), times=3)
    assert not caplog.messages
    Ranks(3).look(fine, fine, off, kinds=(2.0, 1.0, 2.0), times=3)
    (line,) = caplog.messages
    assert " p " in line
    assert "rank 2" in line


def _differ(rank, by):
    """A training in which one rank changes a weight, as seen in a sync round and at the end."""
    run, lines = Run(rank, Way()), collected()
    for step in range(3):
        run.step(step)
        if step == 1 and rank == 1:
            run.model.get_submodule("4").weight.data.add_(by)
        run.health.unpack(run.control.gather(run.health.pack()), run.control)
    run.model.get_submodule("2").bias.requires_grad_(False)
    run.model.get_submodule("2").bias.data.add_(rank)
    run.health.finish()
    run.close()
    return lines


@pytest.mark.parametrize("by", [0.05, 1e-14])
def test_ranks_with_different_weights_are_told_by_parameter_unless_it_is_frozen(by):
    first, second = run_ranks(_differ, 2, by)
    (line,) = first
    assert "4.weight" in line
    assert "rank 1" in line
    assert second == []
