"""Which faults are put into which modes; all pairs but those that are listed here, with the reason."""

from tests.faults.faults import FAULTS, OfFile
from tests.faults.modes import MODES

OWN_LOOPS = ("accelerate", "fabric", "transformers")
DENSE = tuple(mode for mode in MODES if mode not in ("compressed", "hierarchical"))
SAME_STEP = ("powersgd", "hierarchical", "adaptive")

LEFT_OUT = (
    # nothing is promised
    (("Diverge",), ("elastic",), "its replicas differ until they are merged"),
    (("WrongPlan",), ("elastic",), "it has no plan"),
    (("DiskFull", "ReadOnly"), ("elastic",), "it writes no record"),
    (("CorruptMessage",), DENSE, "only block top-k, in two of the modes, has messages of its own"),
    (("Sigterm",), OWN_LOOPS, "their ends have tests of their own: R18"),
    (("TruncateCheckpoint", "FlipByte"), ("accelerate", "transformers"), "their folders have tests of their own: R16"),
    # too dear for what it would tell
    (("TruncateCheckpoint", "FlipByte"), (*SAME_STEP, "stale"), "the file is read by the same code as in plain"),
    (("TruncateCheckpoint", "FlipByte"), ("elastic",), "the same code reads it, and it can be saved at a merge only"),
    (("Segfault",), (*SAME_STEP, "stale", "fabric"), "a process that is gone is gone; Kill is in every mode"),
    (("OutOfMemory-backward",), (*SAME_STEP, "transformers"), "as an error in the forward pass, which is"),
    (("LinkDelay", "LinkLoss"), (*SAME_STEP, *OWN_LOOPS), "as LinkDown, which is in every mode"),
    (("ClockJump--5.0", "ReadOnly", "Inf"), (*SAME_STEP, "fabric"), "as the same fault the other way, which is"),
)
"""Pairs that are not run: which faults, in which modes, and why."""


def left_out(fault, mode):
    """Why a pair is not run; empty if it is."""
    return next((why for kinds, modes, why in LEFT_OUT if str(fault).startswith(kinds) and mode in modes), "")


PAIRS = [(fault, mode) for fault in FAULTS for mode in MODES if not left_out(fault, mode)]
IN_RUNS = [pair for pair in PAIRS if not isinstance(pair[0], OfFile)]
IN_FILES = [pair for pair in PAIRS if isinstance(pair[0], OfFile)]
