"""Checkpoints at SIGTERM (Transformers' ``enable_jit_checkpoint``), saved by all ranks after the same step.

Transformers' callback asks a flag of its own process, which a timer sets some seconds after the signal. Ranks would see
it in different steps: one would save, and wait for the others, which train on and wait for it.
"""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.async_ops import SharedNotes

__all__ = ["share_requests"]


class SharedManager(CheckpointManager):
    """A manager of checkpoints whose request is seen by all ranks after the same step."""

    trainer: Any

    @classmethod
    def take_over(cls, manager: Any, control: ControlPlane) -> "SharedManager":
        """Turn the manager of a callback into one of this class, without a request."""
        vars(manager).pop("is_checkpoint_requested", None)
        manager.__class__ = cls
        shared: SharedManager = manager
        shared.begin(control)
        return shared

    def begin(self, control: ControlPlane) -> None:
        """Begin a training, without a request."""
        self._notes, self._own, self._agreed = SharedNotes(control, 1), False, False

    @property
    def is_checkpoint_requested(self) -> bool:
        """``True`` if a rank had got the signal by the end of the step before."""
        return self._agreed

    @is_checkpoint_requested.setter
    def is_checkpoint_requested(self, requested: bool) -> None:
        """Note a request of this rank, or forget that of all ranks, which is being served."""
        self._own, self._agreed = requested, self._agreed and requested

    def exchange(self) -> None:
        """Read what ranks had noted by the end of the step before, and send what this one has."""
        self._agreed = bool(self._notes.take()[0])
        self._notes.send([int(self._own)])

    def settle(self) -> None:
        """Wait for the message in flight."""
        self._notes.take()

    def execute_jit_checkpoint(self) -> None:
        """Save, with the file that marks a checkpoint as incomplete on rank 0 only: ranks could not all delete it."""
        if self.trainer.is_world_process_zero():
            super().execute_jit_checkpoint()
            return
        self.is_checkpoint_requested = False
        self.trainer._save_checkpoint(self.trainer.model, trial=None)


class Exchange(TrainerCallback):
    """Callback that exchanges requests at the end of each step, before the callback that obeys them is called."""

    def __init__(self, manager: SharedManager) -> None:
        self.manager = manager

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Exchange requests."""
        self.manager.exchange()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave no message in flight."""
        self.manager.settle()


def share_requests(trainer: Any, control: ControlPlane) -> None:
    """Let all ranks see a request for a checkpoint after the same step, if the trainer's arguments provide for it."""
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Exchange)]
    for callback in list(callbacks):
        if isinstance(callback, JITCheckpointCallback) and callback.jit_manager is not None:
            callbacks.insert(0, Exchange(SharedManager.take_over(callback.jit_manager, control)))
