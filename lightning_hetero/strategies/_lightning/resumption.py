"""Position at which training data resumes after a Lightning checkpoint, and Lightning's counters for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_hetero.callbacks.base import policy_states
from lightning_hetero.core.checkpoint_state import reading_state
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.log import log

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Resumption", "resume_data", "resume_position"]


def resume_position(checkpoint: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return ``(epoch, step)`` at which training data resumes after a Lightning checkpoint, ``None`` without loops.

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
    """Position at which training data resumes after a checkpoint, with what Lightning's counters need to know.

    Args:
        epoch: epoch that is resumed.
        behind: batches of the epoch that were trained on before the checkpoint.
        unknown: whether the checkpoint does not say how many samples they had; the epoch then starts over.
        in_last_batch: whether it was saved in the last batch of the epoch before. With another number of workers, that
            epoch has another number of batches, and Lightning would not notice that it is over.
    """

    epoch: int
    behind: int
    unknown: bool = False
    in_last_batch: bool = False

    def begin(self, trainer: "Trainer", engine: HeteroEngine) -> None:
        """Make Lightning count the batches of the epoch as the data does; call it after its loops are restored."""
        epochs: Any = trainer.fit_loop.epoch_progress.total
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False) and epochs.processed == epochs.started:
            trainer.fit_loop.reset_restart_stage()  # else Lightning does not count the next epoch as one that has begun
        if (engine.sampler is None and engine.data.own is None) or not (self.unknown or self.in_last_batch):
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
            batches: Any = trainer.num_training_batches  # infinite for a stream, and then that is what it compares with
            completed = batches if math.isinf(batches) else int(batches)
            loop.batch_progress.current.completed = max(completed, self.behind)
        elif self.unknown:
            loop.batch_progress.reset_on_run()
            loop.reset_restart_stage()  # else it treats batch 0 as one after which validation was due


@reading_state("the place in the training data")
def resume_data(checkpoint: Mapping[str, Any], engine: HeteroEngine) -> Resumption | None:
    """Resume the engine's data where a checkpoint was saved; return the position, ``None`` if it has no loops.

    Our checkpoints hold the plans of the epoch, which say how many samples its batches had, for any number of workers.
    Plain DDP's do not, so a batch number inside an epoch gives no position in the data.
    """
    position = resume_position(checkpoint)
    if position is None:
        return None
    epoch, behind = position
    batch = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    states = [state["engine"] for state in policy_states(checkpoint)]
    known = any("history" in state or state.get("own") == engine.world_size for state in states)
    if behind and not known and not batch["is_last_batch"]:
        engine.resume_at(epoch, 0)
        return Resumption(epoch, behind, unknown=True)
    engine.resume_at(epoch, behind)
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return Resumption(epoch, behind, in_last_batch=behind == 0 and progress["started"] > progress["processed"])
