"""Lightning's check for SIGTERM before every batch, a step late, so that it does not wait behind delayed gradients.

Lightning lets rank 0 tell all ranks before each batch whether it was told to end. On a thin link that message queues
behind the gradients that are under way, and everyone waits for it. Here a message is read one batch after it was sent.
"""

from typing import Any

import torch
import torch.distributed as dist

try:
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError:  # only the standalone package is installed, or an old one
    from pytorch_lightning.utilities.exceptions import SIGTERMException  # type: ignore[assignment]

__all__ = ["LateSignal"]

NAME = "_broadcast_sigterm_tensor"


class LateSignal:
    """Takes the place of the check in a trainer's training loop.

    Args:
        trainer: whose loop checks; one that does not check is left alone.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sent: tuple[torch.Tensor, Any] | None = None

    def start(self) -> "LateSignal":
        """Check a step late from now on."""
        if hasattr(self._trainer.fit_loop.epoch_loop, NAME):
            setattr(self._trainer.fit_loop.epoch_loop, NAME, self._check)
        return self

    def stop(self, *, wait: bool) -> None:
        """Leave the loop as it was, and wait for the last message unless training has failed."""
        vars(self._trainer.fit_loop.epoch_loop).pop(NAME, None)
        if wait:
            self._take()

    def _take(self) -> bool:
        """Whether rank 0 was told to end when it sent the last message."""
        if self._sent is None:
            return False
        (flag, work), self._sent = self._sent, None
        work.wait()
        return bool(flag.item())

    def _check(self) -> None:
        """Read the message of the batch before, send the one of this batch.

        Raises:
            SIGTERMException: on all ranks, if rank 0 was told to end.
        """
        if self._take():
            raise SIGTERMException
        told = bool(getattr(self._trainer, "received_sigterm", False))
        flag = torch.tensor([int(told)], device=self._trainer.strategy.root_device)
        self._sent = flag, dist.broadcast(flag, src=0, async_op=True)
