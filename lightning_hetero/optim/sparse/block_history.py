"""What is known of a parameter's blocks from step to step, and how it rides in a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetero.optim.sparse.deferred_updates import Kind
from lightning_hetero.optim.sparse.kernel_interface import SHIFT

__all__ = ["BlockNotes", "Cohort", "recalled", "waits_in"]

Cohort = tuple[int, Kind | None, int]
"""Parameters that owe alike: their group, how they owe, and how many more steps they have taken than were noted."""

OLD_SHIFT = 16
"""Checkpoints that name no shift have the step in 16 bits."""


@dataclass
class BlockNotes:
    """Notes of one parameter.

    Args:
        cohort: who owes as it does.
        paid: step up to which all of its blocks are settled.
        touched: when each block was touched last and how long it waits, as
            :data:`~lightning_hetero.optim.sparse.kernel_interface.SHIFT` says; ``None`` if nothing is owed.
    """

    cohort: Cohort
    paid: int
    touched: torch.Tensor | None


def waits_in(
    notes: dict[torch.Tensor, BlockNotes], parameters: Iterable[torch.Tensor], block: int, steps: int
) -> dict[str, Any]:
    """What is known of waits once all is settled, for a checkpoint."""
    known = {}
    for number, p in enumerate(parameters):
        touched = notes[p].touched if p in notes and notes[p].cohort[1] == "waits" else None
        if touched is not None:
            known[number] = touched.cpu()
    return {"steps": steps, "block": block, "shift": SHIFT, "noted": known}


def recalled(saved: dict[str, Any], parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """What :func:`waits_in` saved, by parameter, also of checkpoints that had the step in fewer bits."""
    shift, found = saved.get("shift", OLD_SHIFT), {}
    for number, p in enumerate(parameters):
        noted = saved["noted"].get(number)
        if noted is not None and len(noted) == -(-p.numel() // saved["block"]):
            found[p] = (((noted >> shift) << SHIFT) | (noted & ((1 << shift) - 1))).to(p.device)
    return found
