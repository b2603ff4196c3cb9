"""Parameter groups of FSDP2: what lies between the marks, and the names of torch's that the marks rest on."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.sharded_groups import ShardedGroups, groups_of
from tests.ranks import run_ranks

COLLECTIVES = {  # names of functions, since torch 2.13 and before
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all-reduce": ("all_reduce",),
}
USED = "lightning_hetero/comm/gradients/sharded_groups.py uses this {} of torch's FSDP2"


class Timer:
    """Knows whether the worker waits, and how many backward passes have reduced gradients."""

    def __init__(self):
        self.depth, self.passes, self.spans = 0, 0, 0

    @contextmanager
    def waiting(self):
        self.depth, self.spans = self.depth + 1, self.spans + 1
        try:
            yield
        finally:
            self.depth -= 1

    excluded = staticmethod(nullcontext)

    def reduced(self):
        self.passes += 1


class Branches(nn.Module):
    """A layer of which a rank may leave out one or both of two branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2, bias=False)
        self.left, self.right = (nn.Parameter(torch.ones(6)) for _ in range(2))

    def forward(self, x, branches=("left", "right")):
        x = self.first(x).tanh()
        for name in branches:
            x = x * getattr(self, name)
        return self.last(x).sum()


class Sharded:
    """The model under FSDP, and what we watch of it."""

    def __init__(self, shape, weighted=True):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.net, self.timer = Branches(), Timer()
        for part in (self.net.first, self.net.last, self.net):
            fully_shard(part, mesh=mesh)
        self.hook = HookState(self.timer, dist.get_world_size(), weighted=weighted)
        self.watch()

    def watch(self):
        self.groups = ShardedGroups(self.net, self.hook, self.maximum)

    def maximum(self, tensor):
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)

    def step(self, branches=("left", "right"), *, sync=True):
        self.net.set_requires_gradient_sync(sync)
        self.groups.accumulate(False)
        with self.hook.backward():
            self.net(torch.ones(3, 4), branches).backward()
        self.groups.after_backward()
        return self.timer.passes


def _between(rank, shape):
    """Collectives of a step, and whether each is between marks; again without ours, and with those of a later run."""
    one, calls = Sharded(shape), []
    with pytest.MonkeyPatch.context() as patch:
        for kind, names in COLLECTIVES.items():
            name = next(name for name in names if hasattr(dist, name))
            plain = getattr(dist, name)

            def call(*args, plain=plain, kind=kind, **kwargs):
                calls.append((kind, one.timer.depth))
                return plain(*args, **kwargs)

            patch.setattr(dist, name, call)
        with one.hook.backward():
            one.net(torch.ones(3, 4)).backward()
    one.groups.after_backward()
    found = calls, one.timer.passes, one.hook.num_bytes, len(groups_of(one.net))
    spans = [one.timer.spans]
    for again in (one.watch, one.groups.release):
        again()
        one.step()
        spans.append(one.timer.spans)
    return *found, spans, one.hook.averager.shards


@pytest.mark.parametrize(("ranks", "shape"), [(2, (2,)), (4, (2, 2))], ids=["shards", "replicas of shards"])
def test_every_collective_of_a_step_is_between_marks(ranks, shape):
    for calls, passes, num_bytes, groups, (first, second, third), shards in run_ranks(_between, ranks, shape):
        names = [name for name, _ in calls]
        assert names.count("all-gather") >= 3, USED.format("collective")
        assert names.count("reduce-scatter") == 3
        assert names.count("all-reduce") == (3 if len(shape) > 1 else 0)
        assert [name for name, depth in calls if depth == 0] == [], USED.format("seam, and waits elsewhere")
        assert (passes, groups, shards) == (1, 3, True)
        assert num_bytes == sum(p.nbytes for p in Branches().parameters())
        assert second == 2 * first > 0, "marks of a later run replace those of an earlier one"
        assert third == second, "the model may be trained in another way from now on"


def _unused(rank, cases):
    """Gradients of both branches, where ranks use different ones, in one pass or in two."""
    found = []
    for passes in cases:
        one = Sharded((2,))
        for number, branches in enumerate(passes):
            one.step(branches[rank], sync=number == len(passes) - 1)
        both = one.net.left.grad, one.net.right.grad
        found.append([None if grad is None else grad.full_tensor().tolist() for grad in both])
    return found


def _expected(passes):
    """The same in one process: means over ranks, sums over passes."""
    net = Branches()
    for branches in passes:
        for own in branches:
            (net(torch.ones(3, 4), own) / 2).backward()
    return [p.grad if p.grad is None else p.grad.tolist() for p in (net.left, net.right)]


def test_a_parameter_that_some_rank_has_used_gets_its_own_gradient_and_no_other_gets_one():
    """A group sends the gradients that a rank has without names; zeros that decay alone would move weights."""
    both, left, right, none = ("left", "right"), ("left",), ("right",), ()
    cases = [[(both, both)], [(left, right)], [(left, left)], [(left, both)]]
    cases += [[(left, both), (none, left)], [(left, left), (right, right)]]
    for found in run_ranks(_unused, 2, cases):
        for passes, grads in zip(cases, found, strict=True):
            for one, expected in zip(grads, _expected(passes), strict=True):
                assert one == (expected if expected is None else pytest.approx(expected, rel=1e-5)), passes


def _direct(rank, weighted):
    one = Sharded((2,), weighted)
    one.net(torch.ones(3, 4)).backward()
    return one.hook.num_bytes > 0


def test_an_unweighted_backward_pass_is_an_error_on_every_rank():
    errors = run_ranks(_direct, 2, True, expect_errors=True)
    assert [(kind, "manual_backward" in text) for _, kind, text in errors] == [("RuntimeError", True)] * 2
    assert run_ranks(_direct, 2, False) == [True] * 2
