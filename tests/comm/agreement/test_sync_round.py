"""One message for all payloads: each takes in its own part of it, with a row of every rank."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane, PlanMismatchError
from lightning_hetero.comm.agreement.sync_round import Padding, gather_payloads
from tests.helpers import run_ranks


class Payload:
    """Sends given numbers and keeps what it is given."""

    def __init__(self, numbers):
        self.numbers, self.taken = np.asarray(numbers, dtype=float), None

    def pack(self):
        return self.numbers

    def unpack(self, everyone, control):
        self.taken = everyone.copy(), control


class Together:
    """Ranks in one process: a gather gives the rows that the others sent; ``sent`` are the messages of this one."""

    def __init__(self, others):
        self.others, self.sent = others, []

    def gather(self, values):
        self.sent.append(values.copy())
        return np.stack([values, *self.others])


def rows_of(rng, lengths, ranks):
    return [[rng.standard_normal(length) for length in lengths] for _ in range(ranks)]


@pytest.mark.parametrize("lengths", [(), (4,), (3, 1, 5), (2, 0, 2)], ids=str)
def test_a_payload_gets_the_rows_of_all_ranks_of_its_own_part(lengths):
    rng = np.random.default_rng(sum(lengths))
    rows, heads = rows_of(rng, lengths, 3), [(9, 1, 4), (9, 2, 5), (9, 0, 6)]
    control = Together([np.concatenate([head, *row]) for head, row in zip(heads[1:], rows[1:], strict=True)])
    payloads = [Payload(part) for part in rows[0]]
    assert gather_payloads(control, heads[0], payloads) == [(1, 4), (2, 5), (0, 6)]
    for i, payload in enumerate(payloads):
        everyone, given = payload.taken
        np.testing.assert_array_equal(everyone, [row[i] for row in rows])
        assert given is control


def test_one_message_has_the_position_first_and_payloads_in_their_order():
    control = Together([])
    gather_payloads(control, (7, 2, 11), [Payload([0.5, 0.25]), Padding(3), Payload([8.0])])
    (message,) = control.sent
    assert message.tolist() == [7, 2, 11, 0.5, 0.25, 0, 0, 0, 8.0]


@pytest.mark.parametrize("length", [0, 1, 6])
def test_padding_keeps_the_place_of_a_payload(length):
    """The message is as long as with the payload, and what comes behind it arrives where it should."""
    behind, messages = [Payload([3.0, 4.0]) for _ in range(2)], []
    for between, last in zip((Padding(length), Payload(np.ones(length))), behind, strict=True):
        control = Together([])
        gather_payloads(control, (1, 0, 0), [between, last])
        messages.append(control.sent[0])
        np.testing.assert_array_equal(last.taken[0], [[3.0, 4.0]])
    assert len(messages[0]) == len(messages[1])
    assert not messages[0][3 : 3 + length].any()


def test_a_rank_with_another_plan_is_named_before_anything_is_taken_in():
    payload = Payload([1.0])
    control = Together([np.array([0xABC, 0, 0, 1.0])])
    with pytest.raises(PlanMismatchError, match=r"rank 0: 000000000abd, rank 1: 000000000abc"):
        gather_payloads(control, (0xABD, 0, 0), [payload])
    assert payload.taken is None


def test_ranks_may_have_drawn_up_to_different_steps():
    control = Together([np.array([5.0, 1, 30])])
    assert gather_payloads(control, (5, 0, 2), []) == [(0, 2), (1, 30)]


def _round(rank):
    dist.init_process_group("gloo")
    payloads = [Payload([rank, 10.0 * rank]), Payload([rank + 0.5])]
    drawn = gather_payloads(ControlPlane(rank, 2), (2**47 + 1, rank, 7 - rank), payloads)
    return SimpleNamespace(drawn=drawn, taken=[payload.taken[0].tolist() for payload in payloads])


def test_all_ranks_take_in_the_same():
    """Over a real group, with a digest as large as plans have."""
    for result in run_ranks(_round, 2):
        assert result.drawn == [(0, 7), (1, 6)]
        assert result.taken == [[[0.0, 0.0], [1.0, 10.0]], [[0.5], [1.5]]]
