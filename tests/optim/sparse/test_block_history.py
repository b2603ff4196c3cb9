"""Histories of blocks through checkpoints: intervals ride along, also from older ones."""

import copy

import pytest
import torch

from lightning_hetero.optim.sparse.block_history import Histories
from lightning_hetero.optim.sparse.kernel_interface import INTERVAL_SHIFT
from tests.optim.sparse.pairs import BLOCK, KINDS, Pair


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_its_notes_as_it_would_have(kind, dense):
    """The waits of blocks ride along, also where something is owed, which is paid before they are saved.

    A dense step forgets them in either case.
    """
    whole = Pair(kind, "ahead")
    for step in range(20):
        whole.step(dense=step == 0, share=0.3)
    state, notes = copy.deepcopy(whole.sparse.state_dict()), copy.deepcopy(whole.sparse.sparse.state_dict())
    rest = Pair(kind, "ahead")
    for p, saved in zip(rest.ours, whole.ours, strict=True):
        p.data.copy_(saved.data)
    rest.sparse.load_state_dict(state)
    rest.sparse.sparse.load_state_dict(notes)
    rest.generator.set_state(whole.generator.get_state())
    for step in range(12):
        for pair in (whole, rest):
            pair.step(dense=dense and step == 0, share=0.3)
        assert all(torch.equal(a, b) for a, b in zip(whole.ours, rest.ours, strict=True))


def test_notes_of_other_blocks_say_nothing():
    found = []
    for loaded in ({"steps": 6, "block": 2 * BLOCK, "shift": 32, "noted": {0: torch.full((3,), 3 + (257 << 32))}}, {}):
        pair = Pair("momentum", "ahead", shapes=("vector",))
        pair.step(dense=True)
        pair.sparse.sparse.load_state_dict(loaded)
        for _ in range(3):
            pair.step(share=1.0)
        found.append(pair.ours[0].detach())
    assert torch.equal(*found)


def test_notes_of_older_checkpoints_are_read():
    """They had the step in 16 bits, the wait above."""
    found = []
    for shift in (16, 32):
        pair = Pair("momentum", "ahead", shapes=("vector",))
        pair.step(dense=True)
        noted = torch.tensor([3 + (257 << shift), 0, 5 + (700 << shift), 1, 0])
        saved = {"steps": 6, "block": BLOCK, "noted": {0: noted}}
        pair.sparse.sparse.load_state_dict(saved if shift == 16 else {**saved, "shift": shift})
        pair.step(share=1.0)
        found.append(pair.ours[0].detach())
    assert torch.equal(*found)


def test_who_joins_later_has_skipped_nothing():
    histories, (one, other) = Histories(), (torch.zeros(40), torch.zeros(5))
    histories.join(one, (0, "later", 0), 16)
    for _ in range(3):
        histories.advance()
    late = histories.join(other, (0, "later", 0), 16)
    assert histories[one].skipped(histories[one].blocks, histories.steps).tolist() == [3, 3, 3]
    assert late.skipped(late.blocks, histories.steps).tolist() == [0]
    histories[one].flushed_at = 2
    assert histories[one].skipped(torch.tensor([0, 1, 3]), histories.steps).tolist() == [1, 1, 0]


def test_who_changes_its_cohort_leaves():
    histories, (one, other) = Histories(), (torch.zeros(3), torch.zeros(3))
    for p in (one, other):
        histories.join(p, (0, "decay", 0), 16)
    assert histories.leaving({one: (0, "decay", 0), other: (0, "decay", 0)}) == []
    assert [p is other for p in histories.leaving({one: (0, "decay", 0), other: (1, "decay", 0)})] == [True]
    histories.drop(other)
    assert [p is one for p in histories] == [True]


def test_what_is_loaded_is_applied_once_and_only_to_steps_that_have_not_begun():
    p, saved = torch.zeros(20), {"steps": 9, "block": 16, "shift": INTERVAL_SHIFT, "noted": {0: torch.tensor([7, 8])}}
    histories = Histories()
    histories.load_state_dict(saved)
    histories.clear()
    histories.restore([p], 16)
    assert histories.steps == 9
    assert histories.join(p, (0, "interval", 0), 16).blocks.tolist() == [7, 8]
    histories.load_state_dict({**saved, "steps": 50})
    histories.restore([p], 16)
    assert histories.steps == 9


def test_a_parameter_of_another_size_begins_anew():
    saved = {"steps": 9, "block": 16, "noted": {0: torch.tensor([7, 8])}}
    histories, p = Histories(), torch.zeros(100)
    histories.load_state_dict(saved)
    histories.restore([p], 16)
    assert histories.join(p, (0, "interval", 0), 16).blocks.tolist() == [0] * 7
