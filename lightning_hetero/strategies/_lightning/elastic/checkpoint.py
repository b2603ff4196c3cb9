"""Checkpoints of elastic averaging: the merged model, and the optimizer state of each rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.frontend.log import log
from lightning_hetero.strategies._lightning.elastic.collectives import ElasticCollectivesMixin
from lightning_hetero.strategies._lightning.resumption import resume_position

__all__ = ["STATE", "ElasticCheckpointMixin"]

STATE = "hetero_elastic"


class ElasticCheckpointMixin(ElasticCollectivesMixin):
    """Checkpoints of the merged model with each rank's optimizer state; plain DDP's checkpoints can be resumed, too."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the merged model as Lightning does, with the optimizer state of each rank.

        A rank that fails alone saves nothing: its replica is not the merged model, and the other ranks do not take part
        in gathering optimizer states.

        Raises:
            RuntimeError: inside a mega-batch.
        """
        if self._alone:
            log.warning("no checkpoint %s: a worker that fails between two merges has no model to save", filepath)
            return
        self._require_merged("a checkpoint")
        if self.engine is not None and "optimizer_states" in checkpoint:
            own = self.engine.control.gather_objects_at_zero(checkpoint["optimizer_states"])
            checkpoint[STATE] = {**self.engine.state_dict(), "optimizer_states": own}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint, ours or one of plain Lightning's."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.engine is None:
            return checkpoint
        position = resume_position(checkpoint)
        if STATE in checkpoint:
            self.engine.load_state_dict(checkpoint[STATE])
        elif position is not None:
            self.engine.resume_at(*position)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each rank's optimizer its own state back; with more ranks than before, ranks share states."""
        own = checkpoint.get(STATE, {}).get("optimizer_states")
        if own and self.engine is not None:
            checkpoint = {**checkpoint, "optimizer_states": own[self.engine.rank % len(own)]}
        super().load_optimizer_state_dict(checkpoint)
