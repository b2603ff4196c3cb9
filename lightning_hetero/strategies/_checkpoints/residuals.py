"""Gradients that compression has not sent yet, in the checkpoints of strategies."""

from collections.abc import Mapping
from typing import Any

from lightning_hetero.core.checkpoint_state import check_tensors, reading_state
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.log import log

__all__ = ["KEY", "add_residuals", "take_residuals"]

KEY = "lightning_hetero_residuals"


def add_residuals(checkpoint: dict[str, Any], engine: HeteroEngine | None, *, alone: bool = False) -> None:
    """Put the gradients that were not sent yet into the checkpoint; a collective call if gradients are compressed.

    Args:
        checkpoint: receives the residuals.
        engine: has the residuals of this rank.
        alone: whether the other ranks do not take part, so that theirs are missing.
    """
    if engine is None or engine.compression is None:
        return
    state = engine.compression.state_dict(alone=alone)
    if state:
        checkpoint[KEY] = state
    if state and alone and engine.rank == 0:
        log.warning(
            "this checkpoint of an exception has what compression has not sent yet of rank 0 only: the other ranks "
            "could not be asked. A run that goes on from it leaves theirs out"
        )


def take_residuals(checkpoint: Mapping[str, Any], engine: HeteroEngine | None) -> None:
    """Restore the residuals of the checkpoint; clear them if it has none."""
    state = checkpoint.get(KEY, {})
    if engine is None:
        return
    with reading_state("gradients that compression has not sent yet"):
        for one in state["ranks"] if state else ():
            check_tensors("residuals", one.get("residuals", {}))
    if engine.compression is not None:
        engine.compression.load_state_dict(state)
    elif state:
        log.warning(
            "the checkpoint has gradients that compression has not sent yet; without compression they are left out"
        )
