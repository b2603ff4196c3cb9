"""Trains a mode on its ranks with a fault in it, under a wall limit, and tells how it ended on each."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.faults.faults import Injector
from tests.faults.modes import MODES
from tests.helpers import RankError, collected, run_ranks

WALL = 45.0
"""Seconds after which a run counts as hanging, far below torch's limit of 30 minutes."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        results: what each rank returned; ``None`` if one failed.
        errors: kind and text of each failed rank's error.
        injected: how often the fault happened.
        left: weights before each batch, and at the end, of each rank that did not vanish.
    """

    results: list[dict[str, Any]] | None
    errors: dict[int, tuple[str, str]]
    injected: int
    left: dict[int, list[torch.Tensor]]


def _train(rank, fault, mode, folder, kwargs):
    said = collected()
    injector = Injector(fault, rank, folder)
    own = {} if fault is None else fault.settings(folder)
    try:
        result = MODES[mode].train(rank, {**MODES[mode].settings, **own}, injector, **kwargs)
    finally:
        injector.end()
    return {**result, "said": said}


def train(fault, mode, folder, **kwargs):
    """Outcome of a mode's training with a fault in it."""
    folder.mkdir(exist_ok=True)
    ranks = MODES[mode].ranks
    try:
        results, errors = run_ranks(_train, ranks, fault, mode, str(folder), kwargs, timeout=WALL), {}
    except RankError as error:
        results, errors = None, {rank: (kind, text) for rank, kind, text in error.errors}
    counted = folder / "injected"
    left = {rank: torch.load(path) for rank in range(ranks) if (path := folder / f"left{rank}").exists()}
    return Outcome(results, errors, len(counted.read_bytes()) if counted.exists() else 0, left)
