"""Optimizers and the blocks that they may take: all of them or none, and what a checkpoint has of them."""

import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.optimizer_link import OptimizerLink, clip_targets
from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD
from tests.comm.contexts import context_of


def weights(number=1):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(64)) for _ in range(number)]


class Blocks(BlockTopKAverager):
    """The averager, which also tells what it was bound to, and gives the second block of each parameter."""

    def __init__(self, parameters, block=16):
        super().__init__(BlockTopK(block=block), context_of({str(i): p for i, p in enumerate(parameters)}))
        values = torch.ones(1, block)
        self.given, self.bound = {p: BlockGradient.of(p, torch.tensor([1]), values) for p in parameters}, None

    def bind(self, steps):
        self.bound = list(steps)
        super().bind(steps)

    @property
    def gradients(self):
        return self.given


def moved(p, action):
    """Elements of a parameter that something moves."""
    before = p.detach().clone()
    action()
    return (p.detach() != before).nonzero().view(-1).tolist()


def test_dense_optimizers_are_left_alone():
    (p,) = weights()
    link, optimizer, blocks = OptimizerLink(False), torch.optim.SGD([p], lr=0.1), Blocks([p])
    link.bind([optimizer], more=False)
    link.connect(blocks)
    assert link.steps_of(optimizer) is None
    assert blocks.bound == []
    assert link.state() == []


def mixed(p, q):
    """One optimizer with sparse steps, and a dense one."""
    return SparseSGD([p], lr=0.1), torch.optim.Adam([q])


def test_no_optimizer_takes_blocks_where_one_cannot(monkeypatch):
    """The one that could would step without the gradient that the other one needs densely."""
    p, q = weights(2)
    (sparse, dense), sources = mixed(p, q), []
    monkeypatch.setattr(sparse.sparse, "follow", lambda source, block: sources.append(source))
    link, blocks = OptimizerLink(False), Blocks([p, q])
    link.bind([sparse, dense], more=False)
    link.connect(blocks)
    assert sources == [None]
    assert blocks.bound == []
    assert blocks.sparse_steps == 0.0


def test_all_take_blocks_where_all_can():
    p, q = weights(2)
    optimizers = SparseSGD([p], lr=0.1), SparseAdamW([q], lr=0.1)
    link, blocks = OptimizerLink(False), Blocks([p, q], block=8)
    link.bind(optimizers, more=False)
    link.connect(blocks)
    assert blocks.bound == [optimizer.sparse for optimizer in optimizers]
    assert [steps.block for steps in blocks.bound] == [8, 8]


def test_steps_are_sparse_while_there_are_blocks():
    """A sparse step defers the decay of the blocks that it does not touch; without blocks a step is torch's own."""
    (p,) = weights()
    link, optimizer, blocks = OptimizerLink(False), SparseSGD([p], lr=0.1, weight_decay=0.5), Blocks([p])
    link.bind([optimizer], more=False)
    link.connect(blocks)
    p.grad = blocks.given[p].grad
    assert moved(p, optimizer.step) == list(range(16, 32))
    assert moved(p, link.flush) == [*range(16), *range(32, 64)]
    link.connect(None)
    p.grad = p.grad.to_dense()
    assert moved(p, optimizer.step) == list(range(64))


def test_deferred_updates_are_applied_before_blocks_are_taken_away():
    (p,) = weights()
    link, optimizer, blocks = OptimizerLink(False), SparseSGD([p], lr=0.1, weight_decay=0.5), Blocks([p])
    link.bind([optimizer], more=False)
    link.connect(blocks)
    p.grad = blocks.given[p].grad
    optimizer.step()
    assert moved(p, lambda: link.connect(None)) == [*range(16), *range(32, 64)]


@pytest.mark.parametrize(("sparse", "mode"), [(True, "ahead"), ("ahead", "ahead"), ("later", "later")])
def test_torchs_own_optimizer_gets_sparse_steps_once(sparse, mode):
    (p,) = weights()
    link, optimizer, blocks = OptimizerLink(sparse), torch.optim.SGD([p], lr=0.1, momentum=0.9), Blocks([p])
    link.bind([optimizer], more=False)
    link.connect(blocks)
    steps = link.steps_of(optimizer)
    assert steps.momentum_mode == mode
    link.connect(blocks)
    assert link.steps_of(optimizer) is steps
    assert blocks.bound == [steps]


def test_an_optimizer_with_sparse_steps_of_its_own_keeps_them():
    (p,) = weights()
    optimizer = SparseSGD([p], lr=0.1, momentum=0.9, pay="later")
    assert OptimizerLink("ahead").steps_of(optimizer) is optimizer.sparse


def test_optimizers_join_or_replace_those_before():
    p, q = weights(2)
    one, other = mixed(p, q)
    link = OptimizerLink(False)
    link.bind([one], more=False)
    link.bind([other], more=True)
    assert link.optimizers == [one, other]
    link.bind([other], more=False)
    assert link.optimizers == [other]
    link.forget()
    assert link.optimizers == []


def test_sparse_steps_are_for_one_optimizer():
    p, q = weights(2)
    link = OptimizerLink("later")
    link.bind([torch.optim.SGD([p], lr=0.1)], more=False)
    with pytest.raises(ValueError, match=r"sparse_optimizer='later' is for one optimizer.* there are 2\."):
        link.bind([torch.optim.SGD([q], lr=0.1)], more=True)


def test_an_optimizer_of_something_else_as_well_is_refused():
    p, stranger = weights(2)
    link = OptimizerLink(True)
    link.bind([torch.optim.SGD([p, stranger], lr=0.1)], more=False)
    link.connect(None)
    with pytest.raises(ValueError, match=r"trains 1 parameters outside of the module .* \(64,\)"):
        link.connect(Blocks([p]))


class Loads:
    """Stands in for sparse steps, and keeps what is loaded."""

    def __init__(self, monkeypatch, optimizers):
        self.loaded = []
        for i, optimizer in enumerate(optimizers):
            load = lambda state, i=i: self.loaded.append((i, state))  # noqa: E731
            monkeypatch.setattr(optimizer.sparse, "load_state_dict", load)


def test_state_is_loaded_once_by_each_optimizer_in_its_order(monkeypatch):
    optimizers = [SparseSGD([p], lr=0.1) for p in weights(2)]
    loads, link = Loads(monkeypatch, optimizers), OptimizerLink(False)
    link.load_state([{"of": 0}, {"of": 1}])
    assert loads.loaded == [], "there are no optimizers yet"
    link.bind(optimizers, more=False)
    link.connect(None)
    assert loads.loaded == [(0, {"of": 0}), (1, {"of": 1})]
    link.connect(None)
    assert len(loads.loaded) == 2
    link.load_state([{"of": 2}, {"of": 3}])
    assert loads.loaded[2:] == [(0, {"of": 2}), (1, {"of": 3})]


def test_state_is_that_of_all_sparse_steps(monkeypatch):
    p, q = weights(2)
    sparse, dense = mixed(p, q)
    monkeypatch.setattr(sparse.sparse, "state_dict", lambda: {"of": "p"})
    link = OptimizerLink(False)
    link.bind([dense, sparse], more=False)
    assert link.state() == [{"of": "p"}]


def test_the_values_of_blocks_are_clipped_while_they_are_the_gradient():
    """A gradient that something else has put in their place is clipped as it is."""
    p, q = weights(2)
    given = Blocks([p, q]).given
    p.grad, q.grad = given[p].grad, torch.ones(64)
    values, dense = clip_targets([p, q], given)
    assert values.grad is given[p].values
    assert dense is q


def test_a_sparse_gradient_without_blocks_gives_nothing_to_clip():
    p, q = weights(2)
    given = {x: BlockGradient.of(x, torch.arange(n), torch.ones(n, 16)) for x, n in ((p, 0), (q, 2))}
    p.grad, q.grad = given[p].grad, given[q].grad
    (target,) = clip_targets([p, q], given)
    assert target.grad is given[q].values
