"""Lightning's checkpoints under unequal batches: the state that we add, and how a fit resumes from it."""

import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.callbacks.base import policy_states
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.log import log
from lightning_hetero.strategies._checkpoints.residuals import KEY, add_residuals, take_residuals
from lightning_hetero.strategies._lightning.ending import AloneMixin
from lightning_hetero.strategies._lightning.membership.launcher import PEERS
from lightning_hetero.strategies._lightning.resumption import Resumption, resume_data

__all__ = ["CheckpointMixin"]

SHARDS = "lightning_hetero_shards"


class CheckpointMixin(AloneMixin):
    """A strategy that adds its own state to Lightning's checkpoints, and resumes from it."""

    engine: HeteroEngine | None
    _resumption: Resumption | None = None
    _loaded = "none"

    def _begin_without_checkpoint(self) -> None:
        self._resumption, self._loaded = None, "none"

    def _require_one_checkpoint(self) -> None:
        """Check that all ranks resume from the same checkpoint; a collective call.

        Raises:
            PlanMismatchError: if they do not.
        """
        assert self.engine is not None
        self.engine.control.require_equal("the checkpoint that training goes on from", self._loaded)

    def _go_on_counting(self) -> None:
        """Set Lightning's counters to where the data resumes."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None and self.engine is not None:
            resumption.begin(self._trainer, self.engine)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the checkpoint with the gradients that compression has not sent yet, of all ranks."""
        add_residuals(checkpoint, self.engine, alone=self._alone)
        if self.engine is not None and not self._alone:
            add_shards(checkpoint, self.engine)
        leave_out_loader(checkpoint, self.engine)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint; in a fit, take from it the step at which the data resumes, and our own state."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.engine is None or self._trainer.state.fn != "fit":
            return checkpoint
        forget_without_state(checkpoint, self.engine)
        take_residuals(checkpoint, self.engine)
        self.engine.data.streams.add_shards(checkpoint.get(SHARDS, {}))
        self._resumption, self._loaded = resume_data(checkpoint, self.engine), describe(checkpoint)
        if checkpoint_path == PEERS:
            self._loaded = PEERS  # on different hardware, they may differ by rounding
        return checkpoint


def add_shards(checkpoint: dict[str, Any], engine: HeteroEngine) -> None:
    """Put how far all ranks have read claimed shards into the checkpoint; a collective call if shards are claimed."""
    shards = engine.data.shards(engine.position)
    if shards:
        checkpoint[SHARDS] = shards


def forget_without_state(checkpoint: Mapping[str, Any], engine: HeteroEngine) -> None:
    """Drop the state of earlier fits, for a checkpoint without our state, such as one of plain DDP's.

    An earlier fit of the same strategy leaves plans and gradients that were not sent or not applied yet; they belong to
    other weights. Callbacks do the same with what they have learned. Call it before the model is wrapped.
    """
    if KEY in checkpoint or policy_states(checkpoint):
        return
    if engine.history is not None and engine.rank == 0:
        log.info(
            "the checkpoint has no state of hetero_ddp: plans, gradients that were not sent or applied yet, and what "
            "was learned in the fit before are forgotten"
        )
    engine.data.plans.forget()
    engine.hook_state.load_stale_state({})
    if engine.compression is not None:
        engine.compression.reset()


def describe(checkpoint: Mapping[str, Any]) -> str:
    """Describe a checkpoint by its step and some of its weights: equal on ranks that have read the same."""
    weights = checkpoint.get("state_dict", {})
    some = (
        value.flatten()[:16].double().cpu().numpy().tobytes() for value in weights.values() if torch.is_tensor(value)
    )
    crc = functools.reduce(lambda so_far, part: zlib.crc32(part, so_far), some, 0)
    return f"step {checkpoint.get('global_step')} of epoch {checkpoint.get('epoch')} with weights {crc:08x}"


def leave_out_loader(checkpoint: Mapping[str, Any], engine: HeteroEngine | None) -> None:
    """Remove the state of our train loader, which does not need it, from a Lightning checkpoint.

    With it, plain DDP could not resume from the checkpoint, because its loader takes no state.
    """
    if engine is not None and (engine.sampler is not None or engine.data.own is not None):
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
