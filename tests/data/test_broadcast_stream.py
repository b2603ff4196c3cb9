"""The live stream: what the sampler yields when a pass begins, the same on every rank, and again after a resume."""

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_hetero.data import BroadcastStream


def random(seed=0, n=20):
    return RandomSampler(range(n), generator=torch.Generator().manual_seed(seed))


def test_order_is_the_samplers_own():
    stream, alone = BroadcastStream(random()), random()
    for epoch in range(3):
        assert list(stream.indices(epoch)) == list(alone)


def test_a_pass_is_drawn_once():
    stream = BroadcastStream(random())
    assert stream.indices(0) == stream.indices(0)
    assert stream.indices(0) != stream.indices(1)


def test_other_ranks_take_the_order_of_rank_0():
    box = {}
    first = BroadcastStream(random(1), lambda value: box.setdefault("order", value), rank=0)
    other = BroadcastStream(random(2), lambda value: box["order"], rank=1)
    assert list(first.indices(0)) == list(other.indices(0))


def test_sequential_order_needs_no_message():
    stream = BroadcastStream(SequentialSampler(range(4)), lambda value: pytest.fail("nothing to share"))
    assert list(stream.indices(3)) == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [random, lambda: WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator())])
def test_state_draws_the_running_pass_and_the_later_ones_again(make):
    stream = BroadcastStream(make())
    orders = [list(stream.indices(0))]
    state = stream.state_dict(0)
    orders += [list(stream.indices(epoch)) for epoch in (1, 2)]
    resumed = BroadcastStream(make())
    resumed.indices(0)
    resumed.load_state_dict(state, 0)
    assert [list(resumed.indices(epoch)) for epoch in range(3)] == orders


class Seeded(RandomSampler):
    """Draws from its seed and the number of the pass, as Accelerate's seedable sampler."""

    def __init__(self, seed):
        super().__init__(range(20))
        self.initial_seed, self.epoch = seed, 0

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.initial_seed + self.epoch)
        return super().__iter__()


def test_the_seed_of_a_sampler_is_in_the_state_and_a_sampler_may_be_replaced():
    stream, resumed = BroadcastStream(Seeded(5)), BroadcastStream(Seeded(6))
    resumed.load_state_dict(stream.state_dict(0), 0)
    stream.sampler.epoch = resumed.sampler.epoch = 1
    assert list(resumed.indices(1)) == list(stream.indices(1))
    resumed.sampler = Seeded(7)
    assert list(resumed.indices(2)) == list(Seeded(7))


class Liar(SequentialSampler):
    def __iter__(self):
        return iter(range(3))


def test_wrong_samplers():
    with pytest.raises(ValueError, match="says that it has 4 samples and yielded 3. Make __len__ and __iter__ agree"):
        BroadcastStream(Liar(range(4))).indices(0)
    with pytest.raises(ValueError, match="0 samples; it needs at least one"):
        BroadcastStream(SequentialSampler([]))


def test_fingerprint_tells_kinds_and_sizes_apart():
    marks = {BroadcastStream(s).fingerprint() for s in (random(), random(n=21), SequentialSampler(range(20)))}
    assert len(marks) == 3
    assert BroadcastStream(random(5)).fingerprint() in marks
