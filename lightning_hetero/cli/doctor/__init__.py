"""``lightning-hetero doctor``: checks of a machine, or of all ranks of a job under torchrun, and advice in words."""

import argparse
import os
import sys

from lightning_hetero.cli._parser import option
from lightning_hetero.simulate.planning.units import parse_number

__all__ = ["PRECISIONS", "add_options", "run"]

PRECISIONS = ("float32", "bfloat16", "float16")
MOST_SECONDS = 3600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.epilog = "All ranks of a job and their links: torchrun --nproc-per-node N -m lightning_hetero doctor"
    add = parser.add_argument
    seconds = "how long each device multiplies matrices (default 5); throttling may need more"
    add("--seconds", type=option(_seconds), default=5.0, metavar="X", help=seconds)
    add("--precision", choices=PRECISIONS, default="float32", help="of the matrices (default float32)")
    timeout = "longest wait for another rank, and for a check beside its own time (default 60)"
    add("--timeout", type=option(_seconds), default=60.0, metavar="X", help=timeout)
    add("--json", action="store_true", help="write one JSON document, for a bug report")
    add("--hosts", action="store_true", help="name hosts, addresses and folders, which are left out otherwise")


def run(options: argparse.Namespace) -> int:
    """Check this machine, or the ranks of the job that it is part of; rank 0 writes what was found.

    Returns:
        0 if everything was checked, 1 if a check or a rank failed.
    """
    if "torch" not in sys.modules:  # what its sockets log in many lines is a sentence of ours
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from lightning_hetero.cli.doctor.examine import examine

    return examine(options)


def _seconds(text: str) -> float:
    return parse_number(text, 0.01, MOST_SECONDS)
