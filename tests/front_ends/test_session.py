"""``HeteroSession``: a loop of one's own under the engine; passes that end, are left early, skipped and resumed."""

import pytest
import torch
from torch import nn

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import NAMED, POLICIES
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.session import HeteroSession, planner_of

CPU = torch.device("cpu")


def engine_of(rank=0, world_size=1, **config):
    if world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return HeteroEngine(HeteroConfig(**config), rank=rank, world_size=world_size, device=CPU, local_rank=rank)


def session_of(samples=10, batch_size=4, planner=None, **config):
    session = HeteroSession(engine_of(**config), planner)
    return session, session.shard(PermutationStream(samples, shuffle=True, seed=0), batch_size)


def one_pass(session, batches):
    return list(session.steps(lambda: iter(batches)))


def test_passes_are_permutations_of_their_own_also_after_one_that_was_left_or_skipped():
    session, batches = session_of()
    passes = [one_pass(session, batches) for _ in range(2)]
    assert passes[0] != passes[1]
    assert [[len(batch) for batch in p] for p in passes] == [[4, 4, 2]] * 2
    assert all(sorted(sum(p, [])) == list(range(10)) for p in passes)
    left = session.steps(lambda: iter(batches))
    next(left)
    assert session.position == (2, 1)
    assert sorted(sum(one_pass(session, batches), [])) == list(range(10))
    assert list(left) == [], "a second iterator ends the first"
    assert session.position == (4, 0)
    session.skip(2)
    assert len(one_pass(session, batches)) == 1
    assert len(one_pass(session, batches)) == 3


@pytest.mark.parametrize("early", [False, True], ids=["data first", "state first"])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_state_goes_on_where_it_was(taken, early):
    session, batches = session_of()
    iterator = session.steps(lambda: iter(batches))
    for _ in range(taken):
        next(iterator)
    state = session.state_dict()
    rest = [list(iterator), one_pass(session, batches)]
    again = HeteroSession(engine_of())
    if early:
        again.load_state_dict(state)
    batches = again.shard(PermutationStream(10, shuffle=True, seed=0), 4)
    if not early:
        again.load_state_dict(state)
    assert again.restored_step == taken
    assert again.state_dict() == state
    again.skip()
    assert [one_pass(again, batches), one_pass(again, batches)] == rest


def test_planners_are_those_of_the_settings_and_two_that_decide_are_refused():
    for name in NAMED:
        assert type(planner_of(HeteroConfig(policy=name))) is type(POLICIES[name].factory())
    assert planner_of(HeteroConfig(local_batch_sizes=(3, 1))) is None
    moves = planner_of(HeteroConfig(max_total_batch_size=64, min_total_batch_size=8))
    assert (moves.max_total_batch_size, moves.min_total_batch_size) == (64, 8)
    for name, value in (("max_total_batch_size", 64), ("policy", "pid"), ("local_batch_sizes", (4,))):
        with pytest.raises(ValueError, match=f"StaticPlanner and {name}="):
            HeteroSession(engine_of(**{name: value}), planner=StaticPlanner())


def test_one_worker_trains_at_its_total_and_leads_optimizers_alone():
    session, batches = session_of(max_total_batch_size=64, noise_scale=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for wrong in (optimizer, [optimizer, 3]):
        with pytest.raises(TypeError, match="list of optimizers"):
            session.lead(wrong)
    session.lead([optimizer])
    assert [len(batch) for batch in one_pass(session, batches)] == [4, 4, 2]
    assert (session.noise_scale, session.lr_gain, session.candidates) == (None, 1.0, ())
