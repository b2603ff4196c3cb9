"""Every setting of block top-k changes what the optimizer gets."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.optim import SparseAdamW, SparseSGD
from tests.comm.compressors.block_steps import Bucket
from tests.comm.compressors.block_topk.paths import place
from tests.comm.contexts import context_of
from tests.helpers import run_ranks

HALF, STEPS = 64, 9
BASE = BlockTopK(density=0.125, block=8, value_dtype="float32", selector="exact", warmup_steps=1)
"""Two of sixteen blocks a step, after one dense step."""


def test_many_ranks_time_fewer_messages_of_each():
    averager = BlockTopKAverager(BASE, context_of({"p": torch.zeros(64)}, world_size=4000))
    assert averager.messages.take().shape == (16, 4002)


def gradient(step):
    """Of two parameters, the second a thousandth as large: equal blocks at first, so that selectors have to choose."""
    generator = torch.Generator().manual_seed(step)
    large = torch.full((HALF,), (1.1, 1.1, -0.5)[step]) if step < 3 else torch.randn(HALF, generator=generator)
    return large, 1e-3 * torch.randn(HALF, generator=generator)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(HALF)), nn.Parameter(torch.zeros(HALF))

    def forward(self, step):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradient(step), strict=True))


def _given(rank, cases):
    dist.init_process_group("gloo")
    found = []
    for settings in cases:
        model = Pair()
        state = HookState(StepTimer(HostClock()), 1)
        exchange = BlockTopKAverager(settings, context_of(dict(model.named_parameters()), rank=rank))
        state.use(exchange)
        ddp, given = DistributedDataParallel(model), []
        ddp.register_comm_hook(state, gradient_hook)
        for step in range(STEPS):
            model.zero_grad()
            ddp(step).backward()
            exchange.after_backward()
            given.append(torch.cat([p.grad for p in model.parameters()]).numpy().copy())
        found.append(np.stack(given))
    return found


def sent(given):
    """Elements that each step has sent."""
    return [np.flatnonzero(step).tolist() for step in given]


def blocks(given, step):
    return sorted({i // 8 for i in sent(given)[step]})


def dense_steps(given):
    return [step for step, elements in enumerate(sent(given)) if len(elements) == 2 * HALF]


def rounded(given, base):
    return sent(given)[1] == sent(base)[1] and 0 < np.abs(given[1] - base[1]).max() < 0.01


CASES = {
    "density": {0.25: lambda given, base: len(blocks(given, 1)) == 4},
    "block": {4: lambda given, base: max(len(blocks(given, step)) for step in range(3, STEPS)) > 2},
    "value_dtype": {"bfloat16": rounded, "int8": rounded},
    "selector": {
        "histogram": lambda given, base: blocks(given, 1) == [3, 7],  # an even share of those that are equal
        "sample": lambda given, base: blocks(given, 1) not in ([0, 1], [3, 7]) and len(blocks(given, 2)) == 2,
        "aimd": lambda given, base: len(blocks(given, 1)) == 2 and not sent(given)[2],  # its threshold has gone up
    },
    "warmup_steps": {0: lambda given, base: not dense_steps(given), 3: lambda g, base: dense_steps(g) == [0, 1, 2]},
    "dense_every": {4: lambda given, base: dense_steps(given) == [0, 4, 8]},
    "scores": {"balanced": lambda given, base: given[2:, HALF:].any()},
}


@pytest.fixture(scope="module")
def given():
    cases = {(name, value): replace(BASE, **{name: value}) for name, values in CASES.items() for value in values}
    (found,) = run_ranks(_given, 1, [BASE, *cases.values()])
    return dict(zip([None, *cases], found, strict=True))


def test_the_settings_to_compare_with(given):
    base = given[None]
    assert dense_steps(base) == [0]
    assert blocks(base, 1) == [0, 1]
    assert {len(elements) for elements in sent(base)[1:]} == {2 * 8}
    assert not base[1:, HALF:].any(), "the small gradients are never the largest"


def test_every_setting_is_looked_at():
    assert set(CASES) == {field.name for field in fields(BlockTopK)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CASES.items() for value in values])
def test_a_setting_changes_what_is_applied(name, value, given):
    assert CASES[name][value](given[name, value], given[None])


@pytest.mark.parametrize(
    ("density", "sizes", "blocks"),
    [(0.3, (16 * 40, 16 * 13), True), (0.31, (16 * 40, 16 * 13), False), (0.01, (8, 3), False), (0.01, (0,), True)],
)
@pytest.mark.parametrize("kind", [SparseSGD, SparseAdamW])
def test_the_optimizer_gets_blocks_up_to_a_density_however_the_rank_reads_them(kind, density, sizes, blocks):
    """Of a tiny model one block of each rank is most of it, and momentum that is paid ahead would be too much."""
    parameters = {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(sizes)}
    exchange = BlockTopKAverager(BlockTopK(density=density), context_of(parameters, 2))
    exchange.sparse_steps = kind(list(parameters.values()), lr=0.1).sparse.max_sparse_density
    assert exchange.takes_blocks == blocks


def test_only_what_crosses_the_link_counts_as_sent():
    found = []
    for rank in range(3):
        where = place(rank, ((0, 1), (2,)))
        context = context_of({"w": nn.Parameter(torch.zeros(64))}, 3, rank, topology=where)
        exchange = BlockTopKAverager(BASE, context)
        exchange.count(2, 0.5)
        report = exchange.take_report()
        found.append((report.sent, report.received, report.encode))
    size = exchange.message_size.bytes(BASE.density)
    assert found == [(size, size, 0.5), (0.0, 0.0, 0.5), (size, size, 0.5)]


def test_blocks_are_taken_up_to_the_density_of_the_optimizer_that_takes_fewest():
    exchange = BlockTopKAverager(BASE, context_of({"w": nn.Parameter(torch.zeros(64))}))
    exchange.bind([SimpleNamespace(max_sparse_density=share) for share in (0.3, 0.1, 0.2)])
    assert exchange.sparse_steps == 0.1
    exchange.bind([])
    assert exchange.sparse_steps == 0.0


def _dense_not_finite(rank, grad_scale):
    dist.init_process_group("gloo")
    parameter = nn.Parameter(torch.zeros(64))
    exchange = BlockTopKAverager(BASE, context_of({"w": parameter}, rank=rank, grad_scale=grad_scale))
    bucket = Bucket([parameter])
    bucket.flat[5] = float("inf")
    exchange.average(bucket).wait()
    parameter.grad = bucket.flat
    exchange.after_backward()
    return parameter.grad.isinf().sum().item(), bool(exchange.flags.skipped)


def test_a_loss_scaler_sees_a_dense_sum_that_is_not_finite():
    assert run_ranks(_dense_not_finite, 1, lambda: 4.0) == [(1, False)]
    assert run_ranks(_dense_not_finite, 1, None) == [(0, True)]


def _not_finite(rank, sizes):
    dist.init_process_group("gloo")
    parameters = {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(sizes)}
    settings = BlockTopK(density=0.25, warmup_steps=0)
    exchange = BlockTopKAverager(settings, context_of(parameters, rank=rank, grad_scale=lambda: 4.0))
    exchange.sparse_steps = 1.0
    bucket = Bucket(list(parameters.values()))
    bucket.flat[5] = float("inf")
    exchange.average(bucket)
    exchange.after_backward()
    return [p.grad.to_dense().isinf().sum().item() for p in parameters.values()], exchange.flags.skipped


def test_a_loss_scaler_sees_an_infinite_gradient_beside_parameters_without_elements():
    assert run_ranks(_not_finite, 1, (64, 0, 160, 0)) == [([1, 0, 1, 0], True)]


def _left_out_second(rank):
    dist.init_process_group("gloo")
    parameter, said = nn.Parameter(torch.zeros(64)), []
    exchange = BlockTopKAverager(replace(BASE, warmup_steps=2), context_of({"w": parameter}, rank=rank))
    exchange.dropped.add = lambda step, where: said.append(step)
    for value in (1.0, float("inf")):
        bucket = Bucket([parameter])
        bucket.flat.fill_(value)
        exchange.average(bucket).wait()
        exchange.after_backward()
    return said


def test_a_dense_step_that_is_left_out_is_named_by_its_own_number():
    assert run_ranks(_left_out_second, 1) == [[1]]
