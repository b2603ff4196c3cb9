"""What a checkpoint of Lightning's says about where training data goes on, and what of ours rides in it."""

import functools
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetero.callbacks.base import policy_states
from lightning_hetero.core.checkpoint_state import check_tensors, reading_state
from lightning_hetero.engine import HeteroEngine

__all__ = [
    "CheckpointMixin",
    "Resumption",
    "add_residuals",
    "describe",
    "forget_without_state",
    "leave_out_loader",
    "resume_data",
    "resume_position",
    "take_residuals",
]

log = logging.getLogger("lightning_hetero")

KEY = "lightning_hetero_residuals"


def add_residuals(checkpoint: dict[str, Any], engine: HeteroEngine | None, *, alone: bool = False) -> None:
    """Put the gradients that were not sent yet into the checkpoint; a collective call if gradients are compressed.

    Args:
        checkpoint: takes them.
        engine: has them.
        alone: whether the other ranks cannot be asked for theirs.
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
    """Go on with the residuals of the checkpoint; if it has none, with none."""
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
    engine.hook_state.load_stale_state({})
    if engine.compression is not None:
        engine.compression.reset()


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


@dataclass(frozen=True)
class Resumption:
    """Where training data goes on after a checkpoint, and what Lightning's counters have to be told about it.

    Args:
        epoch: epoch that goes on.
        behind: batches of it that the checkpoint has behind it.
        unknown: whether it does not say how many samples they had; the epoch then begins anew.
        in_last_batch: whether it was saved in the last batch of the epoch before. With another number of workers that
            epoch has another number of batches, by which Lightning would not see that it is over.
    """

    epoch: int
    behind: int
    unknown: bool = False
    in_last_batch: bool = False

    def begin(self, trainer: Any, engine: HeteroEngine) -> None:
        """Let Lightning count the batches of the epoch as the data comes; after its loops were restored."""
        if engine.sampler is None or not (self.unknown or self.in_last_batch):
            return
        if self.unknown and engine.rank == 0:
            log.warning(
                "the checkpoint was saved behind batch %d of epoch %d by a run that does not say how many samples its "
                "batches had, such as one of plain DDP: epoch %d begins anew, and the samples of those batches are "
                "trained on once more, so that none is skipped. Checkpoints between two epochs need no such repetition",
                self.behind,
                self.epoch,
                self.epoch,
            )
        loop = trainer.fit_loop.epoch_loop
        if getattr(loop, "restarted_on_train_batch_end", False):
            # Lightning is about to count the batch that saved as completed, and begins at 0 if that completes an epoch
            loop.batch_progress.current.completed = max(trainer.num_training_batches, self.behind)
        elif self.unknown:
            loop.batch_progress.reset_on_run()
            loop.reset_restart_stage()  # else it takes batch 0 for one behind which validation was to run


def describe(checkpoint: Mapping[str, Any]) -> str:
    """Which checkpoint it is, by its step and some of its weights: equal on ranks that have read the same."""
    weights = checkpoint.get("state_dict", {})
    some = (
        value.flatten()[:16].double().cpu().numpy().tobytes() for value in weights.values() if torch.is_tensor(value)
    )
    crc = functools.reduce(lambda so_far, part: zlib.crc32(part, so_far), some, 0)
    return f"step {checkpoint.get('global_step')} of epoch {checkpoint.get('epoch')} with weights {crc:08x}"


@reading_state("the place in the training data")
def resume_data(checkpoint: Mapping[str, Any], engine: HeteroEngine) -> Resumption | None:
    """Let the engine's data go on where a checkpoint was saved, ``None`` if that has no loops.

    A checkpoint of ours has the plans of the epoch, which say how many samples its batches had with whatever number of
    workers; one of plain DDP does not, so that a place inside an epoch is no place in the data.
    """
    position = resume_position(checkpoint)
    if position is None:
        return None
    epoch, behind = position
    batch = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    known = any("history" in state["engine"] for state in policy_states(checkpoint))
    if behind and not known and not batch["is_last_batch"]:
        engine.resume_at(epoch, 0)
        return Resumption(epoch, behind, unknown=True)
    engine.resume_at(epoch, behind)
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return Resumption(epoch, behind, in_last_batch=behind == 0 and progress["started"] > progress["processed"])


def leave_out_loader(checkpoint: Mapping[str, Any], engine: HeteroEngine | None) -> None:
    """Take out of a checkpoint what Lightning saved of our train loader, which needs none of it.

    With it, plain DDP could not go on from the checkpoint: its loader takes no state.
    """
    if engine is not None and engine.sampler is not None:
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)


class CheckpointMixin:
    """What a strategy of Lightning's saves besides what Lightning does, and how a fit goes on from it."""

    engine: HeteroEngine | None
    _resumption: Resumption | None = None
    _loaded = "none"
    _alone: bool

    def _begin_without_checkpoint(self) -> None:
        self._resumption, self._loaded = None, "none"

    def _require_one_checkpoint(self) -> None:
        """Make sure that ranks go on from the same checkpoint; a collective call.

        Raises:
            PlanMismatchError: if they do not.
        """
        assert self.engine is not None
        self.engine.control.require_equal("the checkpoint that training goes on from", self._loaded)

    def _go_on_counting(self) -> None:
        """Tell Lightning's counters where the data goes on."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None and self.engine is not None:
            resumption.begin(self._trainer, self.engine)  # type: ignore[attr-defined]

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As DDP, with the gradients that compression has not sent yet, of all ranks."""
        add_residuals(checkpoint, self.engine, alone=self._alone)
        leave_out_loader(checkpoint, self.engine)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint, and in a fit from it the step at which the data goes on, and what of ours it has."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        if self.engine is None or self._trainer.state.fn != "fit":  # type: ignore[attr-defined]
            return checkpoint
        forget_without_state(checkpoint, self.engine)
        take_residuals(checkpoint, self.engine)
        self._resumption, self._loaded = resume_data(checkpoint, self.engine), describe(checkpoint)
        return checkpoint
