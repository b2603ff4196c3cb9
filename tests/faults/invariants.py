"""What must hold after each fault: one invariant for each, checked on all ranks."""

import re
from itertools import pairwise

import numpy as np
import torch

from lightning_hetero.core import DamagedCheckpointError
from tests.faults import faults
from tests.faults.modes import MODES
from tests.helpers import covered

GONE = r"onnection|does not answer|merge at the end of a mega-batch failed|nothing is heard"
"""What the error of a rank says whose fault it is not: the other one is gone."""


def trained(fault, mode, outcome):
    """Every sample counted exactly once an epoch, and the replicas are equal to the last bit."""
    assert not outcome.errors
    for epoch in range(mode.epochs):
        assert covered(outcome.results, epoch) == list(range(mode.samples))
    for result in outcome.results:
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], outcome.results[0]["weights"])


def nothing_changed(fault, mode, outcome, undisturbed):
    """The run ends as the undisturbed one: the same batches and weights, if two runs give the same at all."""
    trained(fault, mode, outcome)
    if mode.repeats:
        for result, expected in zip(outcome.results, undisturbed.results, strict=True):
            assert result["seen"] == expected["seen"]
            np.testing.assert_array_equal(result["weights"], expected["weights"])


def nothing_changed_but_a_warning(fault, mode, outcome, undisturbed):
    """Training goes on, and one line on one rank says what was not written."""
    nothing_changed(fault, mode, outcome, undisturbed)
    said = [line for result in outcome.results for line in result["said"]]
    assert len([line for line in said if "the record of the run cannot be written" in line]) == 1


def step_is_skipped(fault, mode, outcome, undisturbed):
    """The step is left out on all ranks, or the replica at a merge; the log names the rank, and weights are finite."""
    trained(fault, mode, outcome)
    if not mode.in_step:
        said = [line for result in outcome.results for line in result["said"] if "are not finite" in line]
        assert said == [f"replicas of rank [{fault.rank}] are not finite: left out of the merge and replaced"]
        return
    told = [
        [line for line in result["said"] if "all ranks left that gradient out" in line] for result in outcome.results
    ]
    assert [len(lines) for lines in told] == [1] * mode.ranks
    assert all(f"in step {fault.at}" in lines[0] for lines in told)
    loss = [[line for line in result["said"] if "the loss is" in line] for result in outcome.results]
    assert [len(lines) for lines in loss] == [int(rank == fault.rank) for rank in range(mode.ranks)]
    assert f"rank {fault.rank}: the loss is {fault.factor} in batch {fault.at}" in loss[fault.rank][0]
    for weights in outcome.left.values():
        moved = [not torch.equal(*pair) for pair in pairwise(weights[: fault.at + 3])]
        assert moved == [step != fault.at for step in range(fault.at + 2)]


def difference_is_told(fault, mode, outcome, undisturbed):
    """Rank 0 says once which parameter differs, and on which ranks; training goes on."""
    assert not outcome.errors
    for epoch in range(mode.epochs):
        assert covered(outcome.results, epoch) == list(range(mode.samples))
    (line,) = [line for line in outcome.results[0]["said"] if "ranks hold different weights" in line]
    assert re.search(rf"(bits|element \d+) of \S*2\.(weight|bias) .* rank 0 and .*rank {fault.rank}", line)


def all_end(fault, mode, outcome, undisturbed):
    """Every rank ends: that of the fault with its error, the others with a lost connection and equal weights."""
    assert set(outcome.errors) == set(range(mode.ranks))
    for rank, (kind, text) in outcome.errors.items():
        own_kind, own_text = fault.error
        if rank == fault.rank:
            assert re.fullmatch(own_kind, kind)
            assert re.search(own_text, text)
        else:
            assert kind != "Died"
            assert re.search(GONE, text), text
    if mode.in_step:  # no update that only some of the others have taken
        others = [weights[-1] for rank, weights in outcome.left.items() if rank != fault.rank]
        assert len(others) == mode.ranks - 1
        assert all(torch.equal(weights, others[0]) for weights in others)


def done_in_pieces(fault, mode, outcome, undisturbed):
    """Under Lightning's `hetero_ddp`, the batch is trained on in pieces, with the same gradient; else all ranks end."""
    if not mode.in_pieces:
        all_end(fault, mode, outcome, undisturbed)
        return
    assert not outcome.errors
    taken = [sorted({(epoch, step, i) for epoch, step, own in r["seen"] for i in own}) for r in outcome.results]
    for epoch in range(mode.epochs):  # a set: the first attempt, and the pieces
        assert sorted(i for own in taken for e, _, i in own if e == epoch) == list(range(mode.samples))
    for rank, result in enumerate(outcome.results):
        np.testing.assert_array_equal(result["weights"], outcome.results[0]["weights"])
        said = [line for line in result["said"] if "ran out of memory" in line]
        assert len(said) == int(rank == fault.rank)
        if mode.repeats:
            np.testing.assert_allclose(result["weights"], undisturbed.results[rank]["weights"], rtol=0, atol=1e-12)


def all_end_with_one_error(fault, mode, outcome, undisturbed):
    """Every rank raises the same error, which names the rank of the fault, or what each rank holds."""
    kind, pattern = fault.error
    assert set(outcome.errors) == set(range(mode.ranks))
    assert {found for found, _ in outcome.errors.values()} == {kind}
    assert all(re.search(pattern, text) for _, text in outcome.errors.values()), outcome.errors


def all_stop_together(fault, mode, outcome, undisturbed):
    """Every rank ends as Lightning does when told to: before the same batch, the second one after the signal."""
    assert {rank: kind for rank, (kind, _) in outcome.errors.items()} == dict.fromkeys(
        range(mode.ranks), "SIGTERMException"
    )
    if mode.in_step:
        assert [len(weights) - 1 for weights in outcome.left.values()] == [fault.at + 2] * mode.ranks


def no_rank_goes_on(fault, mode, outcome, undisturbed):
    """No rank goes on from the damaged file: each raises the same error, which names the file."""
    assert set(outcome.errors) == set(range(mode.ranks))
    assert {kind for kind, _ in outcome.errors.values()} == {DamagedCheckpointError.__name__}
    assert all("saved.ckpt" in text for _, text in outcome.errors.values())


INVARIANTS = {
    faults.Kill: all_end,
    faults.Segfault: all_end,
    faults.Raise: all_end,
    faults.OutOfMemory: done_in_pieces,
    faults.LinkCut: all_end,
    faults.Sigterm: all_stop_together,
    faults.Freeze: nothing_changed,
    faults.Pause: nothing_changed,
    faults.Slow: nothing_changed,
    faults.LinkDelay: nothing_changed,
    faults.LinkLoss: nothing_changed,
    faults.LinkDown: nothing_changed,
    faults.ClockJump: nothing_changed,
    faults.NaN: step_is_skipped,
    faults.Inf: step_is_skipped,
    faults.Diverge: difference_is_told,
    faults.WrongPlan: all_end_with_one_error,
    faults.CorruptMessage: all_end_with_one_error,
    faults.DiskFull: nothing_changed_but_a_warning,
    faults.ReadOnly: nothing_changed_but_a_warning,
    faults.TruncateCheckpoint: no_rank_goes_on,
    faults.FlipByte: no_rank_goes_on,
}


def check(fault, mode, outcome, undisturbed):
    """Check the invariant of a fault, and that it has happened as often as it should."""
    assert outcome.injected == fault.times if fault.times is not None else outcome.injected > 0
    INVARIANTS[type(fault)](fault, MODES[mode], outcome, undisturbed)
