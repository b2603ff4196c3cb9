"""What a checkpoint of Lightning's says about where training data goes on, and what of ours rides in it."""

import logging
from collections.abc import Mapping
from typing import Any

from lightning_hetero.callbacks.policy import policy_states
from lightning_hetero.engine import HeteroEngine

__all__ = ["add_residuals", "forget_without_state", "resume_position", "take_residuals"]

log = logging.getLogger("lightning_hetero")

KEY = "lightning_hetero_residuals"


def add_residuals(checkpoint: dict[str, Any], engine: HeteroEngine | None) -> None:
    """Put the gradients that were not sent yet into the checkpoint; a collective call if gradients are compressed."""
    state = {} if engine is None or engine.compression is None else engine.compression.state_dict()
    if state:
        checkpoint[KEY] = state


def take_residuals(checkpoint: Mapping[str, Any], engine: HeteroEngine | None) -> None:
    """Go on with the residuals of the checkpoint; if it has none, with none."""
    state = checkpoint.get(KEY, {})
    if engine is None:
        return
    if engine.compression is not None:
        engine.compression.load_state_dict(state)
    elif state:
        log.warning(
            "the checkpoint has gradients that compression has not sent yet; without compression they are left out"
        )


def forget_without_state(checkpoint: Mapping[str, Any], engine: HeteroEngine) -> None:
    """Let a fit begin anew from a checkpoint with no state of ours, such as one of plain DDP's.

    What an earlier fit of the same strategy has left, its plans and the gradients that were not sent or not applied
    yet, belongs to other weights. The callbacks do the same with what they have learned. To be called before the model
    is wrapped.
    """
    if KEY in checkpoint or policy_states(checkpoint):
        return
    if engine.history is not None and engine.rank == 0:
        log.info(
            "the checkpoint has no state of hetero_ddp: plans, gradients that were not sent or applied yet, and what "
            "was learned in the fit before are forgotten"
        )
    engine.history = None
    engine.log.clear()
    engine.hook_state.load_delayed_state({})
    if engine.compression is not None:
        engine.compression.forget()


def resume_position(checkpoint: Mapping[str, Any]) -> tuple[int, int] | None:
    """``(epoch, step)`` at which training data goes on after a checkpoint of Lightning's, ``None`` if it has no loops.

    Example:
        >>> progress = {"current": {"started": 1, "processed": 0, "completed": 0}}
        >>> batches = {"current": {"ready": 3, "processed": 3, "completed": 2}, "is_last_batch": False}
        >>> loops = {"epoch_progress": progress, "epoch_loop.batch_progress": batches}
        >>> resume_position({"loops": {"fit_loop": loops}})
        (0, 3)
    """
    try:
        loop = checkpoint["loops"]["fit_loop"]
        epoch, batch = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    except (KeyError, TypeError):
        return None
    inside = epoch["started"] > epoch["processed"]
    if not inside:
        return epoch["processed"], 0
    saved_in_last_batch = batch["is_last_batch"] and batch["current"]["completed"] < batch["current"]["processed"]
    if saved_in_last_batch:
        return epoch["processed"] + 1, 0
    return epoch["processed"], batch["current"]["processed"]
