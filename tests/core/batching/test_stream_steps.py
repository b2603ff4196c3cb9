"""Sizes of steps over streams: each sample once, and the plan's total while there is data."""

import random
import re

import pytest

from lightning_hetero.core.batching.stream_steps import StreamRules, next_block, wanted_samples


def played(lengths, plan, block, rules):
    """Steps of a pass in which every rank draws what is wanted; the samples that no step took; most ever held."""
    ranks = range(len(plan))
    left, held, ended = list(lengths), [0 for _ in ranks], [False for _ in ranks]
    known, steps, most = (list(held), list(ended)), [], 0
    while True:
        plans = [plan] * block
        wanted = wanted_samples(plans, *known, rules)
        for rank in ranks:
            asked = max(0, wanted[rank] - held[rank])
            drawn = min(asked, left[rank])
            left[rank], held[rank], ended[rank] = left[rank] - drawn, held[rank] + drawn, ended[rank] or drawn < asked
        most = max(most, *held)
        told = next_block(plans, held, ended, rules)
        assert told.sizes or told.over or ended != known[1], "no step, although nothing new is known"
        held = [own - sum(sizes[rank] for sizes in told.sizes) for rank, own in enumerate(held)]
        known = list(held), list(ended)
        steps.extend(told.sizes)
        if told.over:
            return steps, [a + b for a, b in zip(held, left, strict=True)], most


def cases(number):
    draw = random.Random(7)
    while number:
        ranks, low = draw.randint(1, 5), draw.choice([1, 1, 2, 3])
        unit = draw.choice([1, 1, 2, 3, 8])
        plan = tuple(unit * draw.choice([0, *range(low, 12)]) for _ in range(ranks))
        if sum(plan) == 0:
            continue
        most = [max(size, unit * (2 * low - 1)) + unit * draw.randint(0, 3) for size in plan]
        bound = tuple(most) if draw.random() < 0.4 else None
        lengths = [draw.choice([0, low, draw.randint(low, 60 * unit)]) for _ in range(ranks)]
        yield lengths, plan, draw.randint(1, 4), StreamRules(low, bound, draw.random() < 0.3, unit)
        number -= 1


def test_each_sample_is_taken_once_and_ranks_run_what_they_can():
    for lengths, plan, block, rules in cases(1200):
        steps, rest, most = played(lengths, plan, block, rules)
        for rank, length in enumerate(lengths):
            assert sum(sizes[rank] for sizes in steps) + rest[rank] == length
            assert all(sizes[rank] == 0 or sizes[rank] >= rules.min_local for sizes in steps)
            assert rules.max_local is None or all(sizes[rank] <= rules.max_local[rank] for sizes in steps)
            odd = [step for step, sizes in enumerate(steps) if sizes[rank] % rules.multiple]
            last = max((step for step, sizes in enumerate(steps) if sizes[rank]), default=0)
            assert not odd or rules.min_local > 1 or (odd == [last] and not rules.drop_last)
        dropped = sum(plan) + len(plan) * (rules.stand_in - 1)
        assert sum(rest) < dropped if rules.drop_last else sum(rest) == 0
        assert most <= block * sum(plan) + sum(plan) + rules.reserve
        if rules.min_local == rules.multiple == 1 and rules.max_local is None:
            assert all(sum(sizes) == sum(plan) for sizes in (steps if rules.drop_last else steps[:-1]))
            assert len(steps) == (sum(lengths) // sum(plan) if rules.drop_last else -(-sum(lengths) // sum(plan)))


def test_sizes_are_those_of_the_plan_while_all_streams_go_on():
    steps, _, _ = played([60, 20], (6, 2), 4, StreamRules())
    assert steps == [(6, 2)] * 10
    steps, _, _ = played([600, 20], (6, 2), 4, StreamRules())
    assert steps[:9] == [(6, 2)] * 9
    assert steps[10:-1] == [(8, 0)] * (len(steps) - 11)


def test_others_take_a_share_in_proportion_to_their_sizes():
    assert next_block([(6, 2, 4)], (0, 99, 99), (True, False, False), StreamRules()).sizes == ((0, 4, 8),)


def test_a_rank_left_out_takes_part_only_when_nobody_else_has_data():
    assert wanted_samples([(4, 0)], (0, 0), (False, False), StreamRules()) == (4, 1)
    assert next_block([(4, 0)], (0, 9), (True, False), StreamRules()).sizes == ((0, 4),)


@pytest.mark.parametrize("plan", [(4, 4), (8, 3)])
def test_the_last_samples_of_a_stream_can_be_run_with_batch_normalization(plan):
    for length in range(2, 20):
        steps, rest, _ = played([length, 40], plan, 2, StreamRules(2))
        assert sum(rest) == 0
        assert all(size != 1 for sizes in steps for size in sizes)


def test_what_cannot_be_run_is_refused():
    message = "the stream of rank 1 has ended with 1 samples, fewer than min_local_batch_size=2"
    with pytest.raises(ValueError, match=message):
        next_block([(2, 2)], (9, 1), (False, True), StreamRules(2))
    message = "max_local_batch_sizes=[9, 2] with at least 2 samples per batch leaves no room"
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamRules(2, (9, 2))
