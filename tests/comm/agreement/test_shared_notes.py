"""Notes of all ranks, read at the same step."""

import random

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.shared_notes import SharedNotes
from tests.helpers import run_ranks


def _read(rank):
    """What is read in each step, if ranks note something at steps of their own."""
    torch.distributed.init_process_group("gloo")
    notes, seen = SharedNotes(ControlPlane(rank, 2), 2), []
    for step in range(6):
        seen.append(notes.take())
        notes.send([15 if (rank, step) == (1, 2) else 0, 10 if (rank, step) == (0, 3) else 0])
    return seen, notes.take(), notes.take()


def test_all_ranks_read_a_note_in_the_step_after_it_was_sent():
    nothing = [0, 0]
    for seen, last, none in run_ranks(_read, 2):
        assert seen == [nothing, nothing, nothing, [15, 0], [0, 10], nothing]
        assert last == none == nothing


def test_a_rank_alone_reads_its_own_notes():
    rng = random.Random(0)
    notes = SharedNotes(ControlPlane(0, 1), 3)
    assert notes.take() == [0, 0, 0]
    for _ in range(5):
        sent = [rng.randrange(9) for _ in range(3)]
        notes.send(sent)
        assert notes.take() == sent
