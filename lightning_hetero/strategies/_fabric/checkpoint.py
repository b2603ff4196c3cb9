"""Fabric's checkpoints under unequal batches: plans, what was learned, and gradients that were not sent yet."""

from typing import Any

import torch

from lightning_hetero.strategies._checkpoints.residuals import KEY as RESIDUALS
from lightning_hetero.strategies._checkpoints.residuals import add_residuals, take_residuals
from lightning_hetero.strategies._fabric.train_data import FabricDataMixin

__all__ = ["FabricCheckpointMixin"]

KEY = "hetero_ddp"


class FabricCheckpointMixin(FabricDataMixin):
    """A strategy that saves the session's state beside the user's, and resumes from it."""

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the state, with the plans, what was learned, and the gradients that compression has not sent yet."""
        if self.session is not None:
            interval = self.session.interval()
            self.session.engine.observer.discard()
            state = {**state, KEY: {**self.session.state_dict(), **interval}}
            add_residuals(state, self.session.engine)
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the state; training resumes at the first batch of the checkpoint's epoch.

        If ``state`` has the training loader, it resumes at the exact batch.
        """
        self._wanted_step = None
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        session = self.session
        if state and not isinstance(state, torch.nn.Module | torch.optim.Optimizer) and session is not None:
            session.load_state_dict(rest.pop(KEY, {}))
            take_residuals(rest, session.engine)
            rest.pop(RESIDUALS, None)
            if self._wanted_step is not None:
                session.skip(self._wanted_step)
        return rest
