"""States of an ``Accelerator`` under unequal batches: plans, what was learned, and gradients that were not sent yet."""

import os
from typing import Any

import torch

from lightning_hetero.accelerate.base import SessionAccelerator
from lightning_hetero.accelerate.loaders import SkippedLoader
from lightning_hetero.frontend.log import log

__all__ = ["CheckpointAccelerator"]

STATE_FILE = "hetero_state.pt"


class CheckpointAccelerator(SessionAccelerator):
    """An ``Accelerator`` that saves the session's state beside Accelerate's own, and resumes from it."""

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """Skip batches as ``Accelerator.skip_first_batches`` does; by default those that the loaded state has done."""
        if dataloader is self._hetero_loader and self._hetero_loader is not None:
            return SkippedLoader(self._hetero_loader, num_batches)
        return super().skip_first_batches(dataloader, num_batches or 0)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a state as ``Accelerator.load_state`` does; ranks that had no part in it accumulate with the others.

        Accelerate keeps how many batches it has counted, which says when gradients are summed, in a file of each rank.
        """
        super().load_state(*args, **kwargs)
        folder = next(iter(args), kwargs.get("input_dir"))
        if self.engine is None and folder is not None and os.path.isfile(os.path.join(folder, STATE_FILE)):
            log.warning(
                "%s is a state of several workers, and one plain worker cannot go on inside their epoch: "
                "skip_first_batches skips nothing by itself, and the order of samples is another one. Begin the next "
                "epoch, use HeteroAccelerator in the script, or resume with several workers.",
                folder,
            )
        if self.engine is not None:
            counted: int = self.step  # type: ignore[has-type]
            self.step = self.engine.control.broadcast_object(counted)

    def _save_hetero(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if self._hetero_loader is None:
            return
        session = self._session()
        interval = session.interval()  # collective
        session.engine.observer.discard()
        compression = session.engine.compression
        unsent = {} if compression is None else compression.state_dict()  # collective
        if self.is_main_process:
            extra = {"loader": {"iteration": self._hetero_loader.iteration}, "residuals": unsent}
            torch.save({**session.state_dict(), **interval, **extra}, os.path.join(folder, STATE_FILE))

    def _load_hetero(self, models: list[torch.nn.Module], folder: str) -> None:
        """Load the state that rank 0 reads on all ranks; a checkpoint of plain Accelerate has none."""
        session = self._session()
        state: Any = None
        if self.is_main_process:
            try:
                path = os.path.join(folder, STATE_FILE)
                state = torch.load(path, weights_only=True, map_location="cpu") if os.path.isfile(path) else {}
            except Exception as error:  # noqa: BLE001 - travels as a value, because every rank has to raise it
                state = RuntimeError(f"{os.path.join(folder, STATE_FILE)} cannot be read: {error}")
        state = session.engine.control.broadcast_object(state)
        if isinstance(state, Exception):
            raise state
        loader, unsent = state.pop("loader", {}), state.pop("residuals", {})
        if session.engine.compression is not None:
            session.engine.compression.load_state_dict(unsent)
        elif unsent:
            log.warning("the state has gradients that compression has not sent yet; without it they are left out.")
        session.load_state_dict(state)
        if self._hetero_loader is not None and loader:
            self._hetero_loader.go_on(int(loader["iteration"]))
