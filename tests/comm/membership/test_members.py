"""Generations as the store holds them."""

import torch.distributed as dist

from lightning_hetero.comm.membership.members import Generation, Member, is_open
from lightning_hetero.comm.membership.slots import GONE, RUNS, SlotBoard


def test_a_generation_is_read_as_it_was_written():
    board = SlotBoard(dist.HashStore())
    assert Generation.newest(board) is None
    first = Generation(0, (Member(0, 0), Member(1, 0), Member(12, 3)))
    first.write(board)
    assert Generation.newest(board) == first
    second = Generation(4, (Member(1, 0),))
    second.write(board)
    assert Generation.newest(board) == second
    assert Generation.read(board, 0) == first
    assert Generation.read(board, 2) is None


def test_the_newest_generation_is_written_before_it_is_named():
    """Another worker may look at any moment, and would otherwise begin with the first one."""
    seen, store = [], dist.HashStore()

    class Looks:
        def set(self, key, value):
            store.set(key, value)
            seen.append(Generation.newest(SlotBoard(store)))

    generations = [Generation(number, (Member(0, number),)) for number in range(2)]
    for one in generations:
        one.write(SlotBoard(Looks()))
    assert seen == [None, generations[0], generations[0], generations[1]]


def test_members_that_were_lost_and_an_opened_generation():
    board = SlotBoard(dist.HashStore())
    generation = Generation(0, (Member(0, 0), Member(1, 0), Member(2, 0)))
    for slot in range(3):
        board.tell(slot, 0, RUNS)
    assert generation.lost(board, Member(0, 0)) == []
    board.tell(1, 0, GONE)
    board.tell(2, 1, RUNS)  # its next life is another member
    assert generation.lost(board, Member(0, 0)) == [Member(1, 0), Member(2, 0)]
    assert not is_open(board, 1)
    board.store.set("1/led by", "1 0")
    assert is_open(board, 1)
