"""Data is split within what each rank can hold, which all ranks know of each other."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.config import HeteroConfig
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine.training_data import TrainingData
from tests.helpers import run_ranks


def _sharded(rank, config, needs, memory, seeds=(0, 0)):
    """Bounds of both ranks as each of them knows them, the sizes of the first step, and what is left without data."""
    dist.init_process_group("gloo")
    data = TrainingData(HeteroConfig(**config), ControlPlane(rank, 2), torch.device("cpu"), rank)
    for number in needs[rank]:
        data.require_samples(number)
    data.bound_by_memory(memory[rank])
    stream = PermutationStream(40, shuffle=True, seed=seeds[rank])
    sampler = data.shard(stream, 5, drop_last=False, planner=None, epoch=0)
    found = data.workers.min_local, data.workers.max_local, sampler.min_local, sampler.sizes_at(0, 0)
    data.leave_whole()
    return *found, data.sampler


NOTHING = ((), ())


@pytest.mark.parametrize(
    ("config", "memory", "bounds", "sizes"),
    [
        ({"max_local_batch_sizes": (4, 7)}, (None, None), (4, 7), (4, 6)),
        ({"max_local_batch_sizes": (7, 4)}, (None, None), (7, 4), (6, 4)),
        ({"max_local_batch_sizes": 8}, (3, None), (3, 8), (3, 7)),
        ({"max_local_batch_sizes": (4, 7)}, (6, 9), (4, 7), (4, 6)),
        ({"local_batch_sizes": (9, 3)}, (None, None), None, (9, 3)),
    ],
)
def test_each_rank_gets_as_much_as_it_can_hold(config, memory, bounds, sizes):
    """The tighter one of its own bound and of its memory; a split of the user's says the total itself."""
    assert run_ranks(_sharded, 2, config, NOTHING, memory) == [(1, bounds, 1, sizes, None)] * 2


def test_what_one_rank_needs_all_of_them_get():
    """Batch normalisation needs two samples; it does not matter who has it, nor what another part needs."""
    for needs in (((3, 2), ()), ((), (2, 3))):
        assert run_ranks(_sharded, 2, {}, needs, (None, None)) == [(3, None, 3, (5, 5), None)] * 2


def test_ranks_that_draw_another_order_are_told():
    errors = run_ranks(_sharded, 2, {}, NOTHING, (None, None), (0, 1), expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]
    assert all("the training data must be equal on all ranks" in message for *_, message in errors)
