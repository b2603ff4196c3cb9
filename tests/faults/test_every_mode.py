"""Every fault in every mode that promises something about it: the whole table, with one invariant for each fault."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lightning_hetero.core import DamagedCheckpointError
from tests.faults.faults import FAULTS, FlipByte, TruncateCheckpoint
from tests.faults.harness import train
from tests.faults.invariants import INVARIANTS, check
from tests.faults.modes import MODES

OWN_LOOPS = ("accelerate", "fabric", "transformers")
DENSE = tuple(mode for mode in MODES if mode not in ("compressed", "hierarchical"))
SAME_STEP = ("powersgd", "hierarchical", "adaptive")

LEFT_OUT = (
    # nothing is promised
    (("NaN", "Inf"), ("elastic",), "it has no on_nonfinite, and merges a model as it is"),
    (("Diverge",), ("elastic",), "its replicas differ until they are merged"),
    (("WrongPlan",), ("elastic",), "it has no plan"),
    (("DiskFull", "ReadOnly"), ("elastic",), "it writes no record"),
    (("CorruptMessage",), DENSE, "only block top-k, in two of the modes, has messages of its own"),
    (("Sigterm",), OWN_LOOPS, "the signal is the loop's affair: it ends the process, as without this package"),
    (("TruncateCheckpoint", "FlipByte"), ("accelerate", "transformers"), "they save a folder, which is not checked"),
    # too dear for what it would tell
    (("TruncateCheckpoint", "FlipByte"), (*SAME_STEP, "stale"), "the file is read by the same code as in plain"),
    (("TruncateCheckpoint", "FlipByte"), ("elastic",), "the same code reads it, and it can be saved at a merge only"),
    (("Segfault",), (*SAME_STEP, "stale", "fabric"), "a process that is gone is gone; Kill is in every mode"),
    (("OutOfMemory-backward",), (*SAME_STEP, "transformers"), "as an error in the forward pass, which is"),
    (("LinkDelay", "LinkLoss"), (*SAME_STEP, *OWN_LOOPS), "as LinkDown, which is in every mode"),
    (("ClockJump--5.0", "ReadOnly", "Inf"), (*SAME_STEP, "fabric"), "as the same fault the other way, which is"),
)
"""Pairs that are not run: which faults, in which modes, and why."""

OF_FILES = (TruncateCheckpoint, FlipByte)


def left_out(fault, mode):
    """Why a pair is not run; empty if it is."""
    return next((why for kinds, modes, why in LEFT_OUT if str(fault).startswith(kinds) and mode in modes), "")


PAIRS = [(fault, mode) for fault in FAULTS for mode in MODES if not left_out(fault, mode)]
IN_RUNS = [pair for pair in PAIRS if not isinstance(pair[0], OF_FILES)]
IN_FILES = [pair for pair in PAIRS if isinstance(pair[0], OF_FILES)]


@cache
def undisturbed(mode):
    """A run without any fault, which all faults in this mode share."""
    with TemporaryDirectory() as folder:
        return train(None, mode, Path(folder))


@pytest.mark.parametrize(("fault", "mode"), IN_RUNS, ids=str)
def test_its_invariant_holds(fault, mode, tmp_path):
    check(fault, mode, train(fault, mode, tmp_path), undisturbed(mode))


@pytest.mark.parametrize(("fault", "mode"), IN_FILES, ids=str)
def test_a_damaged_checkpoint_is_a_named_error_on_every_rank(fault, mode, tmp_path):
    path = tmp_path / "saved.ckpt"
    assert not train(None, mode, tmp_path / "first", save={4: str(path)}).errors
    content = bytearray(path.read_bytes())
    fault.damage(content)
    assert content != path.read_bytes()
    path.write_bytes(content)
    errors = train(None, mode, tmp_path / "second", resume=str(path)).errors
    assert {kind for kind, _ in errors.values()} == {DamagedCheckpointError.__name__}
    assert set(errors) == set(range(MODES[mode].ranks))
    assert all(path.name in text for _, text in errors.values())


# the table itself


def test_every_fault_has_an_invariant():
    assert {type(fault) for fault in FAULTS} == {*INVARIANTS, *OF_FILES}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_fault_is_in_two_modes(fault):
    assert len({mode for of, mode in PAIRS if of == fault}) >= 2


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_sees_six_faults(mode):
    assert len({type(fault) for fault, of in PAIRS if of == mode}) >= 6


def test_what_is_left_out_exists():
    for kinds, modes, _ in LEFT_OUT:
        assert set(modes) <= set(MODES)
        assert all(any(str(fault).startswith(kind) for fault in FAULTS) for kind in kinds)
