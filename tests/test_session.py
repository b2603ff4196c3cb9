"""``HeteroSession``: a plain loop of torch's under the engine; passes that end, are left early, skipped and resumed."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero.comm import gradient_hook
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies import NAMED, POLICIES
from lightning_hetero.core.policies.base import Decision
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.session import HeteroSession, planner_of
from tests.helpers import Points, run_ranks
from tests.loops import SAMPLES, every_sample_once, flat, network, replay


def session_of(samples=10, batch_size=4, **config):
    engine = HeteroEngine(HeteroConfig(**config), rank=0, world_size=1, device=torch.device("cpu"))
    session = HeteroSession(engine)
    return session, session.shard(PermutationStream(samples, shuffle=True, seed=0), batch_size)


def one_pass(session, batches):
    return list(session.steps(lambda: iter(batches)))


def test_passes_are_permutations_of_their_own():
    session, batches = session_of()
    passes = [one_pass(session, batches) for _ in range(2)]
    assert [len(p) for p in passes] == [3, 3]
    assert passes[0] != passes[1]
    assert all(sorted(sum(p, [])) == list(range(10)) for p in passes)
    assert session.position == (2, 0)


def test_a_pass_left_early_is_over():
    session, batches = session_of()
    whole = [one_pass(session_of()[0], batches)]
    for _ in session.steps(lambda: iter(batches)):
        break
    assert session.position == (0, 1)
    assert sorted(sum(one_pass(session, batches), [])) == list(range(10))
    assert session.position == (2, 0)
    assert whole


def test_two_iterators_at_once_end_the_first():
    session, batches = session_of()
    first = session.steps(lambda: iter(batches))
    next(first)
    second = session.steps(lambda: iter(batches))
    next(second)
    assert list(first) == []
    assert sum(map(len, second)) == 6


def test_skip_leaves_out_the_first_steps_of_one_pass():
    session, batches = session_of()
    whole = one_pass(*session_of())
    session.skip(2)
    assert one_pass(session, batches) == whole[2:]
    assert len(one_pass(session, batches)) == 3


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_state_goes_on_where_it_was(taken):
    session, batches = session_of()
    iterator = session.steps(lambda: iter(batches))
    for _ in range(taken):
        next(iterator)
    state = session.state_dict()
    rest = [list(iterator), one_pass(session, batches)]
    again, batches = session_of()
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.skip()
    assert [one_pass(again, batches), one_pass(again, batches)] == rest


def test_state_may_be_loaded_before_the_data_is_there():
    session, batches = session_of()
    next(session.steps(lambda: iter(batches)))
    engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
    early = HeteroSession(engine)
    early.load_state_dict(session.state_dict())
    assert early.restored_step == 1
    batches = early.shard(PermutationStream(10, shuffle=True, seed=0), 4)
    early.skip()
    assert one_pass(early, batches) == one_pass(*session_of())[1:]


def test_planners_of_settings():
    for name in NAMED:
        assert type(planner_of(HeteroConfig(policy=name))) is type(POLICIES[name].factory())
    assert planner_of(HeteroConfig(local_batch_sizes=(3, 1))) is None
    moves = planner_of(HeteroConfig(max_total_batch_size=64, min_total_batch_size=8))
    assert (moves.max_total_batch_size, moves.min_total_batch_size) == (64, 8)


def test_a_planner_beside_a_moving_total_is_refused():
    engine = HeteroEngine(HeteroConfig(max_total_batch_size=64), rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="planner=StaticPlanner and max_total_batch_size=64 both"):
        HeteroSession(engine, planner=StaticPlanner())


@pytest.mark.parametrize(("name", "value"), [("policy", "pid"), ("local_batch_sizes", (4,))])
def test_a_planner_beside_another_decider_is_refused(name, value):
    engine = HeteroEngine(HeteroConfig(**{name: value}), rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=f"planner=StaticPlanner and {name}="):
        HeteroSession(engine, planner=StaticPlanner())


def test_one_worker_trains_at_its_total():
    session, batches = session_of(max_total_batch_size=64, noise_scale=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    session.lead([optimizer])
    assert [len(batch) for batch in one_pass(session, batches)] == [4, 4, 2]
    assert (session.noise_scale, session.lr_gain, session.candidates) == (None, 1.0, ())


def counted(session, batches, closes):
    """Micro-batches of a window, as the session counts them behind each batch of a pass."""
    counts = []
    for number, _ in enumerate(session.steps(lambda: iter(batches))):
        counts.append(session.engine.accumulation)
        if closes(number):
            with session.engine.backward():
                session.engine.observer.bucket_ready()
    return [*counts, session.engine.accumulation]


def test_a_window_that_the_end_of_the_data_cuts_does_not_count():
    session, batches = session_of(samples=10, batch_size=2)
    assert counted(session, batches, lambda number: number % 3 == 2 or number == 4) == [1, 1, 1, 3, 3, 3]
    assert counted(session, batches, lambda number: number % 3 == 2 or number == 4) == [3] * 6
    assert counted(session, batches, lambda number: True) == [3, 1, 1, 1, 1, 1]


def test_a_window_may_go_over_the_end_of_a_pass():
    session, batches = session_of(samples=10, batch_size=2)
    assert counted(session, batches, lambda number: number % 2 == 1) == [1, 1, 2, 2, 2, 2]
    assert counted(session, batches, lambda number: number % 2 == 0) == [2] * 6


def test_a_planner_is_told_that_the_number_of_micro_batches_is_the_loops_own():
    """Under a trainer it may change where an epoch begins."""
    seen = []

    class Notes(StaticPlanner):
        def decide(self, observations, current, context):
            seen.append(context.epoch_begins)
            return Decision(self)

    for own in (True, False):
        engine = HeteroEngine(HeteroConfig(replan="epoch"), rank=0, world_size=1, device=torch.device("cpu"))
        session = HeteroSession(engine, Notes())
        engine.rounds.keep_window(own)
        batches = session.shard(PermutationStream(40, shuffle=True, seed=0), 2)
        for _ in range(2):
            counted(session, batches, lambda number: True)
    assert seen == [False, True]


def test_a_loop_with_windows_of_its_own_gains_nothing_by_a_look_at_the_start_of_a_pass():
    """Looks every eight of 40 steps; where the number of micro-batches may move between passes, also after 20."""
    looks = []

    class Moves(StaticPlanner):
        moves_total = True

        def decide(self, observations, current, context):
            looks.append(context.epoch_begins)
            return Decision(self)

    for own in (True, False):
        engine = HeteroEngine(HeteroConfig(replan=8), rank=0, world_size=1, device=torch.device("cpu"))
        session = HeteroSession(engine, Moves())
        engine.rounds.keep_window(own)
        batches = session.shard(PermutationStream(40, shuffle=True, seed=0), 2)
        for _ in range(2):
            counted(session, batches, lambda number: True)
    assert looks == [False] * 5 + [False, False, True, False, False]


def _plain_torch(rank):
    """The loop of somebody who uses no trainer at all."""
    torch.distributed.init_process_group("gloo")
    engine = HeteroEngine(
        HeteroConfig(local_batch_sizes=(7, 3)), rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank
    )
    session = HeteroSession(engine)
    sums = HeteroConfig(loss_reduction="sum", noise_scale=True)
    summed = HeteroEngine(sums, rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
    assert HeteroSession(summed).engine.noise.summed
    batches = session.shard(PermutationStream(SAMPLES, shuffle=True, seed=0), batch_size=5)
    loader = DataLoader(Points(SAMPLES), batch_sampler=batches)
    model = DistributedDataParallel(network())
    model.register_comm_hook(engine.hook_state, gradient_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for epoch in range(2):
        for step, (x, y, index) in enumerate(session.steps(lambda: iter(loader))):
            seen.append((epoch, step, index.tolist()))
            with engine.backward():
                engine.scale_loss(nn.functional.mse_loss(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    result = {"seen": seen, "weights": flat(model)}
    session.close()
    del model  # or it would free the default group, by its reducer
    torch.distributed.destroy_process_group()
    return result


def test_a_loop_of_plain_torch_equals_one_process():
    results = run_ranks(_plain_torch, 2)
    every_sample_once(results)
    for result in results:
        np.testing.assert_allclose(result["weights"], replay(results, schedule=0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda optimizer: optimizer, "takes a list of optimizers; got SGD"),
        (lambda optimizer: [optimizer, 3], "takes a list of optimizers; got a list with int"),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(given, says):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=re.escape(says)):
        session_of()[0].lead(given(optimizer))


def _resumed_plan(rank, later):
    """Adopts a plan, saves in the middle of a pass, and goes on in another session, loaded before or after its data."""
    torch.distributed.init_process_group("gloo")

    def begun():
        engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
        return HeteroSession(engine)

    def sharded(session):
        return session.shard(PermutationStream(40, shuffle=True, seed=0), batch_size=5)

    first = begun()
    batches = sharded(first)
    first.engine.adopt(BatchPlan(10, (7, 3)), "by hand")
    for number, _ in enumerate(first.steps(lambda: iter(batches))):
        if number == 1:
            state = first.state_dict()
            break
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning_hetero").addHandler(handler)
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    again = begun()
    batches = sharded(again) if later else None
    again.load_state_dict(state)
    batches = batches or sharded(again)
    again.skip()
    sizes = [len(batch) for batch in again.steps(lambda: iter(batches))]
    found = lines, [entry.plan.local_batch_sizes for entry in again.engine.plan_history], sizes
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("later", [False, True])
def test_a_resumed_run_says_which_plan_it_goes_on_with(later):
    (lines, history, sizes), (silent, _, _) = run_ranks(_resumed_plan, 2, later)
    assert sizes == [7, 7]
    assert history == [(7, 3)]
    assert [line for line in lines if "of the checkpoint" in line] == [
        "plan of the checkpoint from epoch 0 step 0: 7/3 of 10 samples (by hand)"
    ]
    assert not any("7/3" in line for line in silent)
