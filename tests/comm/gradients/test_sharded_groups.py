"""Parameter groups of FSDP2: the names of torch that the marks rest on, and what lies between the marks."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_hetero.comm.gradients.ddp_hook import DIRECT_BACKWARD, HookState
from lightning_hetero.comm.gradients.sharded_groups import REDUCES, WAITS, ReduceScatterMean, ShardedGroups, groups_of
from tests.helpers import run_ranks

COLLECTIVES = {  # names of functions, since torch 2.13 and before
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all-reduce": ("all_reduce",),
}
USED = "lightning_hetero/comm/gradients/sharded_groups.py uses this {} of torch's FSDP2"
MAXIMUM = partial(dist.all_reduce, op=dist.ReduceOp.MAX, async_op=True)


class Timer:
    """Knows whether the worker waits, and how many backward passes have reduced gradients."""

    def __init__(self):
        self.depth, self.passes, self.spans = 0, 0, 0

    @contextmanager
    def waiting(self):
        self.depth += 1
        self.spans += 1
        try:
            yield
        finally:
            self.depth -= 1

    def excluded(self):
        return nullcontext()

    def reduced(self):
        self.passes += 1


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))


def _sharded(mesh):
    net = network()
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    return net


@contextmanager
def one_group(world_size, shape=None):
    dist.init_process_group("gloo")
    names = ("replicate", "shard")[-len(shape or (world_size,)) :]
    try:
        yield init_device_mesh("cpu", shape or (world_size,), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _listening(timer):
    """Calls of collectives by FSDP from here on: the name of each, and whether it is between marks."""
    calls = []
    for kind, names in COLLECTIVES.items():
        name = next(name for name in names if hasattr(dist, name))
        plain = getattr(dist, name)

        def call(*args, plain=plain, kind=kind, **kwargs):
            calls.append((kind, timer.depth))
            return plain(*args, **kwargs)

        setattr(dist, name, call)
    return calls


def _collectives(rank, shape):
    with one_group(2, shape) as mesh:
        timer = Timer()
        hook, net = HookState(timer, 2), _sharded(mesh)
        groups = ShardedGroups(net, hook, MAXIMUM)
        calls = _listening(timer)
        with hook.backward():
            net(torch.ones(3, 4)).sum().backward()
        groups.after_backward()
        return calls, timer.passes, hook.num_bytes, len(groups_of(net)), net[0].weight.grad is not None


@pytest.mark.parametrize(("world_size", "shape"), [(2, (2,)), (4, (2, 2))], ids=["shards", "replicas of shards"])
def test_every_collective_of_a_step_is_between_marks(world_size, shape):
    for calls, passes, num_bytes, num_groups, has_gradient in run_ranks(_collectives, world_size, shape):
        names = [name for name, _ in calls]
        assert names.count("all-gather") >= 2, USED.format("collective")
        assert names.count("reduce-scatter") == 2
        assert names.count("all-reduce") == (2 if len(shape) > 1 else 0)
        assert [name for name, depth in calls if depth == 0] == [], USED.format("seam, and waits elsewhere")
        assert (passes, num_groups, has_gradient) == (1, 2, True)
        assert num_bytes == sum(p.nbytes for p in network().parameters())


def _passes(rank):
    with one_group(2) as mesh:
        timer = Timer()
        hook, net = HookState(timer, 2), _sharded(mesh)
        groups = ShardedGroups(net, hook, MAXIMUM)

        def step(sync=True, holds=False):
            net.set_requires_gradient_sync(sync)
            groups.accumulate(holds)
            with hook.backward():
                net(torch.ones(3, 4)).sum().backward()
            groups.after_backward()
            return timer.passes

        counted = [step(), step(sync=False), step(holds=True), step()]
        groups.after_backward()
        return [*counted, timer.passes]


def test_the_last_backward_pass_of_a_step_counts():
    """Neither one without a reduction nor one whose gradients the optimizer does not take yet."""
    assert run_ranks(_passes, 2) == [[1, 1, 1, 2, 2]] * 2


def _direct(rank, weighted, released):
    with one_group(2) as mesh:
        hook, net = HookState(Timer(), 2, weighted=weighted), _sharded(mesh)
        groups = ShardedGroups(net, hook, MAXIMUM)
        if released:
            groups.release()
        net(torch.ones(3, 4)).sum().backward()
        return hook.num_bytes > 0, any(name in vars(g) for g in groups_of(net) for name in (*WAITS, REDUCES))


def test_an_unweighted_backward_pass_is_an_error_on_every_rank():
    errors = run_ranks(_direct, 2, True, False, expect_errors=True)
    assert [(kind, text) for _, kind, text in errors] == [("RuntimeError", DIRECT_BACKWARD)] * 2
    assert run_ranks(_direct, 2, False, False) == [(True, True)] * 2


def test_released_groups_train_as_torch_has_them():
    assert run_ranks(_direct, 2, True, True) == [(False, False)] * 2


def _again(rank):
    with one_group(2) as mesh:
        net, spans = _sharded(mesh), []
        for _ in range(3):
            timer = Timer()
            ShardedGroups(net, HookState(timer, 2), MAXIMUM)
            net(torch.ones(3, 4)).sum().backward()
            spans.append(timer.spans)
        return spans


def test_marks_of_a_later_run_replace_those_of_an_earlier_one():
    for first, second, third in run_ranks(_again, 2):
        assert first == second == third > 0


def test_a_model_that_is_not_sharded_has_no_groups():
    assert groups_of(network()) == []
    hook = HookState(Timer(), 1)
    ShardedGroups(network(), hook, MAXIMUM)
    assert isinstance(hook.averager, ReduceScatterMean)
    assert hook.averager.shards


# canaries


@pytest.mark.parametrize("name", [*WAITS, REDUCES, "pre_forward", "pre_backward"])
def test_groups_have_the_methods_that_are_marked(name):
    assert callable(getattr(FSDPParamGroup, name, None)), USED.format(f"method of a group, {name}")


def _attributes(rank):
    with one_group(1) as mesh:
        (group,) = groups_of(fully_shard(nn.Linear(4, 2), mesh=mesh))
        sizes = group.mesh_info.mesh.size(), sum(p.sharded_param.numel() for p in group.fsdp_params)
        return group.reduce_grads, group.gradient_divide_factor, sizes


def test_groups_have_the_attributes_that_are_read():
    assert run_ranks(_attributes, 1) == [(True, None, (1, 10))], USED.format("attributes of a group")


def test_collectives_are_called_by_their_module():
    """The test above listens there."""
    assert _fsdp_collectives.dist is dist
